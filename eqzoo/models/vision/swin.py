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
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from eqzoo import nn
from eqzoo._types import check_choices, typed
from eqzoo.checkpoint import SPLIT, Drop, Rule, Transform, adapt, prefixed
from eqzoo.models._family import Family, Options, Upstream, count_labels
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


def _swin(dim: int, middle_depth: int, **options: Any) -> SwinConfig:
    """Heads of 32 channels, and depth in the third stage."""
    heads = tuple(dim // 32 * 2**stage for stage in range(4))
    return SwinConfig(dim=dim, depths=(2, 2, middle_depth, 2), heads=heads, **options)


def _v2(dim: int, middle_depth: int, window: int, image_size: int, **options: Any) -> SwinConfig:
    return _swin(dim, middle_depth, version=2, windows=(window,) * 4, image_size=image_size, **options)


_384: dict[str, Any] = {"windows": (12, 12, 12, 12), "image_size": 384}
_FROM_12: dict[str, Any] = {"pretrained_windows": (12, 12, 12, 6)}
_TORCHVISION: dict[str, Any] = {"cut_windows": False, "pad_first": True}

VARIANTS = {
    # torchvision
    "swin_t": _swin(96, 6, drop_path=0.2, **_TORCHVISION),
    "swin_s": _swin(96, 18, drop_path=0.3, **_TORCHVISION),
    "swin_b": _swin(128, 18, drop_path=0.5, **_TORCHVISION),
    "swin_v2_t": _v2(96, 6, 8, 256, drop_path=0.2, **_TORCHVISION),
    "swin_v2_s": _v2(96, 18, 8, 256, drop_path=0.3, **_TORCHVISION),
    "swin_v2_b": _v2(128, 18, 8, 256, drop_path=0.5, **_TORCHVISION),
    # timm
    "swin_tiny_patch4_window7_224": _swin(96, 6),
    "swin_small_patch4_window7_224": _swin(96, 18),
    "swin_base_patch4_window7_224": _swin(128, 18),
    "swin_base_patch4_window12_384": _swin(128, 18, **_384),
    "swin_large_patch4_window7_224": _swin(192, 18),
    "swin_large_patch4_window12_384": _swin(192, 18, **_384),
    "swin_s3_tiny_224": _swin(96, 6, windows=(7, 7, 14, 7)),
    "swin_s3_small_224": _swin(96, 18, windows=(14, 14, 14, 7)),
    "swin_s3_base_224": _swin(96, 30, windows=(7, 7, 14, 7)),
    "swinv2_tiny_window8_256": _v2(96, 6, 8, 256),
    "swinv2_tiny_window16_256": _v2(96, 6, 16, 256),
    "swinv2_small_window8_256": _v2(96, 18, 8, 256),
    "swinv2_small_window16_256": _v2(96, 18, 16, 256),
    "swinv2_base_window8_256": _v2(128, 18, 8, 256),
    "swinv2_base_window16_256": _v2(128, 18, 16, 256),
    "swinv2_base_window12_192": _v2(128, 18, 12, 192, num_classes=21841),
    "swinv2_base_window12to16_192to256": _v2(128, 18, 16, 256, **_FROM_12),
    "swinv2_base_window12to24_192to384": _v2(128, 18, 24, 384, **_FROM_12),
    "swinv2_large_window12_192": _v2(192, 18, 12, 192, num_classes=21841),
    "swinv2_large_window12to16_192to256": _v2(192, 18, 16, 256, **_FROM_12),
    "swinv2_large_window12to24_192to384": _v2(192, 18, 24, 384, **_FROM_12),
}

# torchvision and timm store a head's scale with two more axes.
_PER_HEAD = Transform(lambda tensor, shapes: [tensor[:, 0, 0]], lambda parts: parts[0][:, None, None])

# Of the biases of query, key and value, V2 takes the first and the last.
_WITHOUT_KEY = Transform(
    lambda tensor, shapes: [np.split(tensor, 3)[0], np.split(tensor, 3)[2]],
    lambda parts: np.concatenate([parts[0], np.zeros_like(parts[0]), parts[1]]),
)

_QKV = ("attention.query.{0}", "attention.key.{0}", "attention.value.{0}")

_BLOCK = (
    Rule(r"norm(\d)\.(weight|bias)", "norm{0}.{1}"),
    Rule(r"attn\.qkv\.(weight|bias)", _QKV, SPLIT),
    Rule(r"attn\.proj\.(weight|bias)", "attention.out.{0}"),
    Rule(r"attn\.relative_position_bias_table", "attention.bias.table"),
    Rule(r"attn\.logit_scale", "attention.log_scale", _PER_HEAD),
    Rule(r"attn\.cpb_mlp\.0\.(weight|bias)", "attention.bias.fc1.{0}"),
    Rule(r"attn\.cpb_mlp\.2\.weight", "attention.bias.fc2.weight"),
)

_TORCHVISION_BLOCK = (
    *_BLOCK,
    Rule(r"attn\.qkv\.bias", ("attention.query_bias", "attention.value_bias"), _WITHOUT_KEY),
    Rule(r"mlp\.0\.(weight|bias)", "mlp.fc1.{0}"),
    Rule(r"mlp\.3\.(weight|bias)", "mlp.fc2.{0}"),
)

_TIMM_BLOCK = (
    *_BLOCK,
    Rule(r"attn\.q_bias", "attention.query_bias"),
    Rule(r"attn\.v_bias", "attention.value_bias"),
    Rule(r"mlp\.fc(\d)\.(weight|bias)", "mlp.fc{0}.{1}"),
)

# Blocks and mergers take turns in one list.
TORCHVISION = (
    Rule(r"features\.0\.0\.(weight|bias)", "patch_embed.{0}"),
    Rule(r"features\.0\.2\.(weight|bias)", "patch_norm.{0}"),
    *(
        rule
        for stage in range(4)
        for rule in (
            Rule(rf"features\.{2 * stage}\.(norm|reduction)\.(weight|bias)", f"stages.{stage}.merge.{{0}}.{{1}}"),
            *prefixed(rf"features\.{2 * stage + 1}\.(\d+)\.", f"stages.{stage}.blocks[{{0}}].", _TORCHVISION_BLOCK),
        )
    ),
    Rule(r"(norm|head)\.(weight|bias)", "{0}.{1}"),
    Drop(r"features\.\d\.\d+\.attn\.relative_(position_index|coords_table)"),
)

_TIMM = (
    Rule(r"patch_embed\.proj\.(weight|bias)", "patch_embed.{0}"),
    Rule(r"patch_embed\.norm\.(weight|bias)", "patch_norm.{0}"),
    *prefixed(r"layers\.(\d)\.blocks\.(\d+)\.", "stages.{0}.blocks[{1}].", _TIMM_BLOCK),
    Rule(r"norm\.(weight|bias)", "norm.{0}"),
)

TIMM = (
    *_TIMM,
    Rule(r"layers\.(\d)\.downsample\.(norm|reduction)\.(weight|bias)", "stages.{0}.merge.{1}.{2}"),
    Rule(r"head\.fc\.(weight|bias)", "head.{0}"),
)

# The authors' own files: a merger belongs to the stage before it.
MICROSOFT = (
    *_TIMM,
    Rule(r"layers\.(\d)\.downsample\.(norm|reduction)\.(weight|bias)", "stages.{0+1}.merge.{1}.{2}"),
    Rule(r"head\.(weight|bias)", "head.{0}"),
    Drop(r"layers\.\d\.blocks\.\d+\.(attn_mask|attn\.relative_(position_index|coords_table))"),
)

_TRANSFORMERS_BLOCK = (
    Rule(r"layernorm_before\.(weight|bias)", "norm1.{0}"),
    Rule(r"layernorm_after\.(weight|bias)", "norm2.{0}"),
    Rule(r"attention\.output\.dense\.(weight|bias)", "attention.out.{0}"),
    Rule(r"intermediate\.dense\.(weight|bias)", "mlp.fc1.{0}"),
    Rule(r"output\.dense\.(weight|bias)", "mlp.fc2.{0}"),
)

# What transformers writes, and what it has in memory since its version 5.
_TRANSFORMERS_V1_BLOCK = (
    *_TRANSFORMERS_BLOCK,
    Rule(r"attention\.self\.(query|key|value)\.(weight|bias)", "attention.{0}.{1}"),
    Rule(r"attention\.self\.relative_position_bias_table", "attention.bias.table"),
    Rule(r"attention\.q_proj\.(weight|bias)", "attention.query.{0}"),
    Rule(r"attention\.k_proj\.(weight|bias)", "attention.key.{0}"),
    Rule(r"attention\.v_proj\.(weight|bias)", "attention.value.{0}"),
    Rule(r"attention\.o_proj\.(weight|bias)", "attention.out.{0}"),
    Rule(r"attention\.relative_position_bias\.relative_position_bias_table", "attention.bias.table"),
    Rule(r"mlp\.fc(\d)\.(weight|bias)", "mlp.fc{0}.{1}"),
)

_TRANSFORMERS_V2_BLOCK = (
    *_TRANSFORMERS_BLOCK,
    Rule(r"attention\.self\.(query|key|value)\.weight", "attention.{0}.weight"),
    Rule(r"attention\.self\.(query|value)\.bias", "attention.{0}_bias"),
    Rule(r"attention\.self\.logit_scale", "attention.log_scale", _PER_HEAD),
    Rule(r"attention\.self\.continuous_position_bias_mlp\.0\.(weight|bias)", "attention.bias.fc1.{0}"),
    Rule(r"attention\.self\.continuous_position_bias_mlp\.2\.weight", "attention.bias.fc2.weight"),
)


def _transformers_body(block: tuple[Rule, ...]) -> tuple[Rule, ...]:
    return (
        Rule(r"embeddings\.patch_embeddings\.projection\.(weight|bias)", "patch_embed.{0}"),
        Rule(r"embeddings\.norm\.(weight|bias)", "patch_norm.{0}"),
        *prefixed(r"encoder\.layers\.(\d)\.blocks\.(\d+)\.", "stages.{0}.blocks[{1}].", block),
        Rule(r"encoder\.layers\.(\d)\.downsample\.(norm|reduction)\.(weight|bias)", "stages.{0+1}.merge.{1}.{2}"),
        Rule(r"layernorm\.(weight|bias)", "norm.{0}"),
    )


_TRANSFORMERS_V1_BODY = _transformers_body(_TRANSFORMERS_V1_BLOCK)
_TRANSFORMERS_V2_BODY = _transformers_body(_TRANSFORMERS_V2_BLOCK)
_CLASSIFIER = Rule(r"classifier\.(weight|bias)", "head.{0}")
_OLD_BUFFERS = Drop(
    r"(\w+\.)?encoder\.layers\.\d\.blocks\.\d+\.attention\.self\.relative_(position_index|coords_table)"
)

TRANSFORMERS_V1 = (*prefixed(r"swin\.", "", _TRANSFORMERS_V1_BODY), _CLASSIFIER, _OLD_BUFFERS)
TRANSFORMERS_V1_BODY = (*_TRANSFORMERS_V1_BODY, _OLD_BUFFERS)
TRANSFORMERS_V2 = (*prefixed(r"swinv2\.", "", _TRANSFORMERS_V2_BODY), _CLASSIFIER, _OLD_BUFFERS)
TRANSFORMERS_V2_BODY = (*_TRANSFORMERS_V2_BODY, _OLD_BUFFERS)


def _torchvision_buffers(config: SwinConfig) -> dict[str, Shaped[np.ndarray, "..."]]:
    """What each attention stores besides its weights: indices, and in V2 offsets."""
    buffers = {}
    for stage, (depth, window) in enumerate(zip(config.depths, config.windows, strict=True)):
        for layer in range(depth):
            attention = f"features.{2 * stage + 1}.{layer}.attn"
            buffers[f"{attention}.relative_position_index"] = nn.relative_index(window).reshape(-1)
            if config.version == 2:
                side = 2 * window - 1
                offsets = nn.log_offsets(window).reshape(1, side, side, 2)
                buffers[f"{attention}.relative_coords_table"] = offsets
    return buffers


def _one_number(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """Sizes that are stated as a pair as one number."""
    for name in names:
        if isinstance(size := options.get(name), list | tuple):
            if len(set(size)) != 1:
                raise ValueError(f"{name}={size} is not square; eqzoo's Swin has one number for both sides")
            options = {**options, name: size[0]}
    return options


def _prepare_timm(options: dict[str, Any]) -> dict[str, Any]:
    """timm has one window, a number or a pair, for all stages or for each."""
    options = _one_number(_none_for_zeros(options), "img_size", "patch_size")
    if "window_size" not in options:
        return options
    windows = options["window_size"]
    if not isinstance(windows, list | tuple) or (len(windows) == 2 and isinstance(windows[0], int)):
        windows = [windows] * len(options.get("depths", range(4)))
    squares = [_one_number({"window_size": window}, "window_size") for window in windows]
    return {**options, "window_size": [square["window_size"] for square in squares]}


def _none_for_zeros(options: dict[str, Any]) -> dict[str, Any]:
    """A pretrained window of zero is none."""
    if any(options.get("pretrained_window_sizes", ())):
        return options
    return {**options, "pretrained_window_sizes": []} if "pretrained_window_sizes" in options else options


def _zeros_for_none(options: dict[str, Any]) -> dict[str, Any]:
    if options.get("pretrained_window_sizes") == ():
        return {**options, "pretrained_window_sizes": (0,) * len(options["depths"])}
    return options


TIMM_OPTIONS = Options(
    {
        "embed_dim": "dim",
        "depths": "depths",
        "num_heads": "heads",
        "window_size": "windows",
        "pretrained_window_sizes": "pretrained_windows",
        "patch_size": "patch_size",
        "img_size": "image_size",
        "in_chans": "in_channels",
        "mlp_ratio": "mlp_ratio",
        "qkv_bias": "qkv_bias",
        "proj_drop_rate": "dropout",
        "attn_drop_rate": "attention_dropout",
        "drop_path_rate": "drop_path",
        "num_classes": "num_classes",
    },
    fixed={"global_pool": "avg", "head_dim": None, "always_partition": False, "act_layer": "gelu"},
    ignored=("drop_rate", "weight_init", "(strict|dynamic)_img_size"),
    prepare=_prepare_timm,
    restore=_zeros_for_none,
)

_TRANSFORMERS_TABLE = {
    "embed_dim": "dim",
    "depths": "depths",
    "num_heads": "heads",
    "window_size": "windows",
    "patch_size": "patch_size",
    "image_size": "image_size",
    "num_channels": "in_channels",
    "mlp_ratio": "mlp_ratio",
    "qkv_bias": "qkv_bias",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "drop_path_rate": "drop_path",
    "num_labels": "num_classes",
    "cut_windows": "cut_windows",
    "pad_first": "pad_first",
}

_FLOATS = ("mlp_ratio", "hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate")


def _prepare_transformers(options: dict[str, Any], *, classifier: str, body: str, cut: bool) -> dict[str, Any]:
    """transformers has one window for all stages, and one way to treat windows that don't fit."""
    options = {"window_size": 7, "image_size": 224, "patch_size": 4, "depths": [2, 2, 6, 2], **options}
    options = count_labels(_none_for_zeros(options), classifier=classifier, body=body)
    options = _one_number(options, "image_size", "patch_size")
    options = {name: float(value) if name in _FLOATS else value for name, value in options.items()}
    size, stages = options["image_size"], len(options["depths"])
    if cut and size // options["patch_size"] % 2 ** (stages - 1):
        raise ValueError(f"image_size={size} is not supported; eqzoo has those whose maps halve {stages - 1} times")
    return {**options, "window_size": [options["window_size"]] * stages, "cut_windows": cut, "pad_first": True}


def _restore_transformers(options: dict[str, Any], *, cut: bool) -> dict[str, Any]:
    """What upstream has no words for must make no difference to images of the model's size."""
    windows, size = options["window_size"], options["image_size"]
    if len(set(windows)) != 1:
        raise ValueError(f"transformers has one window for all stages, not windows={windows}; use `eqzoo.save`")
    maps = [ceil(size // options["patch_size"] / 2**stage) for stage in range(len(windows))]
    as_cut = options.pop("cut_windows") == cut or min(maps) >= windows[0]
    as_padded = options.pop("pad_first") or all(side % min(windows[0], side) == 0 for side in maps)
    if not (as_cut and as_padded):
        raise ValueError(
            f"transformers treats maps that windows of {windows[0]} don't divide in another way, and image_size={size} "
            f"gives maps of {maps}; use `eqzoo.save`"
        )
    return {**_zeros_for_none(options), "window_size": windows[0]}


def _transformers_options(version: int, name: str) -> Options:
    cut = version == 2
    table = {**_TRANSFORMERS_TABLE, "pretrained_window_sizes": "pretrained_windows"}
    return Options(
        table if version == 2 else _TRANSFORMERS_TABLE,
        fixed={"hidden_act": "gelu", "use_absolute_embeddings": False, "layer_norm_eps": 1e-5},
        lenient=True,
        prepare=partial(
            _prepare_transformers, classifier=f"{name}ForImageClassification", body=f"{name}Model", cut=cut
        ),
        restore=partial(_restore_transformers, cut=cut),
    )


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
    upstreams={
        "torchvision": Upstream(
            TORCHVISION,
            Options({"num_classes": "num_classes", "image_size": "image_size"}),
            names=("swin_[tsb]", "swin_v2_?"),
            buffers=_torchvision_buffers,
        ),
        "timm": Upstream(TIMM, TIMM_OPTIONS, names=("swin_*_patch4_*", "swin_s3_*", "swinv2_*")),
        "microsoft": Upstream(MICROSOFT),
        "transformers_v1": Upstream(
            TRANSFORMERS_V1,
            _transformers_options(1, "Swin"),
            names=("swin_*_patch4_*",),
            model_type="swin",
            architecture="SwinForImageClassification",
            base="swin_tiny_patch4_window7_224",
        ),
        "transformers_v1_body": Upstream(TRANSFORMERS_V1_BODY),
        "transformers_v2": Upstream(
            TRANSFORMERS_V2,
            _transformers_options(2, "Swinv2"),
            names=("swinv2_*",),
            model_type="swinv2",
            architecture="Swinv2ForImageClassification",
            base="swinv2_tiny_window8_256",
        ),
        "transformers_v2_body": Upstream(TRANSFORMERS_V2_BODY),
    },
    sharding=SHARDING,
    adapters={
        "num_classes": adapt.new_head,
        "in_channels": adapt.mix_channels,
        "image_size": _resample_tables,
    },
)
