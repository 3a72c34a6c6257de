"""Swin Transformer (Liu et al., 2021, arXiv 2103.14030), its searched variants S3 (2111.14725), and Swin Transformer V2
(Liu et al., 2022, 2111.09883).

Upstream: torchvision `swin_transformer.py`; timm `swin_transformer.py` and `swin_transformer_v2.py`; transformers'
`SwinForImageClassification`, `SwinModel`, `Swinv2ForImageClassification` and `Swinv2Model`. On images of another size
than `image_size`, windows and shifts stay those of `image_size` as with timm's `dynamic_img_size`. Deviations: pixels
beyond the last whole patch are left out, as in torchvision (transformers pads them); one `dropout` rate serves
attention and MLP as in torchvision and timm; the key biases that torchvision stores for V2, and sets to zero before
use, are no weights here; transformers subtracts 200 where the others subtract 100 from the scores of V2 across the edge
of a rolled map, and rolls neither side of a map one side of which is one window.
"""

from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import check_choices, typed
from eqzoo.checkpoint import adapt
from eqzoo.models._family import Family
from eqzoo.models.vision._swin_upstream import UPSTREAMS
from eqzoo.models.vision._swin_variants import ROWS
from eqzoo.nn._init import normal

_init = partial(normal, std=0.02)

Layer = tuple[Float[Array, ""], Int[Array, ""]]


@dataclass(frozen=True, kw_only=True)
class SwinConfig:
    """One depth, number of heads and window a stage. `cut_windows` cuts a window to the map that `image_size` gives,
    where that is no larger; otherwise maps are padded to whole windows. `pad_first` pads a map before it is rolled, not
    after. V2 measures offsets by the `pretrained_windows` (where one is 0 or none are given, by the windows)."""

    version: Literal[1, 2] = 1
    dim: int
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    windows: tuple[int, ...] = (7, 7, 7, 7)
    pretrained_windows: tuple[int, ...] = ()
    cut_windows: bool = True
    pad_first: bool = False
    patch_size: int = 4
    image_size: int = 224
    in_channels: int = 3
    mlp_ratio: float = 4.0
    qkv_bias: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: float = 0.1
    num_classes: int = 1000

    def __post_init__(self):
        check_choices(self)
        for name in ("heads", "windows", *(["pretrained_windows"] if self.pretrained_windows else [])):
            if len(getattr(self, name)) != len(self.depths):
                raise ValueError(
                    f"{name}={getattr(self, name)} and depths={self.depths} differ in length; give one of each a stage"
                )
        if self.pretrained_windows and self.version == 1:
            raise ValueError(
                f"pretrained_windows={self.pretrained_windows} measure offsets, of which version=1 has a table; "
                f"leave them out or use version=2"
            )
        if min(self.windows) < 1:
            raise ValueError(f"windows={self.windows} holds a window without tokens; each must be 1 or more")
        for dim, heads in zip(self.dims, self.heads, strict=True):
            if dim % heads:
                raise ValueError(
                    f"heads={self.heads} holds {heads}, but its stage has {dim} channels; choose a divisor of them"
                )
        if self.image_size < self.patch_size:
            raise ValueError(
                f"image_size={self.image_size} is below patch_size={self.patch_size}; make it at least one patch"
            )

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(self.dim * 2**stage for stage in range(len(self.depths)))

    @property
    def maps(self) -> tuple[int, ...]:
        """The side of each stage's map for an image of `image_size`."""
        return tuple(ceil(self.image_size // self.patch_size / 2**stage) for stage in range(len(self.depths)))


class PatchMerge(eqx.Module):
    """Halves a map and doubles its channels: four neighbours become one token. V2 normalises last."""

    norm: nn.LayerNorm
    reduction: nn.Linear
    norm_last: bool = eqx.field(static=True)

    def __init__(self, dim: int, *, norm_last: bool, key: PRNGKeyArray):
        self.norm = nn.LayerNorm(2 * dim if norm_last else 4 * dim)
        self.reduction = nn.Linear(4 * dim, 2 * dim, use_bias=False, init=_init, key=key)
        self.norm_last = norm_last

    def __call__(self, x: Float[Array, "height width dim"]) -> Float[Array, "half_height half_width twice_dim"]:
        x = jnp.pad(x, ((0, x.shape[0] % 2), (0, x.shape[1] % 2), (0, 0)))
        height, width, dim = x.shape
        x = x.reshape(height // 2, 2, width // 2, 2, dim).transpose(0, 2, 3, 1, 4)
        x = x.reshape(height // 2, width // 2, 4 * dim)
        return self.norm(self.reduction(x)) if self.norm_last else self.reduction(self.norm(x))


class Block(eqx.Module):
    """Attention inside windows, then a multi-layer perceptron, each beside a shortcut. V2 normalises what they add
    instead of what they get."""

    norm1: nn.LayerNorm
    attention: nn.WindowAttention | nn.CosineWindowAttention
    norm2: nn.LayerNorm
    mlp: nn.MLP
    drop_path: nn.DropPath
    norm_last: bool = eqx.field(static=True)
    window: int = eqx.field(static=True)
    map_size: int | None = eqx.field(static=True)
    pad_first: bool = eqx.field(static=True)

    def __init__(self, config: SwinConfig, stage: int, *, key: PRNGKeyArray):
        key_attention, key_mlp = jax.random.split(key)
        dim, heads, map_size = config.dims[stage], config.heads[stage], config.maps[stage]
        self.norm_last = config.version == 2
        self.map_size = map_size if config.cut_windows else None
        self.window = min(config.windows[stage], map_size) if config.cut_windows else config.windows[stage]
        self.pad_first = config.pad_first
        attention = nn.WindowAttention
        if config.version == 2:
            pretrained = config.pretrained_windows[stage] if config.pretrained_windows else self.window
            attention = partial(nn.CosineWindowAttention, pretrained_window=pretrained)
        self.attention = attention(
            dim,
            heads,
            self.window,
            qkv_bias=config.qkv_bias,
            weight_dropout=config.attention_dropout,
            out_dropout=config.dropout,
            init=_init,
            key=key_attention,
        )
        hidden = int(dim * config.mlp_ratio)
        self.mlp = nn.MLP(dim, hidden, activation=nn.gelu, dropout=config.dropout, init=_init, key=key_mlp)
        self.norm1, self.norm2 = (_silent_norm(dim) if self.norm_last else nn.LayerNorm(dim) for _ in range(2))
        self.drop_path = nn.DropPath(config.drop_path)

    def __call__(
        self, x: Float[Array, "height width dim"], layer: Layer, *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "height width dim"]:
        depth, rolled = layer
        key_attention, key_path1, key_mlp, key_path2 = nn.split_key(key, 4)
        if self.norm_last:
            attend = lambda x: self.norm1(self._attend(x, rolled, key_attention))
            process = lambda x: self.norm2(self.mlp(x, key=key_mlp))
        else:
            attend = lambda x: self._attend(self.norm1(x), rolled, key_attention)
            process = lambda x: self.mlp(self.norm2(x), key=key_mlp)
        x = x + self.drop_path(attend(x), depth, key=key_path1)
        return x + self.drop_path(process(x), depth, key=key_path2)

    def _attend(
        self, x: Float[Array, "height width dim"], rolled: Int[Array, ""], key: PRNGKeyArray | None
    ) -> Float[Array, "height width dim"]:
        """Attention in windows, half a window further in the layers that are `rolled` (1, not 0)."""
        height, width, _ = x.shape
        down, right = (0 if (self.map_size or n) <= self.window else self.window // 2 for n in (height, width))
        roll = lambda x, sign: jnp.roll(x, sign * rolled * np.array([down, right]), (0, 1)) if down or right else x
        pad = lambda x: jnp.pad(x, ((0, -height % self.window), (0, -width % self.window), (0, 0)))
        crop = lambda x: x[:height, :width]

        x = roll(pad(x), -1) if self.pad_first else pad(roll(x, -1))
        size = (x.shape[0], x.shape[1])
        regions = rolled * nn.shifted_regions(size, self.window, (down, right)) if down or right else None
        y = self.attention(nn.partition_windows(x, self.window), regions=regions, key=key)
        y = nn.merge_windows(y, self.window, size)
        return crop(roll(y, 1)) if self.pad_first else roll(crop(y), 1)


def _silent_norm(dim: int) -> nn.LayerNorm:
    """V2's blocks start as shortcuts."""
    return eqx.tree_at(lambda norm: norm.weight, nn.LayerNorm(dim), replace_fn=jnp.zeros_like)


class Stage(eqx.Module):
    merge: PatchMerge | None
    blocks: nn.Stack[Block]

    def __init__(self, config: SwinConfig, stage: int, *, key: PRNGKeyArray):
        key_merge, key_blocks = jax.random.split(key)
        norm_last = config.version == 2
        self.merge = PatchMerge(config.dims[stage - 1], norm_last=norm_last, key=key_merge) if stage else None
        self.blocks = nn.Stack(lambda key: Block(config, stage, key=key), config.depths[stage], key=key_blocks)

    def __call__(
        self,
        x: Float[Array, "height width dim"],
        depths: Float[Array, " depth"],
        *,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "out_height out_width out_dim"]:
        x = x if self.merge is None else self.merge(x)
        rolled = jnp.arange(self.blocks.depth, dtype=jnp.int32) % 2
        return self.blocks(x, each=(depths, rolled), key=key)


class Swin(eqx.Module):
    patch_embed: nn.Conv2d
    patch_norm: nn.LayerNorm
    stages: tuple[Stage, ...]
    norm: nn.LayerNorm
    head: nn.Linear | None
    config: SwinConfig = eqx.field(static=True)

    def __init__(self, config: SwinConfig, *, key: PRNGKeyArray):
        key_patch, key_head, *stage_keys = jax.random.split(key, 2 + len(config.depths))
        patch = config.patch_size
        self.patch_embed = nn.Conv2d(config.in_channels, config.dim, patch, stride=patch, key=key_patch)
        self.patch_norm = nn.LayerNorm(config.dim)
        self.stages = tuple(Stage(config, stage, key=key) for stage, key in enumerate(stage_keys))
        self.norm = nn.LayerNorm(config.dims[-1])
        self.head = (
            nn.Linear(config.dims[-1], config.num_classes, init=_init, key=key_head) if config.num_classes else None
        )
        self.config = config

    @typed
    def features(
        self, x: Float[Array, "height width {self.config.in_channels}"], *, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, "_ _ _"], ...]:
        """The feature map of each stage, at 1/4, 1/8, 1/16 and 1/32 of the image's size."""
        maps, y = [], self.patch_norm(self.patch_embed(x))
        keys = nn.split_key(key, len(self.stages))
        for stage, depths, key in zip(self.stages, nn.block_depths(self.config.depths), keys, strict=True):
            y = stage(y, depths, key=key)
            maps.append(y)
        return tuple(maps)

    @typed
    def __call__(
        self, x: Float[Array, "height width {self.config.in_channels}"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, " out"]:
        pooled = nn.global_avg_pool(self.norm(self.features(x, key=key)[-1]))
        return pooled if self.head is None else self.head(pooled)


VARIANTS = {name: SwinConfig(**fields) for name, fields in ROWS.items()}

SHARDING = (
    (r"stages.*\.(query|key|value|mlp\.fc1)\.weight", P("model", "fsdp")),
    (r"stages.*\.mlp\.fc1\.bias", P("model")),
    (r"stages.*\.(attention\.out|mlp\.fc2)\.weight", P("fsdp", "model")),
    (r"stages.*\.reduction\.weight", P("model", "fsdp")),
    (r"patch_embed\.weight", P(("model", "fsdp"))),
    (r"head\.weight", P("model", "fsdp")),
)


def _resample_tables(
    table: Float[np.ndarray, "depth old_offsets heads"], leaf: jax.ShapeDtypeStruct, old: SwinConfig, new: SwinConfig
) -> Float[np.ndarray, "depth offsets heads"]:
    return np.stack([adapt.resample_offsets(layer, leaf.shape[1]) for layer in table])


FAMILY = Family(
    Swin,
    SwinConfig,
    VARIANTS,
    UPSTREAMS,
    sharding=SHARDING,
    adapters={
        "num_classes": adapt.new_head,
        "in_channels": adapt.mix_channels,
        "image_size": _resample_tables,
    },
)
