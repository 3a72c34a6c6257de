"""ResNet (He et al., 2015, arXiv 1512.03385) and its descendants: ResNeXt (1611.05431), Wide ResNet (1605.07146),
SE-ResNet and SENet (1709.01507), ECA-ResNet (1910.03151), the "bag of tricks" variants C, D, S and T (1812.01187),
ResNet-RS (2103.07579), and those with anti-aliased strides (1904.11486) or group norms (1803.08494).

Upstream: torchvision `resnet.py` and timm `resnet.py`, which agree wherever both have a variant; transformers'
`ResNetForImageClassification` and `ResNetModel`. The stride of a bottleneck sits on its 3x3 convolution. Deviations:
none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import equinox as eqx
import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import check_choices, typed
from eqzoo.checkpoint import adapt
from eqzoo.models._family import Family
from eqzoo.models.vision._resnet_upstream import UPSTREAMS

BlockKind = Literal["basic", "bottleneck"]
ConvNorm = nn.ConvNorm | nn.ConvGroupNorm


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """`block` is the kind of all blocks, or one kind a stage. The `stem` is one 7x7 convolution, three 3x3 ("deep"), or
    three of growing width ("tiered"); then `stem_pool` is a max pool or a strided convolution. The `shortcut` is a
    strided convolution, of size `shortcut_kernel`, or a 1x1 one after an average pool (variant D).

    `cardinality` and `base_width` are ResNeXt's groups and channels per group (at 64 channels); what a block's first
    convolution puts out is divided by `reduce_first`. `attention` rescales the channels at a block's end;
    squeeze-and-excitation reduces them to the fraction `squeeze`. With `antialias`, what strides would skip is averaged
    or blurred into the rest. Norms are batch norms, or group norms of `norm_groups` groups. `output_stride` is how many
    times smaller than the image the last map is: below 32, the last stages dilate their convolutions instead of
    striding."""

    block: BlockKind | tuple[BlockKind, ...]
    depths: tuple[int, ...]
    widths: tuple[int, ...] = (64, 128, 256, 512)
    cardinality: int = 1
    base_width: int = 64
    reduce_first: int = 1
    stem: Literal["conv7", "deep", "tiered"] = "conv7"
    stem_width: int = 64
    stem_pool: Literal["max", "conv"] = "max"
    shortcut: Literal["conv", "pool"] = "conv"
    shortcut_kernel: Literal[1, 3] = 1
    attention: Literal["none", "squeeze_excite", "eca"] = "none"
    squeeze: float = 1 / 16
    antialias: Literal["none", "average", "blur"] = "none"
    norm_groups: int = 0
    output_stride: Literal[8, 16, 32] = 32
    in_channels: int = 3
    num_classes: int = 1000

    def __post_init__(self):
        check_choices(self)
        if not set(self.blocks) <= {*get_args(BlockKind)}:
            raise ValueError(f"ResNetConfig: block={self.block!r} is unknown; choose 'basic', 'bottleneck'")
        if len(self.depths) != len(self.widths):
            raise ValueError(
                f"depths={self.depths} and widths={self.widths} differ in length; give one of each a stage"
            )
        if len(self.depths) != len(self.blocks):
            raise ValueError(
                f"depths={self.depths} and block={self.block} differ in length; give one kind a stage, or one for all"
            )
        if "basic" in self.blocks and (self.cardinality, self.base_width) != (1, 64):
            raise ValueError(
                f"block='basic' has no groups, but cardinality={self.cardinality} and base_width={self.base_width}; "
                f"leave both at 1 and 64 or use block='bottleneck'"
            )
        if not 0 < self.squeeze <= 1:
            raise ValueError(f"squeeze={self.squeeze} is no fraction of a block's channels; choose one such as 1 / 16")
        if self.stem_pool == "conv" and self.antialias != "none":
            raise ValueError(
                f"antialias={self.antialias!r} has no max pool to smooth with stem_pool='conv'; use stem_pool='max'"
            )

    @property
    def blocks(self) -> tuple[BlockKind, ...]:
        """The kind of each stage's blocks."""
        return self.block if isinstance(self.block, tuple) else (self.block,) * len(self.depths)

    @property
    def stem_out(self) -> int:
        return 64 if self.stem == "conv7" else 2 * self.stem_width


class Stem(eqx.Module):
    """To half the image's size by one wide convolution."""

    conv: ConvNorm

    def __init__(self, config: ResNetConfig, *, key: PRNGKeyArray):
        make = partial(_conv_norm(config), activation=jax.nn.relu)
        self.conv = make(config.in_channels, config.stem_out, 7, stride=2, key=key)

    def __call__(
        self, x: Float[Array, "height width channels"], state: eqx.nn.State
    ) -> tuple[Float[Array, "out_height out_width out"], eqx.nn.State]:
        return self.conv(x, state)


class DeepStem(eqx.Module):
    """To half the image's size by three small convolutions."""

    conv1: ConvNorm
    conv2: ConvNorm
    conv3: ConvNorm

    def __init__(self, config: ResNetConfig, *, key: PRNGKeyArray):
        key1, key2, key3 = jax.random.split(key, 3)
        make = partial(_conv_norm(config), activation=jax.nn.relu)
        width = config.stem_width
        first = width // 4 * 3 if config.stem == "tiered" else width
        self.conv1 = make(config.in_channels, first, 3, stride=2, key=key1)
        self.conv2 = make(first, width, 3, key=key2)
        self.conv3 = make(width, config.stem_out, 3, key=key3)

    def __call__(
        self, x: Float[Array, "height width channels"], state: eqx.nn.State
    ) -> tuple[Float[Array, "out_height out_width out"], eqx.nn.State]:
        return nn.in_turn((self.conv1, self.conv2, self.conv3), x, state)


class Block(eqx.Module):
    """Two 3x3 convolutions ("basic"), or 1x1, 3x3, 1x1 ("bottleneck"), beside a shortcut.

    `dilations` are those of the block's first 3x3 convolution and of what follows it. `antialias` smooths what the last
    convolution gets, in place of a stride or of a change of dilation.
    """

    convs: tuple[ConvNorm, ...]
    attention: nn.SqueezeExcite | nn.EfficientChannelAttention | None
    shortcut: ConvNorm | None
    pooled_shortcut: ConvNorm | None
    antialias: Literal["none", "average", "blur"] = eqx.field(static=True)
    stride: int = eqx.field(static=True)
    dilated: bool = eqx.field(static=True)

    def __init__(
        self,
        config: ResNetConfig,
        kind: BlockKind,
        in_channels: int,
        width: int,
        *,
        stride: int,
        dilations: tuple[int, int] = (1, 1),
        key: PRNGKeyArray,
    ):
        key1, key2, key3, key_attention, key_shortcut = jax.random.split(key, 5)
        make = _conv_norm(config)
        inner, out_channels = partial(make, activation=jax.nn.relu), _expansion(kind) * width
        self.antialias = config.antialias if stride > 1 or dilations[0] != dilations[1] else "none"
        conv_stride = stride if self.antialias == "none" else 1
        if kind == "bottleneck":
            wide, groups = width * config.base_width // 64 * config.cardinality, config.cardinality
            first = wide // config.reduce_first
            self.convs = (
                inner(in_channels, first, 1, key=key1),
                inner(first, wide, 3, stride=conv_stride, dilation=dilations[0], groups=groups, key=key2),
                make(wide, out_channels, 1, key=key3),
            )
        else:
            first = width // config.reduce_first
            self.convs = (
                inner(in_channels, first, 3, stride=conv_stride, dilation=dilations[0], key=key1),
                make(first, width, 3, dilation=dilations[1], key=key2),
            )
        self.attention = _attention(config, out_channels, key=key_attention)
        self.stride = stride
        self.dilated = dilations[1] > 1
        self.shortcut = self.pooled_shortcut = None
        changes = stride > 1 or in_channels != out_channels
        if changes and config.shortcut == "pool":
            self.pooled_shortcut = make(in_channels, out_channels, 1, key=key_shortcut)
        elif changes:
            kernel = config.shortcut_kernel if stride > 1 or self.dilated else 1
            self.shortcut = make(
                in_channels, out_channels, kernel, stride=stride, dilation=dilations[0], key=key_shortcut
            )

    def __call__(
        self, x: Float[Array, "height width channels"], state: eqx.nn.State, *, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, "out_height out_width out"], eqx.nn.State]:
        y, state = nn.in_turn(self.convs[:-1], x, state)
        y, state = self.convs[-1](self._smoothed(y), state)
        if self.attention is not None:
            y = self.attention(y)
        if self.shortcut is not None:
            x, state = self.shortcut(x, state)
        if self.pooled_shortcut is not None:
            if self.dilated:
                x = nn.avg_pool(x, 2, stride=1, padding="same_tf")
            elif self.stride > 1:
                x = nn.avg_pool(x, 2, stride=self.stride, ceil_mode=True, count_include_pad=False)
            x, state = self.pooled_shortcut(x, state)
        return jax.nn.relu(x + y), state

    def _smoothed(self, x: Float[Array, "height width channels"]) -> Float[Array, "out_height out_width channels"]:
        if self.antialias == "blur":
            return nn.blur_pool(x, stride=self.stride)
        if self.antialias == "average":
            if x.shape[0] % self.stride or x.shape[1] % self.stride:
                raise ValueError(
                    f"antialias='average' halves even sizes only, got a map of {x.shape[0]} x {x.shape[1]}; "
                    f"resize the image to multiples of 32"
                )
            return nn.avg_pool(x, self.stride)
        return x


class ResNet(eqx.Module):
    stem: Stem | DeepStem
    stem_pool: ConvNorm | None
    stages: tuple[nn.Stage[Block], ...]
    head: nn.Linear | None
    config: ResNetConfig = eqx.field(static=True)

    def __init__(self, config: ResNetConfig, *, key: PRNGKeyArray):
        key_stem, key_head, *stage_keys = jax.random.split(key, 2 + len(config.depths))
        self.stem = (Stem if config.stem == "conv7" else DeepStem)(config, key=key_stem)
        channels, stride, dilation = config.stem_out, 4, 1
        self.stem_pool = None
        if config.stem_pool == "conv":
            make, key_pool = _conv_norm(config), jax.random.fold_in(key_stem, 1)
            self.stem_pool = make(channels, channels, 3, stride=2, activation=jax.nn.relu, key=key_pool)
        stages = []
        for index, (kind, width, depth) in enumerate(zip(config.blocks, config.widths, config.depths, strict=True)):
            block = partial(Block, config, kind)
            out_channels, previous = _expansion(kind) * width, dilation
            halves = index > 0 and stride < config.output_stride
            if halves:
                stride *= 2
            elif index > 0:
                dilation *= 2
            stages.append(
                nn.Stage(
                    lambda key: block(channels, width, stride=1 + halves, dilations=(previous, dilation), key=key),
                    lambda key: block(out_channels, width, stride=1, dilations=(dilation, dilation), key=key),
                    depth,
                    key=stage_keys[index],
                )
            )
            channels = out_channels
        self.stages = tuple(stages)
        self.head = nn.Linear(channels, config.num_classes, key=key_head) if config.num_classes else None
        self.config = config

    @typed
    def features(
        self,
        x: Float[Array, "height width {self.config.in_channels}"],
        state: eqx.nn.State,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[tuple[Float[Array, "_ _ _"], ...], eqx.nn.State]:
        """The feature map of each stage, at 1/4, 1/8, 1/16 and 1/32 of the image's size."""
        (_, *maps), state = self.features_and_stem(x, state)
        return tuple(maps), state

    @typed
    def features_and_stem(
        self,
        x: Float[Array, "height width {self.config.in_channels}"],
        state: eqx.nn.State,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[tuple[Float[Array, "_ _ _"], ...], eqx.nn.State]:
        """The stem's map, at half the image's size, before those of the stages."""
        stem, state = self.stem(x, state)
        y, state = self._pooled(stem, state)
        maps = [stem]
        for stage in self.stages:
            y, state = stage.with_state(y, state)
            maps.append(y)
        return tuple(maps), state

    def _pooled(
        self, x: Float[Array, "height width channels"], state: eqx.nn.State
    ) -> tuple[Float[Array, "out_height out_width channels"], eqx.nn.State]:
        if self.stem_pool is not None:
            return self.stem_pool(x, state)
        if self.config.antialias == "average":
            return nn.avg_pool(x, 2), state
        if self.config.antialias == "blur":
            return nn.blur_pool(nn.max_pool(x, 3, stride=1, padding=1), stride=2), state
        return nn.max_pool(x, 3, stride=2, padding=1), state

    @typed
    def __call__(
        self,
        x: Float[Array, "height width {self.config.in_channels}"],
        state: eqx.nn.State,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, " out"], eqx.nn.State]:
        maps, state = self.features(x, state)
        pooled = nn.global_avg_pool(maps[-1])
        return pooled if self.head is None else self.head(pooled), state


def _expansion(kind: BlockKind) -> int:
    """How many times its width a block puts out."""
    return {"basic": 1, "bottleneck": 4}[kind]


def _conv_norm(config: ResNetConfig) -> Callable[..., ConvNorm]:
    if not config.norm_groups:
        return nn.ConvNorm
    return partial(nn.ConvGroupNorm, norm=partial(nn.GroupNorm, config.norm_groups))


def _attention(
    config: ResNetConfig, channels: int, *, key: PRNGKeyArray
) -> nn.SqueezeExcite | nn.EfficientChannelAttention | None:
    if config.attention == "squeeze_excite":
        return nn.SqueezeExcite(channels, nn.round_channels(channels * config.squeeze), key=key)
    return nn.EfficientChannelAttention(channels, key=key) if config.attention == "eca" else None


def _basic(*depths: int, **options: Any) -> ResNetConfig:
    return ResNetConfig(block="basic", depths=depths, **options)


def _bottleneck(*depths: int, **options: Any) -> ResNetConfig:
    return ResNetConfig(block="bottleneck", depths=depths, **options)


_C: dict[str, Any] = {"stem": "deep", "stem_width": 32}
_D: dict[str, Any] = {**_C, "shortcut": "pool"}
_S: dict[str, Any] = {"stem": "deep", "stem_width": 64}
_T: dict[str, Any] = {"stem": "tiered", "stem_width": 32, "shortcut": "pool"}
_SE: dict[str, Any] = {"attention": "squeeze_excite"}
_ECA: dict[str, Any] = {"attention": "eca"}
_RS: dict[str, Any] = {**_D, **_SE, "squeeze": 0.25, "stem_pool": "conv"}
_AVERAGE: dict[str, Any] = {"antialias": "average"}
_BLUR: dict[str, Any] = {"antialias": "blur"}

VARIANTS = {
    # torchvision and timm
    "resnet18": _basic(2, 2, 2, 2),
    "resnet34": _basic(3, 4, 6, 3),
    "resnet50": _bottleneck(3, 4, 6, 3),
    "resnet101": _bottleneck(3, 4, 23, 3),
    "resnet152": _bottleneck(3, 8, 36, 3),
    "resnext50_32x4d": _bottleneck(3, 4, 6, 3, cardinality=32, base_width=4),
    "resnext101_32x8d": _bottleneck(3, 4, 23, 3, cardinality=32, base_width=8),
    "resnext101_64x4d": _bottleneck(3, 4, 23, 3, cardinality=64, base_width=4),
    "wide_resnet50_2": _bottleneck(3, 4, 6, 3, base_width=128),
    "wide_resnet101_2": _bottleneck(3, 4, 23, 3, base_width=128),
    # timm
    "resnet10t": _basic(1, 1, 1, 1, **_T),
    "resnet14t": _bottleneck(1, 1, 1, 1, **_T),
    "resnet18d": _basic(2, 2, 2, 2, **_D),
    "resnet26": _bottleneck(2, 2, 2, 2),
    "resnet26d": _bottleneck(2, 2, 2, 2, **_D),
    "resnet26t": _bottleneck(2, 2, 2, 2, **_T),
    "resnet34d": _basic(3, 4, 6, 3, **_D),
    "resnet50c": _bottleneck(3, 4, 6, 3, **_C),
    "resnet50d": _bottleneck(3, 4, 6, 3, **_D),
    "resnet50s": _bottleneck(3, 4, 6, 3, **_S),
    "resnet50t": _bottleneck(3, 4, 6, 3, **_T),
    "resnet101c": _bottleneck(3, 4, 23, 3, **_C),
    "resnet101d": _bottleneck(3, 4, 23, 3, **_D),
    "resnet101s": _bottleneck(3, 4, 23, 3, **_S),
    "resnet152c": _bottleneck(3, 8, 36, 3, **_C),
    "resnet152d": _bottleneck(3, 8, 36, 3, **_D),
    "resnet152s": _bottleneck(3, 8, 36, 3, **_S),
    "resnet200": _bottleneck(3, 24, 36, 3),
    "resnet200d": _bottleneck(3, 24, 36, 3, **_D),
    "resnext50d_32x4d": _bottleneck(3, 4, 6, 3, cardinality=32, base_width=4, **_D),
    "resnext101_32x4d": _bottleneck(3, 4, 23, 3, cardinality=32, base_width=4),
    "resnext101_32x16d": _bottleneck(3, 4, 23, 3, cardinality=32, base_width=16),
    "resnext101_32x32d": _bottleneck(3, 4, 23, 3, cardinality=32, base_width=32),
    "seresnet18": _basic(2, 2, 2, 2, **_SE),
    "seresnet34": _basic(3, 4, 6, 3, **_SE),
    "seresnet50": _bottleneck(3, 4, 6, 3, **_SE),
    "seresnet50t": _bottleneck(3, 4, 6, 3, **_T, **_SE),
    "seresnet101": _bottleneck(3, 4, 23, 3, **_SE),
    "seresnet152": _bottleneck(3, 8, 36, 3, **_SE),
    "seresnet152d": _bottleneck(3, 8, 36, 3, **_D, **_SE),
    "seresnet200d": _bottleneck(3, 24, 36, 3, **_D, **_SE),
    "seresnet269d": _bottleneck(3, 30, 48, 8, **_D, **_SE),
    "seresnext26d_32x4d": _bottleneck(2, 2, 2, 2, cardinality=32, base_width=4, **_D, **_SE),
    "seresnext26t_32x4d": _bottleneck(2, 2, 2, 2, cardinality=32, base_width=4, **_T, **_SE),
    "seresnext50_32x4d": _bottleneck(3, 4, 6, 3, cardinality=32, base_width=4, **_SE),
    "seresnext101_32x4d": _bottleneck(3, 4, 23, 3, cardinality=32, base_width=4, **_SE),
    "seresnext101_32x8d": _bottleneck(3, 4, 23, 3, cardinality=32, base_width=8, **_SE),
    "seresnext101d_32x8d": _bottleneck(3, 4, 23, 3, cardinality=32, base_width=8, **_D, **_SE),
    "seresnext101_64x4d": _bottleneck(3, 4, 23, 3, cardinality=64, base_width=4, **_SE),
    "senet154": _bottleneck(3, 8, 36, 3, cardinality=64, base_width=4, reduce_first=2, shortcut_kernel=3, **_S, **_SE),
    "ecaresnet26t": _bottleneck(2, 2, 2, 2, **_T, **_ECA),
    "ecaresnetlight": _bottleneck(1, 1, 11, 3, shortcut="pool", **_ECA),
    "ecaresnet50d": _bottleneck(3, 4, 6, 3, **_D, **_ECA),
    "ecaresnet50t": _bottleneck(3, 4, 6, 3, **_T, **_ECA),
    "ecaresnet101d": _bottleneck(3, 4, 23, 3, **_D, **_ECA),
    "ecaresnet200d": _bottleneck(3, 24, 36, 3, **_D, **_ECA),
    "ecaresnet269d": _bottleneck(3, 30, 48, 8, **_D, **_ECA),
    "ecaresnext26t_32x4d": _bottleneck(2, 2, 2, 2, cardinality=32, base_width=4, **_T, **_ECA),
    "ecaresnext50t_32x4d": _bottleneck(3, 4, 6, 3, cardinality=32, base_width=4, **_T, **_ECA),
    "resnetaa34d": _basic(3, 4, 6, 3, **_D, **_AVERAGE),
    "resnetaa50": _bottleneck(3, 4, 6, 3, **_AVERAGE),
    "resnetaa50d": _bottleneck(3, 4, 6, 3, **_D, **_AVERAGE),
    "resnetaa101d": _bottleneck(3, 4, 23, 3, **_D, **_AVERAGE),
    "seresnetaa50d": _bottleneck(3, 4, 6, 3, **_D, **_SE, **_AVERAGE),
    "seresnextaa101d_32x8d": _bottleneck(3, 4, 23, 3, cardinality=32, base_width=8, **_D, **_SE, **_AVERAGE),
    "seresnextaa201d_32x8d": _bottleneck(
        3, 24, 36, 4, cardinality=32, base_width=8, shortcut="pool", **_S, **_SE, **_AVERAGE
    ),
    "resnetblur18": _basic(2, 2, 2, 2, **_BLUR),
    "resnetblur50": _bottleneck(3, 4, 6, 3, **_BLUR),
    "resnetblur50d": _bottleneck(3, 4, 6, 3, **_D, **_BLUR),
    "resnetblur101d": _bottleneck(3, 4, 23, 3, **_D, **_BLUR),
    "resnetrs50": _bottleneck(3, 4, 6, 3, **_RS),
    "resnetrs101": _bottleneck(3, 4, 23, 3, **_RS),
    "resnetrs152": _bottleneck(3, 8, 36, 3, **_RS),
    "resnetrs200": _bottleneck(3, 24, 36, 3, **_RS),
    "resnetrs270": _bottleneck(4, 29, 53, 4, **_RS),
    "resnetrs350": _bottleneck(4, 36, 72, 4, **_RS),
    "resnetrs420": _bottleneck(4, 44, 87, 4, **_RS),
    "resnet50_gn": _bottleneck(3, 4, 6, 3, norm_groups=32),
    "test_resnet": ResNetConfig(
        block=("basic", "basic", "bottleneck", "basic"),
        depths=(1, 1, 1, 1),
        widths=(32, 48, 48, 96),
        stem="deep",
        stem_width=16,
        shortcut="pool",
    ),
}

SHARDING = (
    (r".*conv\.weight", P("model", "fsdp")),
    (r"head\.weight", P("model", "fsdp")),
)

FAMILY = Family(
    ResNet,
    ResNetConfig,
    VARIANTS,
    UPSTREAMS,
    sharding=SHARDING,
    adapters={"num_classes": adapt.new_head, "in_channels": adapt.mix_channels},
)
