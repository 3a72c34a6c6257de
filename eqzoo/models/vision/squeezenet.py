"""SqueezeNet (Iandola et al., 2016, arXiv 1602.07360), versions 1.0 and 1.1.

Upstream: torchvision `squeezenet.py`. Classes are scored at every position, rectified, and only then averaged. Without
classes the output is the average of what the head would get at each position. Deviations: none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod, sqrt

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import typed
from eqzoo.checkpoint import Rule, adapt, flattened
from eqzoo.models._family import Family, Options, Upstream
from eqzoo.nn._init import normal, uniform


@dataclass(frozen=True, kw_only=True)
class SqueezeNetConfig:
    """`squeeze` has the width of every fire module's first layer, stage by stage; a pool comes before each stage."""

    stem_width: int
    stem_kernel: int
    squeeze: tuple[tuple[int, ...], ...]
    dropout: float = 0.5
    in_channels: int = 3
    num_classes: int = 1000

    def __post_init__(self):
        if not self.squeeze or not all(self.squeeze):
            raise ValueError(f"squeeze={self.squeeze} has a stage without fire module; give each at least one width")


class Fire(eqx.Module):
    """Few channels ("squeeze"), then four times as many from 1x1 and as many from 3x3 windows, side by side."""

    squeeze: nn.Conv2d
    expand1x1: nn.Conv2d
    expand3x3: nn.Conv2d

    def __init__(self, in_channels: int, squeeze: int, *, key: PRNGKeyArray):
        key_squeeze, key1, key3 = jax.random.split(key, 3)
        self.squeeze = nn.Conv2d(in_channels, squeeze, 1, init=_kaiming_uniform, key=key_squeeze)
        self.expand1x1 = nn.Conv2d(squeeze, 4 * squeeze, 1, init=_kaiming_uniform, key=key1)
        self.expand3x3 = nn.Conv2d(squeeze, 4 * squeeze, 3, padding=1, init=_kaiming_uniform, key=key3)

    def __call__(self, x: Float[Array, "height width channels"]) -> Float[Array, "height width out"]:
        y = jax.nn.relu(self.squeeze(x))
        return jax.nn.relu(jnp.concatenate([self.expand1x1(y), self.expand3x3(y)], axis=-1))


class SqueezeNet(eqx.Module):
    """`layers` are numbered as upstream numbers them."""

    layers: tuple[nn.Conv2d | nn.ReLU | nn.MaxPool | Fire, ...]
    dropout: nn.Dropout
    head: nn.Linear | None
    config: SqueezeNetConfig = eqx.field(static=True)

    def __init__(self, config: SqueezeNetConfig, *, key: PRNGKeyArray):
        key_stem, key_head, *keys = jax.random.split(key, 2 + sum(map(len, config.squeeze)))
        channels = config.stem_width
        stem = partial(nn.Conv2d, config.in_channels, channels, config.stem_kernel, init=_kaiming_uniform)
        layers = [stem(stride=2, key=key_stem), nn.ReLU()]
        for stage in config.squeeze:
            layers.append(nn.MaxPool(3, stride=2, ceil_mode=True))
            for squeeze in stage:
                layers.append(Fire(channels, squeeze, key=keys.pop(0)))
                channels = 8 * squeeze
        self.layers = tuple(layers)
        self.dropout = nn.Dropout(config.dropout)
        head = partial(nn.Linear, channels, config.num_classes, init=partial(normal, std=0.01), key=key_head)
        self.head = head() if config.num_classes else None
        self.config = config

    @typed
    def features(
        self, x: Float[Array, "height width {self.config.in_channels}"], *, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, "_ _ _"], ...]:
        """What each pool gets, and the last map: at 1/2, 1/4, 1/8 and 1/16 of the image's size."""
        maps, y = [], x
        for layer in self.layers:
            if isinstance(layer, nn.MaxPool):
                maps.append(y)
            y = layer(y)
        return (*maps, y)

    @typed
    def __call__(
        self, x: Float[Array, "height width {self.config.in_channels}"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, " out"]:
        y = self.dropout(self.features(x)[-1], key=key)
        return nn.global_avg_pool(y if self.head is None else jax.nn.relu(self.head(y)))


def _kaiming_uniform(key: PRNGKeyArray, shape: Sequence[int]) -> Float[Array, "..."]:
    """He et al. (2015) for ReLU, by the number of inputs."""
    return uniform(key, shape, sqrt(6 / prod(shape[1:])))


VARIANTS = {
    "squeezenet1_0": SqueezeNetConfig(stem_width=96, stem_kernel=7, squeeze=((16, 16, 32), (32, 48, 48, 64), (64,))),
    "squeezenet1_1": SqueezeNetConfig(stem_width=64, stem_kernel=3, squeeze=((16, 16), (32, 32), (48, 48, 64, 64))),
}

TORCHVISION = (
    Rule(r"features\.0\.(weight|bias)", "layers.0.{0}"),
    Rule(r"features\.(\d+)\.(squeeze|expand1x1|expand3x3)\.(weight|bias)", "layers.{0}.{1}.{2}"),
    Rule(r"classifier\.1\.weight", "head.weight", flattened(1)),
    Rule(r"classifier\.1\.bias", "head.bias"),
)

SHARDING = (
    (r"layers\.0\.weight", P("model", "fsdp")),
    (r"layers\.\d+\.(squeeze|expand\dx\d)\.weight", P("model", "fsdp")),
    (r"head\.weight", P("model", "fsdp")),
)

FAMILY = Family(
    SqueezeNet,
    SqueezeNetConfig,
    VARIANTS,
    upstreams={
        "torchvision": Upstream(
            TORCHVISION, Options({"num_classes": "num_classes", "dropout": "dropout"}), names=("squeezenet*",)
        )
    },
    sharding=SHARDING,
    adapters={"num_classes": adapt.new_head, "in_channels": adapt.mix_channels},
)
