"""Patch embedding against timm."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import timm
import torch

from eqzoo import nn


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("size", [(8, 8), (8, 12)])
def test_tokens_are_timms_in_value_and_gradient(use_bias, size):
    torch.manual_seed(0)
    there = timm.layers.PatchEmbed(size, 4, in_chans=3, embed_dim=5, bias=use_bias)
    here = nn.PatchEmbed(3, 5, 4, use_bias=use_bias, key=jax.random.key(0))
    assert (here.conv.bias is None) == (not use_bias)
    here = eqx.tree_at(lambda p: p.conv.weight, here, jnp.asarray(there.proj.weight.detach().numpy()))
    if use_bias:
        here = eqx.tree_at(lambda p: p.conv.bias, here, jnp.asarray(there.proj.bias.detach().numpy()))
    x = torch.randn(1, 3, *size, requires_grad=True)
    y = there(x)
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    image = jnp.asarray(x.detach().numpy()[0].transpose(1, 2, 0))
    tokens, pull = jax.vjp(lambda layer, x: layer(x), here, image)
    gradient, dx = pull(jnp.asarray(cotangent[0].numpy()))
    np.testing.assert_allclose(tokens, y[0].detach(), atol=1e-5)
    np.testing.assert_allclose(dx, x.grad[0].movedim(0, -1), atol=1e-5)
    np.testing.assert_allclose(gradient.conv.weight, there.proj.weight.grad, rtol=1e-4, atol=1e-5)


def test_init_draws_the_weight():
    layer = nn.PatchEmbed(3, 5, 4, init=lambda key, shape: jnp.full(shape, 2.0), key=jax.random.key(0))
    np.testing.assert_array_equal(layer.conv.weight, np.full((5, 3, 4, 4), 2.0))
    np.testing.assert_array_equal(layer.conv.bias, np.zeros(5))


@pytest.mark.parametrize("size", [(9, 8), (8, 10)])
def test_an_image_that_does_not_divide_is_refused(size):
    message = (
        rf"PatchEmbed: an image of {size[0]}x{size[1]} doesn't divide into patches of 4; resize it to multiples of 4"
    )
    with pytest.raises(ValueError, match=message):
        nn.PatchEmbed(3, 5, 4, key=jax.random.key(0))(jnp.ones((*size, 3)))
