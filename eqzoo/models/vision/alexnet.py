"""AlexNet in the form of "One weird trick for parallelizing convolutional neural networks" (Krizhevsky, 2014, arXiv
1404.5997): without the original's local response normalisation and without its groups.

Upstream: torchvision `alexnet.py`. Deviations: none.
"""

from dataclasses import dataclass

import equinox as eqx
import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import typed
from eqzoo.checkpoint import Rule, adapt
from eqzoo.models._family import Family, Options, Upstream

GRID = 6  # the side of the last map on images of 224 pixels; others are averaged to it


@dataclass(frozen=True, kw_only=True)
class AlexNetConfig:
    """`widths` are those of the five convolutions, `hidden` that of the two linear layers behind them."""

    widths: tuple[int, ...] = (64, 192, 384, 256, 256)
    hidden: int = 4096
    dropout: float = 0.5
    in_channels: int = 3
    num_classes: int = 1000

    def __post_init__(self):
        if len(self.widths) != 5:
            raise ValueError(f"widths={self.widths} has {len(self.widths)} widths for 5 convolutions; give each one")


class AlexNet(eqx.Module):
    """`layers` are numbered as upstream numbers them."""

    layers: tuple[nn.Conv2d | nn.ReLU | nn.MaxPool, ...]
    fc1: nn.Linear
    fc2: nn.Linear
    dropout: nn.Dropout
    head: nn.Linear | None
    config: AlexNetConfig = eqx.field(static=True)

    def __init__(self, config: AlexNetConfig, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 8)
        width1, width2, width3, width4, width5 = config.widths
        self.layers = (
            nn.Conv2d(config.in_channels, width1, 11, stride=4, padding=2, key=keys[0]),
            nn.ReLU(),
            nn.MaxPool(3, stride=2),
            nn.Conv2d(width1, width2, 5, padding=2, key=keys[1]),
            nn.ReLU(),
            nn.MaxPool(3, stride=2),
            nn.Conv2d(width2, width3, 3, padding=1, key=keys[2]),
            nn.ReLU(),
            nn.Conv2d(width3, width4, 3, padding=1, key=keys[3]),
            nn.ReLU(),
            nn.Conv2d(width4, width5, 3, padding=1, key=keys[4]),
            nn.ReLU(),
            nn.MaxPool(3, stride=2),
        )
        self.fc1 = nn.Linear(GRID**2 * width5, config.hidden, key=keys[5])
        self.fc2 = nn.Linear(config.hidden, config.hidden, key=keys[6])
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.hidden, config.num_classes, key=keys[7]) if config.num_classes else None
        self.config = config

    @typed
    def features(
        self, x: Float[Array, "height width {self.config.in_channels}"], *, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, "_ _ _"], ...]:
        """What each pool gets, at 1/4, 1/8 and 1/16 of the image's size, and what the last pool gives, at 1/32."""
        maps, y = [], x
        for layer in self.layers:
            if isinstance(layer, nn.MaxPool):
                maps.append(y)
            y = layer(y)
        return (*maps, y)

    def embedding(
        self, last_map: Float[Array, "height width channels"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, " hidden"]:
        """What the head gets. A map is flattened as torch does it: channel by channel."""
        key1, key2 = nn.split_key(key, 2)
        y = nn.adaptive_avg_pool(last_map, GRID).transpose(2, 0, 1).reshape(-1)
        y = jax.nn.relu(self.fc1(self.dropout(y, key=key1)))
        return jax.nn.relu(self.fc2(self.dropout(y, key=key2)))

    @typed
    def __call__(
        self, x: Float[Array, "height width {self.config.in_channels}"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, " out"]:
        embedding = self.embedding(self.features(x)[-1], key=key)
        return embedding if self.head is None else self.head(embedding)


VARIANTS = {
    "alexnet": AlexNetConfig(),
}

TORCHVISION = (
    Rule(r"features\.(\d+)\.(weight|bias)", "layers.{0}.{1}"),
    Rule(r"classifier\.1\.(weight|bias)", "fc1.{0}"),
    Rule(r"classifier\.4\.(weight|bias)", "fc2.{0}"),
    Rule(r"classifier\.6\.(weight|bias)", "head.{0}"),
)

SHARDING = (
    (r"layers\.\d+\.weight", P("model", "fsdp")),
    (r"(fc1|head)\.weight", P("model", "fsdp")),
    (r"fc1\.bias", P("model")),
    (r"fc2\.weight", P("fsdp", "model")),
)

FAMILY = Family(
    AlexNet,
    AlexNetConfig,
    VARIANTS,
    upstreams={
        "torchvision": Upstream(
            TORCHVISION, Options({"num_classes": "num_classes", "dropout": "dropout"}), names=("alexnet",)
        )
    },
    sharding=SHARDING,
    adapters={"num_classes": adapt.new_head, "in_channels": adapt.mix_channels},
)
