"""Convolution as three bilinear primitives, each of them the transpose of the other two.

    conv(x, w) -> y        conv_dx(y, w) -> x        conv_dw(x, y) -> w

    x  "n height width (groups in)"
    w  "(groups out) in kernel_height kernel_width"
    y  "n out_height out_width (groups out)"

Two things ask for primitives of our own. XLA's CPU backend runs grouped convolutions, and every gradient convolution
inside a loop, tens to hundreds of times slower than the forms below, so the CPU needs its own lowering. And only
primitives, not `custom_vjp`, compose with forward mode, higher derivatives and `vmap`.

The three are closed under differentiation and batching, so what follows is short: the shapes, one batching rule,
`lax`'s convolutions for accelerators, and three forms for the CPU (dense, depthwise, grouped).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

Pair = tuple[int, int]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Geometry:
    """What a convolution is apart from its arrays. Padding is (low, high) per axis; a negative one crops."""

    size: Pair
    kernel: Pair
    stride: Pair = (1, 1)
    padding: tuple[Pair, Pair] = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)
    groups: int = 1

    @property
    def out_size(self) -> Pair:
        height, width = (
            (self.size[axis] + sum(self.padding[axis]) - self.dilation[axis] * (self.kernel[axis] - 1) - 1)
            // self.stride[axis]
            + 1
            for axis in (0, 1)
        )
        return height, width


def conv(x: Float[Array, "n h w i"], w: Float[Array, "o j kh kw"], geometry: Geometry) -> Float[Array, "n oh ow o"]:
    return _conv_p.bind(x, w, geometry=geometry)


def conv_dx(y: Float[Array, "n oh ow o"], w: Float[Array, "o j kh kw"], geometry: Geometry) -> Float[Array, "n h w i"]:
    return _dx_p.bind(y, w, geometry=geometry)


def conv_dw(x: Float[Array, "n h w i"], y: Float[Array, "n oh ow o"], geometry: Geometry) -> Float[Array, "o j kh kw"]:
    return _dw_p.bind(x, y, geometry=geometry)


# Shapes


def _check(geometry: Geometry, **arrays: Any) -> None:
    dtypes = {name: array.dtype for name, array in arrays.items()}
    if len(set(dtypes.values())) > 1:
        raise ValueError(f"A convolution needs operands of one dtype, got {dtypes}; cast one of them with `.astype`.")
    if min(geometry.out_size) < 1:
        raise ValueError(
            f"A {geometry.kernel} kernel with dilation {geometry.dilation} doesn't fit into an image of "
            f"{geometry.size} with padding {geometry.padding}; enlarge the image or the padding."
        )
    expected = {"x": geometry.size, "w": geometry.kernel, "y": geometry.out_size}
    for name, array in arrays.items():
        spatial = array.shape[2:] if name == "w" else array.shape[1:3]
        channels = array.shape[0 if name == "w" else 3]
        if array.ndim != 4 or spatial != expected[name]:
            raise ValueError(f"{name} of shape {array.shape} doesn't fit {geometry}, which expects {expected[name]}.")
        if channels % geometry.groups:
            raise ValueError(f"{name} has {channels} channels, which {geometry.groups} groups don't divide.")


def _conv_shape(x: Any, w: Any, geometry: Geometry) -> Shape:
    _check(geometry, x=x, w=w)
    if x.shape[3] != w.shape[1] * geometry.groups:
        raise ValueError(
            f"x has {x.shape[3]} channels, but a weight of shape {w.shape} with groups={geometry.groups} "
            f"expects {w.shape[1] * geometry.groups}."
        )
    return (x.shape[0], *geometry.out_size, w.shape[0])


def _dx_shape(y: Any, w: Any, geometry: Geometry) -> Shape:
    _check(geometry, y=y, w=w)
    if y.shape[3] != w.shape[0]:
        raise ValueError(f"y has {y.shape[3]} channels, but a weight of shape {w.shape} gives {w.shape[0]}.")
    return (y.shape[0], *geometry.size, w.shape[1] * geometry.groups)


def _dw_shape(x: Any, y: Any, geometry: Geometry) -> Shape:
    _check(geometry, x=x, y=y)
    if x.shape[0] != y.shape[0]:
        raise ValueError(f"x has {x.shape[0]} examples, but y has {y.shape[0]}.")
    return (y.shape[3], x.shape[3] // geometry.groups, *geometry.kernel)


# Batching

# The axes of each array when its groups are split off. A batch joins the axis that exactly those arrays share that
# carry it: a batch of images (x and y) is n, a batch of weights on the same images (w and y) is more output channels,
# and a batch of everything is more groups.
_AXES = {"x": "nhwgi", "w": "goikl", "y": "nhwgo"}
_JOINED = {frozenset("xy"): "n", frozenset("wy"): "o", frozenset("xw"): "i", frozenset("xwy"): "g"}


def _split(array: Array, axis: int, outer: int) -> Array:
    shape = array.shape
    return array.reshape(*shape[:axis], outer, shape[axis] // outer, *shape[axis + 1 :])


def _merge(array: Array, axis: int) -> Array:
    shape = array.shape
    return array.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def _fold(array: Array, batch_axis: int, role: str, joined: str, groups: int) -> Array:
    group_axis, axis = _AXES[role].index("g"), _AXES[role].index(joined)
    array = _split(jnp.moveaxis(array, batch_axis, 0), 1 + group_axis, groups)
    array = _merge(jnp.moveaxis(array, 0, axis), axis)
    return _merge(array, group_axis)


def _unfold(array: Array, batch: int, role: str, joined: str, groups: int) -> Array:
    group_axis, axis = _AXES[role].index("g"), _AXES[role].index(joined)
    array = _split(array, group_axis, groups * batch if joined == "g" else groups)
    array = jnp.moveaxis(_split(array, axis, batch), axis, 0)
    return _merge(array, 1 + group_axis)


def _batching_rule(primitive: Primitive, roles: str) -> Callable[..., Any]:
    *operands, result = roles

    def rule(arrays: tuple[Array, Array], batch_axes: tuple[int | None, int | None], *, geometry: Geometry) -> Any:
        batched = {role: axis for role, axis in zip(operands, batch_axes, strict=True) if axis is not None}
        joined = _JOINED[frozenset([*batched, result])]
        (batch,) = {a.shape[axis] for a, axis in zip(arrays, batch_axes, strict=True) if axis is not None}
        groups = geometry.groups
        arrays = tuple(
            _fold(array, batched[role], role, joined, groups) if role in batched else array
            for role, array in zip(operands, arrays, strict=True)
        )
        out = primitive.bind(*arrays, geometry=replace(geometry, groups=groups * batch if joined == "g" else groups))
        return _unfold(out, batch, result, joined, groups), 0

    return rule


# Accelerators: lax's own convolution, and its transposes


def _lax_conv(x: Array, w: Array, *, geometry: Geometry) -> Array:
    return lax.conv_general_dilated(
        x,
        w,
        geometry.stride,
        geometry.padding,
        rhs_dilation=geometry.dilation,
        dimension_numbers=("NHWC", "OIHW", "NHWC"),
        feature_group_count=geometry.groups,
    )


def _lax_dx(y: Array, w: Array, *, geometry: Geometry) -> Array:
    x = jax.ShapeDtypeStruct(_dx_shape(y, w, geometry), y.dtype)
    return jax.linear_transpose(lambda x: _lax_conv(x, w, geometry=geometry), x)(y)[0]


def _lax_dw(x: Array, y: Array, *, geometry: Geometry) -> Array:
    w = jax.ShapeDtypeStruct(_dw_shape(x, y, geometry), x.dtype)
    return jax.linear_transpose(lambda w: _lax_conv(x, w, geometry=geometry), w)(y)[0]


# CPU, one group: transposed by hand into the one layout that XLA runs fast, which it does by itself only outside loops


def _fast_conv(x: Array, w: Array, stride: Pair, padding: Any, x_dilation: Pair, w_dilation: Pair) -> Array:
    return lax.conv_general_dilated(x, w, stride, padding, x_dilation, w_dilation, ("NHWC", "HWIO", "NHWC"))


def _dense_conv(x: Array, w: Array, *, geometry: Geometry) -> Array:
    w = w.transpose(2, 3, 1, 0)
    return _fast_conv(x, w, geometry.stride, geometry.padding, (1, 1), geometry.dilation)


def _dense_dx(y: Array, w: Array, *, geometry: Geometry) -> Array:
    padding = _transposed_padding(geometry)
    w = w[:, :, ::-1, ::-1].transpose(2, 3, 0, 1)
    return _fast_conv(y, w, (1, 1), padding, geometry.stride, geometry.dilation)


def _dense_dw(x: Array, y: Array, *, geometry: Geometry) -> Array:
    padding = [(low, _last_tap(geometry, axis) + 1 - geometry.size[axis] - low) for axis, (low, _) in enumerate(geometry.padding)]
    x, y = x.transpose(3, 1, 2, 0), y.transpose(1, 2, 0, 3)
    return _fast_conv(x, y, geometry.dilation, padding, (1, 1), geometry.stride).transpose(3, 0, 1, 2)


def _last_tap(geometry: Geometry, axis: int) -> int:
    """The last position of the padded image that any window touches."""
    return (geometry.out_size[axis] - 1) * geometry.stride[axis] + (geometry.kernel[axis] - 1) * geometry.dilation[axis]


def _transposed_padding(geometry: Geometry) -> list[Pair]:
    """Padding of y, its stride filled with zeros, that makes the transposed convolution an ordinary one."""
    padding = []
    for axis, (low, _) in enumerate(geometry.padding):
        reach = (geometry.kernel[axis] - 1) * geometry.dilation[axis]
        padding.append((reach - low, geometry.size[axis] + low - 1 - (_last_tap(geometry, axis) - reach)))
    return padding


# CPU, depthwise: shifted multiply-adds


def _pad(x: Array, padding: Any, interior: Pair = (1, 1)) -> Array:
    rows, columns = padding
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (*rows, interior[0] - 1), (*columns, interior[1] - 1), (0, 0, 0)])


def _window(x: Array, start: Pair, count: Pair, step: Pair) -> Array:
    stop = tuple(s + (c - 1) * d + 1 for s, c, d in zip(start, count, step, strict=True))
    return lax.slice(x, (0, *start, 0), (x.shape[0], *stop, x.shape[3]), (1, *step, 1))


def _multiply_add(x: Array, w: Array, out_size: Pair, stride: Pair, dilation: Pair) -> Array:
    taps = [(i, j) for i in range(w.shape[0]) for j in range(w.shape[1])]
    return sum(_window(x, (i * dilation[0], j * dilation[1]), out_size, stride) * w[i, j] for i, j in taps)


def _depthwise_conv(x: Array, w: Array, *, geometry: Geometry) -> Array:
    multiplier = w.shape[0] // x.shape[3]
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    x, taps = jnp.repeat(x, multiplier, -1).astype(dtype), w[:, 0].transpose(1, 2, 0).astype(dtype)
    y = _multiply_add(_pad(x, geometry.padding), taps, geometry.out_size, geometry.stride, geometry.dilation)
    return y.astype(w.dtype)


def _depthwise_dx(y: Array, w: Array, *, geometry: Geometry) -> Array:
    dtype = jnp.promote_types(y.dtype, jnp.float32)
    y = _pad(y.astype(dtype), _transposed_padding(geometry), geometry.stride)
    x = _multiply_add(y, w[:, 0, ::-1, ::-1].transpose(1, 2, 0).astype(dtype), geometry.size, (1, 1), geometry.dilation)
    return x.reshape(*x.shape[:3], geometry.groups, -1).sum(-1).astype(w.dtype)


def _depthwise_dw(x: Array, y: Array, *, geometry: Geometry) -> Array:
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    x, y = jnp.repeat(x, y.shape[3] // x.shape[3], -1).astype(dtype), y.astype(dtype)
    x = _pad(x, geometry.padding)
    (height, width), (kh, kw), (dh, dw) = geometry.out_size, geometry.kernel, geometry.dilation
    (sh, sw) = geometry.stride
    rows = []
    for i in range(kh):
        rows.append(sum(_window(x, (i * dh, v * sw), (height, kw), (sh, dw)) * y[:, :, v : v + 1] for v in range(width)).sum((0, 1)))
    return jnp.stack(rows).transpose(2, 0, 1)[:, None].astype(x.dtype)


# CPU, grouped: neighbouring groups become one dense block, mostly zeros, of about 64 channels


def _block_diagonal(w: Array, groups: int) -> Array:
    diagonal = jnp.eye(groups, dtype=bool)[:, None, :, None, None, None]
    return _merge(_merge(jnp.where(diagonal, _split(w, 0, groups)[:, :, None], 0), 0), 1)


def _diagonal_blocks(w: Array, groups: int) -> Array:
    w = jnp.diagonal(_split(_split(w, 1, groups), 0, groups), axis1=0, axis2=2)
    return _merge(jnp.moveaxis(w, -1, 0), 0)


def _by_blocks(dense: Callable[..., Array], roles: str) -> Callable[..., Array]:
    *operands, result = roles

    def lowering(*arrays: Array, geometry: Geometry) -> Array:
        channels = next(a.shape[3] if role != "w" else a.shape[1] * geometry.groups for role, a in zip(operands, arrays, strict=True))
        merged = max(m for m in range(1, geometry.groups + 1) if geometry.groups % m == 0 and (m == 1 or m * channels <= 64 * geometry.groups))
        blocks = geometry.groups // merged

        def one_block(arrays: tuple[Array, ...]) -> Array:
            arrays = [_block_diagonal(a, merged) if role == "w" else a for role, a in zip(operands, arrays, strict=True)]
            out = dense(*arrays, geometry=replace(geometry, groups=1))
            return _diagonal_blocks(out, merged) if result == "w" else out

        arrays = [_unfold(a, blocks, role, "g", merged) for role, a in zip(operands, arrays, strict=True)]
        return _fold(lax.map(one_block, arrays), 0, result, "g", merged)

    return lowering


# The primitives


def _on_cpu(dense: Callable[..., Array], depthwise: Callable[..., Array], roles: str) -> Callable[..., Array]:
    grouped = _by_blocks(dense, roles)

    def lowering(a: Array, b: Array, *, geometry: Geometry) -> Array:
        if geometry.groups == 1:
            return dense(a, b, geometry=geometry)
        in_channels = a.shape[3] if roles[0] == "x" else b.shape[1] * geometry.groups
        if in_channels == geometry.groups:
            return depthwise(a, b, geometry=geometry)
        return grouped(a, b, geometry=geometry)

    return lowering


def _primitive(name: str, roles: str, shape: Callable[..., Shape], default: Callable[..., Array], on_cpu: Callable[..., Array]) -> Primitive:
    primitive = Primitive(name)
    primitive.def_impl(jax.jit(primitive.bind, static_argnames="geometry"))
    primitive.def_abstract_eval(lambda a, b, *, geometry: jax.core.ShapedArray(shape(a, b, geometry), a.dtype))
    batching.primitive_batchers[primitive] = _batching_rule(primitive, roles)
    mlir.register_lowering(primitive, mlir.lower_fun(default, multiple_results=False))
    mlir.register_lowering(primitive, mlir.lower_fun(on_cpu, multiple_results=False), platform="cpu")
    return primitive


_cpu_conv = _on_cpu(_dense_conv, _depthwise_conv, "xwy")
_cpu_dx = _on_cpu(_dense_dx, _depthwise_dx, "ywx")
_cpu_dw = _on_cpu(_dense_dw, _depthwise_dw, "xyw")
_conv_p = _primitive("eqzoo_conv", "xwy", _conv_shape, _lax_conv, _cpu_conv)
_dx_p = _primitive("eqzoo_conv_dx", "ywx", _dx_shape, _lax_dx, _cpu_dx)
_dw_p = _primitive("eqzoo_conv_dw", "xyw", _dw_shape, _lax_dw, _cpu_dw)

ad.defbilinear(
    _conv_p,
    lambda y, x, w, *, geometry: conv_dx(y, w, geometry),
    lambda y, x, w, *, geometry: conv_dw(x, y, geometry),
)
ad.defbilinear(
    _dx_p,
    lambda x, y, w, *, geometry: conv(x, w, geometry),
    lambda x, y, w, *, geometry: conv_dw(x, y, geometry),
)
ad.defbilinear(
    _dw_p,
    lambda w, x, y, *, geometry: conv_dx(y, w, geometry),
    lambda w, x, y, *, geometry: conv(x, w, geometry),
)
