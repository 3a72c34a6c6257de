"""Activations against torch and transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.activations import ACT2FN

from eqzoo import nn

TORCH = {
    "relu": torch.nn.functional.relu,
    "relu6": torch.nn.functional.relu6,
    "leaky_relu": torch.nn.functional.leaky_relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": ACT2FN["gelu_new"],
    "quick_gelu": ACT2FN["quick_gelu"],
    "silu": torch.nn.functional.silu,
    "hard_swish": torch.nn.functional.hardswish,
    "mish": torch.nn.functional.mish,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "hard_sigmoid": torch.nn.functional.hardsigmoid,
}


def test_every_activation_is_compared():
    assert set(TORCH) == set(nn.ACTIVATIONS)


@pytest.mark.parametrize("name", TORCH)
def test_value_and_gradient_are_torchs(name):
    x = np.linspace(-6, 6, 101, dtype=np.float32) + 0.013
    there = torch.tensor(x, requires_grad=True)
    y = TORCH[name](there)
    y.sum().backward()
    here, gradient = jax.vmap(jax.value_and_grad(nn.activation(name)))(jnp.asarray(x))
    np.testing.assert_allclose(here, y.detach(), atol=1e-6)
    np.testing.assert_allclose(gradient, there.grad, atol=1e-5)


@pytest.mark.parametrize("name", TORCH)
def test_keeps_bfloat16_and_is_as_exact_as_torch_there(name):
    x = np.linspace(-4, 4, 101, dtype=np.float32)
    y = nn.activation(name)(jnp.asarray(x, jnp.bfloat16))
    there = TORCH[name](torch.tensor(x).bfloat16().float())
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), there, rtol=2**-6, atol=2**-10)


def test_relu_as_a_layer_is_the_function_and_has_no_leaves():
    x = jnp.linspace(-1.0, 1.0, 5)
    np.testing.assert_array_equal(nn.ReLU()(x), nn.activation("relu")(x))
    assert not jax.tree.leaves(nn.ReLU())


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"activation='gleu' is unknown; choose one of relu, .*gelu, .*sigmoid"):
        nn.activation("gleu")
