"""AttentionPool is timm's AttentionPoolLatent."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from timm.layers import AttentionPoolLatent, LayerNorm

from eqzoo import nn
from tests.parity import array, assert_close, randomise

NORM = partial(nn.LayerNorm, eps=0.1)


def pool(heads: int) -> nn.AttentionPool:
    mlp = nn.MLP(12, 36, activation=nn.gelu, key=jax.random.key(0))
    return nn.AttentionPool(12, heads, mlp=mlp, norm=NORM, key=jax.random.key(1))


@pytest.mark.parametrize("tokens", [1, 7])
def test_the_pool_is_timms(tokens):
    upstream = AttentionPoolLatent(12, num_heads=3, mlp_ratio=3, norm_layer=partial(LayerNorm, eps=0.1))
    upstream = randomise(upstream.eval(), 0)
    key, value = upstream.kv.weight.chunk(2)
    key_bias, value_bias = upstream.kv.bias.chunk(2)
    parts = {
        "latent.weight": upstream.latent[0],
        "query.weight": upstream.q.weight,
        "query.bias": upstream.q.bias,
        "key.weight": key,
        "key.bias": key_bias,
        "value.weight": value,
        "value.bias": value_bias,
        **{f"out.{name}": tensor for name, tensor in upstream.proj.named_parameters()},
        **{f"norm.{name}": tensor for name, tensor in upstream.norm.named_parameters()},
        **{f"mlp.{name}": tensor for name, tensor in upstream.mlp.named_parameters()},
    }
    ours = pool(3)
    for path, tensor in parts.items():
        ours = eqx.tree_at(partial(_part, path=path), ours, array(tensor))
    x = np.random.default_rng(0).normal(size=(tokens, 12)).astype(np.float32)
    assert_close(ours(jnp.asarray(x)), upstream(torch.from_numpy(x)[None])[0])


def _part(tree, path: str):
    for name in path.split("."):
        tree = getattr(tree, name)
    return tree


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="AttentionPool: dim=12 is not a multiple of heads=5; choose a divisor of dim"):
        pool(5)
