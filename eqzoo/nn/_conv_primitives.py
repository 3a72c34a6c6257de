"""Convolution as three bilinear primitives, each of them the transpose of the other two.

    conv(x, w) -> y        conv_dx(y, w) -> x        conv_dw(x, y) -> w

    x  "n height width (groups in)"
    w  "(groups out) in kernel_height kernel_width"
    y  "n out_height out_width (groups out)"

Two things ask for primitives of our own. XLA's CPU backend runs grouped convolutions, and every gradient convolution
inside a loop, tens to hundreds of times slower than the forms in `_conv_cpu.py`, so the CPU needs its own lowering. And
only primitives, not `custom_vjp`, compose with forward mode, higher derivatives and `vmap`.

The three are closed under differentiation and batching, so what follows is short: one batching rule, `lax`'s
convolutions for accelerators, and products for 1x1.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

from eqzoo.nn._conv_cpu import window_conv, window_conv_dw, window_conv_dx
from eqzoo.nn._conv_geometry import (
    Geometry,
    Shape,
    conv_dw_shape,
    conv_dx_shape,
    conv_shape,
    join,
    split,
    unjoin,
)


def conv(x: Float[Array, "n h w i"], w: Float[Array, "o j kh kw"], geometry: Geometry) -> Float[Array, "n oh ow o"]:
    return conv_p.bind(x, w, geometry=geometry)


def conv_dx(y: Float[Array, "n oh ow o"], w: Float[Array, "o j kh kw"], geometry: Geometry) -> Float[Array, "n h w i"]:
    return conv_dx_p.bind(y, w, geometry=geometry)


def conv_dw(x: Float[Array, "n h w i"], y: Float[Array, "n oh ow o"], geometry: Geometry) -> Float[Array, "o j kh kw"]:
    return conv_dw_p.bind(x, y, geometry=geometry)


# Batching: a batch joins the one axis shared by exactly those arrays that carry it. A batch of images (x and y)
# joins n, of weights for the same images (w and y) the output channels, and of everything the groups.

JOINED = {frozenset("xy"): "n", frozenset("wy"): "o", frozenset("xw"): "i", frozenset("xwy"): "g"}


def _batching_rule(primitive: Primitive, names: str, shape: Callable[..., Shape]) -> Callable[..., tuple[Array, int]]:
    *operands, result = names

    def rule(arrays: Sequence[Array], axes: Sequence[int | None], *, geometry: Geometry) -> tuple[Array, int]:
        groups = geometry.groups
        batched = [name for name, axis in zip(operands, axes, strict=True) if axis is not None]
        joined = JOINED[frozenset([*batched, result])]
        (batch,) = {array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None}
        arrays = [a if axis is None else jnp.moveaxis(a, axis, 0) for a, axis in zip(arrays, axes, strict=True)]
        if batch == 0:
            one = [
                jax.ShapeDtypeStruct(a.shape[1:] if name in batched else a.shape, a.dtype)
                for name, a in zip(operands, arrays, strict=True)
            ]
            return jnp.zeros((0, *shape(*one, geometry)), arrays[0].dtype), 0
        arrays = [
            join(a, name, joined, groups) if name in batched else a for name, a in zip(operands, arrays, strict=True)
        ]
        out = primitive.bind(*arrays, geometry=replace(geometry, groups=groups * batch if joined == "g" else groups))
        return unjoin(out, result, joined, groups, batch), 0

    return rule


# Accelerators: lax's convolution and its transposes


def lax_conv(x: Array, w: Array, *, geometry: Geometry) -> Array:
    return lax.conv_general_dilated(
        x,
        w,
        geometry.stride,
        geometry.padding,
        rhs_dilation=geometry.dilation,
        dimension_numbers=("NHWC", "OIHW", "NHWC"),
        feature_group_count=geometry.groups,
    )


def lax_conv_dx(y: Array, w: Array, *, geometry: Geometry) -> Array:
    x = jax.ShapeDtypeStruct(conv_dx_shape(y, w, geometry), y.dtype)
    return jax.linear_transpose(lambda x: lax_conv(x, w, geometry=geometry), x)(y)[0]


def lax_conv_dw(x: Array, y: Array, *, geometry: Geometry) -> Array:
    w = jax.ShapeDtypeStruct(conv_dw_shape(x, y, geometry), x.dtype)
    return jax.linear_transpose(lambda w: lax_conv(x, w, geometry=geometry), w)(y)[0]


# Everywhere, 1x1: a product of matrices for each group, with one row for each pixel of all images. The weight's
# gradient, written as a product over images, rows and columns, would have XLA's CPU backend transpose an image, which
# takes far longer.


def _is_product(geometry: Geometry) -> bool:
    return geometry == Geometry(geometry.size, (1, 1), groups=geometry.groups)


def _rows(array: Array, groups: int) -> Array:
    """(pixels channels), or of several groups (groups pixels channels)"""
    if groups == 1:
        return array.reshape(-1, array.shape[3])
    return array.reshape(-1, groups, array.shape[3] // groups).swapaxes(0, 1)


def _pixels(rows: Array, images: Shape, groups: int) -> Array:
    return (rows if groups == 1 else rows.swapaxes(0, 1)).reshape(*images, groups * rows.shape[-1])


def _matrices(w: Array, groups: int) -> Array:
    return w[:, :, 0, 0] if groups == 1 else split(w[:, :, 0, 0], 0, groups)


def product_conv(x: Array, w: Array, *, geometry: Geometry) -> Array:
    groups = geometry.groups
    return _pixels(_rows(x, groups) @ _matrices(w, groups).mT, x.shape[:3], groups)


def product_conv_dx(y: Array, w: Array, *, geometry: Geometry) -> Array:
    groups = geometry.groups
    return _pixels(_rows(y, groups) @ _matrices(w, groups), y.shape[:3], groups)


def product_conv_dw(x: Array, y: Array, *, geometry: Geometry) -> Array:
    groups = geometry.groups
    x, y = _rows(x, groups), _rows(y, groups)
    # XLA's CPU backend transposes what stands on the left: let it be the smaller one. The barrier keeps it there.
    w = lax.optimization_barrier(x.mT @ y).mT if x.shape[-1] < y.shape[-1] else y.mT @ x
    return w.reshape(-1, w.shape[-1], 1, 1)


def _or_product(convolution: Callable[..., Array], product: Callable[..., Array]) -> Callable[..., Array]:
    def lowering(a: Array, b: Array, *, geometry: Geometry) -> Array:
        return (product if _is_product(geometry) else convolution)(a, b, geometry=geometry)

    return lowering


cpu_conv = _or_product(window_conv, product_conv)
cpu_conv_dx = _or_product(window_conv_dx, product_conv_dx)
cpu_conv_dw = _or_product(window_conv_dw, product_conv_dw)


# The primitives


def _primitive(
    names: str, shape: Callable[..., Shape], default: Callable[..., Array], on_cpu: Callable[..., Array]
) -> Primitive:
    primitive = Primitive(f"eqzoo_{shape.__name__.removesuffix('_shape')}")
    primitive.def_impl(jax.jit(primitive.bind, static_argnames="geometry"))
    primitive.def_abstract_eval(lambda a, b, *, geometry: ShapedArray(shape(a, b, geometry), a.dtype))
    batching.primitive_batchers[primitive] = _batching_rule(primitive, names, shape)
    mlir.register_lowering(primitive, mlir.lower_fun(default, multiple_results=False))
    mlir.register_lowering(primitive, mlir.lower_fun(on_cpu, multiple_results=False), platform="cpu")
    return primitive


conv_p = _primitive("xwy", conv_shape, _or_product(lax_conv, product_conv), cpu_conv)
conv_dx_p = _primitive("ywx", conv_dx_shape, _or_product(lax_conv_dx, product_conv_dx), cpu_conv_dx)
conv_dw_p = _primitive("xyw", conv_dw_shape, _or_product(lax_conv_dw, product_conv_dw), cpu_conv_dw)
CONVOLUTIONS = (conv_p, conv_dx_p, conv_dw_p)

ad.defbilinear(
    conv_p,
    lambda y, x, w, *, geometry: conv_dx(y, w, geometry),
    lambda y, x, w, *, geometry: conv_dw(x, y, geometry),
)
ad.defbilinear(
    conv_dx_p,
    lambda x, y, w, *, geometry: conv(x, w, geometry),
    lambda x, y, w, *, geometry: conv_dw(x, y, geometry),
)
ad.defbilinear(
    conv_dw_p,
    lambda w, x, y, *, geometry: conv_dx(y, w, geometry),
    lambda w, x, y, *, geometry: conv(x, w, geometry),
)
