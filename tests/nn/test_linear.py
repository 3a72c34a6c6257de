"""Linear layers, embeddings and MLPs against torch, timm and transformers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import timm
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from eqzoo import nn
from tests.parity import array, assert_close


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("axes", [(), (1,), (1, 1), (5,), (2, 3)])
def test_linear_is_torchs_in_value_and_gradient(use_bias, axes):
    torch.manual_seed(0)
    there = torch.nn.Linear(7, 4, bias=use_bias)
    here = nn.Linear(7, 4, use_bias=use_bias, key=jax.random.key(0))
    assert (here.bias is None) == (not use_bias)
    here = eqx.tree_at(lambda part: part.weight, here, array(there.weight))
    if use_bias:
        here = eqx.tree_at(lambda part: part.bias, here, array(there.bias))
    x = torch.randn(*axes, 7, requires_grad=True)
    y = there(x)
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    ours, pull = jax.vjp(lambda layer, x: layer(x), here, array(x))
    gradient, dx = pull(array(cotangent))
    assert_close(ours, y.detach())
    assert_close(dx, x.grad)
    assert_close(gradient.weight, there.weight.grad)
    if use_bias:
        assert_close(gradient.bias, there.bias.grad)


@pytest.mark.parametrize("axes", [(), (1,), (5,)])
def test_the_scores_of_an_embedding_are_its_product_with_each_vector(axes):
    embedding = nn.Embedding(9, 4, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (*axes, 4))
    assert_close(embedding.scores(x), np.einsum("...d,td->...t", x, embedding.weight))


def test_linear_starts_as_torchs_does_or_from_init_and_a_zero_bias():
    layer = nn.Linear(16, 400, key=jax.random.key(0))
    for parameter in (layer.weight, layer.bias):
        assert 0.24 < jnp.max(jnp.abs(parameter)) <= 0.25
    own = nn.Linear(16, 400, init=lambda key, shape: jnp.full(shape, 3.0), key=jax.random.key(0))
    assert own.weight.shape == (400, 16)
    assert jnp.all(own.weight == 3)
    assert jnp.all(own.bias == 0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_stays_half_precision(dtype):
    layers = (
        nn.Linear(6, 4, key=jax.random.key(0)),
        nn.MLP(6, 8, activation=nn.gelu, key=jax.random.key(0)),
        nn.GatedMLP(6, 8, activation=jax.nn.silu, key=jax.random.key(0)),
    )
    for layer in layers:
        x = jnp.linspace(-1, 1, 6)
        half = jax.tree.map(lambda leaf: leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf, layer)
        assert half(x.astype(dtype)).dtype == dtype
        np.testing.assert_allclose(half(x.astype(dtype)).astype(jnp.float32), layer(x), atol=0.02)


def test_embedding_looks_vectors_up():
    table = nn.Embedding(100, 64, std=0.5, key=jax.random.key(0))
    assert abs(jnp.std(table.weight) - 0.5) < 0.02
    tokens = jnp.array([[3, 99], [3, 0]])
    np.testing.assert_array_equal(table(tokens), np.asarray(table.weight)[np.asarray(tokens)])
    np.testing.assert_array_equal(table(jnp.array(7)), table.weight[7])


@pytest.mark.parametrize("use_bias", [True, False])
def test_mlp_is_timms(use_bias):
    torch.manual_seed(0)
    there = timm.layers.Mlp(6, 10, bias=use_bias)
    here = nn.MLP(6, 10, activation=nn.gelu, use_bias=use_bias, key=jax.random.key(0))
    for name in ("fc1", "fc2"):
        weight = 3 * torch.randn_like(getattr(there, name).weight)
        getattr(there, name).weight.data = weight
        here = eqx.tree_at(lambda m, name=name: getattr(m, name).weight, here, array(weight))
        if use_bias:
            bias = torch.randn_like(getattr(there, name).bias)
            getattr(there, name).bias.data = bias
            here = eqx.tree_at(lambda m, name=name: getattr(m, name).bias, here, array(bias))
    x = torch.randn(3, 6)
    assert_close(here(array(x)), there(x).detach())


def test_gated_mlp_is_llamas():
    torch.manual_seed(0)
    there = LlamaMLP(LlamaConfig(hidden_size=6, intermediate_size=10, num_attention_heads=2))
    here = nn.GatedMLP(6, 10, activation=jax.nn.silu, key=jax.random.key(0))
    for ours, theirs in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")):
        weight = 3 * torch.randn_like(getattr(there, theirs).weight)
        getattr(there, theirs).weight.data = weight
        here = eqx.tree_at(lambda m, ours=ours: getattr(m, ours).weight, here, array(weight))
    assert here.gate.bias is None
    x = torch.randn(3, 6)
    assert_close(here(array(x)), there(x).detach())


def test_gated_mlp_has_biases_on_request():
    layer = nn.GatedMLP(6, 10, activation=jax.nn.silu, use_bias=True, key=jax.random.key(0))
    shifted = eqx.tree_at(lambda m: m.down.bias, layer, layer.down.bias + 1)
    assert (layer.gate.bias.shape, layer.up.bias.shape, layer.down.bias.shape) == ((10,), (10,), (6,))
    np.testing.assert_allclose(shifted(jnp.ones(6)), layer(jnp.ones(6)) + 1, rtol=1e-5)


def test_mlp_drops_hidden_units_and_outputs_with_different_keys():
    layer = nn.MLP(6, 300, activation=jnp.ones_like, dropout=0.5, key=jax.random.key(0))
    sums = eqx.tree_at(lambda m: (m.fc2.weight, m.fc2.bias), layer, (jnp.ones((6, 300)), jnp.zeros(6)))
    y = np.asarray(sums(jnp.ones(6), key=jax.random.key(0)))
    assert set(np.unique(y == 0)) == {True, False}, "some outputs dropped, some kept"
    kept = y[y != 0] / 2
    assert (kept == kept[0]).all()
    assert kept[0] != 300, "hidden units were dropped"
    assert 220 < kept[0] < 380
    with pytest.raises(ValueError, match="got no key"):
        sums(jnp.ones(6))
    np.testing.assert_allclose(eqx.nn.inference_mode(sums)(jnp.ones(6)), 300.0)
