"""The blocks of timm's experiments with ViT: attention and MLP side by side, in pairs, and attention of differences."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo import nn
from eqzoo.nn._init import Init, normal

Attend = Callable[..., Float[Array, "tokens dim"]]


class DifferentialAttention(eqx.Module):
    """The difference of two softmax attentions, the second times a learned factor (Ye et al., 2024, arXiv 2410.05258).

    A call's `start` is what the factor is near at first; it grows with the layer's number (see `factor_starts`).
    """

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    out: nn.Linear
    query_norm: nn.LayerNorm | nn.RMSNorm | None
    key_norm: nn.LayerNorm | nn.RMSNorm | None
    head_norm: nn.RMSNorm
    out_norm: nn.LayerNorm | nn.RMSNorm | None
    query_factor1: Float[Array, " dim_head"]
    key_factor1: Float[Array, " dim_head"]
    query_factor2: Float[Array, " dim_head"]
    key_factor2: Float[Array, " dim_head"]
    weight_dropout: nn.Dropout
    out_dropout: nn.Dropout
    heads: int = eqx.field(static=True)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        qkv_bias: bool,
        out_bias: bool,
        qk_norm: type[nn.LayerNorm] | type[nn.RMSNorm] | None,
        qk_norm_eps: float,
        out_norm: type[nn.LayerNorm] | type[nn.RMSNorm] | None,
        out_norm_eps: float,
        weight_dropout: float,
        out_dropout: float,
        init: Init,
        key: PRNGKeyArray,
    ):
        key_query, key_key, key_value, key_out, *keys = jax.random.split(key, 8)
        dim_head = dim // heads // 2
        self.query = nn.Linear(dim, dim, use_bias=qkv_bias, init=init, key=key_query)
        self.key = nn.Linear(dim, dim, use_bias=qkv_bias, init=init, key=key_key)
        self.value = nn.Linear(dim, dim, use_bias=qkv_bias, init=init, key=key_value)
        self.out = nn.Linear(dim, dim, use_bias=out_bias, init=init, key=key_out)
        self.query_norm = None if qk_norm is None else qk_norm(dim_head, eps=qk_norm_eps)
        self.key_norm = None if qk_norm is None else qk_norm(dim_head, eps=qk_norm_eps)
        self.head_norm = nn.RMSNorm(2 * dim_head, eps=1e-5)
        self.out_norm = None if out_norm is None else out_norm(dim, eps=out_norm_eps)
        factors = [normal(key, (dim_head,), 0.1) for key in keys]
        self.query_factor1, self.key_factor1, self.query_factor2, self.key_factor2 = factors
        self.weight_dropout = nn.Dropout(weight_dropout)
        self.out_dropout = nn.Dropout(out_dropout)
        self.heads = heads

    def __call__(
        self, x: Float[Array, "tokens dim"], *, start: Float[Array, ""], key: PRNGKeyArray | None = None
    ) -> Float[Array, "tokens dim"]:
        key_weights1, key_weights2, key_out = nn.split_key(key, 3)
        query = nn.split_heads(self.query(x), 2 * self.heads)
        keys = nn.split_heads(self.key(x), 2 * self.heads)
        value = nn.split_heads(self.value(x), self.heads)
        if self.query_norm is not None and self.key_norm is not None:
            query, keys = self.query_norm(query), self.key_norm(keys)
        first, second = (
            nn.attend(query[number::2], keys[number::2], value, dropout=self.weight_dropout, dropout_key=key)
            for number, key in enumerate((key_weights1, key_weights2))
        )
        factor = jnp.exp(self.query_factor1 @ self.key_factor1) - jnp.exp(self.query_factor2 @ self.key_factor2) + start
        mixed = self.head_norm(first - factor.astype(x.dtype) * second) * (1 - start).astype(x.dtype)
        merged = nn.merge_heads(mixed)
        merged = merged if self.out_norm is None else self.out_norm(merged)
        return self.out_dropout(self.out(merged), key=key_out)


def factor_starts(depth: int) -> Float[Array, " depth"]:
    """What the factors of each layer's differential attention start near."""
    return 0.8 - 0.6 * jnp.exp(-0.3 * jnp.arange(depth, dtype=jnp.float32))


def differential_step(
    block: Any, tokens: Float[Array, "tokens dim"], layer: tuple[Array, Array, PRNGKeyArray | None]
) -> tuple[Float[Array, "tokens dim"], None]:
    """What a scan does with a block whose attention is differential, its depth, its factor's start and its key."""
    depth, start, key = layer
    return block(tokens, depth, attention=partial(block.attention, start=start), key=key), None


class ParallelBlock(eqx.Module):
    """Attention and MLP of the same normalised tokens, added (Dehghani et al., 2023, arXiv 2302.05442)."""

    norm: nn.LayerNorm | nn.RMSNorm
    attention: nn.Attention | DifferentialAttention
    fc1: nn.Linear
    fc2: nn.Linear
    scale: nn.LayerScale | None
    dropout: nn.Dropout
    drop_path: nn.DropPath
    activation: Callable[[Array], Array] = eqx.field(static=True)

    def __init__(
        self,
        dim: int,
        attention: nn.Attention | DifferentialAttention,
        hidden: int,
        *,
        norm: nn.Norm,
        out_bias: bool,
        layer_scale: float | None,
        activation: Callable[[Array], Array],
        dropout: float,
        drop_path: float,
        init: Init,
        key: PRNGKeyArray,
    ):
        key1, key2 = jax.random.split(key)
        self.norm = norm(dim)
        self.attention = attention
        self.fc1 = nn.Linear(dim, hidden, init=init, key=key1)
        self.fc2 = nn.Linear(hidden, dim, use_bias=out_bias, init=init, key=key2)
        self.scale = None if layer_scale is None else nn.LayerScale(dim, layer_scale)
        self.dropout = nn.Dropout(dropout)
        self.drop_path = nn.DropPath(drop_path)
        self.activation = activation

    def __call__(
        self,
        x: Float[Array, "tokens dim"],
        depth: Float[Array, ""],
        *,
        attention: Attend | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "tokens dim"]:
        key_attention, key_mlp, key_path = nn.split_key(key, 3)
        attend: Any = self.attention if attention is None else attention
        y = self.norm(x)
        y = attend(y, key=key_attention) + self.fc2(self.dropout(self.activation(self.fc1(y)), key=key_mlp))
        y = y if self.scale is None else self.scale(y)
        return x + self.drop_path(y, depth, key=key_path)


class Branch(eqx.Module):
    """A layer of normalised tokens, scaled."""

    norm: nn.LayerNorm | nn.RMSNorm
    layer: nn.Attention | nn.MLP | nn.GatedMLP
    scale: nn.LayerScale | None
    drop_path: nn.DropPath

    def __init__(
        self,
        dim: int,
        layer: nn.Attention | nn.MLP | nn.GatedMLP,
        *,
        norm: nn.Norm,
        layer_scale: float | None,
        drop_path: float,
    ):
        self.norm = norm(dim)
        self.layer = layer
        self.scale = None if layer_scale is None else nn.LayerScale(dim, layer_scale)
        self.drop_path = nn.DropPath(drop_path)

    def __call__(
        self, x: Float[Array, "tokens dim"], depth: Float[Array, ""], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "tokens dim"]:
        key_layer, key_path = nn.split_key(key, 2)
        y = self.layer(self.norm(x), key=key_layer)
        y = y if self.scale is None else self.scale(y)
        return self.drop_path(y, depth, key=key_path)


class TwinBlock(eqx.Module):
    """Two attentions side by side, then two MLPs side by side (Touvron et al., 2022, arXiv 2203.09795)."""

    attentions: tuple[Branch, Branch]
    mlps: tuple[Branch, Branch]

    def __call__(
        self, x: Float[Array, "tokens dim"], depth: Float[Array, ""], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "tokens dim"]:
        keys = nn.split_key(key, 4)
        for pair, (key1, key2) in ((self.attentions, keys[:2]), (self.mlps, keys[2:])):
            x = x + pair[0](x, depth, key=key1) + pair[1](x, depth, key=key2)
        return x
