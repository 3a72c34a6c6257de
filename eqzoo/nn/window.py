"""Attention inside the windows of a feature map, and biases by how two positions of a window lie to each other."""

from math import log

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from eqzoo.nn._conv_geometry import Pair
from eqzoo.nn._init import Init, constant, normal
from eqzoo.nn._precision import at_least_float32
from eqzoo.nn.attention import attend, merge_heads, split_heads
from eqzoo.nn.conv import as_pair
from eqzoo.nn.dropout import Dropout, split_key
from eqzoo.nn.linear import Linear

_FAR = -100.0  # what upstream adds to the score of a token of another region: not quite minus infinity


def partition_windows(
    x: Float[Array, "height width channels"], window: int | Pair
) -> Float[Array, "windows tokens channels"]:
    """Cuts a map, whose sides are multiples of the window's, into windows; these and their tokens row by row."""
    height, width, channels = x.shape
    rows, columns = as_pair(window)
    x = x.reshape(height // rows, rows, width // columns, columns, channels)
    return x.swapaxes(1, 2).reshape(-1, rows * columns, channels)


def merge_windows(
    windows: Float[Array, "windows tokens channels"], window: int | Pair, size: Pair
) -> Float[Array, "height width channels"]:
    """Puts the windows of a map of that `size` back in their places."""
    (height, width), (rows, columns) = size, as_pair(window)
    x = windows.reshape(height // rows, width // columns, rows, columns, -1)
    return x.swapaxes(1, 2).reshape(height, width, -1)


def shifted_regions(size: Pair, window: int, shift: Pair) -> Int[np.ndarray, "windows tokens"]:
    """Which part of a map each token comes from, in the windows of the map after it was rolled by `-shift`.

    In the last windows, tokens from opposite edges meet; they are of different regions.
    """
    rows, columns = (
        ((np.arange(n) >= n - window).astype(np.int32) + (np.arange(n) >= n - s)).reshape(-1, window)
        for n, s in zip(size, shift, strict=True)
    )
    return (3 * rows[:, None, :, None] + columns[:, None, :]).reshape(-1, window * window)


def relative_index(window: int) -> Int[np.ndarray, "tokens tokens"]:
    """For each query and key of a window, the row of their offset in a table of all offsets."""
    row, column = np.divmod(np.arange(window * window), window)
    down, right = (axis[:, None] - axis + window - 1 for axis in (row, column))
    return down * (2 * window - 1) + right


def log_offsets(window: int, pretrained_window: int = 0) -> Float[np.ndarray, "offsets 2"]:
    """All offsets in a window (down and right, in the order of `relative_index`) on a logarithmic scale.

    An offset across the window, or across the one of pretraining, is one; so those beyond it are barely larger.
    """
    reach = max((pretrained_window or window) - 1, 1)
    axis = np.arange(1 - window, window, dtype=np.float32) / np.float32(reach) * np.float32(8)
    axis = np.sign(axis) * np.log2(np.abs(axis) + 1) / np.float32(3)
    return np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2)


class RelativeBias(eqx.Module):
    """A learned number for each offset between two tokens of a window, and each head (Liu et al., 2021)."""

    table: Float[Array, "offsets heads"]
    window: int = eqx.field(static=True)

    def __init__(self, window: int, heads: int, *, key: PRNGKeyArray):
        self.table = normal(key, ((2 * window - 1) ** 2, heads), 0.02)
        self.window = window

    def __call__(self) -> Float[Array, "heads tokens tokens"]:
        return self.table[relative_index(self.window)].transpose(2, 0, 1)


class ContinuousBias(eqx.Module):
    """A number between 0 and 16 for each offset, computed by a small network (Liu et al., 2022): it serves windows of
    any size."""

    fc1: Linear
    fc2: Linear
    window: int = eqx.field(static=True)
    pretrained_window: int = eqx.field(static=True)

    def __init__(
        self, window: int, heads: int, *, pretrained_window: int = 0, init: Init | None = None, key: PRNGKeyArray
    ):
        key1, key2 = jax.random.split(key)
        self.fc1 = Linear(2, 512, init=init, key=key1)
        self.fc2 = Linear(512, heads, use_bias=False, init=init, key=key2)
        self.window = window
        self.pretrained_window = pretrained_window

    def __call__(self) -> Float[Array, "heads tokens tokens"]:
        offsets = jnp.asarray(log_offsets(self.window, self.pretrained_window))
        table = 16 * jax.nn.sigmoid(at_least_float32(self.fc2(jax.nn.relu(self.fc1(offsets)))))
        return table[relative_index(self.window)].transpose(2, 0, 1)


def attend_windows(
    query: Float[Array, "windows heads tokens dim_head"],
    key: Float[Array, "windows heads tokens dim_head"],
    value: Float[Array, "windows heads tokens dim_head"],
    *,
    bias: Float[Array, "heads tokens tokens"],
    regions: Int[Array, "windows tokens"] | None = None,
    scale: float | None = None,
    dropout: Dropout | None = None,
    dropout_key: PRNGKeyArray | None = None,
) -> Float[Array, "windows tokens all_heads"]:
    """`attend` in each window, with the same bias in all of them; tokens of different regions don't see each other."""

    def one(query, key, value, region, dropout_key):
        far = 0.0 if region is None else jnp.where(region[:, None] == region, 0.0, _FAR)
        mixed = attend(query, key, value, bias=bias + far, scale=scale, dropout=dropout, dropout_key=dropout_key)
        return merge_heads(mixed)

    keys = None if dropout_key is None else jax.random.split(dropout_key, query.shape[0])
    return jax.vmap(one)(query, key, value, regions, keys)


class WindowAttention(eqx.Module):
    """Multi-head self-attention of each window by itself, with a bias by offset (Liu et al., 2021)."""

    query: Linear
    key: Linear
    value: Linear
    out: Linear
    bias: RelativeBias
    weight_dropout: Dropout
    out_dropout: Dropout
    heads: int = eqx.field(static=True)
    scale: float | None = eqx.field(static=True)

    def __init__(
        self,
        dim: int,
        heads: int,
        window: int,
        *,
        scale: float | None = None,
        qkv_bias: bool = True,
        weight_dropout: float = 0.0,
        out_dropout: float = 0.0,
        init: Init | None = None,
        key: PRNGKeyArray,
    ):
        key_query, key_key, key_value, key_out, key_bias = jax.random.split(key, 5)
        self.query = Linear(dim, dim, use_bias=qkv_bias, init=init, key=key_query)
        self.key = Linear(dim, dim, use_bias=qkv_bias, init=init, key=key_key)
        self.value = Linear(dim, dim, use_bias=qkv_bias, init=init, key=key_value)
        self.out = Linear(dim, dim, init=init, key=key_out)
        self.bias = RelativeBias(window, heads, key=key_bias)
        self.weight_dropout = Dropout(weight_dropout)
        self.out_dropout = Dropout(out_dropout)
        self.heads = heads
        self.scale = scale

    def __call__(
        self,
        x: Float[Array, "windows tokens dim"],
        *,
        regions: Int[Array, "windows tokens"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "windows tokens dim"]:
        key_weights, key_out = split_key(key, 2)
        mixed = attend_windows(
            *(_split_heads(layer(x), self.heads) for layer in (self.query, self.key, self.value)),
            bias=self.bias(),
            regions=regions,
            scale=self.scale,
            dropout=self.weight_dropout,
            dropout_key=key_weights,
        )
        return self.out_dropout(self.out(mixed), key=key_out)


class CosineWindowAttention(eqx.Module):
    """As `WindowAttention`, but scores are cosines times a learned scale (of at most 100) for each head, and the bias
    is continuous (Liu et al., 2022).

    Keys have no bias of their own. Queries and values have, beside their layers, for upstream has them so.
    """

    query: Linear
    key: Linear
    value: Linear
    out: Linear
    query_bias: Float[Array, " dim"] | None
    value_bias: Float[Array, " dim"] | None
    log_scale: Float[Array, " heads"]
    bias: ContinuousBias
    weight_dropout: Dropout
    out_dropout: Dropout

    def __init__(
        self,
        dim: int,
        heads: int,
        window: int,
        *,
        pretrained_window: int = 0,
        qkv_bias: bool = True,
        weight_dropout: float = 0.0,
        out_dropout: float = 0.0,
        init: Init | None = None,
        key: PRNGKeyArray,
    ):
        key_query, key_key, key_value, key_out, key_bias = jax.random.split(key, 5)
        self.query = Linear(dim, dim, use_bias=False, init=init, key=key_query)
        self.key = Linear(dim, dim, use_bias=False, init=init, key=key_key)
        self.value = Linear(dim, dim, use_bias=False, init=init, key=key_value)
        self.out = Linear(dim, dim, init=init, key=key_out)
        self.query_bias = constant(dim, 0.0) if qkv_bias else None
        self.value_bias = constant(dim, 0.0) if qkv_bias else None
        self.log_scale = constant(heads, log(10))
        self.bias = ContinuousBias(window, heads, pretrained_window=pretrained_window, init=init, key=key_bias)
        self.weight_dropout = Dropout(weight_dropout)
        self.out_dropout = Dropout(out_dropout)

    def __call__(
        self,
        x: Float[Array, "windows tokens dim"],
        *,
        regions: Int[Array, "windows tokens"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "windows tokens dim"]:
        key_weights, key_out = split_key(key, 2)
        query, keys, value = self.query(x), self.key(x), self.value(x)
        query = query if self.query_bias is None else query + self.query_bias
        value = value if self.value_bias is None else value + self.value_bias
        query, keys, value = (_split_heads(each, self.log_scale.shape[0]) for each in (query, keys, value))
        scale = jnp.exp(jnp.minimum(at_least_float32(self.log_scale), log(100)))[:, None, None]
        mixed = attend_windows(
            (_unit(query) * scale).astype(x.dtype),
            _unit(keys).astype(x.dtype),
            value,
            bias=self.bias(),
            regions=regions,
            scale=1.0,
            dropout=self.weight_dropout,
            dropout_key=key_weights,
        )
        return self.out_dropout(self.out(mixed), key=key_out)


def _split_heads(x: Float[Array, "windows tokens all_heads"], heads: int) -> Float[Array, "windows heads tokens _"]:
    return jax.vmap(lambda window: split_heads(window, heads))(x)


def _unit(x: Float[Array, "*axes dim"]) -> Float[Array, "*axes dim"]:
    """Vectors of length one, or of zero (with a finite gradient), as a window's padding has them."""
    wide = at_least_float32(x)
    return wide * jax.lax.rsqrt(jnp.maximum(jnp.sum(wide * wide, axis=-1, keepdims=True), 1e-24))
