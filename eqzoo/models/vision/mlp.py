"""Multi-layer perceptron on the flattened image.

Upstream: torchvision's `ops.MLP`. Deviations: no dropout after the last layer.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import equinox as eqx
import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import check_choices, typed
from eqzoo.checkpoint import adapt
from eqzoo.models._family import Family


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    hidden: tuple[int, ...]
    image_size: int = 28
    in_channels: int = 1
    norm: bool = False
    activation: Literal["relu", "gelu", "gelu_tanh", "silu", "tanh"] = "relu"
    dropout: float = 0.0
    num_classes: int = 10

    def __post_init__(self):
        check_choices(self)
        if not self.hidden:
            raise ValueError("hidden=() leaves no layer before the head; pass at least one width, e.g. hidden=(512,)")


class Layer(eqx.Module):
    """Linear, normalised if asked for, activated, thinned out."""

    linear: nn.Linear
    norm: nn.LayerNorm | None
    dropout: nn.Dropout
    activation: str = eqx.field(static=True)

    def __init__(
        self, in_features: int, out_features: int, *, norm: bool, activation: str, dropout: float, key: PRNGKeyArray
    ):
        self.linear = nn.Linear(in_features, out_features, key=key)
        self.norm = nn.LayerNorm(out_features) if norm else None
        self.dropout = nn.Dropout(dropout)
        self.activation = activation

    def __call__(self, x: Float[Array, " in"], *, key: PRNGKeyArray | None = None) -> Float[Array, " out"]:
        x = self.linear(x)
        x = x if self.norm is None else self.norm(x)
        return self.dropout(nn.activation(self.activation)(x), key=key)


class MLP(eqx.Module):
    layers: tuple[Layer, ...]
    head: nn.Linear | None
    config: MLPConfig = eqx.field(static=True)

    def __init__(self, config: MLPConfig, *, key: PRNGKeyArray):
        *layer_keys, head_key = jax.random.split(key, len(config.hidden) + 1)
        widths = pairwise((config.image_size**2 * config.in_channels, *config.hidden))
        self.layers = tuple(
            Layer(before, after, norm=config.norm, activation=config.activation, dropout=config.dropout, key=layer_key)
            for (before, after), layer_key in zip(widths, layer_keys, strict=True)
        )
        self.head = nn.Linear(config.hidden[-1], config.num_classes, key=head_key) if config.num_classes else None
        self.config = config

    @typed
    def features(
        self,
        x: Float[Array, "{self.config.image_size} {self.config.image_size} {self.config.in_channels}"],
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, " dim"], ...]:
        """The output of each hidden layer."""
        outputs = []
        y = x.reshape(-1)
        for layer, layer_key in zip(self.layers, nn.split_key(key, len(self.layers)), strict=True):
            y = layer(y, key=layer_key)
            outputs.append(y)
        return tuple(outputs)

    @typed
    def __call__(
        self,
        x: Float[Array, "{self.config.image_size} {self.config.image_size} {self.config.in_channels}"],
        *,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, " out"]:
        hidden = self.features(x, key=key)[-1]
        return hidden if self.head is None else self.head(hidden)


VARIANTS = {
    "mlp": MLPConfig(hidden=(512, 512)),
}

SHARDING = (
    (r"layers\.\d+\.linear\.weight", P("model", "fsdp")),
    (r"layers\.\d+\.linear\.bias", P("model")),
    (r"head\.weight", P("model", "fsdp")),
)

FAMILY = Family(MLP, MLPConfig, VARIANTS, upstreams={}, sharding=SHARDING, adapters={"num_classes": adapt.new_head})
