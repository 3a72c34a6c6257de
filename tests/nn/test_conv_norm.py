"""A convolution with its norm and activation is torch's, in training too."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from eqzoo import nn


@pytest.mark.parametrize(
    ("kernel_size", "options", "padding", "activation"),
    [
        (3, {"stride": 2}, 1, None),
        ((1, 7), {}, (0, 3), "relu"),
        (3, {"dilation": 2, "groups": 2, "eps": 1e-3, "momentum": 0.03}, 2, "silu"),
        (3, {"padding": 0}, 0, "relu6"),
    ],
)
def test_outputs_and_statistics_in_training(kernel_size, options, padding, activation):
    make = eqx.nn.make_with_state(nn.ConvNorm)
    function = None if activation is None else nn.activation(activation)
    layer, state = make(4, 6, kernel_size, activation=function, **options, key=jax.random.key(0))
    norm_options = {name: options[name] for name in ("eps", "momentum") if name in options}
    conv_options = {name: options[name] for name in ("stride", "dilation", "groups") if name in options}
    conv = torch.nn.Conv2d(4, 6, kernel_size, padding=padding, bias=False, **conv_options)
    norm = torch.nn.BatchNorm2d(6, **norm_options)
    with torch.no_grad():
        conv.weight.copy_(torch.tensor(np.asarray(layer.conv.weight)))
        norm.weight.uniform_(0.5, 2)
        norm.bias.uniform_(-1, 1)
    layer = eqx.tree_at(lambda layer: layer.norm.weight, layer, jnp.asarray(norm.weight.detach().numpy()))
    layer = eqx.tree_at(lambda layer: layer.norm.bias, layer, jnp.asarray(norm.bias.detach().numpy()))
    images = np.random.default_rng(0).normal(size=(3, 9, 8, 4)).astype(np.float32)

    y, state = jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(jnp.asarray(images), state)
    there = norm(conv(torch.tensor(images).permute(0, 3, 1, 2)))
    there = {None: lambda x: x, "relu": torch.relu, "silu": torch.nn.functional.silu}.get(
        activation, torch.nn.functional.relu6
    )(there)
    np.testing.assert_allclose(y, there.detach().permute(0, 2, 3, 1), atol=1e-5)
    running = state.get(layer.norm.running)
    np.testing.assert_allclose(running.mean, norm.running_mean, atol=1e-6)
    np.testing.assert_allclose(running.var, norm.running_var, atol=1e-5)


@pytest.mark.parametrize(
    ("kernel_size", "options"), [(3, {"stride": 2}), (1, {}), (3, {"dilation": 2, "groups": 2}), (7, {"stride": 2})]
)
def test_with_a_group_norm_it_hands_the_state_through(kernel_size, options):
    norm = lambda channels: nn.GroupNorm(channels // 2, channels)
    layer = nn.ConvGroupNorm(4, 6, kernel_size, norm=norm, activation=jax.nn.relu, **options, key=jax.random.key(0))
    padding = kernel_size // 2 * options.get("dilation", 1)
    there = torch.nn.Sequential(
        torch.nn.Conv2d(4, 6, kernel_size, padding=padding, bias=False, **options),
        torch.nn.GroupNorm(3, 6),
        torch.nn.ReLU(),
    )
    with torch.no_grad():
        there[0].weight.copy_(torch.tensor(np.asarray(layer.conv.weight)))
        there[1].weight.uniform_(0.5, 2)
        there[1].bias.uniform_(-1, 1)
    for name in ("weight", "bias"):
        value = jnp.asarray(getattr(there[1], name).detach().numpy())
        layer = eqx.tree_at(lambda layer, name=name: getattr(layer.norm, name), layer, value)
    image = np.random.default_rng(0).normal(size=(9, 8, 4)).astype(np.float32)
    state = eqx.nn.State(layer)
    y, after = layer(jnp.asarray(image), state)
    np.testing.assert_allclose(
        y, there(torch.tensor(image).permute(2, 0, 1)[None])[0].detach().permute(1, 2, 0), atol=1e-5
    )
    assert after is state
