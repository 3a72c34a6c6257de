"""A convolution and its norm: the brick of most convolutional networks."""

from collections.abc import Callable, Sequence

import equinox as eqx
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo.nn._conv_geometry import Pair
from eqzoo.nn._init import Init, kaiming_fan_out
from eqzoo.nn.conv import Conv2d, Padding, as_pair
from eqzoo.nn.norm import BatchNorm, GroupNorm


class ConvNorm(eqx.Module):
    """A convolution without bias, its batch norm, and an activation if one is given.

    Without `padding`, stride 1 keeps the image's size.
    """

    conv: Conv2d
    norm: BatchNorm
    activation: Callable[[Array], Array] | None = eqx.field(static=True)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Pair,
        *,
        stride: int = 1,
        padding: Padding | None = None,
        dilation: int = 1,
        groups: int = 1,
        activation: Callable[[Array], Array] | None = None,
        eps: float = 1e-5,
        momentum: float = 0.1,
        init: Init = kaiming_fan_out,
        key: PRNGKeyArray,
    ):
        height, width = as_pair(kernel_size)
        centred = (height // 2 * dilation, width // 2 * dilation)
        self.conv = Conv2d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=centred if padding is None else padding,
            dilation=dilation,
            groups=groups,
            use_bias=False,
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


class ConvGroupNorm(eqx.Module):
    """`ConvNorm` with a group norm, which `norm` makes for a number of channels; it hands the state through."""

    conv: Conv2d
    norm: GroupNorm
    activation: Callable[[Array], Array] | None = eqx.field(static=True)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        norm: Callable[[int], GroupNorm],
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        activation: Callable[[Array], Array] | None = None,
        key: PRNGKeyArray,
    ):
        self.conv = Conv2d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=kernel_size // 2 * dilation,
            dilation=dilation,
            groups=groups,
            use_bias=False,
            init=kaiming_fan_out,
            key=key,
        )
        self.norm = norm(out_channels)
        self.activation = activation

    def __call__(
        self, x: Float[Array, "height width channels"], state: eqx.nn.State
    ) -> tuple[Float[Array, "out_height out_width out"], eqx.nn.State]:
        y = self.norm(self.conv(x))
        return (y if self.activation is None else self.activation(y)), state


Layer = Callable[[Array, eqx.nn.State], tuple[Array, eqx.nn.State]]


def in_turn(
    layers: Sequence[Layer], x: Float[Array, "height width channels"], state: eqx.nn.State
) -> tuple[Float[Array, "out_height out_width out"], eqx.nn.State]:
    """Through each of the layers, one after the other."""
    for layer in layers:
        x, state = layer(x, state)
    return x, state
