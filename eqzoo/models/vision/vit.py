"""Vision Transformer (Dosovitskiy et al., 2020, arXiv 2010.11929), and the models that share its mathematics: DeiT
(2012.12877), DeiT-3 (2204.07118), registers (2309.16588), and the image towers of CLIP, SigLIP (averaged) and DINOv2.

Upstream: torchvision `vision_transformer.py`, timm `vision_transformer.py` and `deit.py`; transformers'
`ViTForImageClassification`, `DeiTForImageClassificationWithTeacher`, `Dinov2Model` and `Dinov2WithRegistersModel`.
Deviations: a distilled model always averages its two heads; one `dropout` rate serves the positions and both layers of
each block; positions are resampled to another image size with antialiasing, as in timm (transformers does so only for
DINOv2 with registers).
"""

from dataclasses import dataclass, replace
from functools import partial
from math import inf, nextafter
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import check_choices, typed
from eqzoo.checkpoint import SPLIT, Drop, Rule, Transform, adapt, prefixed
from eqzoo.models._family import Family, Option, Options, Upstream, count_labels
from eqzoo.nn._init import normal

_init = partial(normal, std=0.02)  # timm's `trunc_normal_` cuts at +-2, a hundred deviations away


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """`prefix_positions` gives the class, distillation and register tokens positions too, the last only with
    `register_positions`. `fc_norm` normalises after pooling instead of before. `pre_norm` normalises the tokens before
    the first block. `layer_scale` is the value that layer scales start from, or None for a model without them."""

    dim: int
    depth: int
    heads: int
    patch_size: int = 16
    image_size: int = 224
    in_channels: int = 3
    mlp_ratio: float = 4.0
    class_token: bool = True
    distilled: bool = False
    registers: int = 0
    prefix_positions: bool = True
    register_positions: bool = True
    pool: Literal["token", "avg"] = "token"
    fc_norm: bool = False
    pre_norm: bool = False
    qk_norm: bool = False
    layer_scale: float | None = None
    qkv_bias: bool = True
    activation: Literal["gelu", "gelu_tanh", "quick_gelu"] = "gelu"
    norm_eps: float = 1e-6
    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: float = 0.0
    num_classes: int = 1000

    def __post_init__(self):
        check_choices(self)
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size={self.image_size} is not a multiple of patch_size={self.patch_size}; "
                f"the nearest below is {self.image_size // self.patch_size * self.patch_size}"
            )
        if self.dim % self.heads:
            raise ValueError(f"dim={self.dim} is not a multiple of heads={self.heads}; choose a divisor of dim")
        if self.pool == "token" and not self.class_token:
            raise ValueError("pool='token' reads the class token, but class_token=False; use pool='avg'")
        if self.layer_scale == 0:
            raise ValueError(
                "layer_scale=0 would silence every block; start from a small number, or pass None for none"
            )
        others = (self.registers, self.pool, self.fc_norm, self.prefix_positions)
        if self.distilled and others != (0, "token", False, True):
            raise ValueError(
                f"distilled=True, but registers, pool, fc_norm and prefix_positions are {others}; "
                f"a distilled model has (0, 'token', False, True): leave them at their defaults"
            )

    @property
    def prefix(self) -> int:
        """How many tokens come before the image's."""
        return self.class_token + self.distilled + self.registers

    @property
    def positioned_prefix(self) -> int:
        """How many of these have positions."""
        return self.prefix_positions * (self.prefix - (not self.register_positions) * self.registers)


class Block(eqx.Module):
    """Attention, then a multi-layer perceptron, each normalised first and beside a shortcut."""

    norm1: nn.LayerNorm
    attention: nn.Attention
    scale1: nn.LayerScale | None
    norm2: nn.LayerNorm
    mlp: nn.MLP
    scale2: nn.LayerScale | None
    drop_path: nn.DropPath

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        hidden: int,
        qkv_bias: bool,
        qk_norm: bool,
        layer_scale: float | None,
        activation: str,
        norm_eps: float,
        dropout: float,
        attention_dropout: float,
        drop_path: float,
        key: PRNGKeyArray,
    ):
        key_attention, key_mlp = jax.random.split(key)
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attention = nn.Attention(
            dim,
            heads,
            qkv_bias=qkv_bias,
            qk_norm=nn.LayerNorm if qk_norm else None,
            qk_norm_eps=norm_eps,
            weight_dropout=attention_dropout,
            out_dropout=dropout,
            init=_init,
            key=key_attention,
        )
        self.scale1 = None if layer_scale is None else nn.LayerScale(dim, layer_scale)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = nn.MLP(dim, hidden, activation=nn.activation(activation), dropout=dropout, init=_init, key=key_mlp)
        self.scale2 = None if layer_scale is None else nn.LayerScale(dim, layer_scale)
        self.drop_path = nn.DropPath(drop_path)

    def __call__(
        self, x: Float[Array, "tokens dim"], depth: Float[Array, ""], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "tokens dim"]:
        key_attention, key_path1, key_mlp, key_path2 = nn.split_key(key, 4)
        y = self.attention(self.norm1(x), key=key_attention)
        y = y if self.scale1 is None else self.scale1(y)
        x = x + self.drop_path(y, depth, key=key_path1)
        y = self.mlp(self.norm2(x), key=key_mlp)
        y = y if self.scale2 is None else self.scale2(y)
        return x + self.drop_path(y, depth, key=key_path2)


class ViT(eqx.Module):
    patch_embed: nn.PatchEmbed
    class_token: Float[Array, "1 dim"] | None
    distillation_token: Float[Array, "1 dim"] | None
    registers: Float[Array, "registers dim"] | None
    positions: Float[Array, "positions dim"]
    dropout: nn.Dropout
    pre_norm: nn.LayerNorm | None
    blocks: nn.Stack[Block]
    norm: nn.LayerNorm | None
    fc_norm: nn.LayerNorm | None
    head: nn.Linear | None
    distillation_head: nn.Linear | None
    config: ViTConfig = eqx.field(static=True)

    def __init__(self, config: ViTConfig, *, key: PRNGKeyArray):
        dim = config.dim
        key_patch, key_class, key_dist, key_registers, key_positions, key_blocks, *key_heads = jax.random.split(key, 8)
        self.patch_embed = nn.PatchEmbed(
            config.in_channels, dim, config.patch_size, use_bias=not config.pre_norm, key=key_patch
        )
        self.class_token = normal(key_class, (1, dim), 1e-6) if config.class_token else None
        self.distillation_token = _init(key_dist, (1, dim)) if config.distilled else None
        self.registers = normal(key_registers, (config.registers, dim), 1e-6) if config.registers else None
        positions = (config.image_size // config.patch_size) ** 2 + config.positioned_prefix
        self.positions = _init(key_positions, (positions, dim))
        self.dropout = nn.Dropout(config.dropout)
        norm = partial(nn.LayerNorm, dim, eps=config.norm_eps)
        self.pre_norm = norm() if config.pre_norm else None
        self.blocks = nn.Stack(
            lambda key: Block(
                dim,
                config.heads,
                hidden=int(dim * config.mlp_ratio),
                qkv_bias=config.qkv_bias,
                qk_norm=config.qk_norm,
                layer_scale=config.layer_scale,
                activation=config.activation,
                norm_eps=config.norm_eps,
                dropout=config.dropout,
                attention_dropout=config.attention_dropout,
                drop_path=config.drop_path,
                key=key,
            ),
            config.depth,
            key=key_blocks,
        )
        self.norm = None if config.fc_norm else norm()
        self.fc_norm = norm() if config.fc_norm else None
        head = partial(nn.Linear, dim, config.num_classes, init=_init)
        self.head = head(key=key_heads[0]) if config.num_classes else None
        self.distillation_head = head(key=key_heads[1]) if config.num_classes and config.distilled else None
        self.config = config

    @typed
    def features(
        self,
        x: Float[Array, "{self.config.image_size} {self.config.image_size} {self.config.in_channels}"],
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "tokens dim"], ...]:
        """All tokens after the last block and the final norm: class, distillation and register tokens come first."""
        key_dropout, key_blocks = nn.split_key(key, 2)
        tokens = self.patch_embed(x)
        prefix = [each for each in (self.class_token, self.distillation_token, self.registers) if each is not None]
        positioned, bare = self.config.positioned_prefix, self.config.prefix - self.config.positioned_prefix
        none = jnp.zeros((bare, self.config.dim), self.positions.dtype)
        positions = jnp.concatenate([self.positions[:positioned], none, self.positions[positioned:]])
        tokens = jnp.concatenate([*prefix, tokens]) + positions
        tokens = self.dropout(tokens, key=key_dropout)
        tokens = tokens if self.pre_norm is None else self.pre_norm(tokens)
        tokens = self.blocks(tokens, each=jnp.linspace(0.0, 1.0, self.config.depth), key=key_blocks)
        return (tokens if self.norm is None else self.norm(tokens),)

    @typed
    def __call__(
        self,
        x: Float[Array, "{self.config.image_size} {self.config.image_size} {self.config.in_channels}"],
        *,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, " out"]:
        tokens = self.features(x, key=key)[-1]
        pooled = tokens[0] if self.config.pool == "token" else jnp.mean(tokens[self.config.prefix :], axis=0)
        pooled = pooled if self.fc_norm is None else self.fc_norm(pooled)
        y = pooled if self.head is None else self.head(pooled)
        if not self.config.distilled:
            return y
        return (y + (tokens[1] if self.distillation_head is None else self.distillation_head(tokens[1]))) / 2


def _vits(names: str, size: tuple[int, int, int], patch_size: int, **options: Any) -> dict[str, ViTConfig]:
    """One config for all `names`, but for the image size, which their last number is."""
    dim, depth, heads = size
    config = ViTConfig(dim=dim, depth=depth, heads=heads, patch_size=patch_size, **options)
    return {name: replace(config, image_size=int(name[-3:])) for name in names.split()}


_TINY, _SMALL, _MEDIUM, _BASE = (192, 12, 3), (384, 12, 6), (512, 12, 8), (768, 12, 12)
_LARGE, _HUGE, _MEDIUM_DEEP, _BETWIXT = (1024, 24, 16), (1280, 32, 16), (512, 20, 8), (640, 12, 10)

_DEIT3: dict[str, Any] = {"prefix_positions": False, "layer_scale": 1e-6}
_DINO: dict[str, Any] = {"image_size": 518, "layer_scale": 1e-5, "num_classes": 0}
_DINO_REG4: dict[str, Any] = {**_DINO, "registers": 4, "prefix_positions": False}
_CLIP: dict[str, Any] = {"pre_norm": True, "norm_eps": 1e-5}
_GAP: dict[str, Any] = {"class_token": False, "prefix_positions": False, "pool": "avg", "fc_norm": True}
_REG1: dict[str, Any] = {**_GAP, "registers": 1, "layer_scale": 1e-5}
_REG4: dict[str, Any] = {**_GAP, "registers": 4, "layer_scale": 1e-5}

VARIANTS = {
    # torchvision
    "vit_b_16": ViTConfig(dim=768, depth=12, heads=12),
    "vit_b_32": ViTConfig(dim=768, depth=12, heads=12, patch_size=32),
    "vit_l_16": ViTConfig(dim=1024, depth=24, heads=16),
    "vit_l_32": ViTConfig(dim=1024, depth=24, heads=16, patch_size=32),
    "vit_h_14": ViTConfig(dim=1280, depth=32, heads=16, patch_size=14),
    # timm
    **_vits("vit_tiny_patch16_224 vit_tiny_patch16_384 deit_tiny_patch16_224", _TINY, 16),
    **_vits("vit_small_patch8_224", _SMALL, 8, num_classes=0),
    **_vits("vit_small_patch16_224 vit_small_patch16_384 deit_small_patch16_224", _SMALL, 16),
    **_vits("vit_small_patch32_224 vit_small_patch32_384", _SMALL, 32),
    **_vits("vit_base_patch8_224", _BASE, 8),
    **_vits("vit_base_patch16_224 vit_base_patch16_384 deit_base_patch16_224 deit_base_patch16_384", _BASE, 16),
    **_vits("vit_base_patch32_224 vit_base_patch32_384", _BASE, 32),
    **_vits("vit_large_patch14_224", _LARGE, 14),
    **_vits("vit_large_patch16_224 vit_large_patch16_384", _LARGE, 16),
    **_vits("vit_large_patch32_224", _LARGE, 32, num_classes=0),
    **_vits("vit_large_patch32_384", _LARGE, 32),
    **_vits("vit_huge_patch14_224", _HUGE, 14, num_classes=0),
    **_vits("deit_tiny_distilled_patch16_224", _TINY, 16, distilled=True),
    **_vits("deit_small_distilled_patch16_224", _SMALL, 16, distilled=True),
    **_vits("deit_base_distilled_patch16_224 deit_base_distilled_patch16_384", _BASE, 16, distilled=True),
    **_vits("deit3_small_patch16_224 deit3_small_patch16_384", _SMALL, 16, **_DEIT3),
    **_vits("deit3_medium_patch16_224", _MEDIUM, 16, **_DEIT3),
    **_vits("deit3_base_patch16_224 deit3_base_patch16_384", _BASE, 16, **_DEIT3),
    **_vits("deit3_large_patch16_224 deit3_large_patch16_384", _LARGE, 16, **_DEIT3),
    **_vits("deit3_huge_patch14_224", _HUGE, 14, **_DEIT3),
    **_vits("vit_base_patch16_reg4_gap_256", _BASE, 16, registers=4, **_GAP),
    **_vits("vit_medium_patch16_reg1_gap_256", _MEDIUM, 16, **_REG1),
    **_vits("vit_medium_patch16_reg4_gap_256", _MEDIUM, 16, **_REG4),
    **_vits("vit_mediumd_patch16_reg4_gap_256 vit_mediumd_patch16_reg4_gap_384", _MEDIUM_DEEP, 16, **_REG4),
    **_vits("vit_betwixt_patch16_reg1_gap_256", _BETWIXT, 16, **_REG1),
    **_vits("vit_betwixt_patch16_reg4_gap_256 vit_betwixt_patch16_reg4_gap_384", _BETWIXT, 16, **_REG4),
    **_vits("vit_base_patch16_clip_224 vit_base_patch16_clip_384", _BASE, 16, **_CLIP),
    **_vits("vit_base_patch32_clip_224 vit_base_patch32_clip_384 vit_base_patch32_clip_448", _BASE, 32, **_CLIP),
    **_vits("vit_large_patch14_clip_224 vit_large_patch14_clip_336", _LARGE, 14, **_CLIP),
    **_vits("vit_huge_patch14_clip_224 vit_huge_patch14_clip_336", _HUGE, 14, **_CLIP),
    "vit_small_patch14_dinov2": ViTConfig(dim=384, depth=12, heads=6, patch_size=14, **_DINO),
    "vit_base_patch14_dinov2": ViTConfig(dim=768, depth=12, heads=12, patch_size=14, **_DINO),
    "vit_large_patch14_dinov2": ViTConfig(dim=1024, depth=24, heads=16, patch_size=14, **_DINO),
    "vit_small_patch14_reg4_dinov2": ViTConfig(dim=384, depth=12, heads=6, patch_size=14, **_DINO_REG4),
    "vit_base_patch14_reg4_dinov2": ViTConfig(dim=768, depth=12, heads=12, patch_size=14, **_DINO_REG4),
    "vit_large_patch14_reg4_dinov2": ViTConfig(dim=1024, depth=24, heads=16, patch_size=14, **_DINO_REG4),
}

# Upstream's tokens and positions have a batch axis of one.
UNBATCH = Transform(lambda tensor, shapes: [tensor.squeeze(0)], lambda parts: parts[0][None])

_QKV = ("attention.query.{0}", "attention.key.{0}", "attention.value.{0}")

_TORCHVISION_BLOCK = (
    Rule(r"ln_(\d)\.(weight|bias)", "norm{0}.{1}"),
    Rule(r"self_attention\.in_proj_(weight|bias)", _QKV, SPLIT),
    Rule(r"self_attention\.out_proj\.(weight|bias)", "attention.out.{0}"),
    Rule(r"mlp\.0\.(weight|bias)", "mlp.fc1.{0}"),
    Rule(r"mlp\.3\.(weight|bias)", "mlp.fc2.{0}"),
    Rule(r"mlp\.linear_(\d)\.(weight|bias)", "mlp.fc{0}.{1}"),  # an older naming
)

TORCHVISION = (
    Rule(r"conv_proj\.(weight|bias)", "patch_embed.conv.{0}"),
    Rule(r"class_token", "class_token", UNBATCH),
    Rule(r"encoder\.pos_embedding", "positions", UNBATCH),
    *prefixed(r"encoder\.layers\.encoder_layer_(\d+)\.", "blocks[{0}].", _TORCHVISION_BLOCK),
    Rule(r"encoder\.ln\.(weight|bias)", "norm.{0}"),
    Rule(r"heads\.head\.(weight|bias)", "head.{0}"),
)

_TIMM_BLOCK = (
    Rule(r"norm(\d)\.(weight|bias)", "norm{0}.{1}"),
    Rule(r"attn\.qkv\.(weight|bias)", _QKV, SPLIT),
    Rule(r"attn\.q_norm\.(weight|bias)", "attention.query_norm.{0}"),
    Rule(r"attn\.k_norm\.(weight|bias)", "attention.key_norm.{0}"),
    Rule(r"attn\.proj\.(weight|bias)", "attention.out.{0}"),
    Rule(r"ls(\d)\.gamma", "scale{0}.weight"),
    Rule(r"mlp\.fc(\d)\.(weight|bias)", "mlp.fc{0}.{1}"),
)

TIMM = (
    Rule(r"patch_embed\.proj\.(weight|bias)", "patch_embed.conv.{0}"),
    Rule(r"cls_token", "class_token", UNBATCH),
    Rule(r"dist_token", "distillation_token", UNBATCH),
    Rule(r"reg_token", "registers", UNBATCH),
    Rule(r"pos_embed", "positions", UNBATCH),
    Rule(r"norm_pre\.(weight|bias)", "pre_norm.{0}"),
    *prefixed(r"blocks\.(\d+)\.", "blocks[{0}].", _TIMM_BLOCK),
    Rule(r"(norm|fc_norm|head)\.(weight|bias)", "{0}.{1}"),
    Rule(r"head_dist\.(weight|bias)", "distillation_head.{0}"),
)

# What transformers writes, and what it has in memory since its version 5.
_TRANSFORMERS_ATTENTION = (
    Rule(r"attention\.attention\.(query|key|value)\.(weight|bias)", "attention.{0}.{1}"),
    Rule(r"attention\.output\.dense\.(weight|bias)", "attention.out.{0}"),
    Rule(r"attention\.q_proj\.(weight|bias)", "attention.query.{0}"),
    Rule(r"attention\.k_proj\.(weight|bias)", "attention.key.{0}"),
    Rule(r"attention\.v_proj\.(weight|bias)", "attention.value.{0}"),
    Rule(r"attention\.o_proj\.(weight|bias)", "attention.out.{0}"),
)

_TRANSFORMERS_BLOCK = (
    *_TRANSFORMERS_ATTENTION,
    Rule(r"layernorm_before\.(weight|bias)", "norm1.{0}"),
    Rule(r"layernorm_after\.(weight|bias)", "norm2.{0}"),
    Rule(r"intermediate\.dense\.(weight|bias)", "mlp.fc1.{0}"),
    Rule(r"output\.dense\.(weight|bias)", "mlp.fc2.{0}"),
    Rule(r"mlp\.fc(\d)\.(weight|bias)", "mlp.fc{0}.{1}"),
)

_DINOV2_BLOCK = (
    *_TRANSFORMERS_ATTENTION,
    Rule(r"norm(\d)\.(weight|bias)", "norm{0}.{1}"),
    Rule(r"layer_scale(\d)\.lambda1", "scale{0}.weight"),
    Rule(r"mlp\.fc(\d)\.(weight|bias)", "mlp.fc{0}.{1}"),
)

_TRANSFORMERS_ENDS = (
    Rule(r"embeddings\.patch_embeddings\.projection\.(weight|bias)", "patch_embed.conv.{0}"),
    Rule(r"embeddings\.cls_token", "class_token", UNBATCH),
    Rule(r"embeddings\.distillation_token", "distillation_token", UNBATCH),
    Rule(r"embeddings\.register_tokens", "registers", UNBATCH),
    Rule(r"embeddings\.position_embeddings", "positions", UNBATCH),
    Rule(r"layernorm\.(weight|bias)", "norm.{0}"),
)

_TRANSFORMERS = (
    *_TRANSFORMERS_ENDS,
    *prefixed(r"encoder\.layer\.(\d+)\.", "blocks[{0}].", _TRANSFORMERS_BLOCK),
    *prefixed(r"layers\.(\d+)\.", "blocks[{0}].", _TRANSFORMERS_BLOCK),
)

# The mask token stands for patches that pretraining hides. The pooler is one more layer on the class token that neither
# a classifier nor DINOv2 has.
_UNUSED = Drop(r"(\w+\.)?(embeddings\.mask_token|pooler\.dense\.(weight|bias))")

TRANSFORMERS_VIT = (
    *prefixed(r"vit\.", "", _TRANSFORMERS),
    Rule(r"classifier\.(weight|bias)", "head.{0}"),
    _UNUSED,
)
TRANSFORMERS_DEIT = (
    *prefixed(r"deit\.", "", _TRANSFORMERS),
    Rule(r"cls_classifier\.(weight|bias)", "head.{0}"),
    Rule(r"distillation_classifier\.(weight|bias)", "distillation_head.{0}"),
    _UNUSED,
)
TRANSFORMERS_BODY = (*_TRANSFORMERS, _UNUSED)
TRANSFORMERS_DINOV2 = (
    *_TRANSFORMERS_ENDS,
    *prefixed(r"encoder\.layer\.(\d+)\.", "blocks[{0}].", _DINOV2_BLOCK),
    _UNUSED,
)


def _square(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """Sizes that are stated as a pair as one number."""
    for name in names:
        if isinstance(size := options.get(name), list | tuple):
            if len(set(size)) != 1:
                raise ValueError(f"{name}={size} is not square; eqzoo's ViT takes square images")
            options = {**options, name: size[0]}
    return options


TORCHVISION_OPTIONS = Options({"num_classes": "num_classes", "image_size": "image_size"})


def _prepare_timm(options: dict[str, Any]) -> dict[str, Any]:
    """timm normalises after average pooling unless told otherwise."""
    options = _square(options, "img_size", "patch_size")
    return {"fc_norm": options["global_pool"] == "avg", **options} if "global_pool" in options else options


TIMM_OPTIONS = Options(
    {
        "embed_dim": "dim",
        "depth": "depth",
        "num_heads": "heads",
        "patch_size": "patch_size",
        "img_size": "image_size",
        "in_chans": "in_channels",
        "mlp_ratio": "mlp_ratio",
        "class_token": "class_token",
        "reg_tokens": "registers",
        "no_embed_class": Option("prefix_positions", {True: False, False: True}),
        "global_pool": Option("pool", {"token": "token", "avg": "avg"}),
        "fc_norm": "fc_norm",
        "pre_norm": "pre_norm",
        "qk_norm": "qk_norm",
        "init_values": "layer_scale",
        "qkv_bias": "qkv_bias",
        "act_layer": Option("activation", {name: name for name in ("gelu", "gelu_tanh", "quick_gelu")}),
        "num_classes": "num_classes",
        "attn_drop_rate": "attention_dropout",
        "drop_path_rate": "drop_path",
    },
    fixed={"pos_embed": "learn", "final_norm": True, "pool_include_prefix": False},
    ignored=(r"(pos_|patch_|proj_)?drop_rate", "weight_init", "fix_init", "dynamic_img_size", "strict_img_size"),
    prepare=_prepare_timm,
)

_TRANSFORMERS_TABLE = {
    "hidden_size": "dim",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "patch_size": "patch_size",
    "image_size": "image_size",
    "num_channels": "in_channels",
    "mlp_ratio": "mlp_ratio",
    "qkv_bias": "qkv_bias",
    "hidden_act": Option(
        "activation",
        {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"}
        | {"quick_gelu": "quick_gelu"},
    ),
    "layer_norm_eps": "norm_eps",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}

_FLOATS = ("mlp_ratio", "layerscale_value", "hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate")


def _plain_numbers(options: dict[str, Any]) -> dict[str, Any]:
    """One number for a square, and floats for what JSON may have as integers."""
    options = _square(options, "image_size", "patch_size")
    return {name: float(value) if name in _FLOATS else value for name, value in options.items()}


def _prepare_transformers(options: dict[str, Any], *, classifier: str, body: str) -> dict[str, Any]:
    """transformers states the width inside an MLP."""
    options = {"hidden_size": 768, "intermediate_size": 3072, "layer_norm_eps": 1e-12, **options}
    options = _plain_numbers(count_labels(options, classifier=classifier, body=body))
    dim, hidden = options["hidden_size"], options["intermediate_size"]
    ratio = hidden / dim
    return {**options, "mlp_ratio": ratio if int(dim * ratio) == hidden else nextafter(ratio, inf)}


def _restore_transformers(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "intermediate_size": int(options["hidden_size"] * options.pop("mlp_ratio"))}


def _transformers_options(classifier: str, body: str) -> Options:
    return Options(
        {**_TRANSFORMERS_TABLE, "num_labels": "num_classes"},
        lenient=True,
        prepare=partial(_prepare_transformers, classifier=classifier, body=body),
        restore=_restore_transformers,
    )


def _prepare_dinov2(options: dict[str, Any], *, patch_size: int) -> dict[str, Any]:
    return _plain_numbers({"image_size": 224, "patch_size": patch_size, "layerscale_value": 1.0, **options})


def _restore_dinov2(options: dict[str, Any]) -> dict[str, Any]:
    ratio, scale = options["mlp_ratio"], options["layerscale_value"]
    if ratio % 1:
        raise ValueError(f"transformers' DINOv2 takes a whole number as mlp_ratio, not {ratio}; use `eqzoo.save`")
    if scale is None:
        raise ValueError("transformers' DINOv2 always has layer scales, but layer_scale=None; use `eqzoo.save`")
    return {**options, "mlp_ratio": int(ratio), "layerscale_value": float(scale), "use_mask_token": False}


# A classifier on DINOv2 sees the mean of the patches too, and its giant has gated MLPs; eqzoo's ViT has neither.
DINOV2_OPTIONS = Options(
    {**_TRANSFORMERS_TABLE, "layerscale_value": "layer_scale", "drop_path_rate": "drop_path"},
    fixed={"architectures": ["Dinov2Model"], "use_swiglu_ffn": False},
    lenient=True,
    prepare=partial(_prepare_dinov2, patch_size=14),
    restore=_restore_dinov2,
)
DINOV2_WITH_REGISTERS_OPTIONS = replace(
    DINOV2_OPTIONS,
    table={**DINOV2_OPTIONS.table, "num_register_tokens": "registers"},
    fixed={"architectures": ["Dinov2WithRegistersModel"], "use_swiglu_ffn": False},
    implied={"prefix_positions": True, "register_positions": False},
    prepare=partial(_prepare_dinov2, patch_size=16),
)

SHARDING = (
    (r"blocks.*\.(query|key|value|fc1)\.weight", P("model", "fsdp")),
    (r"blocks.*\.(query|key|value|fc1)\.bias", P("model")),
    (r"blocks.*\.(out|fc2)\.weight", P("fsdp", "model")),
    (r"patch_embed\.conv\.weight", P(("model", "fsdp"))),
    (r"(head|distillation_head)\.weight", P("model", "fsdp")),
)


def _resample_positions(
    weight: Float[np.ndarray, "old dim"], leaf: jax.ShapeDtypeStruct, old: ViTConfig, new: ViTConfig
) -> Float[np.ndarray, "new dim"]:
    prefix = old.positioned_prefix
    return np.concatenate([weight[:prefix], adapt.resample_grid(weight[prefix:], leaf.shape[0] - prefix)])


FAMILY = Family(
    ViT,
    ViTConfig,
    VARIANTS,
    upstreams={
        "torchvision": Upstream(TORCHVISION, TORCHVISION_OPTIONS, names=("vit_?_*",)),
        "timm": Upstream(TIMM, TIMM_OPTIONS, names=("vit_*_patch*", "deit*")),
        "transformers_vit": Upstream(
            TRANSFORMERS_VIT,
            _transformers_options("ViTForImageClassification", "ViTModel"),
            names=("vit_*_patch*_224", "vit_*_patch*_384", "deit_*_patch*"),
            model_type="vit",
            architecture="ViTForImageClassification",
            base="vit_base_patch16_224",
        ),
        "transformers_deit": Upstream(
            TRANSFORMERS_DEIT,
            _transformers_options("DeiTForImageClassificationWithTeacher", "DeiTModel"),
            names=("deit_*_distilled_patch*",),
            model_type="deit",
            architecture="DeiTForImageClassificationWithTeacher",
            base="deit_base_distilled_patch16_224",
        ),
        "transformers_body": Upstream(TRANSFORMERS_BODY),
        "transformers_dinov2": Upstream(
            TRANSFORMERS_DINOV2,
            DINOV2_OPTIONS,
            names=("vit_*_patch14_dinov2",),
            model_type="dinov2",
            architecture="Dinov2Model",
            base="vit_base_patch14_dinov2",
        ),
        "transformers_dinov2_with_registers": Upstream(
            TRANSFORMERS_DINOV2,
            DINOV2_WITH_REGISTERS_OPTIONS,
            names=("vit_*_patch14_reg4_dinov2",),
            model_type="dinov2_with_registers",
            architecture="Dinov2WithRegistersModel",
            base="vit_base_patch14_reg4_dinov2",
            zeros={"embeddings.mask_token": lambda config: (1, config.dim)},
        ),
    },
    sharding=SHARDING,
    adapters={
        "num_classes": adapt.new_head,
        "in_channels": adapt.mix_channels,
        "image_size": _resample_positions,
    },
)
