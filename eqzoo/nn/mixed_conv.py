"""A convolution with several kernel sizes, and its batch norm."""

from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo.nn._init import Init, kaiming_fan_out
from eqzoo.nn.conv import Conv2d, Padding
from eqzoo.nn.norm import BatchNorm


class MixedConv2d(eqx.Module):
    """The channels in parts, each with a kernel size of its own (MixConv, Tan and Le, 2019); the first takes the rest.

    With `depthwise`, each channel is filtered by itself. Without `padding`, stride 1 keeps the image's size.
    """

    convs: tuple[Conv2d, ...]
    splits: tuple[int, ...] = eqx.field(static=True)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_sizes: Sequence[int],
        *,
        stride: int = 1,
        padding: Padding | None = None,
        dilation: int = 1,
        depthwise: bool = False,
        init: Init | None = None,
        key: PRNGKeyArray,
    ):
        number = len(kernel_sizes)
        ins, outs = _parts(in_channels, number), _parts(out_channels, number)
        keys = jax.random.split(key, number)
        self.splits = tuple(np.cumsum(ins)[:-1].tolist())
        self.convs = tuple(
            Conv2d(
                ins[index],
                outs[index],
                size,
                stride=stride,
                padding=size // 2 * dilation if padding is None else padding,
                dilation=dilation,
                groups=ins[index] if depthwise else 1,
                use_bias=False,
                init=init,
                key=keys[index],
            )
            for index, size in enumerate(kernel_sizes)
        )

    def __call__(self, x: Float[Array, "height width channels"]) -> Float[Array, "out_height out_width out"]:
        parts = jnp.split(x, self.splits, axis=-1)
        return jnp.concatenate([conv(part) for conv, part in zip(self.convs, parts, strict=True)], axis=-1)


class MixedConvNorm(eqx.Module):
    """`ConvNorm` with a mixed convolution."""

    conv: MixedConv2d
    norm: BatchNorm
    activation: Callable[[Array], Array] | None = eqx.field(static=True)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_sizes: Sequence[int],
        *,
        stride: int = 1,
        padding: Padding | None = None,
        dilation: int = 1,
        depthwise: bool = False,
        activation: Callable[[Array], Array] | None = None,
        eps: float = 1e-5,
        momentum: float = 0.1,
        init: Init = kaiming_fan_out,
        key: PRNGKeyArray,
    ):
        self.conv = MixedConv2d(
            in_channels,
            out_channels,
            kernel_sizes,
            stride=stride,
            padding=padding,
            dilation=dilation,
            depthwise=depthwise,
            init=init,
            key=key,
        )
        self.norm = BatchNorm(out_channels, eps=eps, momentum=momentum)
        self.activation = activation

    def __call__(
        self, x: Float[Array, "height width channels"], state: eqx.nn.State
    ) -> tuple[Float[Array, "out_height out_width out"], eqx.nn.State]:
        y, state = self.norm(self.conv(x), state)
        return (y if self.activation is None else self.activation(y)), state


def _parts(channels: int, number: int) -> list[int]:
    return [channels - (number - 1) * (channels // number), *[channels // number] * (number - 1)]
