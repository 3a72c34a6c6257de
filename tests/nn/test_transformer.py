"""TransformerBlock: what it adds up, before or after its norms."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from eqzoo import nn
from tests.parity import assert_close


def block(**options) -> nn.TransformerBlock:
    keys = jax.random.split(jax.random.key(0), 2)
    attention = nn.Attention(8, 2, key=keys[0])
    mlp = nn.MLP(8, 16, activation=nn.gelu, key=keys[1])
    made = nn.TransformerBlock(8, attention, mlp, norm=partial(nn.LayerNorm, eps=0.1), **options)
    weights = lambda block: (block.norm1.weight, block.norm2.weight)
    return eqx.tree_at(weights, made, (jnp.linspace(1, 2, 8), jnp.linspace(3, 1, 8)))


X = jax.random.normal(jax.random.key(2), (5, 8))


@pytest.mark.parametrize("layer_scale", [None, 0.5])
@pytest.mark.parametrize("post_norm", [False, True])
def test_a_block_is_two_residual_branches(post_norm, layer_scale):
    b = block(post_norm=post_norm, layer_scale=layer_scale)
    branch = lambda norm, layer, x: norm(layer(x)) if post_norm else layer(norm(x))
    scale = 1 if layer_scale is None else layer_scale
    expected = X + scale * branch(b.norm1, b.attention, X)
    expected = expected + scale * branch(b.norm2, b.mlp, expected)
    assert_close(b(X, jnp.zeros(())), expected)


def test_another_attention_stands_in_for_the_blocks_own():
    b = block()
    angles = nn.rotary_angles(jnp.arange(5.0), 4)
    turned = b(X, jnp.zeros(()), attention=partial(b.attention, rotary=angles))
    y = X + b.attention(b.norm1(X), rotary=angles)
    assert_close(turned, y + b.mlp(b.norm2(y)))
    assert jnp.abs(turned - b(X, jnp.zeros(()))).max() > 1e-3


def test_a_branch_is_dropped_by_itself():
    b = block(drop_path=0.5)
    run = jax.jit(jax.vmap(lambda key: b(X, jnp.ones(()), key=key)))
    ys = run(jax.random.split(jax.random.key(1), 32))
    assert len(jnp.unique(jnp.round(ys.reshape(32, -1), 3), axis=0)) == 4
