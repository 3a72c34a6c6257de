"""DenseNet (Huang et al., 2016, arXiv 1608.06993), and timm's variants with a deep stem (1812.01187) and with blur
pooling (1904.11486).

Upstream: torchvision and timm `densenet.py`, which agree wherever both have a variant. Each layer is wider than the one
before it, so that no two have weights of one shape: layers are laid out one by one, not stacked and scanned, and the
program grows with their number. Deviations: none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod, sqrt
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import check_choices, typed
from eqzoo.checkpoint import BATCH_NORM, Rule, adapt, prefixed
from eqzoo.models._family import Family, Option, Options, Upstream
from eqzoo.nn._init import normal, torch_default


def _kaiming_fan_in(key: PRNGKeyArray, shape: Sequence[int]) -> Float[Array, "..."]:
    return normal(key, shape, sqrt(2 / prod(shape[1:])))


@dataclass(frozen=True, kw_only=True)
class DenseNetConfig:
    """`layers` is their number in each block, `growth_rate` how many channels each adds to what it gets, and
    `bottleneck` how many times that its 3x3 convolution sees. The stem is one 7x7 convolution or three 3x3 ("deep");
    `blur` smoothes what its pooling leaves out. `layer_dropout` thins out each layer, `dropout` the pooled features."""

    growth_rate: int
    layers: tuple[int, ...]
    bottleneck: int = 4
    stem: Literal["conv7", "deep"] = "conv7"
    blur: bool = False
    layer_dropout: float = 0.0
    dropout: float = 0.0
    in_channels: int = 3
    num_classes: int = 1000

    def __post_init__(self):
        check_choices(self)
        if not self.layers or min(self.layers) < 1:
            raise ValueError(f"layers={self.layers} has a block without layers; give each block at least one")


class NormConv(eqx.Module):
    """A batch norm, an activation, and a convolution that keeps the size."""

    norm: nn.BatchNorm
    conv: nn.Conv2d

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, *, key: PRNGKeyArray):
        self.norm = nn.BatchNorm(in_channels)
        self.conv = nn.Conv2d(
            in_channels,
            out_channels,
            kernel_size,
            padding=kernel_size // 2,
            use_bias=False,
            init=_kaiming_fan_in,
            key=key,
        )

    def __call__(
        self, x: Float[Array, "height width in"], state: eqx.nn.State
    ) -> tuple[Float[Array, "height width out"], eqx.nn.State]:
        y, state = self.norm(x, state)
        return self.conv(jax.nn.relu(y)), state


class DenseLayer(eqx.Module):
    """A few new channels, computed from all that there are and put behind them."""

    conv1: NormConv
    conv2: NormConv
    dropout: nn.Dropout

    def __init__(self, in_channels: int, *, growth_rate: int, bottleneck: int, dropout: float, key: PRNGKeyArray):
        key1, key2 = jax.random.split(key)
        self.conv1 = NormConv(in_channels, bottleneck * growth_rate, 1, key=key1)
        self.conv2 = NormConv(bottleneck * growth_rate, growth_rate, 3, key=key2)
        self.dropout = nn.Dropout(dropout)

    def __call__(
        self, x: Float[Array, "height width channels"], state: eqx.nn.State, *, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, "height width more_channels"], eqx.nn.State]:
        y, state = self.conv1(x, state)
        y, state = self.conv2(y, state)
        return jnp.concatenate([x, self.dropout(y, key=key)], axis=-1), state


class DenseNet(eqx.Module):
    stem: tuple[nn.ConvNorm, ...]
    blocks: tuple[tuple[DenseLayer, ...], ...]
    transitions: tuple[NormConv, ...]
    norm: nn.BatchNorm
    dropout: nn.Dropout
    head: nn.Linear | None
    config: DenseNetConfig = eqx.field(static=True)

    def __init__(self, config: DenseNetConfig, *, key: PRNGKeyArray):
        key_stem, key_blocks, key_transitions, key_head = jax.random.split(key, 4)
        channels = 2 * config.growth_rate
        self.stem = _stem(config, channels, key=key_stem)
        layer = partial(
            DenseLayer,
            growth_rate=config.growth_rate,
            bottleneck=config.bottleneck,
            dropout=config.layer_dropout,
        )
        layer_keys = iter(jax.random.split(key_blocks, sum(config.layers)))
        transition_keys = iter(jax.random.split(key_transitions, len(config.layers)))
        blocks, transitions = [], []
        for number, depth in enumerate(config.layers):
            if number > 0:
                transitions.append(NormConv(channels, channels // 2, 1, key=next(transition_keys)))
                channels //= 2
            widths = (channels + index * config.growth_rate for index in range(depth))
            blocks.append(tuple(layer(width, key=next(layer_keys)) for width in widths))
            channels += depth * config.growth_rate
        self.blocks, self.transitions = tuple(blocks), tuple(transitions)
        self.norm = nn.BatchNorm(channels)
        self.dropout = nn.Dropout(config.dropout)
        init = partial(torch_default, fan_in=channels)
        self.head = nn.Linear(channels, config.num_classes, init=init, key=key_head) if config.num_classes else None
        self.config = config

    @typed
    def features(
        self,
        x: Float[Array, "height width {self.config.in_channels}"],
        state: eqx.nn.State,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[tuple[Float[Array, "_ _ _"], ...], eqx.nn.State]:
        """The feature map of each block, at 1/4, 1/8, 1/16 and 1/32 of the image's size; the last one normalised."""
        keys = iter(nn.split_key(key, sum(self.config.layers)))
        y, state = nn.in_turn(self.stem, x, state)
        if self.config.blur:
            y = nn.blur_pool(nn.max_pool(y, 3, stride=1, padding=1), stride=2)
        else:
            y = nn.max_pool(y, 3, stride=2, padding=1)
        maps = []
        for number, block in enumerate(self.blocks):
            if number > 0:
                y, state = self.transitions[number - 1](y, state)
                y = nn.avg_pool(y, 2)
            for layer in block:
                y, state = layer(y, state, key=next(keys))
            maps.append(y)
        y, state = self.norm(y, state)
        return (*maps[:-1], jax.nn.relu(y)), state

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
        pooled = self.dropout(nn.global_avg_pool(maps[-1]), key=key_dropout)
        return pooled if self.head is None else self.head(pooled), state


def _stem(config: DenseNetConfig, width: int, *, key: PRNGKeyArray) -> tuple[nn.ConvNorm, ...]:
    make = partial(nn.ConvNorm, activation=jax.nn.relu, init=_kaiming_fan_in)
    if config.stem == "conv7":
        return (make(config.in_channels, width, 7, stride=2, key=key),)
    key1, key2, key3 = jax.random.split(key, 3)
    return (
        make(config.in_channels, config.growth_rate, 3, stride=2, key=key1),
        make(config.growth_rate, config.growth_rate, 3, key=key2),
        make(config.growth_rate, width, 3, key=key3),
    )


VARIANTS = {
    # torchvision and timm
    "densenet121": DenseNetConfig(growth_rate=32, layers=(6, 12, 24, 16)),
    "densenet161": DenseNetConfig(growth_rate=48, layers=(6, 12, 36, 24)),
    "densenet169": DenseNetConfig(growth_rate=32, layers=(6, 12, 32, 32)),
    "densenet201": DenseNetConfig(growth_rate=32, layers=(6, 12, 48, 32)),
    # timm
    "densenetblur121d": DenseNetConfig(growth_rate=32, layers=(6, 12, 24, 16), stem="deep", blur=True),
    "densenet264d": DenseNetConfig(growth_rate=48, layers=(6, 12, 64, 48), stem="deep"),
}

_NORM_CONV = (*prefixed(r"norm\.", "norm.", BATCH_NORM), Rule(r"conv\.weight", "conv.weight"))

_LAYER = (
    *prefixed(r"norm(\d)\.", "conv{0}.norm.", BATCH_NORM),
    Rule(r"conv(\d)\.weight", "conv{0}.conv.weight"),
    *prefixed(r"norm\.(\d)\.", "conv{0}.norm.", BATCH_NORM),  # as in files from before torch 0.4.1
    Rule(r"conv\.(\d)\.weight", "conv{0}.conv.weight"),
)

# torchvision and timm use the same names.
TIMM = (
    Rule(r"features\.conv(\d)\.weight", "stem.{0}.conv.weight"),
    *prefixed(r"features\.norm(\d)\.", "stem.{0}.norm.", BATCH_NORM),
    *prefixed(r"features\.denseblock(\d)\.denselayer(\d+)\.", "blocks.{0-1}.{1-1}.", _LAYER),
    *prefixed(r"features\.transition(\d)\.", "transitions.{0-1}.", _NORM_CONV),
    *prefixed(r"features\.norm5\.", "norm.", BATCH_NORM),
    Rule(r"classifier\.(weight|bias)", "head.{0}"),
)

TIMM_OPTIONS = Options(
    {
        "growth_rate": "growth_rate",
        "block_config": "layers",
        "bn_size": "bottleneck",
        "stem_type": Option("stem", {"": "conv7", "deep": "deep"}),
        "in_chans": "in_channels",
        "num_classes": "num_classes",
    },
    fixed={"global_pool": "avg", "act_layer": "relu", "norm_layer": "batchnorm2d", "aa_stem_only": True},
    ignored=(r"(proj_)?drop_rate", "memory_efficient"),
)

SHARDING = (
    (r".*conv\.weight", P("model", "fsdp")),
    (r"head\.weight", P("model", "fsdp")),
)

_IN_TORCHVISION = ("densenet121", "densenet161", "densenet169", "densenet201")

FAMILY = Family(
    DenseNet,
    DenseNetConfig,
    VARIANTS,
    upstreams={
        "torchvision": Upstream(TIMM, Options({"num_classes": "num_classes"}), names=_IN_TORCHVISION),
        "timm": Upstream(TIMM, TIMM_OPTIONS, names=("*",)),
    },
    sharding=SHARDING,
    adapters={"num_classes": adapt.new_head, "in_channels": adapt.mix_channels},
)
