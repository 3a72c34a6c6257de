"""Convolutions in the forms that XLA's CPU backend has fast kernels for: Winograd's, dense, depthwise and grouped."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array

from eqzoo.nn._conv_geometry import AXES, Geometry, Pair, Shape, conv_dx_shape, group_axis, join, merge, split, unjoin
from eqzoo.nn._precision import at_least_float32

CACHE = 2**18  # numbers that one core keeps close, at least
FEW = 32  # inputs behind one output
MANY = 64  # channels


def _pad(x: Array, padding: Sequence[Pair]) -> Array:
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *((low, high, 0) for low, high in padding), (0, 0, 0)])


def _slice(x: Array, start: Shape, count: Shape, step: Shape) -> Array:
    stop = [start[axis] + (count[axis] - 1) * step[axis] + 1 for axis in AXES]
    return lax.slice(x, (0, *start, 0), (x.shape[0], *stop, x.shape[3]), (1, *step, 1))


def _seen(padded: Array, geometry: Geometry) -> list[Array]:
    """For each place of the kernel, the pixels of the padded image that it meets."""
    rows, columns = geometry.dilation
    return [
        _slice(padded, (i * rows, j * columns), geometry.out_size, geometry.stride)
        for i in range(geometry.kernel[0])
        for j in range(geometry.kernel[1])
    ]


# 3x3 of one group with stride 1, by Winograd's F(2x2, 3x3). A tile of four pixels takes 16 products for each pair
# of channels in place of 36: y = sums @ ((kernel @ w @ kernel.T) * (window @ x @ window.T)) @ sums.T

WINDOW = ((1.0, 0.0, -1.0, 0.0), (0.0, 1.0, 1.0, 0.0), (0.0, -1.0, 1.0, 0.0), (0.0, 1.0, 0.0, -1.0))
KERNEL = ((1.0, 0.0, 0.0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0.0, 0.0, 1.0))
SUMS = ((1.0, 1.0, 1.0, 0.0), (0.0, 1.0, -1.0, -1.0))

Matrix = Sequence[Sequence[float]]
Square = list[list[Array]]


def _is_winograd(image: Array, others: int, geometry: Geometry) -> bool:
    """Where its additions take less time than it spares, and float32's accuracy is there to lose a little of."""
    tiles = image.shape[0] * math.prod(_tiles(geometry.out_size))
    is_large = min(image.shape[3], others) >= MANY and tiles >= 16 and image.dtype.itemsize >= 4
    return is_large and geometry == Geometry(geometry.size, (3, 3), padding=geometry.padding)


def _tiles(size: Shape) -> Shape:
    return tuple(-(-size[axis] // 2) for axis in AXES)


def _places(image: Array, of_tile: int, low: Sequence[int], tiles: Shape) -> Square:
    """The pixels at each place of square tiles that begin at every second pixel of the padded image."""
    used = [2 * (tiles[axis] - 1) + of_tile for axis in AXES]
    image = _pad(image, [(low[axis], used[axis] - image.shape[1 + axis] - low[axis]) for axis in AXES])
    return [[_slice(image, (i, j), tiles, (2, 2)) for j in range(of_tile)] for i in range(of_tile)]


def _transform(matrix: Matrix, square: Square) -> Square:
    """matrix @ square @ matrix.T"""

    def times(arrays: Sequence[Array]) -> list[Array]:
        return [reduce(add, (weight * a for weight, a in zip(row, arrays, strict=True) if weight)) for row in matrix]

    return _transpose([times(column) for column in _transpose([times(row) for row in square])])


def _transpose(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]


def _products(product: Callable[[Array, Array], Array], a: Square, b: Square) -> Square:
    return [list(map(product, *rows)) for rows in zip(a, b, strict=True)]


def _kernels(w: Array, places: Sequence[int]) -> Square:
    """(o i) each, as w is laid out: XLA's CPU backend would transpose time and again."""
    return _transform(KERNEL, [[w[:, :, i, j] for j in places] for i in places])


def winograd_conv(x: Array, w: Array, *, geometry: Geometry) -> Array:
    low, size = [low for low, _ in geometry.padding], geometry.out_size
    windows = _transform(WINDOW, _places(x, 4, low, _tiles(size)))
    return _sums(_products(lambda x, kernel: x @ kernel.T, windows, _kernels(w, (0, 1, 2))), size)


def winograd_conv_dx(y: Array, w: Array, *, geometry: Geometry) -> Array:
    low, size = [2 - low for low, _ in geometry.padding], geometry.size
    windows = _transform(WINDOW, _places(y, 4, low, _tiles(size)))
    return _sums(_products(jnp.matmul, windows, _kernels(w, (2, 1, 0))), size)


def _sums(products: Square, size: Shape) -> Array:
    image = jnp.stack([jnp.stack(row, 3) for row in _transform(SUMS, products)], 2)
    return merge(merge(image, 3), 1)[:, : size[0], : size[1]]


def winograd_conv_dw(x: Array, y: Array, *, geometry: Geometry) -> Array:
    def product(x: Array, y: Array) -> Array:
        return (x.reshape(-1, x.shape[3]).T @ y.reshape(-1, y.shape[3])).T

    tiles = _tiles(geometry.out_size)
    windows = _transform(WINDOW, _places(x, 4, [low for low, _ in geometry.padding], tiles))
    outputs = _transform(_transpose(SUMS), _places(y, 2, (0, 0), tiles))
    w = _transform(_transpose(KERNEL), _products(product, windows, outputs))
    return jnp.stack([jnp.stack(row, 2) for row in w], 2)


# One group: explicit transposes into the layout of XLA's fast kernels, which it finds by itself only outside loops


def _fast_conv(
    x: Array, w: Array, stride: Shape, padding: Sequence[Pair], x_dilation: Shape, w_dilation: Shape
) -> Array:
    if x_dilation == (1, 1):  # XLA's CPU backend reads past the image if it is cropped by 2 above and padded below
        x = _pad(x, [(min(low, 0), min(high, 0)) for low, high in padding])
        padding = [(max(low, 0), max(high, 0)) for low, high in padding]
    return lax.conv_general_dilated(x, w, stride, padding, x_dilation, w_dilation, ("NHWC", "HWIO", "NHWC"))


def _narrow_conv(
    x: Array, w: Array, stride: Shape, padding: Sequence[Pair], x_dilation: Shape, w_dilation: Shape
) -> Array:
    """As `_fast_conv`, with the images side by side where that gives more threads than one something to do.

    Each of its threads computes tiles of one row of pixels and of up to 64 channels, which are one tile if the image
    is small and the channels are few.
    """
    images, _, width, channels = x.shape
    if w.shape[3] > MANY or x_dilation != (1, 1) or images * width < 256:
        return _fast_conv(x, w, stride, padding, x_dilation, w_dilation)
    reach, (low, high) = w_dilation[1] * (w.shape[1] - 1), padding[1]
    columns = -(-(width + low + high) // stride[1])
    x = _pad(x, [padding[0], (low, columns * stride[1] - width - low)])
    x = x.swapaxes(0, 1).reshape(1, -1, images * columns * stride[1], channels)
    y = _fast_conv(x, w, stride, [(0, 0), (0, reach)], (1, 1), w_dilation)
    y = y.reshape(-1, images, columns, w.shape[3]).swapaxes(0, 1)
    return y[:, :, : (width + low + high - reach - 1) // stride[1] + 1]


def _is_tiny(geometry: Geometry) -> bool:
    """An image smaller than the window, as in the last stages of a network on small images: no fast kernel takes it."""
    return any(geometry.size[axis] <= geometry.reach[axis] for axis in AXES)


def _matmul_conv(x: Array, w: Array, *, geometry: Geometry) -> Array:
    seen, places = _seen(_pad(x, geometry.padding), geometry), w.reshape(*w.shape[:2], -1)
    return reduce(add, (pixels @ places[:, :, i].T for i, pixels in enumerate(seen)))


def dense_conv(x: Array, w: Array, *, geometry: Geometry) -> Array:
    if _is_tiny(geometry):
        return _matmul_conv(x, w, geometry=geometry)
    if w[0].size <= FEW:  # a network's first layer: cheap to lay out, and then a product
        windows = jnp.concatenate(_seen(_pad(x, geometry.padding), geometry), 3)
        return windows @ w.transpose(2, 3, 1, 0).reshape(-1, w.shape[0])
    if _is_winograd(x, w.shape[0], geometry):
        return _in_memory(partial(winograd_conv, geometry=geometry), x, w)
    return _narrow_conv(x, w.transpose(2, 3, 1, 0), geometry.stride, geometry.padding, (1, 1), geometry.dilation)


def dense_conv_dx(y: Array, w: Array, *, geometry: Geometry) -> Array:
    if _is_tiny(geometry):
        x = jax.ShapeDtypeStruct(conv_dx_shape(y, w, geometry), y.dtype)
        return jax.linear_transpose(lambda x: _matmul_conv(x, w, geometry=geometry), x)(y)[0]
    if _is_winograd(y, w.shape[1], geometry):
        return _in_memory(partial(winograd_conv_dx, geometry=geometry), y, w)
    padding = []
    for axis, (low, _) in enumerate(geometry.padding):
        padding.append((geometry.reach[axis] - low, geometry.size[axis] - 1 + low - geometry.last_start[axis]))
    flipped = w[:, :, ::-1, ::-1].transpose(2, 3, 0, 1)
    return _narrow_conv(y, flipped, (1, 1), padding, geometry.stride, geometry.dilation)


def _used(geometry: Geometry) -> list[Pair]:
    """The padding without what no window reaches."""
    used = [geometry.last_start[axis] + geometry.reach[axis] + 1 for axis in AXES]
    return [(low, used[axis] - geometry.size[axis] - low) for axis, (low, _) in enumerate(geometry.padding)]


def _narrow_conv_dw(x: Array, y: Array, *, geometry: Geometry) -> Array:
    """As `dense_conv_dw`, with columns and channels of x as one row of pixels, and in parts that fit into a cache."""
    (height, width), (down, right) = geometry.kernel, geometry.stride
    x = _pad(x, _used(geometry))
    (images, x_rows, x_columns, channels), rows = x.shape, y.shape[1]
    x, y = x.transpose(1, 2, 3, 0).reshape(1, x_rows, x_columns * channels, images), y.transpose(1, 2, 0, 3)
    rows_of_part = -(-rows // _parts(y))
    parts = []
    for first in range(0, rows, rows_of_part):
        part = y[first : first + rows_of_part]
        seen = x[:, first * down : (first + len(part) - 1) * down + height]
        parts.append(_fast_conv(seen, part, (1, 1), [(0, 0), (0, 0)], (1, 1), (down, right * channels)))
    return reduce(add, parts).reshape(height, width, channels, -1).transpose(3, 2, 0, 1)


def _parts(y: Array) -> int:
    return -(-y.size // CACHE)


def dense_conv_dw(x: Array, y: Array, *, geometry: Geometry) -> Array:
    if _is_winograd(x, y.shape[3], geometry):
        return _in_memory(partial(winograd_conv_dw, geometry=geometry), x, y)
    inputs = x.shape[3] * geometry.kernel[0] * geometry.kernel[1]
    if _parts(y) > 1 and y.shape[3] <= MANY and inputs > FEW and geometry.dilation == (1, 1):
        return _narrow_conv_dw(x, y, geometry=geometry)
    x, y = x.transpose(3, 1, 2, 0), y.transpose(1, 2, 0, 3)
    return _fast_conv(x, y, geometry.dilation, _used(geometry), (1, 1), geometry.stride).transpose(3, 0, 1, 2)


# Depthwise: shifted multiply-adds, accumulated in float32


def _taps(w: Array) -> Array:
    """(c 1 kh kw) to (kh kw c). A two-dimensional transpose: XLA fuses any other into every multiply-add."""
    channels, _, height, width = w.shape
    return w.reshape(channels, height * width).T.reshape(height, width, channels)


def depthwise_conv(x: Array, w: Array, *, geometry: Geometry) -> Array:
    padded = _pad(at_least_float32(jnp.repeat(x, w.shape[0] // x.shape[3], axis=3)), geometry.padding)
    taps = merge(_taps(at_least_float32(w)), 0)

    def sum_of_taps(padded: Array, taps: Array) -> Array:
        products = (pixels * tap for pixels, tap in zip(_seen(padded, geometry), taps, strict=True))
        return reduce(add, products).astype(x.dtype)

    return _in_memory(sum_of_taps, padded, taps)


def depthwise_conv_dx(y: Array, w: Array, *, geometry: Geometry) -> Array:
    """Cuts image and dilated kernel into squares of one stride, which makes it shifted multiply-adds again."""
    dtype, size, stride, reach = y.dtype, geometry.size, geometry.stride, geometry.reach
    low = [geometry.padding[axis][0] for axis in AXES]
    squares = tuple(-(-(size[axis] + low[axis]) // stride[axis]) for axis in AXES)
    last = [reach[axis] // stride[axis] for axis in AXES]
    y = _pad(at_least_float32(y), [(last[axis], squares[axis] - geometry.out_size[axis]) for axis in AXES])

    fill = [((last[axis] + 1) * stride[axis] - reach[axis] - 1, geometry.dilation[axis] - 1) for axis in AXES]

    def taps_of_squares(w: Array) -> Array:
        w = lax.pad(_taps(w), jnp.zeros((), w.dtype), [*((0, high, between) for high, between in fill), (0, 0, 0)])
        return split(split(w, 1, last[1] + 1), 0, last[0] + 1)

    w = _in_memory(taps_of_squares, at_least_float32(w))
    rows, columns = (
        sorted({tap // stride[axis] for tap in range(0, reach[axis] + 1, geometry.dilation[axis])}) for axis in AXES
    )
    products = (
        _slice(y, (last[0] - i, last[1] - j), squares, (1, 1))[:, :, None, :, None] * w[i, :, j][:, None]
        for i in rows
        for j in columns
    )
    x = merge(merge(reduce(add, products), 3), 1)
    x = _pad(x, [(-low[axis], size[axis] + low[axis] - squares[axis] * stride[axis]) for axis in AXES])
    return split(x, 3, geometry.groups).sum(4).astype(dtype)


def depthwise_conv_dw(x: Array, y: Array, *, geometry: Geometry) -> Array:
    """For each kernel row a sum of shifted products over the columns, then one over images and rows."""
    dtype, (_, rows, columns, channels) = x.dtype, y.shape
    (height, width), (down, right) = geometry.kernel, geometry.stride
    x = _pad(at_least_float32(jnp.repeat(x, channels // x.shape[3], axis=3)), geometry.padding)
    y = at_least_float32(y)

    def seen(x: Array) -> list[Array]:
        starts = (i * geometry.dilation[0] for i in range(height))
        return [_slice(x, (start, 0), (rows, x.shape[2]), (down, 1)) for start in starts]

    def over_columns(seen: list[Array], y: Array) -> list[Array]:
        step, every = (1, geometry.dilation[1]), [y[:, :, j : j + 1] for j in range(columns)]
        return [
            reduce(add, (_slice(row, (0, j * right), (rows, width), step) * column for j, column in enumerate(every)))
            for row in seen
        ]

    if down == 1:
        partial = _in_memory(lambda x, y: over_columns(seen(x), y), x, y)
    else:  # rows apart from each other are slow to read time and again: cut them out first
        partial = _in_memory(over_columns, seen(x), y)
    w = _in_memory(lambda partial: jnp.stack([row.sum((0, 1)) for row in partial]), partial)
    return w.transpose(2, 0, 1)[:, None].astype(dtype)


def _in_memory(function: Callable[..., Any], *operands: Any) -> Any:
    """`function(*operands)`, its operands and its result kept as arrays.

    XLA would fuse them with what comes before and after and compute them time and again. A call that it may not inline
    stops it.
    """
    with set_xla_metadata(inlineable="false"):
        return jax.jit(function)(*operands)


# Grouped: neighbouring groups merge into one dense block, mostly zeros, of up to 32 channels


def _block_diagonal(w: Array, groups: int) -> Array:
    on_diagonal = jnp.eye(groups, dtype=bool)[:, None, :, None, None, None]
    return merge(merge(jnp.where(on_diagonal, split(w, 0, groups)[:, :, None], 0), 0), 1)


def _diagonal_blocks(w: Array, groups: int) -> Array:
    blocks = jnp.diagonal(split(split(w, 1, groups), 0, groups), axis1=0, axis2=2)
    return merge(jnp.moveaxis(blocks, -1, 0), 0)


def _in_groups(names: str, dense: Callable[..., Array], depthwise: Callable[..., Array]) -> Callable[..., Array]:
    *operands, result = names

    def lowering(*arrays: Array, geometry: Geometry) -> Array:
        groups = geometry.groups
        shapes = {name: array.shape for name, array in zip(operands, arrays, strict=True)}
        in_per_group = shapes["w"][1] if "w" in shapes else shapes["x"][3] // groups
        if groups == 1:
            return dense(*arrays, geometry=geometry)
        if in_per_group == 1:
            return depthwise(*arrays, geometry=geometry)
        merged = next(m for m in range(max(32 // in_per_group, 1), 0, -1) if groups % m == 0)
        blocks = groups // merged
        # The more of them in one turn of the loop, the fewer copies, and the longer it takes to compile.
        at_once = next(n for n in range(12, 0, -1) if blocks % n == 0) if in_per_group < MANY else 1

        def one_block(*block: Array) -> Array:
            wide = [_block_diagonal(a, merged) if name == "w" else a for name, a in zip(operands, block, strict=True)]
            out = dense(*wide, geometry=replace(geometry, groups=1))
            return _diagonal_blocks(out, merged) if result == "w" else out

        def some_blocks(arrays: Sequence[Array]) -> Array:
            cut = [jnp.split(a, at_once, group_axis(name)) for name, a in zip(operands, arrays, strict=True)]
            return jnp.concatenate(list(map(one_block, *cut)), group_axis(result))

        turns = [
            unjoin(a, name, "g", merged * at_once, batch=blocks // at_once)
            for name, a in zip(operands, arrays, strict=True)
        ]
        return join(lax.map(some_blocks, turns), result, "g", merged * at_once)

    return lowering


window_conv = _in_groups("xwy", dense_conv, depthwise_conv)
window_conv_dx = _in_groups("ywx", dense_conv_dx, depthwise_conv_dx)
window_conv_dw = _in_groups("xyw", dense_conv_dw, depthwise_conv_dw)
