"""Softmax attention."""

from functools import partial
from math import sqrt

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from eqzoo.nn._init import Init
from eqzoo.nn.dropout import Dropout, split_key
from eqzoo.nn.linear import Linear
from eqzoo.nn.norm import LayerNorm, RMSNorm
from eqzoo.nn.position import rotate


def attend(
    query: Float[Array, "heads tokens dim_head"],
    key: Float[Array, "kv_heads keys dim_head"],
    value: Float[Array, "kv_heads keys dim_value"],
    *,
    mask: Bool[Array, "#heads #tokens #keys"] | None = None,
    bias: Float[Array, "#heads #tokens #keys"] | None = None,
    scale: Float[Array, ""] | float | None = None,
    dropout: Dropout | None = None,
    dropout_key: PRNGKeyArray | None = None,
) -> Float[Array, "heads tokens dim_value"]:
    """`softmax(query @ key.T * scale + bias) @ value` where `mask` is true; the softmax runs in float32.

    Each key and value head serves `heads / kv_heads` query heads in a row (grouped-query attention, Ainslie et al.,
    2023). The division by the softmax's sum comes last, on the small result instead of the large matrix of weights.
    """
    heads, tokens, dim_head = query.shape
    kv_heads = key.shape[0]
    if heads % kv_heads:
        raise ValueError(f"attend: {heads} query heads can't share {kv_heads} key heads; pass a divisor of {heads}")
    scale = 1 / sqrt(dim_head) if scale is None else scale
    query = (query * scale).reshape(kv_heads, heads // kv_heads, tokens, dim_head)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("hgqd,hkd->hgqk", query, key, preferred_element_type=wide)
    if bias is not None:
        scores = scores + jnp.broadcast_to(bias, (heads, tokens, key.shape[1])).reshape(scores.shape)
    if mask is not None:
        mask = jnp.broadcast_to(mask, (heads, tokens, key.shape[1])).reshape(scores.shape)
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if dropout is not None:
        weights = dropout(weights, key=dropout_key)
    mixed = jnp.einsum("hgqk,hkd->hgqd", weights.astype(value.dtype), value, preferred_element_type=wide) / total
    return mixed.reshape(heads, tokens, value.shape[-1]).astype(value.dtype)


def causal_mask(tokens: int) -> Bool[Array, "1 tokens tokens"]:
    """True where a token may look: at itself and at what came before."""
    return jnp.tril(jnp.ones((1, tokens, tokens), bool))


def split_heads(x: Float[Array, "tokens all_heads"], heads: int) -> Float[Array, "heads tokens dim_head"]:
    return x.reshape(x.shape[0], heads, -1).transpose(1, 0, 2)


def merge_heads(x: Float[Array, "heads tokens dim_head"]) -> Float[Array, "tokens all_heads"]:
    return x.transpose(1, 0, 2).reshape(x.shape[1], -1)


class Attention(eqx.Module):
    """Multi-head self-attention (Vaswani et al., 2017).

    `kv_heads` below `heads` gives grouped-query attention; `qk_norm` normalises each head's queries and keys, and
    `out_norm` what all heads found, before the last layer; `rotary` angles passed to the call turn queries and keys, in
    pairs of neighbours if `interleaved`.
    """

    query: Linear
    key: Linear
    value: Linear
    out: Linear
    query_norm: LayerNorm | RMSNorm | None
    key_norm: LayerNorm | RMSNorm | None
    out_norm: LayerNorm | RMSNorm | None
    weight_dropout: Dropout
    out_dropout: Dropout
    heads: int = eqx.field(static=True)
    kv_heads: int = eqx.field(static=True)
    interleaved: bool = eqx.field(static=True)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        dim_head: int | None = None,
        qkv_bias: bool = True,
        key_bias: bool | None = None,
        out_bias: bool = True,
        qk_norm: type[LayerNorm] | type[RMSNorm] | None = None,
        qk_norm_eps: float = 1e-6,
        out_norm: type[LayerNorm] | type[RMSNorm] | None = None,
        out_norm_eps: float = 1e-6,
        interleaved: bool = False,
        weight_dropout: float = 0.0,
        out_dropout: float = 0.0,
        init: Init | None = None,
        key: PRNGKeyArray,
    ):
        kv_heads = heads if kv_heads is None else kv_heads
        if dim_head is None:
            if dim % heads:
                raise ValueError(f"Attention: dim={dim} is not a multiple of heads={heads}; pass dim_head explicitly")
            dim_head = dim // heads
        if heads % kv_heads:
            raise ValueError(f"Attention: heads={heads} is not a multiple of kv_heads={kv_heads}; pass a divisor")
        key_query, key_key, key_value, key_out = jax.random.split(key, 4)
        self.query = Linear(dim, heads * dim_head, use_bias=qkv_bias, init=init, key=key_query)
        key_bias = qkv_bias if key_bias is None else key_bias
        self.key = Linear(dim, kv_heads * dim_head, use_bias=key_bias, init=init, key=key_key)
        self.value = Linear(dim, kv_heads * dim_head, use_bias=qkv_bias, init=init, key=key_value)
        self.out = Linear(heads * dim_head, dim, use_bias=out_bias, init=init, key=key_out)
        self.query_norm = None if qk_norm is None else qk_norm(dim_head, eps=qk_norm_eps)
        self.key_norm = None if qk_norm is None else qk_norm(dim_head, eps=qk_norm_eps)
        self.out_norm = None if out_norm is None else out_norm(heads * dim_head, eps=out_norm_eps)
        self.weight_dropout = Dropout(weight_dropout)
        self.out_dropout = Dropout(out_dropout)
        self.heads = heads
        self.kv_heads = kv_heads
        self.interleaved = interleaved

    def __call__(
        self,
        x: Float[Array, "tokens dim"],
        *,
        mask: Bool[Array, "#heads tokens tokens"] | None = None,
        rotary: Float[Array, "*heads tokens half_dim_head"] | None = None,
        scale: Float[Array, ""] | float | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "tokens dim"]:
        key_weights, key_out = split_key(key, 2)
        query = split_heads(self.query(x), self.heads)
        keys = split_heads(self.key(x), self.kv_heads)
        value = split_heads(self.value(x), self.kv_heads)
        if self.query_norm is not None and self.key_norm is not None:
            query, keys = self.query_norm(query), self.key_norm(keys)
        if rotary is not None:
            turn = partial(rotate, angles=rotary, interleaved=self.interleaved)
            query, keys = turn(query), turn(keys)
        mixed = attend(query, keys, value, mask=mask, scale=scale, dropout=self.weight_dropout, dropout_key=key_weights)
        merged = merge_heads(mixed)
        merged = merged if self.out_norm is None else self.out_norm(merged)
        return self.out_dropout(self.out(merged), key=key_out)
