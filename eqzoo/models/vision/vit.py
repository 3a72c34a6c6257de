"""Vision Transformer (Dosovitskiy et al., 2020, arXiv 2010.11929), and the models that share its mathematics: DeiT
(2012.12877), DeiT-3 (2204.07118), registers (2309.16588), and the image towers of CLIP, SigLIP (averaged) and DINOv2.

Upstream: torchvision `vision_transformer.py`, timm `vision_transformer.py` and `deit.py`. Deviations: a distilled model
always averages its two heads; one `dropout` rate serves the positions and both layers of each block.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import check_choices, typed
from eqzoo.checkpoint import SPLIT, Rule, Transform, prefixed
from eqzoo.models._family import Family
from eqzoo.nn._init import normal

_init = partial(normal, std=0.02)  # timm's `trunc_normal_` cuts at +-2, a hundred deviations away


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """`prefix_positions` gives the class, distillation and register tokens positions too. `fc_norm` normalises after
    pooling instead of before. `pre_norm` normalises the tokens before the first block. `layer_scale` is the value that
    layer scales start from, or None for a model without them."""

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
        positions = (config.image_size // config.patch_size) ** 2 + config.prefix_positions * config.prefix
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
        if self.config.prefix_positions:
            tokens = jnp.concatenate([*prefix, tokens]) + self.positions
        else:
            tokens = jnp.concatenate([*prefix, tokens + self.positions])
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

SHARDING = (
    (r"blocks.*\.(query|key|value|fc1)\.weight", P("model", "fsdp")),
    (r"blocks.*\.(query|key|value|fc1)\.bias", P("model")),
    (r"blocks.*\.(out|fc2)\.weight", P("fsdp", "model")),
    (r"patch_embed\.conv\.weight", P(("model", "fsdp"))),
    (r"(head|distillation_head)\.weight", P("model", "fsdp")),
)

FAMILY = Family(ViT, ViTConfig, VARIANTS, rules={"torchvision": TORCHVISION, "timm": TIMM}, sharding=SHARDING)
