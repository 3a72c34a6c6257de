"""DenseNet (Huang et al., 2016, arXiv 1608.06993), and timm's variants with a deep stem (1812.01187) and with blur
pooling (1904.11486).

Upstream: torchvision and timm `densenet.py`, which agree wherever both have a variant. Each layer is wider than the one
before it, so that no two have weights of one shape and a stack can't hold them: when the model is called, runs of them
are padded to one width and scanned. Deviations: none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import prod, sqrt
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from eqzoo import nn
from eqzoo._types import check_choices, typed
from eqzoo.checkpoint import BATCH_NORM, Rule, adapt, prefixed
from eqzoo.models._family import Family, Option, Options, Upstream
from eqzoo.nn._init import normal, torch_default
from eqzoo.nn.stack import keep_products

# In training. A longer run compiles sooner, but its layers compute with as many channels as its last one has.
LONGEST_RUN = 6


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
    """A few new channels, computed from all that there are."""

    conv1: NormConv
    conv2: NormConv
    dropout: nn.Dropout

    def __init__(self, in_channels: int, *, growth_rate: int, bottleneck: int, dropout: float, key: PRNGKeyArray):
        key1, key2 = jax.random.split(key)
        self.conv1 = NormConv(in_channels, bottleneck * growth_rate, 1, key=key1)
        self.conv2 = NormConv(bottleneck * growth_rate, growth_rate, 3, key=key2)
        self.dropout = nn.Dropout(dropout)

    def __call__(
        self, x: Float[Array, "height width in"], state: eqx.nn.State, *, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, "height width new_channels"], eqx.nn.State]:
        y, state = nn.in_turn((self.conv1, self.conv2), x, state)
        return self.dropout(y, key=key), state


def _run(
    layers: Sequence[DenseLayer],
    x: Float[Array, "height width in"],
    state: eqx.nn.State,
    *,
    new_channels: int,
    key: PRNGKeyArray | None,
) -> tuple[Float[Array, "height width out"], eqx.nn.State]:
    """What comes in and what each of the layers adds to it, in one scan.

    The layers differ in how many channels they get, and are padded to the last one's number: zeros that change nothing.
    """
    widths = [x.shape[-1] + index * new_channels for index in range(len(layers) + 1)]
    states = [state.substate(layer) for layer in layers]
    arrays, statics = zip(*(eqx.partition(layer, eqx.is_array) for layer in layers), strict=True)

    def step(maps, each):
        arrays, state, width, key = each
        layer = eqx.combine(arrays, statics[-1])
        new, state = layer(maps[..., : widths[-2]], state, key=key)
        return jax.lax.dynamic_update_slice_in_dim(maps, new, width, axis=2), state

    maps = jnp.pad(x, ((0, 0), (0, 0), (0, widths[-1] - widths[0])))
    keys = None if key is None else jax.random.split(key, len(layers))
    xs = (_padded(arrays), _padded(states), jnp.array(widths[:-1]), keys)
    maps, padded = jax.lax.scan(keep_products(step), maps, xs)
    for index, old in enumerate(states):
        leaves, structure = jax.tree.flatten(old)
        new = [
            leaf[index][tuple(map(slice, shape.shape))]
            for leaf, shape in zip(jax.tree.leaves(padded), leaves, strict=True)
        ]
        state = state.update(jax.tree.unflatten(structure, new))
    return maps, state


def _padded(trees: Sequence[PyTree]) -> PyTree:
    """The trees' arrays stacked, each padded with zeros to the shape that the last tree has."""

    def grown(leaf, shape):
        missing = [(0, new - old) for old, new in zip(leaf.shape, shape, strict=True)]
        return jnp.pad(leaf, missing) if leaf.shape != shape else leaf

    groups = zip(*map(jax.tree.leaves, trees), strict=True)
    stacked = [jnp.stack([grown(leaf, leaves[-1].shape) for leaf in leaves]) for leaves in groups]
    return jax.tree.unflatten(jax.tree.structure(trees[-1]), stacked)


def _runs(layers: Sequence[DenseLayer]) -> Iterator[list[DenseLayer]]:
    """Layers that can run in one scan: a few, and all alike, which some may no longer be that someone has changed."""
    for _, alike in groupby(layers, _kind):
        run = list(alike)
        longest = 1 if run[0].conv1.norm.inference else LONGEST_RUN
        yield from (run[start : start + longest] for start in range(0, len(run), longest))


def _kind(layer: DenseLayer) -> Any:
    """All about a layer but its sizes and numbers."""

    def kind(leaf):
        if isinstance(leaf, eqx.nn.StateIndex):
            return None
        return (leaf.ndim, leaf.dtype) if eqx.is_array(leaf) else leaf

    return jax.tree.flatten(jax.tree.map(kind, layer, is_leaf=lambda node: isinstance(node, eqx.nn.StateIndex)))


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
        block_keys = nn.split_key(key, len(self.blocks))
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
            runs = list(_runs(block))
            for run, key_run in zip(runs, nn.split_key(block_keys[number], len(runs)), strict=True):
                y, state = _run(run, y, state, new_channels=self.config.growth_rate, key=key_run)
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
