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
from eqzoo.checkpoint import adapt
from eqzoo.models._family import Family
from eqzoo.models.vision._regnet_blocks import PreBlock, bare_conv, halved, optional_gate
from eqzoo.models.vision._regnet_upstream import UPSTREAMS
from eqzoo.models.vision._regnet_variants import ROWS
from eqzoo.nn._init import normal


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
            if self.inner(width) != self.groups(width) * min(self.group_size, self.inner(width)):
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

    def squeezed(self, in_channels: int) -> int | None:
        """The squeezed width in blocks of so many input channels, None without squeeze-and-excitation."""
        return round(in_channels * self.squeeze_excite) if self.squeeze_excite else None


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
            *optional_gate(inner, config.squeezed(in_channels), activation=activation, key=key_se),
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
                x, state = self.pooled_shortcut(halved(x), state)
            y = self.drop_path(y, depth, key=key) + x
        return (y if self.activation is None else self.activation(y)), state


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
        stem = partial(bare_conv, padding=1) if config.pre_activation else make
        self.stem = stem(config.in_channels, config.stem_width, 3, stride=2, key=key_stem)
        block = partial(_pre_block if config.pre_activation else Block, config)
        stages, channels = [], config.stem_width
        for width, depth, stage_key in zip(config.widths, config.depths, stage_keys, strict=True):
            first = lambda key: block(channels, width, stride=2, key=key)
            rest = lambda key: block(width, width, stride=1, key=key)
            stages.append(nn.Stage(first, rest, depth, key=stage_key))
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


def _pre_block(config: RegNetConfig, in_channels: int, width: int, *, stride: int, key: PRNGKeyArray) -> PreBlock:
    return PreBlock(
        in_channels,
        width,
        inner=config.inner(width),
        groups=config.groups(width),
        squeezed=config.squeezed(in_channels),
        shortcut=config.shortcut,
        stride=stride,
        activation=nn.activation(config.activation),
        drop_path=config.drop_path,
        key=key,
    )


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


VARIANTS = {name: _regnet(*numbers, **fields) for name, (numbers, fields) in ROWS.items()}

SHARDING = (
    (r"(.*\.)?(conv|stem|shortcut|pooled_shortcut|convs\.\d)\.weight", P("model", "fsdp")),
    (r"head\.weight", P("model", "fsdp")),
)

FAMILY = Family(
    RegNet,
    RegNetConfig,
    VARIANTS,
    UPSTREAMS,
    sharding=SHARDING,
    adapters={"num_classes": adapt.new_head, "in_channels": adapt.mix_channels},
)
