"""Inception v3 (Szegedy et al., 2015, arXiv 1512.00567).

Upstream: torchvision `inception.py` and timm `inception_v3.py`, which agree but for three options: torchvision's
variant is what its builder makes of the published weights, which renormalises its input and has an auxiliary head.
Deviations: the auxiliary head runs in training mode only, which in timm it always does; biases of linear layers start
at zero.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import typed
from eqzoo.checkpoint import adapt
from eqzoo.models._family import Family
from eqzoo.models.vision._inception_v3_upstream import UPSTREAMS
from eqzoo.nn._init import normal

Layer = tuple[int | tuple[int, int], int]  # a convolution's window and width

SMALLEST = 75
SMALLEST_WITH_AUX = 299  # its last window is 5x5, on a map that has been divided by 16 and pooled by 3

_init = partial(normal, std=0.1)
_conv = partial(nn.ConvNorm, activation=jax.nn.relu, eps=1e-3, init=_init)


@dataclass(frozen=True, kw_only=True)
class InceptionV3Config:
    """The blocks of the paper's three grids: `pool_widths` are the widths behind the pools of the first grid's blocks,
    `widths_7x7` those between the 1x7 and 7x1 windows of the second's, `wide_blocks` the number of the third's. `width`
    scales every width. `transform_input` takes images normalised by ImageNet's statistics.
    """

    pool_widths: tuple[int, ...] = (32, 64, 64)
    widths_7x7: tuple[int, ...] = (128, 160, 160, 192)
    wide_blocks: int = 2
    width: float = 1.0
    transform_input: bool = False
    aux_heads: bool = False
    dropout: float = 0.0
    in_channels: int = 3
    num_classes: int = 1000

    def __post_init__(self):
        if self.width <= 0:
            raise ValueError(f"width={self.width} leaves no channels; pass a positive factor, as 0.5 for half of all")

    def scaled(self, width: int) -> int:
        return max(1, round(width * self.width))


class Mixed(eqx.Module):
    """Branches side by side, and one that pools. Without `pool_width` it does nothing else, but halves the size of the
    image, as do the last convolutions of the others. With `forks`, the last two convolutions of longer branches
    stand side by side too: `ends` counts them.
    """

    branches: tuple[tuple[nn.ConvNorm, ...], ...]
    pooled: nn.ConvNorm | None
    ends: tuple[int, ...] = eqx.field(static=True)
    out_channels: int = eqx.field(static=True)

    def __init__(
        self,
        in_channels: int,
        branches: Sequence[Sequence[Layer]],
        pool_width: int | None,
        *,
        forks: bool = False,
        key: PRNGKeyArray,
    ):
        key_pooled, *keys = jax.random.split(key, 1 + sum(map(len, branches)))
        self.ends = tuple(2 if forks and len(layers) > 1 else 1 for layers in branches)
        self.out_channels = in_channels if pool_width is None else pool_width
        made = []
        for layers, ends in zip(branches, self.ends, strict=True):
            convs, channels = [], in_channels
            for left, (window, width) in zip(range(len(layers), 0, -1), layers, strict=True):
                stride, padding = (2, 0) if pool_width is None and left == 1 else (1, None)
                convs.append(_conv(channels, width, window, stride=stride, padding=padding, key=keys.pop(0)))
                if left > ends:
                    channels = width
                else:
                    self.out_channels += width
            made.append(tuple(convs))
        self.branches = tuple(made)
        self.pooled = None if pool_width is None else _conv(in_channels, pool_width, 1, key=key_pooled)

    def __call__(
        self, x: Float[Array, "height width channels"], state: eqx.nn.State
    ) -> tuple[Float[Array, "out_height out_width out"], eqx.nn.State]:
        ys = []
        for convs, ends in zip(self.branches, self.ends, strict=True):
            y, state = nn.in_turn(convs[:-ends], x, state)
            for conv in convs[-ends:]:
                end, state = conv(y, state)
                ys.append(end)
        if self.pooled is None:
            ys.append(nn.max_pool(x, 3, stride=2))
        else:
            y, state = self.pooled(nn.avg_pool(x, 3, stride=1, padding=1), state)
            ys.append(y)
        return jnp.concatenate(ys, axis=-1), state


class AuxHead(eqx.Module):
    """A classifier before the last grid, which gives what comes before it a shorter way to the loss."""

    conv0: nn.ConvNorm
    conv1: nn.ConvNorm
    fc: nn.Linear | None

    def __init__(self, in_channels: int, widths: tuple[int, int], num_classes: int, *, key: PRNGKeyArray):
        key0, key1, key_fc = jax.random.split(key, 3)
        self.conv0 = _conv(in_channels, widths[0], 1, key=key0)
        self.conv1 = _conv(widths[0], widths[1], 5, padding=0, key=key1)
        fc = partial(nn.Linear, widths[1], num_classes, init=partial(normal, std=0.001), key=key_fc)
        self.fc = fc() if num_classes else None

    def __call__(
        self, x: Float[Array, "height width channels"], state: eqx.nn.State
    ) -> tuple[Float[Array, " out"], eqx.nn.State]:
        y, state = nn.in_turn((self.conv0, self.conv1), nn.avg_pool(x, 5, stride=3), state)
        pooled = nn.global_avg_pool(y)
        return (pooled if self.fc is None else self.fc(pooled)), state


class InceptionV3(eqx.Module):
    stem: tuple[tuple[nn.ConvNorm, ...], tuple[nn.ConvNorm, ...]]
    stages: tuple[tuple[Mixed, ...], ...]
    aux_head: AuxHead | None
    dropout: nn.Dropout
    head: nn.Linear | None
    config: InceptionV3Config = eqx.field(static=True)

    def __init__(self, config: InceptionV3Config, *, key: PRNGKeyArray):
        blocks = tuple(tuple(stage) for stage in _blocks(config))
        key1, key2, key3, key4, key5, key_aux, key_head, *keys = jax.random.split(key, 7 + sum(map(len, blocks)))
        width1, width2, width3, width4, width5 = map(config.scaled, (32, 32, 64, 80, 192))
        self.stem = (
            (
                _conv(config.in_channels, width1, 3, stride=2, padding=0, key=key1),
                _conv(width1, width2, 3, padding=0, key=key2),
                _conv(width2, width3, 3, key=key3),
            ),
            (
                _conv(width3, width4, 1, key=key4),
                _conv(width4, width5, 3, padding=0, key=key5),
            ),
        )
        stages, channels = [], width5
        for stage in blocks:
            made = []
            for block in stage:
                made.append(block(channels, key=keys.pop(0)))
                channels = made[-1].out_channels
            stages.append(tuple(made))
        self.stages = tuple(stages)
        aux_widths = config.scaled(128), config.scaled(768)
        aux_head = partial(AuxHead, stages[1][-1].out_channels, aux_widths, config.num_classes, key=key_aux)
        self.aux_head = aux_head() if config.aux_heads else None
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(channels, config.num_classes, init=_init, key=key_head) if config.num_classes else None
        self.config = config

    @typed
    def features(
        self,
        x: Float[Array, "height width {self.config.in_channels}"],
        state: eqx.nn.State,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[tuple[Float[Array, "_ _ _"], ...], eqx.nn.State]:
        """The last map at about 1/2, 1/4, 1/8, 1/16 and 1/32 of the image's size."""
        if min(x.shape[:2]) < SMALLEST:
            raise ValueError(
                f"InceptionV3: an image of {x.shape[0]} x {x.shape[1]} is smaller than what the last window "
                f"sees; enlarge it to {SMALLEST} x {SMALLEST} or more"
            )
        y = nn.renormalise(x) if self.config.transform_input else x
        maps = []
        for convs in self.stem:
            y, state = nn.in_turn(convs, y, state)
            maps.append(y)
            y = nn.max_pool(y, 3, stride=2)
        for blocks in self.stages:
            y, state = nn.in_turn(blocks, y, state)
            maps.append(y)
        return tuple(maps), state

    @typed
    def logits_with_auxiliary(
        self,
        x: Float[Array, "height width {self.config.in_channels}"],
        state: eqx.nn.State,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[tuple[Float[Array, " _"], ...], eqx.nn.State]:
        """The head's logits; in training mode those of the auxiliary head too."""
        maps, state = self.features(x, state)
        pooled = self.dropout(nn.global_avg_pool(maps[-1]), key=key)
        logits = pooled if self.head is None else self.head(pooled)
        if self.aux_head is None or self.dropout.inference:
            return (logits,), state
        if min(x.shape[:2]) < SMALLEST_WITH_AUX:
            raise ValueError(
                f"InceptionV3: in training, the auxiliary head has no whole window on an image of {x.shape[0]} x "
                f"{x.shape[1]}; enlarge it to {SMALLEST_WITH_AUX} x {SMALLEST_WITH_AUX} or more, or set aux_heads=False"
            )
        auxiliary, state = self.aux_head(maps[-2], state)
        return (logits, auxiliary), state

    @typed
    def __call__(
        self,
        x: Float[Array, "height width {self.config.in_channels}"],
        state: eqx.nn.State,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, " out"], eqx.nn.State]:
        """In training mode the auxiliary head runs too, for its running statistics."""
        logits, state = self.logits_with_auxiliary(x, state, key=key)
        return logits[0], state


def _blocks(config: InceptionV3Config) -> Iterator[Iterator[Callable[..., Mixed]]]:
    """What makes each block of each grid, given its channels and a key: the paper's figures 5, 10, 6, 10 and 7."""
    row, column = (1, 7), (7, 1)

    def mixed(*branches: list[Layer], pool: int | None = None, forks: bool = False) -> Callable[..., Mixed]:
        scaled = [[(window, config.scaled(width)) for window, width in layers] for layers in branches]
        pool_width = None if pool is None else config.scaled(pool)
        return partial(Mixed, branches=scaled, pool_width=pool_width, forks=forks)

    yield (mixed([(1, 64)], [(1, 48), (5, 64)], [(1, 64), (3, 96), (3, 96)], pool=pool) for pool in config.pool_widths)
    yield chain(
        [mixed([(3, 384)], [(1, 64), (3, 96), (3, 96)])],
        (
            mixed(
                [(1, 192)],
                [(1, width), (row, width), (column, 192)],
                [(1, width), (column, width), (row, width), (column, width), (row, 192)],
                pool=192,
            )
            for width in config.widths_7x7
        ),
    )
    yield chain(
        [mixed([(1, 192), (3, 320)], [(1, 192), (row, 192), (column, 192), (3, 192)])],
        repeat(
            mixed(
                [(1, 320)],
                [(1, 384), ((1, 3), 384), ((3, 1), 384)],
                [(1, 448), (3, 384), ((1, 3), 384), ((3, 1), 384)],
                pool=192,
                forks=True,
            ),
            config.wide_blocks,
        ),
    )


VARIANTS = {
    "torchvision/inception_v3": InceptionV3Config(transform_input=True, aux_heads=True, dropout=0.5),
    "timm/inception_v3": InceptionV3Config(),
}

SHARDING = (
    (r".*conv\.weight", P("model", "fsdp")),
    (r"(head|aux_head\.fc)\.weight", P("model", "fsdp")),
)

FAMILY = Family(
    InceptionV3,
    InceptionV3Config,
    VARIANTS,
    UPSTREAMS,
    sharding=SHARDING,
    adapters={"num_classes": adapt.new_head, "in_channels": adapt.mix_channels},
)
