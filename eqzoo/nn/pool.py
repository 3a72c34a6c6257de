"""Pooling of one channels-last image, with torch's semantics."""

from dataclasses import dataclass
from functools import partial, reduce
from math import ceil
from operator import add

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from eqzoo.nn._conv_geometry import Pair, Shape
from eqzoo.nn._precision import at_least_float32
from eqzoo.nn.conv import as_pair, conv2d, same_tf_padding


@dataclass(frozen=True)
class _Windows:
    """Where the windows lie: `count` of them per axis, on an image with (low, high) `pads`."""

    window: Pair
    stride: Pair
    dilation: Pair
    count: Shape
    pads: tuple[Pair, ...]

    @staticmethod
    def over(size: Shape, window: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool) -> "_Windows":
        counts, pads = [], []
        for n, k, s, p, d in zip(size, window, stride, padding, dilation, strict=True):
            reach = d * (k - 1) + 1
            room = n + 2 * p - reach
            count = (ceil(room / s) if ceil_mode else room // s) + 1
            if ceil_mode and (count - 1) * s >= n + p:
                count -= 1  # torch wants the last window to start inside the image or the padding before it
            if count < 1:
                raise ValueError(
                    f"A window of {window} with dilation {dilation} doesn't fit into an image of {size} with "
                    f"padding {padding}; enlarge the image or choose a smaller window."
                )
            counts.append(count)
            pads.append((p, (count - 1) * s + reach - n - p))
        return _Windows(window, stride, dilation, tuple(counts), tuple(pads))

    def taps(self, x: Array) -> list[Array]:
        """The padded image as the windows' first elements see it, their second elements, and so on."""
        (rows, columns), (down, right) = self.count, self.stride
        return [
            lax.slice(
                x, (i, j, 0), (i + (rows - 1) * down + 1, j + (columns - 1) * right + 1, x.shape[2]), (down, right, 1)
            )
            for i in range(0, self.window[0] * self.dilation[0], self.dilation[0])
            for j in range(0, self.window[1] * self.dilation[1], self.dilation[1])
        ]


def max_pool(
    x: Float[Array, "height width channels"],
    window: int | Pair,
    *,
    stride: int | Pair | None = None,
    padding: int | Pair | str = 0,
    dilation: int | Pair = 1,
    ceil_mode: bool = False,
) -> Float[Array, "out_height out_width channels"]:
    """The largest value of each window; `padding` is a size per axis or `"same_tf"`.

    The gradient goes to the first of equal maxima, row by row, as in torch.
    """
    window, dilation = as_pair(window), as_pair(dilation)
    stride = window if stride is None else as_pair(stride)
    x, padding = _pad_same_tf(x, window, stride, padding, dilation, -jnp.inf)
    windows = _Windows.over(x.shape[:2], window, stride, padding, dilation, ceil_mode)
    return _max_of_windows(_pad(x, windows.pads, -jnp.inf), windows)


class MaxPool(eqx.Module):
    """`max_pool` as a layer, for networks that are one sequence."""

    window: int = eqx.field(static=True)
    stride: int = eqx.field(static=True)
    ceil_mode: bool = eqx.field(static=True, default=False)

    def __call__(self, x: Float[Array, "height width channels"]) -> Float[Array, "out_height out_width channels"]:
        return max_pool(x, self.window, stride=self.stride, ceil_mode=self.ceil_mode)


def avg_pool(
    x: Float[Array, "height width channels"],
    window: int | Pair,
    *,
    stride: int | Pair | None = None,
    padding: int | Pair | str = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Float[Array, "out_height out_width channels"]:
    """The mean of each window, accumulated in float32. The zeros of `"same_tf"` always count, as in timm."""
    window = as_pair(window)
    stride = window if stride is None else as_pair(stride)
    x, padding = _pad_same_tf(x, window, stride, padding, (1, 1), 0.0)
    windows = _Windows.over(x.shape[:2], window, stride, padding, (1, 1), ceil_mode)
    total = _pad(at_least_float32(x), windows.pads, 0.0)
    for axis in (0, 1):
        span = (windows.count[axis] - 1) * stride[axis] + 1
        taps = (lax.slice_in_dim(total, i, i + span, stride[axis], axis) for i in range(window[axis]))
        total = reduce(add, taps)
    rows, columns = (
        _window_lengths(n, k, s, p, count, count_include_pad)
        for n, k, s, p, count in zip(x.shape[:2], window, stride, padding, windows.count, strict=True)
    )
    return (total / jnp.asarray(np.multiply.outer(rows, columns)[:, :, None], total.dtype)).astype(x.dtype)


def blur_pool(
    x: Float[Array, "height width channels"], *, stride: int
) -> Float[Array, "out_height out_width channels"]:
    """Every `stride`-th pixel of the image smoothed by a binomial filter (Zhang, 2019); the border is mirrored."""
    channels = x.shape[-1]
    taps = np.outer([1, 2, 1], [1, 2, 1]) / 16
    weight = jnp.broadcast_to(jnp.asarray(taps, x.dtype), (channels, 1, 3, 3))
    return conv2d(jnp.pad(x, ((1, 1), (1, 1), (0, 0)), mode="reflect"), weight, stride=stride, groups=channels)


def adaptive_avg_pool(
    x: Float[Array, "height width channels"], size: int | Pair
) -> Float[Array, "out_height out_width channels"]:
    """Means over `size` windows of nearly equal lengths, as in torch."""
    wide = at_least_float32(x)
    rows, columns = (
        _averaging_matrix(n, out).astype(wide.dtype) for n, out in zip(x.shape[:2], as_pair(size), strict=True)
    )
    y = jnp.einsum("ah,hwc->awc", rows, wide, precision="highest")
    return jnp.einsum("bw,awc->abc", columns, y, precision="highest").astype(x.dtype)


def global_avg_pool(x: Float[Array, "height width channels"]) -> Float[Array, " channels"]:
    """The mean over all positions, accumulated in float32."""
    return jnp.mean(at_least_float32(x), axis=(0, 1)).astype(x.dtype)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _max_of_windows(x: Array, windows: _Windows) -> Array:
    return reduce(jnp.maximum, windows.taps(x))


@_max_of_windows.defjvp
def _max_of_windows_jvp(windows: _Windows, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    largest, *taps = windows.taps(primals[0])
    first = jnp.zeros(largest.shape, np.min_scalar_type(len(taps) + 1))
    for index, tap in enumerate(taps, 1):
        better = (tap > largest) | jnp.isnan(tap)
        largest, first = jnp.where(better, tap, largest), jnp.where(better, first.dtype.type(index), first)

    # Rematerialised, so that the backward pass keeps `first` and not a mask per tap.
    chosen = jax.checkpoint(partial(_chosen, windows), prevent_cse=False)
    return largest, chosen(first, tangents[0])


def _chosen(windows: _Windows, first: Array, tangent: Array) -> Array:
    """The tangent at each window's largest pixel, the one it sees through the tap number `first`.

    The image is cut into squares of one stride: all windows see the square `i` down and `j` right of their own corner
    through the same taps. So the transpose, the pool's gradient, adds up few shifted arrays, pixel by pixel; that of
    `windows.taps` would spread each tap over the image.
    """
    (height, width), (down, right) = windows.window, windows.stride
    below, beside = (d * (k - 1) // s for d, k, s in zip(windows.dilation, windows.window, windows.stride, strict=True))
    rows, columns = windows.count[0] + below, windows.count[1] + beside
    no_tap = height * width
    taps = np.full(((below + 1) * down, (beside + 1) * right), no_tap, first.dtype)
    taps[:: windows.dilation[0], :: windows.dilation[1]][:height, :width] = np.arange(no_tap).reshape(height, width)

    image = _pad(tangent, ((0, rows * down - tangent.shape[0]), (0, columns * right - tangent.shape[1])), 0.0)
    squares = image.reshape(rows, down, columns, right, -1)
    first = _pad(first, ((below, below), (beside, beside)), 0.0)
    parts = []
    for i, j in np.ndindex(below + 1, beside + 1):
        tap = taps[i * down : (i + 1) * down, j * right : (j + 1) * right]
        if np.all(tap == no_tap):
            continue
        seen = first[below - i : below - i + rows, beside - j : beside - j + columns]
        part = jnp.where(seen[:, None, :, None] == tap[:, None, :, None], squares, 0).sum((1, 3))
        parts.append(_pad(part, ((below - i, i), (beside - j, j)), 0.0))
    return reduce(add, parts)[below : below + windows.count[0], beside : beside + windows.count[1]]


def _pad(x: Array, pads: tuple[Pair, ...], value: float) -> Array:
    return lax.pad(x, jnp.asarray(value, x.dtype), [(*pads[0], 0), (*pads[1], 0), (0, 0, 0)])


def _pad_same_tf(
    x: Array, window: Pair, stride: Pair, padding: int | Pair | str, dilation: Pair, value: float
) -> tuple[Array, Pair]:
    """Pads the image by TensorFlow's rule if asked to, and says which padding is left to do."""
    if padding == "same_tf":
        return _pad(x, same_tf_padding(x.shape[:2], window, stride, dilation), value), (0, 0)
    if isinstance(padding, str):
        raise ValueError(f'padding="{padding}" is unknown; pass "same_tf" or a size per axis.')
    padding = as_pair(padding)
    if any(2 * p > d * (k - 1) + 1 for p, k, d in zip(padding, window, dilation, strict=True)):
        raise ValueError(f"padding={padding} is more than half of window={window}; make it at most half.")
    return x, padding


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
