"""Layer scale, squeeze-and-excitation, efficient channel attention and channel rounding against timm."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import timm
import torch

from eqzoo import nn
from tests.parity import array


def test_layer_scale_is_timms_and_starts_at_its_init():
    x = torch.randn(5, 4)
    here, there = nn.LayerScale(4, 0.1), timm.layers.LayerScale(4, 0.1)
    np.testing.assert_allclose(here(array(x)), there(x).detach(), rtol=1e-6)
    there.gamma.data = torch.randn(4)
    here = eqx.tree_at(lambda part: part.weight, here, array(there.gamma))
    np.testing.assert_allclose(here(array(x)), there(x).detach(), rtol=1e-6)
    assert here(array(x).astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({}, {}),
        ({"activation": jax.nn.silu}, {"act_layer": torch.nn.SiLU}),
        ({"gate": jax.nn.hard_sigmoid}, {"gate_layer": torch.nn.Hardsigmoid}),
    ],
)
def test_squeeze_excite_is_timms_in_value_and_gradient(options, theirs):
    torch.manual_seed(0)
    there = timm.layers.SEModule(6, rd_channels=4, **theirs)
    here = nn.SqueezeExcite(6, 4, key=jax.random.key(0), **options)
    for name in ("fc1", "fc2"):
        conv = getattr(there, name)
        conv.weight.data, conv.bias.data = 2 * torch.randn_like(conv.weight), torch.randn_like(conv.bias)
        here = eqx.tree_at(lambda s, name=name: getattr(s, name).weight, here, array(conv.weight))
        here = eqx.tree_at(lambda s, name=name: getattr(s, name).bias, here, array(conv.bias))
    x = (torch.randn(1, 6, 3, 5) + 0.5).requires_grad_()
    y = there(x)
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    ours, pull = jax.vjp(lambda layer, x: layer(x), here, array(x[0].movedim(0, -1)))
    gradient, dx = pull(array(cotangent[0].movedim(0, -1)))
    np.testing.assert_allclose(ours, y[0].movedim(0, -1).detach(), atol=1e-5)
    np.testing.assert_allclose(dx, x.grad[0].movedim(0, -1), atol=1e-5)
    np.testing.assert_allclose(gradient.fc1.weight, there.fc1.weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 6, 48, 256])
def test_efficient_channel_attention_is_timms_in_value_and_gradient(channels):
    torch.manual_seed(0)
    there = timm.layers.EcaModule(channels)
    there.conv.weight.data = 2 * torch.randn_like(there.conv.weight)
    here = nn.EfficientChannelAttention(channels, key=jax.random.key(0))
    assert here.weight.shape == tuple(there.conv.weight.shape)
    here = eqx.tree_at(lambda layer: layer.weight, here, array(there.conv.weight))
    x = (torch.randn(1, channels, 3, 5) + 0.5).requires_grad_()
    y = there(x)
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    ours, pull = jax.vjp(lambda layer, x: layer(x), here, array(x[0].movedim(0, -1)))
    gradient, dx = pull(array(cotangent[0].movedim(0, -1)))
    np.testing.assert_allclose(ours, y[0].movedim(0, -1).detach(), atol=1e-5)
    np.testing.assert_allclose(dx, x.grad[0].movedim(0, -1), atol=1e-5)
    np.testing.assert_allclose(gradient.weight, there.conv.weight.grad, rtol=1e-4, atol=1e-5)


def test_the_neighbours_that_count_grow_with_the_channels_as_timms_do():
    for power in range(1, 13):
        for channels in (2**power - 1, 2**power, 2**power + 1):
            here = nn.EfficientChannelAttention(channels, key=jax.random.key(0))
            assert here.weight.shape == tuple(timm.layers.EcaModule(channels).conv.weight.shape)


@pytest.mark.parametrize("divisor", [8, 16])
def test_round_channels_is_timms_without_a_round_limit(divisor):
    for channels in [1, 4, 11.5, 12, 20, 28, 36.2, 100]:
        theirs = timm.layers.make_divisible(channels, divisor, round_limit=0.0)
        assert nn.round_channels(channels, divisor) == theirs
    assert nn.round_channels(20) == 24


def test_round_channels_is_timms_at_any_round_limit():
    for limit in (0.9, 0.95):
        for channels in range(1, 200):
            theirs = timm.layers.make_divisible(channels, 8, round_limit=limit)
            assert nn.round_channels(channels, limit=limit) == theirs
