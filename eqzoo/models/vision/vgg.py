"""VGG (Simonyan and Zisserman, 2014, arXiv 1409.1556), with and without batch norm.

Upstream: torchvision `vgg.py` and timm `vgg.py`. They share weights, but differ on images above 255 pixels (`pool`), in
their dropout and in what a classifier starts from, so each name has two variants. Deviations: none.
"""

from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import check_choices, typed
from eqzoo.checkpoint import BATCH_NORM, Rule, adapt, flattened, prefixed
from eqzoo.models._family import Family, Options, Upstream
from eqzoo.models.vision.alexnet import SHARDING
from eqzoo.nn._init import kaiming_fan_out, normal

WINDOW = 7  # the side of the last map on images of 224 pixels, all of which the classifier sees


@dataclass(frozen=True, kw_only=True)
class VGGConfig:
    """`widths` are those of the convolutions, stage by stage. A last map that isn't 7x7 is averaged to that size first
    (`pool` "before", as in torchvision), or the classifier slides over it and its outputs are averaged ("after", timm).
    """

    widths: tuple[tuple[int, ...], ...]
    norm: bool = False
    hidden: int = 4096
    pool: Literal["before", "after"] = "before"
    dropout: float = 0.5
    in_channels: int = 3
    num_classes: int = 1000

    def __post_init__(self):
        check_choices(self)
        if not all(self.widths):
            raise ValueError(f"widths={self.widths} has a stage without convolution; give each at least one width")


class VGG(eqx.Module):
    """`layers` are numbered as upstream numbers them. Without batch norm the state is empty."""

    layers: tuple[nn.Conv2d | nn.BatchNorm | nn.ReLU | nn.MaxPool, ...]
    fc1: nn.Linear
    fc2: nn.Linear
    dropout: nn.Dropout
    head: nn.Linear | None
    config: VGGConfig = eqx.field(static=True)

    def __init__(self, config: VGGConfig, *, key: PRNGKeyArray):
        key_fc1, key_fc2, key_head, *keys = jax.random.split(key, 3 + sum(map(len, config.widths)))
        layers, channels = [], config.in_channels
        for widths in config.widths:
            for width in widths:
                layers.append(nn.Conv2d(channels, width, 3, padding=1, init=kaiming_fan_out, key=keys.pop(0)))
                layers += [nn.BatchNorm(width), nn.ReLU()] if config.norm else [nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool(2, stride=2))
        self.layers = tuple(layers)

        std1 = std2 = 0.01
        if config.pool == "after":  # timm's layers are convolutions
            std1, std2 = sqrt(2 / (WINDOW**2 * config.hidden)), sqrt(2 / config.hidden)
        self.fc1 = nn.Linear(WINDOW**2 * channels, config.hidden, init=partial(normal, std=std1), key=key_fc1)
        self.fc2 = nn.Linear(config.hidden, config.hidden, init=partial(normal, std=std2), key=key_fc2)
        self.dropout = nn.Dropout(config.dropout)
        head = partial(nn.Linear, config.hidden, config.num_classes, init=partial(normal, std=0.01), key=key_head)
        self.head = head() if config.num_classes else None
        self.config = config

    @typed
    def features(
        self,
        x: Float[Array, "height width {self.config.in_channels}"],
        state: eqx.nn.State,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[tuple[Float[Array, "_ _ _"], ...], eqx.nn.State]:
        """What each pool gets, at the image's size and halves of it, and what the last pool gives."""
        maps, y = [], x
        for layer in self.layers:
            if isinstance(layer, nn.MaxPool):
                maps.append(y)
            if isinstance(layer, nn.BatchNorm):
                y, state = layer(y, state)
            else:
                y = layer(y)
        return (*maps, y), state

    def embedding(
        self, last_map: Float[Array, "height width channels"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, " hidden"]:
        """What the head gets."""
        key1, key2 = nn.split_key(key, 2)
        height, width, _ = last_map.shape
        grid = (WINDOW, WINDOW) if self.config.pool == "before" else (max(WINDOW, height), max(WINDOW, width))
        y = last_map if grid == (height, width) else nn.adaptive_avg_pool(last_map, grid)
        y = self.dropout(jax.nn.relu(self.fc1(_windows(y))), key=key1)
        return self.dropout(nn.global_avg_pool(jax.nn.relu(self.fc2(y))), key=key2)

    @typed
    def __call__(
        self,
        x: Float[Array, "height width {self.config.in_channels}"],
        state: eqx.nn.State,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, " out"], eqx.nn.State]:
        maps, state = self.features(x, state)
        embedding = self.embedding(maps[-1], key=key)
        return embedding if self.head is None else self.head(embedding), state


def _windows(x: Float[Array, "height width channels"]) -> Float[Array, "rows columns channels_of_window"]:
    """All windows side by side, each flattened as torch does it: channel by channel."""
    rows, columns = (size - WINDOW + 1 for size in x.shape[:2])
    pixels = [x[i : i + rows, j : j + columns] for i in range(WINDOW) for j in range(WINDOW)]
    return jnp.stack(pixels, axis=-1).reshape(rows, columns, -1)


_TORCHVISION: dict[str, Any] = {"pool": "before", "dropout": 0.5}
_TIMM: dict[str, Any] = {"pool": "after", "dropout": 0.0}


def _vgg(name: str, *depths: int) -> dict[str, VGGConfig]:
    """Each library's variants with and without batch norm."""
    widths = tuple((width,) * depth for width, depth in zip((64, 128, 256, 512, 512), depths, strict=True))
    return {
        f"{library}/{name}{suffix}": VGGConfig(widths=widths, norm=bool(suffix), **options)
        for library, options in (("torchvision", _TORCHVISION), ("timm", _TIMM))
        for suffix in ("", "_bn")
    }


VARIANTS = {
    **_vgg("vgg11", 1, 1, 2, 2, 2),
    **_vgg("vgg13", 2, 2, 2, 2, 2),
    **_vgg("vgg16", 2, 2, 3, 3, 3),
    **_vgg("vgg19", 2, 2, 4, 4, 4),
}

_LAYERS = prefixed(r"features\.(\d+)\.", "layers.{0}.", BATCH_NORM)  # whose weight and bias are a convolution's too

TORCHVISION = (
    *_LAYERS,
    Rule(r"classifier\.0\.(weight|bias)", "fc1.{0}"),
    Rule(r"classifier\.3\.(weight|bias)", "fc2.{0}"),
    Rule(r"classifier\.6\.(weight|bias)", "head.{0}"),
)

TIMM = (
    *_LAYERS,
    Rule(r"pre_logits\.fc1\.weight", "fc1.weight", flattened(WINDOW)),
    Rule(r"pre_logits\.fc2\.weight", "fc2.weight", flattened(1)),
    Rule(r"pre_logits\.fc(\d)\.bias", "fc{0}.bias"),
    Rule(r"head\.fc\.(weight|bias)", "head.{0}"),
)

TIMM_OPTIONS = Options(
    {"num_classes": "num_classes", "in_chans": "in_channels", "drop_rate": "dropout"},
    fixed={"global_pool": "avg", "output_stride": 32, "mlp_ratio": 1.0},
)

FAMILY = Family(
    VGG,
    VGGConfig,
    VARIANTS,
    upstreams={
        "torchvision": Upstream(
            TORCHVISION, Options({"num_classes": "num_classes", "dropout": "dropout"}), names=("torchvision/*",)
        ),
        "timm": Upstream(TIMM, TIMM_OPTIONS, names=("timm/*",)),
    },
    sharding=SHARDING,
    adapters={"num_classes": adapt.new_head, "in_channels": adapt.mix_channels},
)
