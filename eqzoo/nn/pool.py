"""Pooling of one channels-last image, with torch's semantics."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from eqzoo.nn.conv import Pair, as_pair, same_tf_padding


def max_pool(
    x: Float[Array, "height width channels"],
    window: int | Pair,
    *,
    stride: int | Pair | None = None,
    padding: int | Pair | Literal["same_tf"] = 0,
    dilation: int | Pair = 1,
    ceil_mode: bool = False,
) -> Float[Array, "out_height out_width channels"]:
    """The largest value of each window. The gradient goes to the first of equal maxima, row by row, as in torch."""
    window, dilation = as_pair(window), as_pair(dilation)
    stride = window if stride is None else as_pair(stride)
    x, padding = _pad_same_tf(x, window, stride, padding, dilation, -jnp.inf)
    out_size, pads = _windows(x.shape[:2], window, stride, padding, dilation, ceil_mode)
    return _max_of_taps(_taps(_pad(x, pads, -jnp.inf), window, stride, dilation, out_size))


def avg_pool(
    x: Float[Array, "height width channels"],
    window: int | Pair,
    *,
    stride: int | Pair | None = None,
    padding: int | Pair | Literal["same_tf"] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Float[Array, "out_height out_width channels"]:
    """The mean of each window, accumulated in float32. The zeros of `"same_tf"` always count, as in timm."""
    window = as_pair(window)
    stride = window if stride is None else as_pair(stride)
    x, padding = _pad_same_tf(x, window, stride, padding, (1, 1), 0)
    out_size, pads = _windows(x.shape[:2], window, stride, padding, (1, 1), ceil_mode)
    total = sum(_taps(_pad(x.astype(_float32_or_wider(x)), pads, 0), window, stride, (1, 1), out_size))
    rows, columns = (
        _window_lengths(x.shape[axis], window[axis], stride[axis], padding[axis], out_size[axis], count_include_pad)
        for axis in (0, 1)
    )
    return (total / np.multiply.outer(rows, columns)[:, :, None].astype(total.dtype)).astype(x.dtype)


def adaptive_avg_pool(
    x: Float[Array, "height width channels"], size: int | Pair
) -> Float[Array, "out_height out_width channels"]:
    """Means over `size` windows of nearly equal lengths, as in torch."""
    rows, columns = (_averaging_matrix(n, out).astype(_float32_or_wider(x)) for n, out in zip(x.shape, as_pair(size)))
    y = jnp.einsum("ah,hwc->awc", rows, x.astype(rows.dtype), precision="highest")
    return jnp.einsum("bw,awc->abc", columns, y, precision="highest").astype(x.dtype)


def global_avg_pool(x: Float[Array, "height width channels"]) -> Float[Array, " channels"]:
    """The mean over all positions, accumulated in float32."""
    return jnp.mean(x, axis=(0, 1), dtype=_float32_or_wider(x)).astype(x.dtype)


@jax.custom_jvp
def _max_of_taps(taps: list[Array]) -> Array:
    largest = taps[0]
    for tap in taps[1:]:
        largest = jnp.maximum(largest, tap)
    return largest


@_max_of_taps.defjvp
def _max_of_taps_jvp(primals: tuple[list[Array]], tangents: tuple[list[Array]]) -> tuple[Array, Array]:
    (taps,), (tangent_taps,) = primals, tangents
    largest, first = taps[0], jnp.zeros(taps[0].shape, jnp.int32)
    for index, tap in enumerate(taps[1:], 1):
        better = (tap > largest) | jnp.isnan(tap)
        largest, first = jnp.where(better, tap, largest), jnp.where(better, index, first)
    tangent = sum(jnp.where(first == index, tap, 0) for index, tap in enumerate(tangent_taps))
    return largest, tangent


def _float32_or_wider(x: Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _pad(x: Array, pads: tuple[Pair, Pair], value: float) -> Array:
    return lax.pad(x, jnp.asarray(value, x.dtype), [(*pads[0], 0), (*pads[1], 0), (0, 0, 0)])


def _pad_same_tf(x: Array, window: Pair, stride: Pair, padding: int | Pair | str, dilation: Pair, value: float):
    if padding == "same_tf":
        return _pad(x, same_tf_padding(x.shape[:2], window, stride, dilation), value), (0, 0)
    if isinstance(padding, str):
        raise ValueError(f'padding="{padding}" is unknown; pass "same_tf" or a size per axis.')
    padding = as_pair(padding)
    if any(2 * p > d * (k - 1) + 1 for p, k, d in zip(padding, window, dilation, strict=True)):
        raise ValueError(f"padding={padding} is more than half of window={window}; some windows would see only padding.")
    return x, padding


def _windows(
    size: Pair, window: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool
) -> tuple[Pair, tuple[Pair, Pair]]:
    """How many windows there are per axis, and the (low, high) padding that they reach into."""
    counts, pads = [], []
    for n, k, s, p, d in zip(size, window, stride, padding, dilation, strict=True):
        reach = d * (k - 1) + 1
        span = n + 2 * p - reach
        count = (-(-span // s) if ceil_mode else span // s) + 1
        if ceil_mode and (count - 1) * s >= n + p:
            count -= 1  # the last window has to start inside the image or the padding before it
        if count < 1:
            raise ValueError(f"window={window} doesn't fit into an image of {size} with padding={padding}.")
        counts.append(count)
        pads.append((p, (count - 1) * s + reach - n - p))
    return tuple(counts), tuple(pads)


def _taps(x: Array, window: Pair, stride: Pair, dilation: Pair, out_size: Pair) -> list[Array]:
    taps = []
    for i in range(0, window[0] * dilation[0], dilation[0]):
        for j in range(0, window[1] * dilation[1], dilation[1]):
            stop = (i + (out_size[0] - 1) * stride[0] + 1, j + (out_size[1] - 1) * stride[1] + 1, x.shape[2])
            taps.append(lax.slice(x, (i, j, 0), stop, (*stride, 1)))
    return taps


def _window_lengths(n: int, k: int, s: int, p: int, count: int, include_pad: bool) -> np.ndarray:
    start = np.arange(count) * s - p
    stop = np.minimum(start + k, n + p)
    if include_pad:
        return stop - start
    return np.minimum(stop, n) - np.maximum(start, 0)


def _averaging_matrix(n: int, out: int) -> np.ndarray:
    index = np.arange(out)
    start, stop = index * n // out, -(-(index + 1) * n // out)
    inside = (np.arange(n) >= start[:, None]) & (np.arange(n) < stop[:, None])
    return inside / (stop - start)[:, None]
