"""What timm adds to RegNet: V's block, which normalises and activates before each convolution."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo import nn
from eqzoo.nn._init import kaiming_fan_out

bare_conv = partial(nn.Conv2d, use_bias=False, init=kaiming_fan_out)


class PreBlock(eqx.Module):
    """A block's convolutions, each after its norm and activation; the shortcut starts behind the first of these."""

    norms: tuple[nn.BatchNorm, ...]
    convs: tuple[nn.Conv2d, ...]
    squeeze_excite: tuple[nn.SqueezeExcite, ...]
    shortcut: nn.Conv2d | None
    pooled_shortcut: nn.Conv2d | None
    drop_path: nn.DropPath
    activation: Callable[[Array], Array] = eqx.field(static=True)
    is_residual: bool = eqx.field(static=True)

    def __init__(
        self,
        in_channels: int,
        width: int,
        *,
        inner: int,
        groups: int,
        squeezed: int | None,
        shortcut: Literal["conv", "pool", "none"],
        stride: int,
        activation: Callable[[Array], Array],
        drop_path: float,
        key: PRNGKeyArray,
    ):
        key1, key2, key_se, key3, key_shortcut = jax.random.split(key, 5)
        self.norms = (nn.BatchNorm(in_channels), nn.BatchNorm(inner), nn.BatchNorm(inner))
        self.convs = (
            bare_conv(in_channels, inner, 1, key=key1),
            bare_conv(inner, inner, 3, stride=stride, padding=1, groups=groups, key=key2),
            bare_conv(inner, width, 1, key=key3),
        )
        self.squeeze_excite = optional_gate(inner, squeezed, activation=activation, key=key_se)
        self.shortcut = self.pooled_shortcut = None
        if stride > 1 and shortcut == "conv":
            self.shortcut = bare_conv(in_channels, width, 1, stride=stride, key=key_shortcut)
        elif stride > 1 and shortcut == "pool":
            self.pooled_shortcut = bare_conv(in_channels, width, 1, key=key_shortcut)
        self.drop_path = nn.DropPath(drop_path)
        self.activation = activation
        self.is_residual = stride == 1 or shortcut != "none"

    def __call__(
        self,
        x: Float[Array, "height width channels"],
        state: eqx.nn.State,
        depth: Float[Array, ""],
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "out_height out_width out"], eqx.nn.State]:
        y = x
        for index, (norm, conv) in enumerate(zip(self.norms, self.convs, strict=True)):
            y, state = norm(y, state)
            y = self.activation(y)
            x = y if index == 0 else x
            y = conv(y)
            if index == 1:
                for gate in self.squeeze_excite:
                    y = gate(y)
        if not self.is_residual:
            return y, state
        if self.shortcut is not None:
            x = self.shortcut(x)
        if self.pooled_shortcut is not None:
            x = self.pooled_shortcut(halved(x))
        return self.drop_path(y, depth, key=key) + x, state


def optional_gate(
    channels: int, squeezed: int | None, *, activation: Callable[[Array], Array], key: PRNGKeyArray
) -> tuple[nn.SqueezeExcite, ...]:
    """Squeeze-and-excitation, or nothing."""
    return () if squeezed is None else (nn.SqueezeExcite(channels, squeezed, activation=activation, key=key),)


def halved(x: Float[Array, "height width channels"]) -> Float[Array, "out_height out_width channels"]:
    return nn.avg_pool(x, 2, ceil_mode=True, count_include_pad=False)
