"""Vision Transformer (Dosovitskiy et al., 2020, arXiv 2010.11929), and the models that share its mathematics: DeiT
(2012.12877), DeiT-3 (2204.07118), registers (2309.16588), and image towers such as those of CLIP, SigLIP (2303.15343),
DINOv2, BEiT-3, AIMv2 (2411.14402) and RADIO.

Upstream: torchvision `vision_transformer.py`, timm `vision_transformer.py` and `deit.py`; transformers'
`ViTForImageClassification`, `DeiTForImageClassificationWithTeacher`, `Dinov2Model`, `Dinov2WithRegistersModel` and
`SiglipVisionModel`. Deviations: a distilled model always averages its two heads; one `dropout` rate serves the
positions and both layers of each block; positions are resampled to another image size with antialiasing, as in timm
(transformers does so only for DINOv2 with registers).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import check_choices, typed
from eqzoo.checkpoint import adapt
from eqzoo.models._family import Family
from eqzoo.models.vision._vit_blocks import (
    Branch,
    DifferentialAttention,
    ParallelBlock,
    TwinBlock,
    differential_step,
    factor_starts,
)
from eqzoo.models.vision._vit_upstream import UPSTREAMS
from eqzoo.models.vision._vit_variants import ROWS
from eqzoo.nn._init import normal

_almost_zero = partial(normal, std=1e-6)
_init = partial(normal, std=0.02)  # timm's `trunc_normal_` cuts at +-2, a hundred deviations away

Block = nn.TransformerBlock[Any] | ParallelBlock | TwinBlock


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """`prefix_positions` gives the class, distillation and register tokens positions too, the last only with
    `register_positions`. `pool_prefix` pools these tokens with the image's. `crop` leaves out what the patches leave
    over of an image.

    Norms: `embed_norm` of the patches, `pre_norm` of all tokens before the first block, `qk_norm` of each head's
    queries and keys, `attention_norm` and `mlp_norm` before the last layer of each; `fc_norm` puts the final one behind
    the pooling. `layer_scale` is the value that layer scales (the norms of a "postnorm" block) start from, or None for
    a model without them. A "swiglu_packed" MLP has the mathematics of "swiglu", but its ratio counts gate and value."""

    dim: int
    depth: int
    heads: int
    patch_size: int = 16
    image_size: int = 224
    crop: bool = False
    in_channels: int = 3
    block: Literal["prenorm", "postnorm", "parallel", "twin"] = "prenorm"
    attention: Literal["softmax", "differential"] = "softmax"
    mlp: Literal["mlp", "swiglu", "swiglu_packed"] = "mlp"
    mlp_ratio: float = 4.0
    class_token: bool = True
    distilled: bool = False
    registers: int = 0
    prefix_positions: bool = True
    register_positions: bool = True
    pool: Literal["token", "avg", "map"] = "token"
    pool_prefix: bool = False
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-6
    embed_norm: bool = False
    pre_norm: bool = False
    qk_norm: bool = False
    attention_norm: bool = False
    mlp_norm: bool = False
    final_norm: bool = True
    fc_norm: bool = False
    layer_scale: float | None = None
    qkv_bias: bool = True
    proj_bias: bool = True
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "silu"] = "gelu"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: float = 0.0
    num_classes: int = 1000

    def __post_init__(self):
        check_choices(self)
        if self.image_size % self.patch_size and not self.crop:
            raise ValueError(
                f"image_size={self.image_size} is not a multiple of patch_size={self.patch_size}; "
                f"the nearest below is {self.image_size // self.patch_size * self.patch_size}"
            )
        if self.dim % self.heads:
            raise ValueError(f"dim={self.dim} is not a multiple of heads={self.heads}; choose a divisor of dim")
        if self.pool == "token" and not self.class_token:
            raise ValueError("pool='token' reads the class token, but class_token=False; use pool='avg'")
        if self.fc_norm and not self.final_norm:
            raise ValueError("fc_norm=True moves the final norm, but final_norm=False; leave one of them out")
        if self.layer_scale == 0:
            raise ValueError(
                "layer_scale=0 would silence every block; start from a small number, or pass None for none"
            )
        inside = (self.mlp, self.attention_norm, self.mlp_norm)
        if self.block in ("parallel", "twin") and inside != ("mlp", False, False):
            raise ValueError(
                f"block={self.block!r} has plain MLPs and no inner norms; leave mlp, attention_norm and mlp_norm out"
            )
        if self.attention == "differential" and (self.block == "twin" or self.dim % (2 * self.heads)):
            raise ValueError(
                f"attention='differential' halves each head and doesn't come in twins, but dim={self.dim}, "
                f"heads={self.heads}, block={self.block!r}; let dim be a multiple of {2 * self.heads}"
            )
        others = (self.registers, self.pool, self.fc_norm, self.prefix_positions)
        if self.distilled and others != (0, "token", False, True):
            raise ValueError(
                f"distilled=True, but registers, pool, fc_norm and prefix_positions are {others}; "
                f"a distilled model has (0, 'token', False, True): leave them at their defaults"
            )

    @property
    def grid(self) -> int:
        """How many patches lie in a row."""
        return self.image_size // self.patch_size

    @property
    def prefix(self) -> int:
        """How many tokens come before the image's."""
        return self.class_token + self.distilled + self.registers

    @property
    def positioned_prefix(self) -> int:
        """How many of these have positions."""
        return self.prefix_positions * (self.prefix - (not self.register_positions) * self.registers)


def _norm(config: ViTConfig) -> nn.Norm:
    return partial(nn.RMSNorm if config.norm == "rms" else nn.LayerNorm, eps=config.norm_eps)


def _attention(config: ViTConfig, *, key: PRNGKeyArray) -> nn.Attention | DifferentialAttention:
    make = DifferentialAttention if config.attention == "differential" else nn.Attention
    norm = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return make(
        config.dim,
        config.heads,
        qkv_bias=config.qkv_bias,
        out_bias=config.proj_bias,
        qk_norm=norm if config.qk_norm else None,
        qk_norm_eps=config.norm_eps,
        out_norm=norm if config.attention_norm else None,
        out_norm_eps=config.norm_eps,
        weight_dropout=config.attention_dropout,
        out_dropout=0.0 if config.block == "parallel" else config.dropout,
        init=_init,
        key=key,
    )


def _mlp(config: ViTConfig, *, key: PRNGKeyArray) -> nn.MLP | nn.GatedMLP:
    hidden = int(config.dim * config.mlp_ratio)
    options: dict[str, Any] = {
        "activation": nn.activation(config.activation),
        "use_bias": config.proj_bias,
        "norm": _norm(config) if config.mlp_norm else None,
        "dropout": config.dropout,
        "init": _init,
    }
    if config.mlp == "mlp":
        return nn.MLP(config.dim, hidden, key=key, **options)
    packed = config.mlp == "swiglu_packed"
    mlp = nn.GatedMLP(config.dim, hidden // 2 if packed else hidden, key=key, **options)
    # Of the two factors, timm lets one start as the constant 1: the second of the packed matrix, or the gate.
    one = lambda mlp: mlp.up if packed else mlp.gate
    linear = nn.Linear(config.dim, one(mlp).weight.shape[0], use_bias=config.proj_bias, init=_almost_zero, key=key)
    bias = None if linear.bias is None else jnp.ones_like(linear.bias)
    return eqx.tree_at(one, mlp, eqx.tree_at(lambda linear: linear.bias, linear, bias, is_leaf=lambda x: x is None))


def _block(config: ViTConfig, *, key: PRNGKeyArray) -> Block:
    key1, key2, key3, key4 = jax.random.split(key, 4)
    rest: dict[str, Any] = {"norm": _norm(config), "layer_scale": config.layer_scale, "drop_path": config.drop_path}
    if config.block == "twin":
        branch = partial(Branch, config.dim, **rest)
        return TwinBlock(
            (branch(_attention(config, key=key1)), branch(_attention(config, key=key2))),
            (branch(_mlp(config, key=key3)), branch(_mlp(config, key=key4))),
        )
    attention = _attention(config, key=key1)
    if config.block == "parallel":
        return ParallelBlock(
            config.dim,
            attention,
            int(config.dim * config.mlp_ratio),
            out_bias=config.proj_bias and config.attention == "softmax",  # the other's last layers have one bias
            activation=nn.activation(config.activation),
            dropout=config.dropout,
            init=_init,
            key=key2,
            **rest,
        )
    if config.block == "prenorm":
        return nn.TransformerBlock(config.dim, attention, _mlp(config, key=key2), **rest)
    rest["layer_scale"] = None
    block = nn.TransformerBlock(config.dim, attention, _mlp(config, key=key2), post_norm=True, **rest)
    start = 1.0 if config.layer_scale is None else config.layer_scale
    weights = lambda block: (block.norm1.weight, block.norm2.weight)
    return eqx.tree_at(weights, block, replace_fn=lambda weight: jnp.full_like(weight, start))


class ViT(eqx.Module):
    patch_embed: nn.PatchEmbed
    embed_norm: nn.LayerNorm | nn.RMSNorm | None
    class_token: Float[Array, "1 dim"] | None
    distillation_token: Float[Array, "1 dim"] | None
    registers: Float[Array, "registers dim"] | None
    positions: Float[Array, "positions dim"]
    dropout: nn.Dropout
    pre_norm: nn.LayerNorm | nn.RMSNorm | None
    blocks: nn.Stack[Block]
    norm: nn.LayerNorm | nn.RMSNorm | None
    attention_pool: nn.AttentionPool | None
    fc_norm: nn.LayerNorm | nn.RMSNorm | None
    head: nn.Linear | None
    distillation_head: nn.Linear | None
    config: ViTConfig = eqx.field(static=True)

    def __init__(self, config: ViTConfig, *, key: PRNGKeyArray):
        dim = config.dim
        key_patch, key_class, key_dist, key_registers, key_positions, key_blocks, *key_heads = jax.random.split(key, 8)
        self.patch_embed = nn.PatchEmbed(
            config.in_channels, dim, config.patch_size, use_bias=not config.pre_norm, key=key_patch
        )
        norm = partial(_norm(config), dim)
        self.embed_norm = norm() if config.embed_norm else None
        self.class_token = normal(key_class, (1, dim), 1e-6) if config.class_token else None
        self.distillation_token = _init(key_dist, (1, dim)) if config.distilled else None
        self.registers = normal(key_registers, (config.registers, dim), 1e-6) if config.registers else None
        self.positions = _init(key_positions, (config.grid**2 + config.positioned_prefix, dim))
        self.dropout = nn.Dropout(config.dropout)
        self.pre_norm = norm() if config.pre_norm else None
        self.blocks = nn.Stack(lambda key: _block(config, key=key), config.depth, key=key_blocks)
        self.norm = norm() if config.final_norm and not config.fc_norm else None
        self.attention_pool = _attention_pool(config, key=key_heads[1]) if config.pool == "map" else None
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
        config = self.config
        key_dropout, key_blocks = nn.split_key(key, 2)
        whole = config.grid * config.patch_size
        tokens = self.patch_embed(x[:whole, :whole])
        tokens = tokens if self.embed_norm is None else self.embed_norm(tokens)
        prefix = [each for each in (self.class_token, self.distillation_token, self.registers) if each is not None]
        positioned, bare = config.positioned_prefix, config.prefix - config.positioned_prefix
        none = jnp.zeros((bare, config.dim), self.positions.dtype)
        positions = jnp.concatenate([self.positions[:positioned], none, self.positions[positioned:]])
        tokens = jnp.concatenate([*prefix, tokens]) + positions
        tokens = self.dropout(tokens, key=key_dropout)
        tokens = tokens if self.pre_norm is None else self.pre_norm(tokens)
        depths = jnp.linspace(0.0, 1.0, config.depth)
        if config.attention == "softmax":
            tokens = self.blocks(tokens, each=depths, key=key_blocks)
        else:
            keys = None if key_blocks is None else jax.random.split(key_blocks, config.depth)
            tokens, _ = self.blocks.scan(differential_step, tokens, (depths, factor_starts(config.depth), keys))
        return (tokens if self.norm is None else self.norm(tokens),)

    @typed
    def __call__(
        self,
        x: Float[Array, "{self.config.image_size} {self.config.image_size} {self.config.in_channels}"],
        *,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, " out"]:
        tokens = self.features(x, key=key)[-1]
        pooled = self._pool(tokens)
        pooled = pooled if self.fc_norm is None else self.fc_norm(pooled)
        y = pooled if self.head is None else self.head(pooled)
        if not self.config.distilled:
            return y
        return (y + (tokens[1] if self.distillation_head is None else self.distillation_head(tokens[1]))) / 2

    def _pool(self, tokens: Float[Array, "tokens dim"]) -> Float[Array, " dim"]:
        if self.config.pool == "token":
            return tokens[0]
        tokens = tokens if self.config.pool_prefix else tokens[self.config.prefix :]
        return jnp.mean(tokens, axis=0) if self.attention_pool is None else self.attention_pool(tokens)


def _attention_pool(config: ViTConfig, *, key: PRNGKeyArray) -> nn.AttentionPool:
    key_pool, key_mlp = jax.random.split(key)
    hidden = int(config.dim * config.mlp_ratio)
    mlp = nn.MLP(config.dim, hidden, activation=nn.activation(config.activation), init=_init, key=key_mlp)
    return nn.AttentionPool(config.dim, config.heads, mlp=mlp, norm=_norm(config), init=_init, key=key_pool)


VARIANTS = {name: ViTConfig(**fields) for name, fields in ROWS.items()}

SHARDING = (
    (r"(blocks|attention_pool).*\.(query|key|value|fc1|gate|up)\.weight", P("model", "fsdp")),
    (r"(blocks|attention_pool).*\.(query|key|value|fc1|gate|up)\.bias", P("model")),
    (r"(blocks|attention_pool).*\.(out|fc2|down)\.weight", P("fsdp", "model")),
    (r"patch_embed\.conv\.weight", P(("model", "fsdp"))),
    (r"(head|distillation_head)\.weight", P("model", "fsdp")),
)

FAMILY = Family(
    ViT,
    ViTConfig,
    VARIANTS,
    UPSTREAMS,
    sharding=SHARDING,
    adapters={"num_classes": adapt.new_head, "in_channels": adapt.mix_channels, "image_size": adapt.resample_positions},
)
