"""RegNet (Radosavovic et al., 2020, arXiv 2003.13678): X, Y with squeeze-and-excitation, Z with linear outputs
(2103.06877), and timm's V, which normalises and activates before each convolution.

Upstream: torchvision and timm `regnet.py`; transformers' `RegNetForImageClassification` and `RegNetModel`. Initial
weights are torchvision's. Deviations: none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import log
from typing import Any, Literal

import equinox as eqx
import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import check_choices, typed
from eqzoo.checkpoint import BATCH_NORM, Rule, adapt, prefixed, staged
from eqzoo.models._family import Family, Option, Options, Upstream, count_labels
from eqzoo.nn._init import kaiming_fan_out, normal


@dataclass(frozen=True, kw_only=True)
class RegNetConfig:
    """`group_size` is how many channels a group of the 3x3 convolutions has, at most all; `bottleneck` is their width
    as a multiple of the block's. `squeeze_excite` is the squeezed width as a fraction of the block's input, 0 for none.
    `shortcut` is a strided 1x1 convolution, one after an average pool, or none where size and width change.
    `linear_out` puts no activation behind a block, `pre_activation` all of them before the convolutions.
    `last_width` is that of a last 1x1 convolution, 0 for none, and `group_norm` how many channels a group of the norms
    has, 0 for batch norms."""

    depths: tuple[int, ...]
    widths: tuple[int, ...]
    group_size: int
    bottleneck: float = 1.0
    squeeze_excite: float = 0.0
    shortcut: Literal["conv", "pool", "none"] = "conv"
    linear_out: bool = False
    pre_activation: bool = False
    group_norm: int = 0
    activation: Literal["relu", "silu"] = "relu"
    stem_width: int = 32
    last_width: int = 0
    dropout: float = 0.0
    drop_path: float = 0.0
    in_channels: int = 3
    num_classes: int = 1000

    def __post_init__(self):
        check_choices(self)
        if len(self.depths) != len(self.widths):
            raise ValueError(
                f"depths={self.depths} and widths={self.widths} differ in length; give one of each a stage"
            )
        for width in self.widths:
            if self.inner(width) % self.groups(width):
                raise ValueError(
                    f"group_size={self.group_size} makes no whole groups of {self.inner(width)} channels (width "
                    f"{width} times bottleneck {self.bottleneck}); choose multiples of it"
                )
        others = (self.linear_out, self.group_norm)
        if self.pre_activation and others != (False, 0):
            raise ValueError(
                f"pre_activation=True has no activation behind a block and batch norms, but linear_out and group_norm "
                f"are {others}; leave them at (False, 0)"
            )

    def inner(self, width: int) -> int:
        """The width of the 3x3 convolutions in blocks of a width."""
        return round(width * self.bottleneck)

    def groups(self, width: int) -> int:
        """How many groups they have."""
        return max(1, self.inner(width) // self.group_size)


class Block(eqx.Module):
    """1x1, grouped 3x3, and 1x1 convolutions, beside a shortcut; squeeze-and-excitation comes before the last."""

    layers: tuple[nn.ConvNorm | nn.ConvGroupNorm | nn.SqueezeExcite, ...]
    shortcut: nn.ConvNorm | nn.ConvGroupNorm | None
    pooled_shortcut: nn.ConvNorm | nn.ConvGroupNorm | None
    drop_path: nn.DropPath
    activation: Callable[[Array], Array] | None = eqx.field(static=True)
    is_residual: bool = eqx.field(static=True)

    def __init__(self, config: RegNetConfig, in_channels: int, width: int, *, stride: int, key: PRNGKeyArray):
        key1, key2, key_se, key3, key_shortcut = jax.random.split(key, 5)
        inner, groups, activation = config.inner(width), config.groups(width), nn.activation(config.activation)
        make = _conv_norm(config)
        self.layers = (
            make(in_channels, inner, 1, activation=activation, key=key1),
            make(inner, inner, 3, stride=stride, groups=groups, activation=activation, key=key2),
            *_squeeze_excite(config, in_channels, inner, key=key_se),
            make(inner, width, 1, key=key3),
        )
        self.shortcut = self.pooled_shortcut = None
        if stride > 1 and config.shortcut == "conv":
            self.shortcut = make(in_channels, width, 1, stride=stride, key=key_shortcut)
        elif stride > 1 and config.shortcut == "pool":
            self.pooled_shortcut = make(in_channels, width, 1, key=key_shortcut)
        self.drop_path = nn.DropPath(config.drop_path)
        self.activation = None if config.linear_out else activation
        self.is_residual = stride == 1 or config.shortcut != "none"

    def __call__(
        self,
        x: Float[Array, "height width channels"],
        state: eqx.nn.State,
        depth: Float[Array, ""],
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "out_height out_width out"], eqx.nn.State]:
        y = x
        for layer in self.layers:
            if isinstance(layer, nn.SqueezeExcite):
                y = layer(y)
            else:
                y, state = layer(y, state)
        if self.is_residual:
            if self.shortcut is not None:
                x, state = self.shortcut(x, state)
            if self.pooled_shortcut is not None:
                x, state = self.pooled_shortcut(_halved(x), state)
            y = self.drop_path(y, depth, key=key) + x
        return (y if self.activation is None else self.activation(y)), state


class PreBlock(eqx.Module):
    """The same convolutions, each after its norm and activation; the shortcut starts behind the first of these."""

    norms: tuple[nn.BatchNorm, ...]
    convs: tuple[nn.Conv2d, ...]
    squeeze_excite: tuple[nn.SqueezeExcite, ...]
    shortcut: nn.Conv2d | None
    pooled_shortcut: nn.Conv2d | None
    drop_path: nn.DropPath
    activation: Callable[[Array], Array] = eqx.field(static=True)
    is_residual: bool = eqx.field(static=True)

    def __init__(self, config: RegNetConfig, in_channels: int, width: int, *, stride: int, key: PRNGKeyArray):
        key1, key2, key_se, key3, key_shortcut = jax.random.split(key, 5)
        inner = config.inner(width)
        self.norms = (nn.BatchNorm(in_channels), nn.BatchNorm(inner), nn.BatchNorm(inner))
        self.convs = (
            _conv(in_channels, inner, 1, key=key1),
            _conv(inner, inner, 3, stride=stride, groups=config.groups(width), key=key2),
            _conv(inner, width, 1, key=key3),
        )
        self.squeeze_excite = _squeeze_excite(config, in_channels, inner, key=key_se)
        self.shortcut = self.pooled_shortcut = None
        if stride > 1 and config.shortcut == "conv":
            self.shortcut = _conv(in_channels, width, 1, stride=stride, key=key_shortcut)
        elif stride > 1 and config.shortcut == "pool":
            self.pooled_shortcut = _conv(in_channels, width, 1, key=key_shortcut)
        self.drop_path = nn.DropPath(config.drop_path)
        self.activation = nn.activation(config.activation)
        self.is_residual = stride == 1 or config.shortcut != "none"

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
                for squeeze_excite in self.squeeze_excite:
                    y = squeeze_excite(y)
        if not self.is_residual:
            return y, state
        if self.shortcut is not None:
            x = self.shortcut(x)
        if self.pooled_shortcut is not None:
            x = self.pooled_shortcut(_halved(x))
        return self.drop_path(y, depth, key=key) + x, state


class RegNet(eqx.Module):
    stem: nn.ConvNorm | nn.ConvGroupNorm | nn.Conv2d
    stages: tuple[nn.Stage[Block], ...] | tuple[nn.Stage[PreBlock], ...]
    last: nn.ConvNorm | nn.ConvGroupNorm | None
    dropout: nn.Dropout
    head: nn.Linear | None
    config: RegNetConfig = eqx.field(static=True)

    def __init__(self, config: RegNetConfig, *, key: PRNGKeyArray):
        key_stem, key_last, key_head, *stage_keys = jax.random.split(key, 3 + len(config.depths))
        make = partial(_conv_norm(config), activation=nn.activation(config.activation))
        first = _conv if config.pre_activation else make
        self.stem = first(config.in_channels, config.stem_width, 3, stride=2, key=key_stem)
        block = partial(PreBlock if config.pre_activation else Block, config)
        stages, channels = [], config.stem_width
        for width, depth, stage_key in zip(config.widths, config.depths, stage_keys, strict=True):
            stages.append(
                nn.Stage(
                    lambda key: block(channels, width, stride=2, key=key),
                    lambda key: block(width, width, stride=1, key=key),
                    depth,
                    key=stage_key,
                )
            )
            channels = width
        self.stages = tuple(stages)
        self.last = make(channels, config.last_width, 1, key=key_last) if config.last_width else None
        self.dropout = nn.Dropout(config.dropout)
        head = partial(nn.Linear, config.last_width or channels, config.num_classes, init=partial(normal, std=0.01))
        self.head = head(key=key_head) if config.num_classes else None
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
        if isinstance(self.stem, nn.Conv2d):
            y = self.stem(x)
        else:
            y, state = self.stem(x, state)
        maps, keys = [], nn.split_key(key, len(self.stages))
        for stage, depths, stage_key in zip(self.stages, nn.block_depths(self.config.depths), keys, strict=True):
            y, state = stage.with_state(y, state, each=depths, key=stage_key)
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
        key_features, key_dropout = nn.split_key(key, 2)
        maps, state = self.features(x, state, key=key_features)
        y = maps[-1]
        if self.last is not None:
            y, state = self.last(y, state)
        elif self.config.linear_out or self.config.pre_activation:
            y = nn.activation(self.config.activation)(y)
        pooled = self.dropout(nn.global_avg_pool(y), key=key_dropout)
        return pooled if self.head is None else self.head(pooled), state


def _conv_norm(config: RegNetConfig) -> Callable[..., nn.ConvNorm | nn.ConvGroupNorm]:
    if not config.group_norm:
        return nn.ConvNorm
    return partial(nn.ConvGroupNorm, norm=lambda channels: nn.GroupNorm(channels // config.group_norm, channels))


def _conv(
    in_channels: int, out_channels: int, kernel_size: int, *, stride: int = 1, groups: int = 1, key: PRNGKeyArray
) -> nn.Conv2d:
    return nn.Conv2d(
        in_channels,
        out_channels,
        kernel_size,
        stride=stride,
        padding=kernel_size // 2,
        groups=groups,
        use_bias=False,
        init=kaiming_fan_out,
        key=key,
    )


def _squeeze_excite(
    config: RegNetConfig, in_channels: int, inner: int, *, key: PRNGKeyArray
) -> tuple[nn.SqueezeExcite, ...]:
    """One, or none. Its squeezed width depends on the block's input, not on what it squeezes."""
    if not config.squeeze_excite:
        return ()
    squeezed = round(in_channels * config.squeeze_excite)
    return (nn.SqueezeExcite(inner, squeezed, activation=nn.activation(config.activation), key=key),)


def _halved(x: Float[Array, "height width channels"]) -> Float[Array, "out_height out_width channels"]:
    return nn.avg_pool(x, 2, ceil_mode=True, count_include_pad=False)


def _regnet(
    depth: int,
    initial: int,
    slope: float,
    step: float,
    group_size: int,
    *,
    torchvision: bool = False,
    bottleneck: float = 1.0,
    **options: Any,
) -> RegNetConfig:
    """The paper's quantised linear parametrisation (section 3.3).

    Block j asks for `initial + slope * j` channels. They are rounded to `initial` times a power of `step`, and then to
    a multiple of 8. Blocks of one width make a stage, whose 3x3 convolutions are rounded to whole groups. Halfway
    between two numbers of groups, timm takes the even one; torchvision the larger, and so wherever the smaller would
    leave less than 90% of the channels.
    """
    asked = initial + slope * np.arange(depth)
    powers = np.round(np.log(asked / initial) / log(step))
    widths, depths = np.unique(8 * np.round(initial * step**powers / 8).astype(int), return_counts=True)

    def fitted(width: int) -> int:
        inner = int(width * bottleneck)
        size = min(group_size, inner)
        groups = round(inner / size)
        if torchvision:
            groups = int(inner / size + 0.5)
            groups += groups * size < 0.9 * inner
        return int(groups * size / bottleneck)

    return RegNetConfig(
        depths=tuple(depths.tolist()),
        widths=tuple(map(fitted, widths.tolist())),
        group_size=group_size,
        bottleneck=bottleneck,
        **options,
    )


_X: dict[str, tuple[int, int, float, float, int]] = {
    "002": (13, 24, 36.44, 2.49, 8),
    "004": (22, 24, 24.48, 2.54, 16),
    "006": (16, 48, 36.97, 2.24, 24),
    "008": (16, 56, 35.73, 2.28, 16),
    "016": (18, 80, 34.01, 2.25, 24),
    "032": (25, 88, 26.31, 2.25, 48),
    "040": (23, 96, 38.65, 2.43, 40),
    "064": (17, 184, 60.83, 2.07, 56),
    "080": (23, 80, 49.56, 2.88, 120),
    "120": (19, 168, 73.36, 2.37, 112),
    "160": (22, 216, 55.59, 2.1, 128),
    "320": (23, 320, 69.86, 2.0, 168),
}
_Y: dict[str, tuple[int, int, float, float, int]] = {
    "002": (13, 24, 36.44, 2.49, 8),
    "004": (16, 48, 27.89, 2.09, 8),
    "006": (15, 48, 32.54, 2.32, 16),
    "008": (14, 56, 38.84, 2.4, 16),
    "016": (27, 48, 20.71, 2.65, 24),
    "032": (21, 80, 42.63, 2.66, 24),
    "040": (22, 96, 31.41, 2.24, 64),
    "064": (25, 112, 33.22, 2.27, 72),
    "080": (17, 192, 76.82, 2.19, 56),
    "120": (19, 168, 73.36, 2.37, 112),
    "160": (18, 200, 106.23, 2.48, 112),
    "320": (20, 232, 115.89, 2.53, 232),
    "640": (20, 352, 147.48, 2.4, 328),
    "1280": (27, 456, 160.83, 2.52, 264),
    "2560": (27, 640, 230.83, 2.53, 373),
}
_TORCHVISION_X = {
    "400mf": "004",
    "800mf": "008",
    "1_6gf": "016",
    "3_2gf": "032",
    "8gf": "080",
    "16gf": "160",
    "32gf": "320",
}
_TORCHVISION_Y = {**_TORCHVISION_X, "128gf": "1280"}
_SE: dict[str, Any] = {"squeeze_excite": 0.25}
_V: dict[str, Any] = {**_SE, "pre_activation": True, "activation": "silu"}
_Z: dict[str, Any] = {**_SE, "bottleneck": 4.0, "shortcut": "none", "linear_out": True, "activation": "silu"}

VARIANTS = {
    # torchvision
    **{f"regnet_x_{name}": _regnet(*_X[size], torchvision=True) for name, size in _TORCHVISION_X.items()},
    **{f"regnet_y_{name}": _regnet(*_Y[size], torchvision=True, **_SE) for name, size in _TORCHVISION_Y.items()},
    # timm
    **{f"regnetx_{size}": _regnet(*_X[size]) for size in _X},
    **{f"regnety_{size}": _regnet(*_Y[size], **_SE) for size in _Y},
    "regnetx_004_tv": _regnet(*_X["004"], torchvision=True),
    "regnety_008_tv": _regnet(*_Y["008"], torchvision=True, **_SE),
    "regnety_080_tv": _regnet(*_Y["080"], torchvision=True, **_SE),
    "regnety_040_sgn": _regnet(*_Y["040"], group_norm=16, activation="silu", **_SE),
    "regnetv_040": _regnet(*_Y["040"], **_V),
    "regnetv_064": _regnet(*_Y["064"], shortcut="pool", **_V),
    "regnetz_005": _regnet(21, 16, 10.7, 2.51, 4, last_width=1024, **_Z),
    "regnetz_040": _regnet(28, 48, 14.5, 2.226, 8, **_Z),
    "regnetz_040_h": _regnet(28, 48, 14.5, 2.226, 8, last_width=1536, **_Z),
}


def _normed(source: str, target: str, *, conv: str, norm: str) -> tuple[Rule, ...]:
    """The rules of a convolution and its norm, of which upstream has its own names."""
    return (
        Rule(rf"{source}{conv}\.weight", f"{target}.conv.weight"),
        *prefixed(rf"{source}{norm}\.", f"{target}.norm.", BATCH_NORM),
    )


# A block's third layer is squeeze-and-excitation or already the last convolution: what the model lacks, the next fits.
_TORCHVISION_BLOCK = (
    *_normed(r"f\.a\.", "layers.0", conv="0", norm="1"),
    *_normed(r"f\.b\.", "layers.1", conv="0", norm="1"),
    Rule(r"f\.se\.fc(\d)\.(weight|bias)", "layers.2.fc{0}.{1}"),
    *_normed(r"f\.c\.", "layers.2", conv="0", norm="1"),
    *_normed(r"f\.c\.", "layers.3", conv="0", norm="1"),
    *_normed(r"proj\.", "shortcut", conv="0", norm="1"),
)

TORCHVISION = (
    *_normed(r"stem\.", "stem", conv="0", norm="1"),
    *staged(r"trunk_output\.block1\.block1-", "stages.0.", _TORCHVISION_BLOCK),
    *staged(r"trunk_output\.block2\.block2-", "stages.1.", _TORCHVISION_BLOCK),
    *staged(r"trunk_output\.block3\.block3-", "stages.2.", _TORCHVISION_BLOCK),
    *staged(r"trunk_output\.block4\.block4-", "stages.3.", _TORCHVISION_BLOCK),
    Rule(r"fc\.(weight|bias)", "head.{0}"),
)

_TIMM_BLOCK = (
    *_normed(r"conv1\.", "layers.0", conv="conv", norm="bn"),
    *_normed(r"conv2\.", "layers.1", conv="conv", norm="bn"),
    Rule(r"se\.fc(\d)\.(weight|bias)", "layers.2.fc{0}.{1}"),
    *_normed(r"conv3\.", "layers.2", conv="conv", norm="bn"),
    *_normed(r"conv3\.", "layers.3", conv="conv", norm="bn"),
    *_normed(r"downsample\.", "shortcut", conv="conv", norm="bn"),
    *_normed(r"downsample\.1\.", "pooled_shortcut", conv="conv", norm="bn"),
)

_TIMM_PRE_BLOCK = (
    *prefixed(r"norm(\d)\.", "norms.{0-1}.", BATCH_NORM),
    Rule(r"conv(\d)\.weight", "convs.{0-1}.weight"),
    Rule(r"se\.fc(\d)\.(weight|bias)", "squeeze_excite.0.fc{0}.{1}"),
    Rule(r"downsample\.weight", "shortcut.weight"),
    Rule(r"downsample\.1\.weight", "pooled_shortcut.weight"),
)

TIMM = (
    *_normed(r"stem\.", "stem", conv="conv", norm="bn"),
    Rule(r"stem\.weight", "stem.weight"),
    *staged(r"s(\d)\.b", "stages.{0-1}.", (*_TIMM_BLOCK, *_TIMM_PRE_BLOCK), start=1),
    *_normed(r"final_conv\.", "last", conv="conv", norm="bn"),
    Rule(r"head\.fc\.(weight|bias)", "head.{0}"),
)

_TRANSFORMERS_BLOCK = (
    *_normed(r"layer\.(\d)\.", "layers.{0}", conv="convolution", norm="normalization"),
    Rule(r"layer\.2\.attention\.0\.(weight|bias)", "layers.2.fc1.{0}"),
    Rule(r"layer\.2\.attention\.2\.(weight|bias)", "layers.2.fc2.{0}"),
    *_normed(r"shortcut\.", "shortcut", conv="convolution", norm="normalization"),
)

TRANSFORMERS_BODY = (
    *_normed(r"embedder\.embedder\.", "stem", conv="convolution", norm="normalization"),
    *staged(r"encoder\.stages\.(\d)\.layers\.", "stages.{0}.", _TRANSFORMERS_BLOCK),
)
TRANSFORMERS = (*prefixed(r"regnet\.", "", TRANSFORMERS_BODY), Rule(r"classifier\.1\.(weight|bias)", "head.{0}"))

# What timm computes widths and depths from comes with a variant's name, and so do they.
TIMM_OPTIONS = Options(
    {
        "stem_width": "stem_width",
        "se_ratio": "squeeze_excite",
        "downsample": Option("shortcut", {"conv1x1": "conv", "avg": "pool", None: "none"}),
        "linear_out": "linear_out",
        "preact": "pre_activation",
        "num_features": "last_width",
        "act_layer": Option("activation", {"relu": "relu", "silu": "silu"}),
        "in_chans": "in_channels",
        "num_classes": "num_classes",
    },
    fixed={"global_pool": "avg", "output_stride": 32},
    ignored=(r"drop_(path_)?rate", "zero_init_last"),
)

TRANSFORMERS_OPTIONS = Options(
    {
        "layer_type": Option("squeeze_excite", {"x": 0.0, "y": 0.25}),
        "depths": "depths",
        "hidden_sizes": "widths",
        "groups_width": "group_size",
        "embedding_size": "stem_width",
        "num_channels": "in_channels",
        "num_labels": "num_classes",
    },
    fixed={"hidden_act": "relu", "downsample_in_first_stage": True},
    lenient=True,
    prepare=partial(count_labels, classifier="RegNetForImageClassification", body="RegNetModel"),
)

SHARDING = (
    (r"(.*\.)?(conv|stem|shortcut|pooled_shortcut|convs\.\d)\.weight", P("model", "fsdp")),
    (r"head\.weight", P("model", "fsdp")),
)

FAMILY = Family(
    RegNet,
    RegNetConfig,
    VARIANTS,
    upstreams={
        "torchvision": Upstream(
            TORCHVISION, Options({"num_classes": "num_classes"}), names=("regnet_x_*", "regnet_y_*")
        ),
        "timm": Upstream(TIMM, TIMM_OPTIONS, names=("regnetx_*", "regnety_*", "regnetv_*", "regnetz_*")),
        "transformers": Upstream(
            TRANSFORMERS,
            TRANSFORMERS_OPTIONS,
            names=("regnetx_[0-9][0-9][0-9]", "regnety_[0-9][0-9][0-9]", "regnety_1280"),
            model_type="regnet",
            architecture="RegNetForImageClassification",
            base="regnety_040",
        ),
        "transformers_body": Upstream(TRANSFORMERS_BODY),
    },
    sharding=SHARDING,
    adapters={"num_classes": adapt.new_head, "in_channels": adapt.mix_channels},
)
