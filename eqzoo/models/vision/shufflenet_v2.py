"""ShuffleNet V2 (Ma et al., 2018, arXiv 1807.11164).

Upstream: torchvision `shufflenetv2.py`. Deviations: none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import typed
from eqzoo.checkpoint import BATCH_NORM, Rule, adapt, prefixed, staged
from eqzoo.models._family import Family, Options, Upstream
from eqzoo.nn._init import torch_default


def _init(key: PRNGKeyArray, shape: Sequence[int]) -> Float[Array, "..."]:
    return torch_default(key, shape, prod(shape[1:]))


@dataclass(frozen=True, kw_only=True)
class ShuffleNetV2Config:
    """`widths` are those of the stages, between a stem's and that of a last 1x1 convolution."""

    depths: tuple[int, ...]
    widths: tuple[int, ...]
    stem_width: int = 24
    last_width: int = 1024
    in_channels: int = 3
    num_classes: int = 1000

    def __post_init__(self):
        if len(self.depths) != len(self.widths):
            raise ValueError(
                f"depths={self.depths} and widths={self.widths} differ in length; give one of each a stage"
            )
        if any(width % 2 for width in self.widths):
            raise ValueError(f"widths={self.widths} can't all be halved for two branches; choose even ones")


class Unit(eqx.Module):
    """Two branches side by side, whose channels are then shuffled: taken from one and the other in turn.

    A first unit halves the size, each branch from the whole input. Any other leaves half of its channels alone.
    """

    left: tuple[nn.ConvNorm, ...]
    right: tuple[nn.ConvNorm, ...]

    def __init__(self, in_channels: int, width: int, *, stride: int, key: PRNGKeyArray):
        half, relu = width // 2, jax.nn.relu
        key1, key2, key3, key4, key5 = jax.random.split(key, 5)
        pointwise = partial(nn.ConvNorm, kernel_size=1, activation=relu, init=_init)
        depthwise = partial(nn.ConvNorm, kernel_size=3, stride=stride, init=_init)
        self.left = ()
        if stride > 1:
            self.left = (
                depthwise(in_channels, in_channels, groups=in_channels, key=key1),
                pointwise(in_channels, half, key=key2),
            )
        self.right = (
            pointwise(in_channels if stride > 1 else half, half, key=key3),
            depthwise(half, half, groups=half, key=key4),
            pointwise(half, half, key=key5),
        )

    def __call__(
        self, x: Float[Array, "height width channels"], state: eqx.nn.State, *, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, "out_height out_width out"], eqx.nn.State]:
        left, right = (x, x) if self.left else jnp.split(x, 2, axis=-1)
        left, state = nn.in_turn(self.left, left, state)
        right, state = nn.in_turn(self.right, right, state)
        return jnp.stack([left, right], axis=-1).reshape(*left.shape[:-1], -1), state


class ShuffleNetV2(eqx.Module):
    stem: nn.ConvNorm
    stages: tuple[nn.Stage[Unit], ...]
    last: nn.ConvNorm
    head: nn.Linear | None
    config: ShuffleNetV2Config = eqx.field(static=True)

    def __init__(self, config: ShuffleNetV2Config, *, key: PRNGKeyArray):
        key_stem, key_last, key_head, *stage_keys = jax.random.split(key, 3 + len(config.depths))
        make = partial(nn.ConvNorm, activation=jax.nn.relu, init=_init)
        self.stem = make(config.in_channels, config.stem_width, 3, stride=2, key=key_stem)
        stages, channels = [], config.stem_width
        for width, depth, stage_key in zip(config.widths, config.depths, stage_keys, strict=True):
            first = lambda key: Unit(channels, width, stride=2, key=key)
            rest = lambda key: Unit(width, width, stride=1, key=key)
            stages.append(nn.Stage(first, rest, depth, key=stage_key))
            channels = width
        self.stages = tuple(stages)
        self.last = make(channels, config.last_width, 1, key=key_last)
        self.head = nn.Linear(config.last_width, config.num_classes, key=key_head) if config.num_classes else None
        self.config = config

    @typed
    def features(
        self,
        x: Float[Array, "height width {self.config.in_channels}"],
        state: eqx.nn.State,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[tuple[Float[Array, "_ _ _"], ...], eqx.nn.State]:
        """The feature map of each stage, at 1/8, 1/16 and 1/32 of the image's size."""
        y, state = self.stem(x, state)
        y = nn.max_pool(y, 3, stride=2, padding=1)
        maps = ()
        for stage in self.stages:
            y, state = stage.with_state(y, state)
            maps = (*maps, y)
        return maps, state

    @typed
    def __call__(
        self,
        x: Float[Array, "height width {self.config.in_channels}"],
        state: eqx.nn.State,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, " out"], eqx.nn.State]:
        maps, state = self.features(x, state)
        y, state = self.last(maps[-1], state)
        pooled = nn.global_avg_pool(y)
        return pooled if self.head is None else self.head(pooled), state


VARIANTS = {
    "shufflenet_v2_x0_5": ShuffleNetV2Config(depths=(4, 8, 4), widths=(48, 96, 192)),
    "shufflenet_v2_x1_0": ShuffleNetV2Config(depths=(4, 8, 4), widths=(116, 232, 464)),
    "shufflenet_v2_x1_5": ShuffleNetV2Config(depths=(4, 8, 4), widths=(176, 352, 704)),
    "shufflenet_v2_x2_0": ShuffleNetV2Config(depths=(4, 8, 4), widths=(244, 488, 976), last_width=2048),
}


def _conv_norm(source: str, target: str, *, first: int = 0) -> tuple[Rule, ...]:
    """The rules of a convolution, upstream's number `first` of a list, and of its norm, the next one."""
    return (
        Rule(rf"{source}{first}\.weight", f"{target}.conv.weight"),
        *prefixed(rf"{source}{first + 1}\.", f"{target}.norm.", BATCH_NORM),
    )


_UNIT = (
    *_conv_norm(r"branch1\.", "left.0"),
    *_conv_norm(r"branch1\.", "left.1", first=2),
    *_conv_norm(r"branch2\.", "right.0"),
    *_conv_norm(r"branch2\.", "right.1", first=3),
    *_conv_norm(r"branch2\.", "right.2", first=5),
)

TORCHVISION = (
    *_conv_norm(r"conv1\.", "stem"),
    *staged(r"stage(\d)\.", "stages.{0-2}.", _UNIT),
    *_conv_norm(r"conv5\.", "last"),
    Rule(r"fc\.(weight|bias)", "head.{0}"),
)

SHARDING = (
    (r".*conv\.weight", P("model", "fsdp")),
    (r"head\.weight", P("model", "fsdp")),
)

FAMILY = Family(
    ShuffleNetV2,
    ShuffleNetV2Config,
    VARIANTS,
    upstreams={"torchvision": Upstream(TORCHVISION, Options({"num_classes": "num_classes"}), names=("*",))},
    sharding=SHARDING,
    adapters={"num_classes": adapt.new_head, "in_channels": adapt.mix_channels},
)
