"""Softmax attention."""

from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from eqzoo.nn._init import Init
from eqzoo.nn._kept import KEPT
from eqzoo.nn.cache import KVCache
from eqzoo.nn.dropout import Dropout, split_key
from eqzoo.nn.linear import Linear
from eqzoo.nn.norm import LayerNorm, RMSNorm
from eqzoo.nn.position import rotate

_BLOCK = 128  # queries that attend at a time
_RUNS = 4  # of blocks, each a loop; with more of them fewer keys are looked at in vain, and programs are larger


def attend(
    query: Float[Array, "heads tokens dim_head"],
    key: Float[Array, "kv_heads keys dim_head"],
    value: Float[Array, "kv_heads keys dim_value"],
    *,
    mask: Bool[Array, "#heads #tokens #keys"] | None = None,
    bias: Float[Array, "#heads #tokens #keys"] | None = None,
    scale: Float[Array, ""] | float | None = None,
    cap: float | None = None,
    dropout: Dropout | None = None,
    dropout_key: PRNGKeyArray | None = None,
) -> Float[Array, "heads tokens dim_value"]:
    """`softmax(query @ key.T * scale + bias) @ value` where `mask` is true; the softmax runs in float32.

    A `cap` bends each product smoothly so that it stays between `-cap` and `cap` (Gemma 2).

    Each key and value head serves `heads / kv_heads` query heads in a row (grouped-query attention, Ainslie et al.,
    2023). The division by the softmax's sum comes last, on the small result instead of the large matrix of weights.
    """
    mixed = attend_to(
        query,
        (KVCache(key, value),),
        mask=mask,
        bias=bias,
        scale=scale,
        cap=cap,
        dropout=dropout,
        dropout_key=dropout_key,
    )
    return mixed.astype(value.dtype)


def attend_causal(
    query: Float[Array, "heads tokens dim_head"],
    key: Float[Array, "kv_heads tokens dim_head"],
    value: Float[Array, "kv_heads tokens dim_value"],
    *,
    window: Int[Array, ""] | int | None = None,
    scale: Float[Array, ""] | float | None = None,
    cap: float | None = None,
    dropout: Dropout | None = None,
    dropout_key: PRNGKeyArray | None = None,
) -> Float[Array, "heads tokens dim_value"]:
    """`attend` with a `causal_mask`, in memory that grows with the tokens instead of with their square.

    Queries attend in blocks, whose scores are computed again for the backward pass. Most keys ahead of a block are
    skipped, and those behind its window if that is a Python number.
    """
    tokens = query.shape[1]
    attend_alike = partial(attend, scale=scale, cap=cap, dropout=dropout)
    if tokens <= 2 * _BLOCK:  # too few to gain anything
        return attend_alike(query, key, value, mask=causal_mask(tokens, window), dropout_key=dropout_key)
    blocks = -(-tokens // _BLOCK)
    size = -(-tokens // blocks)
    # What fills up the last block lies ahead of every token.
    query, key, value = (jnp.pad(x, ((0, 0), (0, blocks * size - tokens), (0, 0))) for x in (query, key, value))
    queries = query.reshape(query.shape[0], blocks, size, -1).swapaxes(0, 1)

    def run(first: int, stop: int) -> Float[Array, "blocks heads size dim_value"]:
        end = stop * size
        seen = min(end, size + window - 1) if isinstance(window, int) else end

        @jax.checkpoint
        def attend_block(number: Int[Array, ""], query: Float[Array, "heads size dim_head"]) -> Array:
            start = jnp.maximum((number + 1) * size - seen, 0)
            near_key, near_value = (jax.lax.dynamic_slice_in_dim(x[:, :end], start, seen, axis=1) for x in (key, value))
            mask = _sees(number * size + jnp.arange(size), start + jnp.arange(seen), window)
            block_key = None if dropout_key is None else jax.random.fold_in(dropout_key, number)
            return attend_alike(query, near_key, near_value, mask=mask, dropout_key=block_key)

        return jax.lax.map(lambda block: attend_block(*block), (jnp.arange(first, stop), queries[first:stop]))

    runs = np.array_split(range(blocks), min(_RUNS, blocks))
    mixed = jnp.concatenate([run(int(numbers[0]), int(numbers[-1]) + 1) for numbers in runs])
    mixed = mixed.swapaxes(0, 1).reshape(query.shape[0], blocks * size, -1)[:, :tokens]
    return checkpoint_name(mixed, KEPT)


def attend_to(
    query: Float[Array, "heads tokens dim_head"],
    parts: Sequence[KVCache],
    *,
    mask: Bool[Array, "#heads #tokens #keys"] | None = None,
    bias: Float[Array, "#heads #tokens #keys"] | None = None,
    scale: Float[Array, ""] | float | None = None,
    cap: float | None = None,
    dropout: Dropout | None = None,
    dropout_key: PRNGKeyArray | None = None,
) -> Float[Array, "heads tokens dim_value"]:
    """As `attend`, with keys and values in several parts, which are never copied to lie together."""
    heads, tokens, dim_head = query.shape
    kv_heads, dtype = parts[0].key.shape[0], query.dtype
    if heads % kv_heads:
        raise ValueError(f"attend: {heads} query heads can't share {kv_heads} key heads; pass a divisor of {heads}")
    scale = 1 / sqrt(dim_head) if scale is None else scale
    query = (query * scale).reshape(kv_heads, heads // kv_heads, tokens, dim_head)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    product = partial(jnp.einsum, preferred_element_type=wide)
    keys, values = zip(*(part.read() for part in parts), strict=True)
    scores = [product("hgqd,hkd->hgqk", query, key.astype(dtype)) for key in keys]
    scores = scores[0] if len(scores) == 1 else jnp.concatenate(scores, axis=-1)
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    if bias is not None:
        scores = scores + jnp.broadcast_to(bias, (heads, *scores.shape[2:])).reshape(scores.shape)
    if mask is not None:
        mask = jnp.broadcast_to(mask, (heads, *scores.shape[2:])).reshape(scores.shape)
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if dropout is not None:
        weights = dropout(weights, key=dropout_key)
    ends = np.cumsum([value.shape[1] for value in values])
    parts_of_weights = jnp.split(weights.astype(dtype), ends[:-1], axis=-1)
    of_parts = zip(parts_of_weights, values, strict=True)
    mixed = sum(product("hgqk,hkd->hgqd", part, value.astype(dtype)) for part, value in of_parts)
    return (mixed / total).reshape(heads, tokens, -1).astype(dtype)


def causal_mask(tokens: int, window: Int[Array, ""] | int | None = None) -> Bool[Array, "1 tokens tokens"]:
    """True where a token may look: at itself and at what came before, `window` tokens in all."""
    positions = jnp.arange(tokens)
    return _sees(positions, positions, window)


def _sees(
    queries: Int[Array, " queries"], keys: Int[Array, " keys"], window: Int[Array, ""] | int | None
) -> Bool[Array, "1 queries keys"]:
    behind = queries[None, :, None] - keys
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)


def split_heads(x: Float[Array, "tokens all_heads"], heads: int) -> Float[Array, "heads tokens dim_head"]:
    return x.reshape(x.shape[0], heads, -1).transpose(1, 0, 2)


def merge_heads(x: Float[Array, "heads tokens dim_head"]) -> Float[Array, "tokens all_heads"]:
    return x.transpose(1, 0, 2).reshape(x.shape[1], -1)


def cached_mask(
    cache: KVCache, position: Int[Array, ""], tokens: int, window: Int[Array, ""] | int | None = None
) -> Bool[Array, "1 tokens keys"]:
    """Where `tokens` new ones from `position` on may look: at what `cache` holds, and at each other."""
    held = cache.positions(position)
    distance = position + jnp.arange(tokens)[:, None] - held
    cached = (held >= 0) if window is None else (held >= 0) & (distance < window)
    cached = jnp.broadcast_to(cached, distance.shape)
    return jnp.concatenate([cached[None], causal_mask(tokens, window)], axis=-1)


def attend_cached(
    query: Float[Array, "heads tokens dim_head"],
    new: KVCache,
    cache: KVCache,
    position: Int[Array, ""],
    *,
    window: Int[Array, ""] | int | None = None,
    scale: Float[Array, ""] | float | None = None,
    cap: float | None = None,
) -> Float[Array, "heads tokens dim_value"]:
    """`attend` of tokens at `position` and after it to themselves, `new`, and to those before them, in `cache`."""
    mask = cached_mask(cache, position, query.shape[1], window)
    return attend_to(query, (cache, new), mask=mask, scale=scale, cap=cap)


class Attention(eqx.Module):
    """Multi-head self-attention (Vaswani et al., 2017).

    `kv_heads` below `heads` gives grouped-query attention; `qk_norm` normalises the queries and keys, each head's by
    itself or, if `qk_norm_whole`, all heads' together; `out_norm` what all heads found, before the last layer. `cap`
    bounds the scores. `rotary` angles passed to the call turn the first channels of queries and keys, as many as there
    are angles for, in pairs of neighbours if `interleaved`, and lengthen them by `rotary_scale`.
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
    qk_norm_whole: bool = eqx.field(static=True)
    interleaved: bool = eqx.field(static=True)
    rotary_scale: float = eqx.field(static=True)
    cap: float | None = eqx.field(static=True)

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
        qk_norm: Callable[..., LayerNorm | RMSNorm] | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_whole: bool = False,
        out_norm: type[LayerNorm] | type[RMSNorm] | None = None,
        out_norm_eps: float = 1e-6,
        interleaved: bool = False,
        rotary_scale: float = 1.0,
        cap: float | None = None,
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
        query_width, key_width = (heads * dim_head, kv_heads * dim_head) if qk_norm_whole else (dim_head, dim_head)
        self.query_norm = None if qk_norm is None else qk_norm(query_width, eps=qk_norm_eps)
        self.key_norm = None if qk_norm is None else qk_norm(key_width, eps=qk_norm_eps)
        self.out_norm = None if out_norm is None else out_norm(heads * dim_head, eps=out_norm_eps)
        self.weight_dropout = Dropout(weight_dropout)
        self.out_dropout = Dropout(out_dropout)
        self.heads = heads
        self.kv_heads = kv_heads
        self.qk_norm_whole = qk_norm_whole
        self.interleaved = interleaved
        self.rotary_scale = rotary_scale
        self.cap = cap

    def __call__(
        self,
        x: Float[Array, "tokens dim"],
        *,
        mask: Bool[Array, "#heads tokens tokens"] | None = None,
        causal: bool = False,
        window: Int[Array, ""] | int | None = None,
        rotary: Float[Array, "*heads tokens half_dim_rotary"] | None = None,
        scale: Float[Array, ""] | float | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "tokens dim"]:
        """A token attends to where `mask` is true, or to itself and to what came before (`causal`), `window` tokens in
        all, or to every token."""
        if causal and mask is not None:
            raise ValueError("Attention: got a mask beside causal=True; pass one of them")
        if window is not None and not causal:
            raise ValueError(f"Attention: window={window} means nothing without causal=True; pass that too, or a mask")
        key_weights, key_out = split_key(key, 2)
        look = partial(attend_causal, window=window) if causal else partial(attend, mask=mask)
        mixed = look(
            *self._heads(x, rotary), scale=scale, cap=self.cap, dropout=self.weight_dropout, dropout_key=key_weights
        )
        return self.out_dropout(self._merge(mixed), key=key_out)

    def extend(
        self,
        x: Float[Array, "tokens dim"],
        cache: KVCache,
        position: Int[Array, ""],
        *,
        rotary: Float[Array, "*heads tokens half_dim_rotary"] | None = None,
        window: Int[Array, ""] | int | None = None,
        scale: Float[Array, ""] | float | None = None,
    ) -> tuple[Float[Array, "tokens dim"], KVCache]:
        """What the layer makes of tokens at `position` and after it, and their keys and values.

        `cache` holds those of the tokens before, in one layer; it is the caller's to write the new ones to all layers
        at once. A token attends to itself and to what came before, `window` tokens in all.
        """
        look = partial(attend_cached, cache=cache, position=position, window=window, scale=scale, cap=self.cap)
        return self.around(look, x, rotary=rotary)

    def around(
        self,
        look: Callable[[Array, KVCache], Array],
        x: Float[Array, "tokens dim"],
        *,
        rotary: Float[Array, "*heads tokens half_dim_rotary"] | None = None,
    ) -> tuple[Float[Array, "tokens dim"], KVCache]:
        """As `extend`, with another way to attend: `look(query, new)` is given the queries and what the cache gets."""
        query, keys, value = self._heads(x, rotary)
        new = KVCache(keys, value)
        return self._merge(look(query, new)), new

    def _heads(
        self, x: Float[Array, "tokens dim"], rotary: Float[Array, "*heads tokens half_dim_rotary"] | None
    ) -> tuple[
        Float[Array, "heads tokens dim_head"],
        Float[Array, "kv_heads tokens dim_head"],
        Float[Array, "kv_heads tokens dim_head"],
    ]:
        query, keys = self.query(x), self.key(x)
        if self.qk_norm_whole:
            query, keys = self._normalise(query, keys)
        query, keys = split_heads(query, self.heads), split_heads(keys, self.kv_heads)
        if not self.qk_norm_whole:
            query, keys = self._normalise(query, keys)
        if rotary is not None:
            turn = partial(rotate, angles=rotary, interleaved=self.interleaved, scale=self.rotary_scale)
            query, keys = turn(query), turn(keys)
        return query, keys, split_heads(self.value(x), self.kv_heads)

    def _normalise(self, query: Array, keys: Array) -> tuple[Array, Array]:
        if self.query_norm is None or self.key_norm is None:
            return query, keys
        return self.query_norm(query), self.key_norm(keys)

    def _merge(self, mixed: Float[Array, "heads tokens dim_head"]) -> Float[Array, "tokens dim"]:
        merged = merge_heads(mixed)
        return self.out(merged if self.out_norm is None else self.out_norm(merged))
