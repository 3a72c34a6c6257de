"""ResNet (He et al., 2015, arXiv 1512.03385) and its descendants: ResNeXt (1611.05431), Wide ResNet (1605.07146),
SE-ResNet (1709.01507), and the "bag of tricks" variants C, D, S and T (1812.01187).

Upstream: torchvision `resnet.py` and timm `resnet.py`, which agree wherever both have a variant; transformers'
`ResNetForImageClassification` and `ResNetModel`. The stride of a bottleneck sits on its 3x3 convolution. Deviations:
none.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import check_choices, typed
from eqzoo.checkpoint import BATCH_NORM, Rule, adapt, prefixed, staged
from eqzoo.models._family import Family, Option, Options, Upstream, count_labels


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """`stem` is one 7x7 convolution, three 3x3 ("deep"), or three of growing width ("tiered"); `shortcut` is a strided
    1x1 convolution, or one after an average pool (variant D). `cardinality` and `base_width` are ResNeXt's groups and
    channels per group (at 64 channels). `output_stride` is how many times smaller than the image the last map is: below
    32, the last stages dilate their convolutions instead of striding."""

    block: Literal["basic", "bottleneck"]
    depths: tuple[int, ...]
    widths: tuple[int, ...] = (64, 128, 256, 512)
    cardinality: int = 1
    base_width: int = 64
    stem: Literal["conv7", "deep", "tiered"] = "conv7"
    stem_width: int = 64
    shortcut: Literal["conv", "pool"] = "conv"
    squeeze_excite: bool = False
    output_stride: Literal[8, 16, 32] = 32
    in_channels: int = 3
    num_classes: int = 1000

    def __post_init__(self):
        check_choices(self)
        if len(self.depths) != len(self.widths):
            raise ValueError(
                f"depths={self.depths} and widths={self.widths} differ in length; give one of each a stage"
            )
        if self.block == "basic" and (self.cardinality, self.base_width) != (1, 64):
            raise ValueError(
                f"block='basic' has no groups, but cardinality={self.cardinality} and base_width={self.base_width}; "
                f"leave both at 1 and 64 or use block='bottleneck'"
            )

    @property
    def stem_out(self) -> int:
        return 64 if self.stem == "conv7" else 2 * self.stem_width

    @property
    def expansion(self) -> int:
        return {"basic": 1, "bottleneck": 4}[self.block]


class Stem(eqx.Module):
    """To half the image's size by one wide convolution."""

    conv: nn.ConvNorm

    def __init__(self, in_channels: int, *, key: PRNGKeyArray):
        self.conv = nn.ConvNorm(in_channels, 64, 7, stride=2, key=key)

    def __call__(
        self, x: Float[Array, "height width channels"], state: eqx.nn.State
    ) -> tuple[Float[Array, "out_height out_width out"], eqx.nn.State]:
        x, state = self.conv(x, state)
        return jax.nn.relu(x), state


class DeepStem(eqx.Module):
    """To half the image's size by three small convolutions."""

    conv1: nn.ConvNorm
    conv2: nn.ConvNorm
    conv3: nn.ConvNorm

    def __init__(self, in_channels: int, widths: tuple[int, int, int], *, key: PRNGKeyArray):
        key1, key2, key3 = jax.random.split(key, 3)
        self.conv1 = nn.ConvNorm(in_channels, widths[0], 3, stride=2, key=key1)
        self.conv2 = nn.ConvNorm(widths[0], widths[1], 3, key=key2)
        self.conv3 = nn.ConvNorm(widths[1], widths[2], 3, key=key3)

    def __call__(
        self, x: Float[Array, "height width channels"], state: eqx.nn.State
    ) -> tuple[Float[Array, "out_height out_width out"], eqx.nn.State]:
        for conv in (self.conv1, self.conv2, self.conv3):
            x, state = conv(x, state)
            x = jax.nn.relu(x)
        return x, state


class Block(eqx.Module):
    """Two 3x3 convolutions ("basic"), or 1x1, 3x3, 1x1 ("bottleneck"), beside a shortcut.

    `dilations` are those of the block's first 3x3 convolution and of what follows it.
    """

    convs: tuple[nn.ConvNorm, ...]
    squeeze_excite: nn.SqueezeExcite | None
    shortcut: nn.ConvNorm | None
    pooled_shortcut: nn.ConvNorm | None
    stride: int = eqx.field(static=True)
    dilated: bool = eqx.field(static=True)

    def __init__(
        self,
        in_channels: int,
        *,
        width: int,
        stride: int,
        dilations: tuple[int, int] = (1, 1),
        bottleneck: bool,
        cardinality: int,
        base_width: int,
        squeeze_excite: bool,
        pool_shortcut: bool,
        key: PRNGKeyArray,
    ):
        key1, key2, key3, key_se, key_shortcut = jax.random.split(key, 5)
        if bottleneck:
            inner, out_channels = width * base_width // 64 * cardinality, 4 * width
            self.convs = (
                nn.ConvNorm(in_channels, inner, 1, key=key1),
                nn.ConvNorm(inner, inner, 3, stride=stride, dilation=dilations[0], groups=cardinality, key=key2),
                nn.ConvNorm(inner, out_channels, 1, key=key3),
            )
        else:
            out_channels = width
            self.convs = (
                nn.ConvNorm(in_channels, width, 3, stride=stride, dilation=dilations[0], key=key1),
                nn.ConvNorm(width, width, 3, dilation=dilations[1], key=key2),
            )
        self.squeeze_excite = (
            nn.SqueezeExcite(out_channels, nn.round_channels(out_channels / 16), key=key_se) if squeeze_excite else None
        )
        self.shortcut = self.pooled_shortcut = None
        if pool_shortcut and (stride > 1 or in_channels != out_channels):
            self.pooled_shortcut = nn.ConvNorm(in_channels, out_channels, 1, key=key_shortcut)
        elif stride > 1 or in_channels != out_channels:
            self.shortcut = nn.ConvNorm(in_channels, out_channels, 1, stride=stride, key=key_shortcut)
        self.stride = stride
        self.dilated = dilations[1] > 1

    def __call__(
        self, x: Float[Array, "height width channels"], state: eqx.nn.State, *, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, "out_height out_width out"], eqx.nn.State]:
        y = x
        for index, conv in enumerate(self.convs):
            y, state = conv(y if index == 0 else jax.nn.relu(y), state)
        if self.squeeze_excite is not None:
            y = self.squeeze_excite(y)
        if self.shortcut is not None:
            x, state = self.shortcut(x, state)
        if self.pooled_shortcut is not None:
            if self.dilated:
                x = nn.avg_pool(x, 2, stride=1, padding="same_tf")
            elif self.stride > 1:
                x = nn.avg_pool(x, 2, stride=self.stride, ceil_mode=True, count_include_pad=False)
            x, state = self.pooled_shortcut(x, state)
        return jax.nn.relu(x + y), state


class ResNet(eqx.Module):
    stem: Stem | DeepStem
    stages: tuple[nn.Stage[Block], ...]
    head: nn.Linear | None
    config: ResNetConfig = eqx.field(static=True)

    def __init__(self, config: ResNetConfig, *, key: PRNGKeyArray):
        key_stem, key_head, *stage_keys = jax.random.split(key, 2 + len(config.depths))
        self.stem = _stem(config, key=key_stem)
        stages, channels, stride, dilation = [], config.stem_out, 4, 1
        for index, (width, depth) in enumerate(zip(config.widths, config.depths, strict=True)):
            block = partial(
                Block,
                width=width,
                bottleneck=config.block == "bottleneck",
                cardinality=config.cardinality,
                base_width=config.base_width,
                squeeze_excite=config.squeeze_excite,
                pool_shortcut=config.shortcut == "pool",
            )
            out_channels, previous = width * config.expansion, dilation
            halves = index > 0 and stride < config.output_stride
            if halves:
                stride *= 2
            elif index > 0:
                dilation *= 2
            stages.append(
                nn.Stage(
                    lambda key: block(channels, stride=1 + halves, dilations=(previous, dilation), key=key),
                    lambda key: block(out_channels, stride=1, dilations=(dilation, dilation), key=key),
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
        y, maps = nn.max_pool(stem, 3, stride=2, padding=1), [stem]
        for stage in self.stages:
            y, state = stage.with_state(y, state)
            maps.append(y)
        return tuple(maps), state

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


def _stem(config: ResNetConfig, *, key: PRNGKeyArray) -> Stem | DeepStem:
    if config.stem == "conv7":
        return Stem(config.in_channels, key=key)
    first = config.stem_width // 4 * 3 if config.stem == "tiered" else config.stem_width
    return DeepStem(config.in_channels, (first, config.stem_width, config.stem_out), key=key)


def _basic(*depths: int, **options: Any) -> ResNetConfig:
    return ResNetConfig(block="basic", depths=depths, **options)


def _bottleneck(*depths: int, **options: Any) -> ResNetConfig:
    return ResNetConfig(block="bottleneck", depths=depths, **options)


_C: dict[str, Any] = {"stem": "deep", "stem_width": 32}
_D: dict[str, Any] = {**_C, "shortcut": "pool"}
_S: dict[str, Any] = {"stem": "deep", "stem_width": 64}
_T: dict[str, Any] = {"stem": "tiered", "stem_width": 32, "shortcut": "pool"}
_SE: dict[str, Any] = {"squeeze_excite": True}

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
}

_BLOCK = (
    Rule(r"conv(\d)\.weight", "convs.{0-1}.conv.weight"),
    *prefixed(r"bn(\d)\.", "convs.{0-1}.norm.", BATCH_NORM),
    Rule(r"se\.fc(\d)\.(weight|bias)", "squeeze_excite.fc{0}.{1}"),
    Rule(r"downsample\.0\.weight", "shortcut.conv.weight"),
    *prefixed(r"downsample\.1\.", "shortcut.norm.", BATCH_NORM),
    Rule(r"downsample\.1\.weight", "pooled_shortcut.conv.weight"),
    *prefixed(r"downsample\.2\.", "pooled_shortcut.norm.", BATCH_NORM),
)

# torchvision and timm use the same names; where a model lacks a rule's target, the next rule that fits counts.
TIMM = (
    Rule(r"conv1\.weight", "stem.conv.conv.weight"),
    *prefixed(r"bn1\.", "stem.conv.norm.", BATCH_NORM),
    Rule(r"conv1\.0\.weight", "stem.conv1.conv.weight"),
    *prefixed(r"conv1\.1\.", "stem.conv1.norm.", BATCH_NORM),
    Rule(r"conv1\.3\.weight", "stem.conv2.conv.weight"),
    *prefixed(r"conv1\.4\.", "stem.conv2.norm.", BATCH_NORM),
    Rule(r"conv1\.6\.weight", "stem.conv3.conv.weight"),
    *prefixed(r"bn1\.", "stem.conv3.norm.", BATCH_NORM),
    *staged(r"layer(\d)\.", "stages.{0-1}.", _BLOCK),
    Rule(r"fc\.(weight|bias)", "head.{0}"),
)

_TRANSFORMERS_BLOCK = (
    Rule(r"layer\.(\d)\.convolution\.weight", "convs.{0}.conv.weight"),
    *prefixed(r"layer\.(\d)\.normalization\.", "convs.{0}.norm.", BATCH_NORM),
    Rule(r"shortcut\.convolution\.weight", "shortcut.conv.weight"),
    *prefixed(r"shortcut\.normalization\.", "shortcut.norm.", BATCH_NORM),
)

TRANSFORMERS_BODY = (
    Rule(r"embedder\.embedder\.convolution\.weight", "stem.conv.conv.weight"),
    *prefixed(r"embedder\.embedder\.normalization\.", "stem.conv.norm.", BATCH_NORM),
    *staged(r"encoder\.stages\.(\d)\.layers\.", "stages.{0}.", _TRANSFORMERS_BLOCK),
)
TRANSFORMERS = (*prefixed(r"resnet\.", "", TRANSFORMERS_BODY), Rule(r"classifier\.1\.(weight|bias)", "head.{0}"))

TIMM_OPTIONS = Options(
    {
        "layers": "depths",
        "channels": "widths",
        "cardinality": "cardinality",
        "base_width": "base_width",
        "stem_type": Option("stem", {"": "conv7", "deep": "deep", "deep_tiered": "tiered"}),
        "stem_width": "stem_width",
        "avg_down": Option("shortcut", {False: "conv", True: "pool"}),
        "output_stride": "output_stride",
        "in_chans": "in_channels",
        "num_classes": "num_classes",
    },
    fixed={"global_pool": "avg", "replace_stem_pool": False, "down_kernel_size": 1},
    ignored=(r"drop_(path_|block_)?rate", "zero_init_last"),
)


def _prepare_transformers(options: dict[str, Any]) -> dict[str, Any]:
    """transformers states how many channels a stage puts out."""
    options = {"layer_type": "bottleneck", "hidden_sizes": [256, 512, 1024, 2048], **options}
    options = count_labels(options, classifier="ResNetForImageClassification", body="ResNetModel")
    sizes = options["hidden_sizes"]
    if options["layer_type"] == "bottleneck":
        if any(size % 4 for size in sizes):
            raise ValueError(f"hidden_sizes={sizes} of a bottleneck are not supported; eqzoo has multiples of 4")
        sizes = [size // 4 for size in sizes]
    return {**options, "widths": sizes}


def _restore_transformers(options: dict[str, Any]) -> dict[str, Any]:
    expansion = 4 if options["layer_type"] == "bottleneck" else 1
    return {**options, "hidden_sizes": [expansion * width for width in options.pop("widths")]}


TRANSFORMERS_OPTIONS = Options(
    {
        "layer_type": Option("block", {"basic": "basic", "bottleneck": "bottleneck"}),
        "depths": "depths",
        "widths": "widths",
        "num_channels": "in_channels",
        "num_labels": "num_classes",
    },
    fixed={
        "embedding_size": 64,
        "hidden_act": "relu",
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
    },
    lenient=True,
    prepare=_prepare_transformers,
    restore=_restore_transformers,
)

SHARDING = (
    (r".*conv\.weight", P("model", "fsdp")),
    (r"head\.weight", P("model", "fsdp")),
)

_IN_TORCHVISION = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d", "wide_resnet50_2", "wide_resnet101_2"),
)

FAMILY = Family(
    ResNet,
    ResNetConfig,
    VARIANTS,
    upstreams={
        "torchvision": Upstream(TIMM, Options({"num_classes": "num_classes"}), names=_IN_TORCHVISION),
        "timm": Upstream(TIMM, TIMM_OPTIONS, names=("*",)),
        "transformers": Upstream(
            TRANSFORMERS,
            TRANSFORMERS_OPTIONS,
            names=("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
            model_type="resnet",
            architecture="ResNetForImageClassification",
            base="resnet50",
        ),
        "transformers_body": Upstream(TRANSFORMERS_BODY),
    },
    sharding=SHARDING,
    adapters={"num_classes": adapt.new_head, "in_channels": adapt.mix_channels},
)
