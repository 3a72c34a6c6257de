"""Two-dimensional convolution, channels-last."""

from math import ceil

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo.nn._conv_geometry import Geometry, Pair, Shape
from eqzoo.nn._conv_primitives import conv
from eqzoo.nn._init import Init, weight_and_bias

Padding = int | Pair | str


def conv2d(
    x: Float[Array, "height width in"],
    weight: Float[Array, "out in_per_group kh kw"],
    bias: Float[Array, " out"] | None = None,
    *,
    stride: int | Pair = 1,
    padding: Padding = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
) -> Float[Array, "out_height out_width out"]:
    """Convolves one image. `padding` is a size per axis, torch's `"same"`, or TensorFlow's, `"same_tf"`."""
    channels = weight.shape[1] * groups
    if x.shape[2] != channels:
        message = f"The image has {x.shape[2]} channels (shape {x.shape}), but the convolution expects {channels}."
        if x.shape[0] == channels:
            message += " Images are channels-last, (height, width, channels): pass `jnp.moveaxis(x, 0, -1)`."
        raise ValueError(message)

    size, kernel, stride, dilation = x.shape[:2], weight.shape[2:], as_pair(stride), as_pair(dilation)
    pads = _explicit_padding(padding, size, kernel, stride, dilation)
    geometry = Geometry(size, kernel, stride, pads, dilation, groups)
    dtype = jnp.promote_types(x.dtype, weight.dtype)
    x, weight = x.astype(dtype), weight.astype(dtype)

    # What is a product of matrices, or can be made one, becomes a 1x1 convolution of stride 1.
    if groups == 1 and pads == ((0, 0), (0, 0)):
        if kernel == (1, 1):
            x = x[:: stride[0], :: stride[1]]
            geometry = Geometry(x.shape[:2], kernel)
        elif kernel == stride and dilation == (1, 1):
            x = _patches(x, geometry)
            weight = weight.transpose(0, 2, 3, 1).reshape(weight.shape[0], -1, 1, 1)
            geometry = Geometry(x.shape[:2], (1, 1))
    y = conv(x[None], weight, geometry)[0]
    return y if bias is None else y + bias


class Conv2d(eqx.Module):
    """`torch.nn.Conv2d` on one channels-last image; the weight keeps torch's layout.

    With `init`, that draws the weight and the bias starts at zero; without, both start as torch's do.
    """

    weight: Float[Array, "out in_per_group kh kw"]
    bias: Float[Array, " out"] | None
    stride: Pair = eqx.field(static=True)
    padding: Padding = eqx.field(static=True)
    dilation: Pair = eqx.field(static=True)
    groups: int = eqx.field(static=True)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Pair,
        *,
        stride: int | Pair = 1,
        padding: Padding = 0,
        dilation: int | Pair = 1,
        groups: int = 1,
        use_bias: bool = True,
        init: Init | None = None,
        key: PRNGKeyArray,
    ):
        for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
            if channels % groups:
                raise ValueError(f"{name}={channels} is not a multiple of groups={groups}; change one of them.")
        kernel_size, self.stride, self.dilation = as_pair(kernel_size), as_pair(stride), as_pair(dilation)
        _check_padding(padding, self.stride)
        self.padding = as_pair(padding) if isinstance(padding, int) else padding
        self.groups = groups

        shape = (out_channels, in_channels // groups, *kernel_size)
        self.weight, self.bias = weight_and_bias(key, shape, init, use_bias=use_bias)

    def __call__(self, x: Float[Array, "height width in"]) -> Float[Array, "out_height out_width out"]:
        return conv2d(
            x,
            self.weight,
            self.bias,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
        )


def _patches(x: Array, geometry: Geometry) -> Array:
    (rows, columns), (kh, kw) = geometry.out_size, geometry.kernel
    x = x[: rows * kh, : columns * kw].reshape(rows, kh, columns, kw, x.shape[2])
    return x.swapaxes(1, 2).reshape(rows, columns, -1)


def as_pair(value: int | Pair) -> Pair:
    return (value, value) if isinstance(value, int) else value


def _check_padding(padding: Padding, stride: Pair) -> None:
    if isinstance(padding, str) and padding not in ("same", "same_tf"):
        raise ValueError(f'padding="{padding}" is unknown; pass "same", "same_tf", or a size per axis.')
    if padding == "same" and stride != (1, 1):
        raise ValueError(f'padding="same" needs stride 1, got stride={stride}; pass "same_tf" or a size per axis.')


def _explicit_padding(padding: Padding, size: Shape, kernel: Shape, stride: Pair, dilation: Pair) -> tuple[Pair, Pair]:
    """(low, high) per axis. Where the two can't be equal, the end gets one more."""
    _check_padding(padding, stride)
    if isinstance(padding, str):
        return same_tf_padding(size, kernel, stride, dilation)  # which at stride 1 is torch's "same" too
    height, width = as_pair(padding)
    return (height, height), (width, width)


def same_tf_padding(size: Shape, kernel: Shape, stride: Pair, dilation: Pair) -> tuple[Pair, Pair]:
    height, width = (
        max((ceil(n / s) - 1) * s + d * (k - 1) + 1 - n, 0)
        for n, k, s, d in zip(size, kernel, stride, dilation, strict=True)
    )
    return (height // 2, height - height // 2), (width // 2, width - width // 2)
