"""T5's attention, blocks, and what distances between tokens add to their scores."""

from collections.abc import Callable
from functools import partial
from math import log
from typing import Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from eqzoo import nn
from eqzoo.nn._init import normal

Block = TypeVar("Block")


class Attention(eqx.Module):
    """Attention whose scores aren't scaled: `query` is initialised smaller instead."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    out: nn.Linear
    dropout: nn.Dropout
    heads: int = eqx.field(static=True)

    def __init__(self, dim: int, heads: int, dim_head: int, *, dropout: float, key: PRNGKeyArray):
        keys = jax.random.split(key, 4)
        inner = heads * dim_head
        linear = lambda ins, outs, fan, key: nn.Linear(
            ins, outs, use_bias=False, init=partial(normal, std=fan**-0.5), key=key
        )
        self.query = linear(dim, inner, dim * dim_head, keys[0])
        self.key = linear(dim, inner, dim, keys[1])
        self.value = linear(dim, inner, dim, keys[2])
        self.out = linear(inner, dim, inner, keys[3])
        self.dropout = nn.Dropout(dropout)
        self.heads = heads

    def keys_and_values(self, x: Float[Array, "tokens dim"]) -> nn.KVCache:
        return nn.KVCache(nn.split_heads(self.key(x), self.heads), nn.split_heads(self.value(x), self.heads))

    def __call__(
        self,
        x: Float[Array, "tokens dim"],
        *parts: nn.KVCache,
        mask: Bool[Array, "1 #tokens keys"],
        bias: Float[Array, "heads tokens keys"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "tokens dim"]:
        query = nn.split_heads(self.query(x), self.heads)
        mixed = nn.attend_to(query, parts, mask=mask, bias=bias, scale=1.0, dropout=self.dropout, dropout_key=key)
        return self.out(nn.merge_heads(mixed))


class EncoderBlock(eqx.Module):
    norm1: nn.RMSNorm
    attention: Attention
    norm2: nn.RMSNorm
    mlp: nn.MLP | nn.GatedMLP
    dropout: nn.Dropout

    def __init__(self, dim: int, attention: Attention, mlp: nn.MLP | nn.GatedMLP, *, norm_eps: float, dropout: float):
        self.norm1 = nn.RMSNorm(dim, eps=norm_eps)
        self.attention = attention
        self.norm2 = nn.RMSNorm(dim, eps=norm_eps)
        self.mlp = mlp
        self.dropout = nn.Dropout(dropout)

    def __call__(
        self,
        x: Float[Array, "tokens dim"],
        mask: Bool[Array, "1 1 tokens"],
        bias: Float[Array, "heads tokens tokens"],
        *,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "tokens dim"]:
        key_attention, key_dropout, key_mlp = nn.split_key(key, 3)
        y = self.norm1(x)
        y = self.attention(y, self.attention.keys_and_values(y), mask=mask, bias=bias, key=key_attention)
        x = x + self.dropout(y, key=key_dropout)
        return x + self.mlp(self.norm2(x), key=key_mlp)


class DecoderBlock(eqx.Module):
    norm1: nn.RMSNorm
    attention: Attention
    cross_norm: nn.RMSNorm
    cross_attention: Attention
    norm2: nn.RMSNorm
    mlp: nn.MLP | nn.GatedMLP
    dropout: nn.Dropout

    def __init__(
        self,
        dim: int,
        attention: Attention,
        cross_attention: Attention,
        mlp: nn.MLP | nn.GatedMLP,
        *,
        norm_eps: float,
        dropout: float,
    ):
        self.norm1 = nn.RMSNorm(dim, eps=norm_eps)
        self.attention = attention
        self.cross_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.cross_attention = cross_attention
        self.norm2 = nn.RMSNorm(dim, eps=norm_eps)
        self.mlp = mlp
        self.dropout = nn.Dropout(dropout)

    def __call__(
        self,
        x: Float[Array, "answer dim"],
        held: nn.KVCache | None,
        source: nn.KVCache,
        *,
        mask: Bool[Array, "1 answer keys"],
        bias: Float[Array, "heads answer keys"],
        source_mask: Bool[Array, "1 1 tokens"],
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "answer dim"], nn.KVCache]:
        """And the keys and values of these tokens. `held` are those of the answer so far, `source` of the text."""
        key_attention, key_dropout, key_cross, key_cross_dropout, key_mlp = nn.split_key(key, 5)
        y = self.norm1(x)
        new = self.attention.keys_and_values(y)
        parts = (new,) if held is None else (held, new)
        y = self.attention(y, *parts, mask=mask, bias=bias, key=key_attention)
        x = x + self.dropout(y, key=key_dropout)
        y = self.cross_attention(self.cross_norm(x), source, mask=source_mask, key=key_cross)
        x = x + self.dropout(y, key=key_cross_dropout)
        return x + self.mlp(self.norm2(x), key=key_mlp), new


class Tower(eqx.Module, Generic[Block]):
    """Encoder or decoder: blocks that share what distances between tokens add to their scores."""

    positions: Float[Array, "buckets heads"]
    blocks: nn.Stack[Block]
    norm: nn.RMSNorm

    def __init__(
        self,
        dim: int,
        heads: int,
        buckets: int,
        make_block: Callable[[PRNGKeyArray], Block],
        depth: int,
        *,
        norm_eps: float,
        key: PRNGKeyArray,
    ):
        key_positions, key_blocks = jax.random.split(key)
        self.positions = normal(key_positions, (buckets, heads), dim**-0.5)
        self.blocks = nn.Stack(make_block, depth, key=key_blocks)
        self.norm = nn.RMSNorm(dim, eps=norm_eps)

    def bias(
        self, queries: Int[Array, " queries"], keys: Int[Array, " keys"], max_distance: int, *, both_ways: bool
    ) -> Float[Array, "heads queries keys"]:
        """What the distance from each query to each key adds to the scores.

        With `both_ways`, half of the buckets are for keys ahead; without, these count as near ones.
        """
        buckets = self.positions.shape[0] // (2 if both_ways else 1)
        ahead = keys - queries[:, None]
        distance = jnp.abs(ahead) if both_ways else jnp.maximum(-ahead, 0)
        bucket = jnp.asarray(distance_buckets(buckets, max_distance))[jnp.minimum(distance, max_distance)]
        bucket = bucket + buckets * (ahead > 0) if both_ways else bucket
        return jnp.moveaxis(self.positions[bucket], -1, 0)


def distance_buckets(buckets: int, max_distance: int) -> Int[np.ndarray, " distances"]:
    """The bucket of each distance from 0 to `max_distance`: half of them for one distance each, then ever wider."""
    exact = buckets // 2
    distance = np.arange(max_distance + 1, dtype=np.float32)
    with np.errstate(divide="ignore"):
        growth = np.log(distance / np.float32(exact)) / np.float32(log(max_distance / exact))
    wide = exact + np.maximum(growth * np.float32(buckets - exact), 0).astype(np.int32)
    return np.where(distance < exact, distance.astype(np.int32), np.minimum(wide, buckets - 1)).astype(np.int32)
