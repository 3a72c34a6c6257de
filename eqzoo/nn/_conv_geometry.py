"""A convolution's sizes, its arrays' axes, and what both of them allow."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

Pair = tuple[int, int]
Shape = tuple[int, ...]
AXES = (0, 1)


@dataclass(frozen=True)
class Geometry:
    """A convolution without its arrays. `size` is the image's; padding is (low, high) per axis, negative ones crop."""

    size: Shape
    kernel: Shape
    stride: Shape = (1, 1)
    padding: tuple[Pair, Pair] = ((0, 0), (0, 0))
    dilation: Shape = (1, 1)
    groups: int = 1

    def __post_init__(self):
        if min(self.out_size) < 1:
            raise ValueError(f"{self} has windows larger than the padded image; enlarge the image or the padding.")

    @property
    def reach(self) -> Shape:
        """From a window's first tap to its last."""
        return tuple(self.dilation[axis] * (self.kernel[axis] - 1) for axis in AXES)

    @property
    def out_size(self) -> Shape:
        room = (self.size[axis] + sum(self.padding[axis]) - self.reach[axis] - 1 for axis in AXES)
        return tuple(pixels // stride + 1 for pixels, stride in zip(room, self.stride, strict=True))

    @property
    def last_start(self) -> Shape:
        """Where the last window starts, counted from the padded image's corner."""
        return tuple((self.out_size[axis] - 1) * self.stride[axis] for axis in AXES)


def conv_shape(x: Any, w: Any, geometry: Geometry) -> Shape:
    _check(geometry, x=x, w=w)
    expected = w.shape[1] * geometry.groups
    if x.shape[3] != expected:
        raise ValueError(f"x has {x.shape[3]} channels, but w of shape {w.shape} in {geometry} expects {expected}.")
    return (x.shape[0], *geometry.out_size, w.shape[0])


def conv_dx_shape(y: Any, w: Any, geometry: Geometry) -> Shape:
    _check(geometry, y=y, w=w)
    if y.shape[3] != w.shape[0]:
        raise ValueError(f"y has {y.shape[3]} channels, but w of shape {w.shape} expects {w.shape[0]}.")
    return (y.shape[0], *geometry.size, w.shape[1] * geometry.groups)


def conv_dw_shape(x: Any, y: Any, geometry: Geometry) -> Shape:
    _check(geometry, x=x, y=y)
    if x.shape[0] != y.shape[0]:
        raise ValueError(f"x holds {x.shape[0]} images, but y holds {y.shape[0]}; they have to be as many.")
    return (y.shape[3], x.shape[3] // geometry.groups, *geometry.kernel)


def _check(geometry: Geometry, **arrays: Any) -> None:
    dtypes = {name: str(array.dtype) for name, array in arrays.items()}
    if len(set(dtypes.values())) > 1:
        raise ValueError(f"A convolution needs arrays of one dtype, got {dtypes}; cast one of them with `.astype`.")
    sizes = {"x": geometry.size, "w": geometry.kernel, "y": geometry.out_size}
    for name, array in arrays.items():
        size, channels = (array.shape[2:], array.shape[0]) if name == "w" else (array.shape[1:3], array.shape[3])
        if size != sizes[name] or channels % geometry.groups:
            raise ValueError(
                f"{name} of shape {array.shape} doesn't fit {geometry}, which expects a size of {sizes[name]} "
                f"and a multiple of {geometry.groups} channels."
            )


# Groups are the outer part of an axis

LAYOUT = {"x": "nhwgi", "w": "goikl", "y": "nhwgo"}


def group_axis(name: str) -> int:
    return LAYOUT[name].index("g")


def split(array: Array, axis: int, outer: int) -> Array:
    shape = array.shape
    return array.reshape(*shape[:axis], outer, shape[axis] // outer, *shape[axis + 1 :])


def merge(array: Array, axis: int) -> Array:
    shape = array.shape
    return array.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def join(array: Array, name: str, joined: str, groups: int) -> Array:
    """Merges the leading batch axis of an array of `groups` groups into the axis `joined`."""
    outer, axis = group_axis(name), LAYOUT[name].index(joined)
    array = split(array, 1 + outer, groups)
    return merge(merge(jnp.moveaxis(array, 0, axis), axis), outer)


def unjoin(array: Array, name: str, joined: str, groups: int, batch: int) -> Array:
    outer, axis = group_axis(name), LAYOUT[name].index(joined)
    array = split(array, outer, groups * batch if joined == "g" else groups)
    return merge(jnp.moveaxis(split(array, axis, batch), axis, 0), 1 + outer)
