"""The blocks of mobile networks: convolutions that filter each channel alone, between 1x1 convolutions that mix them.

Every block is told how deep it lies (`depth`, for its `DropPath`). `conv` makes its convolutions: a `ConvNorm` with
the network's padding and norm. `squeeze_excite` makes its gate, of a number of channels. Without `drop_path`, a block
has no shortcut.
"""

from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo.nn._init import xavier
from eqzoo.nn.attention import attend, merge_heads, split_heads
from eqzoo.nn.conv_norm import ConvNorm
from eqzoo.nn.dropout import DropPath
from eqzoo.nn.linear import Linear
from eqzoo.nn.mixed_conv import MixedConvNorm
from eqzoo.nn.norm import BatchNorm
from eqzoo.nn.scale import LayerScale, SqueezeExcite

Image = Float[Array, "height width channels"]
NewImage = Float[Array, "out_height out_width out"]
Activation = Callable[[Array], Array]
Kernel = int | tuple[int, ...]
MakeConv = Callable[..., ConvNorm | MixedConvNorm]
MakeGate = Callable[..., SqueezeExcite]


class ConvBlock(eqx.Module):
    """One convolution, with a shortcut or without."""

    conv: ConvNorm | MixedConvNorm
    drop_path: DropPath | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel: Kernel,
        stride: int,
        activation: Activation,
        drop_path: DropPath | None,
        conv: MakeConv,
        key: PRNGKeyArray,
    ):
        self.conv = conv(in_channels, out_channels, kernel, stride=stride, activation=activation, key=key)
        self.drop_path = drop_path

    def __call__(
        self,
        x: Image,
        state: eqx.nn.State,
        depth: Float[Array, ""] | float = 1.0,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[NewImage, eqx.nn.State]:
        y, state = self.conv(x, state)
        return _shortcut(self.drop_path, x, y, depth, key), state


class DepthwiseSeparable(eqx.Module):
    """Filters each channel, then mixes them: a convolution in two steps (MobileNet, Howard et al., 2017)."""

    depthwise: ConvNorm | MixedConvNorm
    squeeze_excite: SqueezeExcite | None
    pointwise: ConvNorm | MixedConvNorm
    drop_path: DropPath | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel: Kernel,
        stride: int,
        group_size: int,
        activation: Activation,
        last_activation: Activation | None,
        drop_path: DropPath | None,
        conv: MakeConv,
        squeeze_excite: MakeGate | None,
        key: PRNGKeyArray,
    ):
        key1, key2, key_gate = jax.random.split(key, 3)
        self.depthwise = conv(
            in_channels,
            in_channels,
            kernel,
            stride=stride,
            groups=in_channels // group_size,
            activation=activation,
            key=key1,
        )
        self.squeeze_excite = None if squeeze_excite is None else squeeze_excite(in_channels, key=key_gate)
        self.pointwise = conv(in_channels, out_channels, 1, activation=last_activation, key=key2)
        self.drop_path = drop_path

    def __call__(
        self,
        x: Image,
        state: eqx.nn.State,
        depth: Float[Array, ""] | float = 1.0,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[NewImage, eqx.nn.State]:
        y, state = self.depthwise(x, state)
        y = y if self.squeeze_excite is None else self.squeeze_excite(y)
        y, state = self.pointwise(y, state)
        return _shortcut(self.drop_path, x, y, depth, key), state


class InvertedResidual(eqx.Module):
    """Expands to many channels, filters each, and projects back to few (MobileNetV2, Sandler et al., 2018)."""

    expand: ConvNorm | MixedConvNorm
    filter: ConvNorm | MixedConvNorm
    squeeze_excite: SqueezeExcite | None
    project: ConvNorm | MixedConvNorm
    drop_path: DropPath | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden: int,
        kernels: tuple[Kernel, Kernel, Kernel],
        stride: int,
        group_size: int,
        activation: Activation,
        drop_path: DropPath | None,
        conv: MakeConv,
        squeeze_excite: MakeGate | None,
        key: PRNGKeyArray,
    ):
        key1, key2, key3, key_gate = jax.random.split(key, 4)
        groups = hidden // group_size
        self.expand = conv(in_channels, hidden, kernels[0], activation=activation, key=key1)
        self.filter = conv(hidden, hidden, kernels[1], stride=stride, groups=groups, activation=activation, key=key2)
        self.squeeze_excite = None if squeeze_excite is None else squeeze_excite(hidden, key=key_gate)
        self.project = conv(hidden, out_channels, kernels[2], key=key3)
        self.drop_path = drop_path

    def __call__(
        self,
        x: Image,
        state: eqx.nn.State,
        depth: Float[Array, ""] | float = 1.0,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[NewImage, eqx.nn.State]:
        y, state = self.expand(x, state)
        y, state = self.filter(y, state)
        y = y if self.squeeze_excite is None else self.squeeze_excite(y)
        y, state = self.project(y, state)
        return _shortcut(self.drop_path, x, y, depth, key), state


class FusedResidual(eqx.Module):
    """Expands and filters by one full convolution, then projects (EfficientNet-EdgeTPU, Gupta and Akin, 2020)."""

    fused: ConvNorm | MixedConvNorm
    squeeze_excite: SqueezeExcite | None
    reduce: ConvNorm | MixedConvNorm
    drop_path: DropPath | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden: int,
        kernel: Kernel,
        stride: int,
        groups: int,
        activation: Activation,
        drop_path: DropPath | None,
        conv: MakeConv,
        squeeze_excite: MakeGate | None,
        key: PRNGKeyArray,
    ):
        key1, key2, key_gate = jax.random.split(key, 3)
        self.fused = conv(in_channels, hidden, kernel, stride=stride, groups=groups, activation=activation, key=key1)
        self.squeeze_excite = None if squeeze_excite is None else squeeze_excite(hidden, key=key_gate)
        self.reduce = conv(hidden, out_channels, 1, key=key2)
        self.drop_path = drop_path

    def __call__(
        self,
        x: Image,
        state: eqx.nn.State,
        depth: Float[Array, ""] | float = 1.0,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[NewImage, eqx.nn.State]:
        y, state = self.fused(x, state)
        y = y if self.squeeze_excite is None else self.squeeze_excite(y)
        y, state = self.reduce(y, state)
        return _shortcut(self.drop_path, x, y, depth, key), state


class UniversalInvertedResidual(eqx.Module):
    """An inverted residual that may filter before it expands, in the middle, both, or not (MobileNetV4, 2024).

    A kernel of 0 leaves a filter out; the last one there takes the stride.
    """

    dw_start: ConvNorm | MixedConvNorm | None
    pw_exp: ConvNorm | MixedConvNorm
    dw_mid: ConvNorm | MixedConvNorm | None
    pw_proj: ConvNorm | MixedConvNorm
    layer_scale: LayerScale | None
    drop_path: DropPath | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden: int,
        start_kernel: Kernel,
        kernel: Kernel,
        stride: int,
        activation: Activation,
        layer_scale: float | None,
        drop_path: DropPath | None,
        conv: MakeConv,
        key: PRNGKeyArray,
    ):
        key1, key2, key3, key4 = jax.random.split(key, 4)
        self.dw_start = self.dw_mid = None
        if start_kernel:
            first_stride = 1 if kernel else stride
            self.dw_start = conv(
                in_channels, in_channels, start_kernel, stride=first_stride, groups=in_channels, key=key1
            )
        self.pw_exp = conv(in_channels, hidden, 1, activation=activation, key=key2)
        if kernel:
            self.dw_mid = conv(hidden, hidden, kernel, stride=stride, groups=hidden, activation=activation, key=key3)
        self.pw_proj = conv(hidden, out_channels, 1, key=key4)
        self.layer_scale = None if layer_scale is None else LayerScale(out_channels, layer_scale)
        self.drop_path = drop_path

    def __call__(
        self,
        x: Image,
        state: eqx.nn.State,
        depth: Float[Array, ""] | float = 1.0,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[NewImage, eqx.nn.State]:
        y = x
        for conv in (self.dw_start, self.pw_exp, self.dw_mid, self.pw_proj):
            if conv is not None:
                y, state = conv(y, state)
        y = y if self.layer_scale is None else self.layer_scale(y)
        return _shortcut(self.drop_path, x, y, depth, key), state


class MobileAttention(eqx.Module):
    """Attention of many queries to one head of keys and values, on a smaller image if `kv_stride` is above one
    (MobileNetV4, 2024)."""

    norm: BatchNorm
    query: Linear
    key_down: ConvNorm | MixedConvNorm | None
    key: Linear
    value_down: ConvNorm | MixedConvNorm | None
    value: Linear
    out: Linear
    layer_scale: LayerScale | None
    drop_path: DropPath | None
    heads: int = eqx.field(static=True)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        heads: int,
        dim_head: int,
        kernel: Kernel,
        kv_stride: int,
        eps: float,
        momentum: float,
        layer_scale: float | None,
        drop_path: DropPath | None,
        conv: MakeConv,
        key: PRNGKeyArray,
    ):
        keys = jax.random.split(key, 6)
        linear = partial(Linear, use_bias=False, init=xavier)
        self.norm = BatchNorm(in_channels, eps=eps, momentum=momentum)
        self.key_down = self.value_down = None
        if kv_stride > 1:
            down = partial(conv, in_channels, in_channels, kernel, stride=kv_stride, groups=in_channels, init=xavier)
            self.key_down, self.value_down = down(key=keys[0]), down(key=keys[1])
        self.query = linear(in_channels, heads * dim_head, key=keys[2])
        self.key = linear(in_channels, dim_head, key=keys[3])
        self.value = linear(in_channels, dim_head, key=keys[4])
        self.out = linear(heads * dim_head, out_channels, key=keys[5])
        self.layer_scale = None if layer_scale is None else LayerScale(out_channels, layer_scale)
        self.drop_path = drop_path
        self.heads = heads

    def __call__(
        self,
        x: Image,
        state: eqx.nn.State,
        depth: Float[Array, ""] | float = 1.0,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[NewImage, eqx.nn.State]:
        height, width, channels = x.shape
        y, state = self.norm(x, state)
        keys = values = y
        if self.key_down is not None and self.value_down is not None:
            keys, state = self.key_down(y, state)
            values, state = self.value_down(y, state)
        query = split_heads(self.query(y.reshape(-1, channels)), self.heads)
        keys, values = (each.reshape(1, -1, channels) for each in (keys, values))
        mixed = attend(query, self.key(keys), self.value(values))
        y = self.out(merge_heads(mixed)).reshape(height, width, -1)
        y = y if self.layer_scale is None else self.layer_scale(y)
        return _shortcut(self.drop_path, x, y, depth, key), state


def _shortcut(
    drop_path: DropPath | None, x: Image, y: NewImage, depth: Float[Array, ""] | float, key: PRNGKeyArray | None
) -> NewImage:
    return y if drop_path is None else x + drop_path(y, depth, key=key)
