"""EVA (Fang et al., 2022, arXiv 2211.07636) and EVA-02 (2303.11331): ViTs that turn queries and keys by where a patch
lies, with gated and inwardly normalised MLPs; and the ViTs of that build: DINOv3 (2508.10104), the Perception Encoder
(2504.13181), RoPE-ViT (2403.13298).

Upstream: timm `eva.py`; transformers' `DINOv3ViTModel`. Deviations: one `dropout` rate serves the positions and both
layers of each block; no layer starts smaller than the one before; DINOv3's random shifts of positions in training are
left out.
"""

from dataclasses import dataclass
from functools import partial
from math import pi
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import check_choices, typed
from eqzoo.checkpoint import adapt
from eqzoo.models._family import Family
from eqzoo.models.vision._eva_upstream import UPSTREAMS
from eqzoo.models.vision._eva_variants import ROWS
from eqzoo.models.vision.vit import SHARDING
from eqzoo.nn._init import normal, uniform

_init = partial(normal, std=0.02)


@dataclass(frozen=True, kw_only=True)
class EvaConfig:
    """`image_size` is what `learned_positions` are for; a model without takes images of any size.

    `rotary` positions count patches ("grid"), rescaled to a grid of `rotary_grid` in a row and begun at
    `rotary_offset`; or do so with learned frequencies for each head ("mixed"); or go from -1 to 1 ("centred").
    `rotary_columns_first` turns the first half of a head with the column. `mlp_multiple` is what the width of MLPs is
    rounded up to. `pool_heads` are those of the attention pool, by default `heads`.
    """

    dim: int
    depth: int
    heads: int
    patch_size: int = 16
    image_size: int = 224
    in_channels: int = 3
    mlp: Literal["mlp", "swiglu"] = "mlp"
    mlp_ratio: float = 4.0
    mlp_multiple: int = 1
    class_token: bool = True
    registers: int = 0
    learned_positions: bool = True
    prefix_positions: bool = True
    rotary: Literal["none", "grid", "mixed", "centred"] = "none"
    rotary_base: float = 10000.0
    rotary_grid: int | None = None
    rotary_offset: float = 0.0
    rotary_columns_first: bool = False
    pool: Literal["token", "avg", "map"] = "avg"
    pool_heads: int | None = None
    norm_eps: float = 1e-6
    post_norm: bool = False
    pre_norm: bool = False
    attention_norm: bool = False
    mlp_norm: bool = False
    final_norm: bool = False
    fc_norm: bool = True
    layer_scale: float | None = None
    qkv_bias: bool = True
    key_bias: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: float = 0.0
    num_classes: int = 1000

    def __post_init__(self):
        check_choices(self)
        if self.learned_positions and self.image_size % self.patch_size:
            raise ValueError(
                f"image_size={self.image_size} is not a multiple of patch_size={self.patch_size}; "
                f"the nearest below is {self.image_size // self.patch_size * self.patch_size}"
            )
        if self.dim % self.heads:
            raise ValueError(f"dim={self.dim} is not a multiple of heads={self.heads}; choose a divisor of dim")
        if self.rotary != "none" and self.dim // self.heads % 4:
            raise ValueError(
                f"rotary={self.rotary!r} turns a head's channels in pairs by row and by column, but dim={self.dim} and "
                f"heads={self.heads} make heads of {self.dim // self.heads}; choose a multiple of 4"
            )
        if self.pool == "token" and not self.class_token:
            raise ValueError("pool='token' reads the class token, but class_token=False; use pool='avg'")
        if self.post_norm and self.layer_scale is not None:
            raise ValueError(f"post_norm=True has no layer scales, but layer_scale={self.layer_scale}; leave it out")
        if self.layer_scale == 0:
            raise ValueError(
                "layer_scale=0 would silence every block; start from a small number, or pass None for none"
            )

    @property
    def prefix(self) -> int:
        """How many tokens come before the image's."""
        return self.class_token + self.registers

    @property
    def positioned_prefix(self) -> int:
        """How many of these have positions."""
        return self.prefix_positions * self.prefix

    @property
    def positions(self) -> int:
        """How many positions a model learns, if it does."""
        return (self.image_size // self.patch_size) ** 2 + self.positioned_prefix

    @property
    def hidden(self) -> int:
        """How wide MLPs are within."""
        hidden = int(self.dim * self.mlp_ratio)
        return hidden + -hidden % self.mlp_multiple


def _block(config: EvaConfig, *, key: PRNGKeyArray) -> nn.TransformerBlock[nn.Attention]:
    key_attention, key_mlp = jax.random.split(key)
    norm = partial(nn.LayerNorm, eps=config.norm_eps)
    attention = nn.Attention(
        config.dim,
        config.heads,
        qkv_bias=config.qkv_bias,
        key_bias=config.key_bias,
        out_norm=nn.LayerNorm if config.attention_norm else None,
        out_norm_eps=config.norm_eps,
        interleaved=config.rotary != "centred",
        weight_dropout=config.attention_dropout,
        out_dropout=config.dropout,
        init=_init,
        key=key_attention,
    )
    make, activation = (nn.MLP, nn.gelu) if config.mlp == "mlp" else (nn.GatedMLP, jax.nn.silu)
    mlp = make(
        config.dim,
        config.hidden,
        activation=activation,
        use_bias=True,
        norm=norm if config.mlp_norm else None,
        dropout=config.dropout,
        init=_init,
        key=key_mlp,
    )
    return nn.TransformerBlock(
        config.dim,
        attention,
        mlp,
        norm=norm,
        layer_scale=config.layer_scale,
        drop_path=config.drop_path,
        post_norm=config.post_norm,
    )


class Eva(eqx.Module):
    patch_embed: nn.PatchEmbed
    class_token: Float[Array, "1 dim"] | None
    registers: Float[Array, "registers dim"] | None
    positions: Float[Array, "positions dim"] | None
    frequencies: Float[Array, "2 depth heads half_dim_head"] | None
    dropout: nn.Dropout
    pre_norm: nn.LayerNorm | None
    blocks: nn.Stack[nn.TransformerBlock[nn.Attention]]
    norm: nn.LayerNorm | None
    attention_pool: nn.AttentionPool | None
    fc_norm: nn.LayerNorm | None
    head: nn.Linear | None
    config: EvaConfig = eqx.field(static=True)

    def __init__(self, config: EvaConfig, *, key: PRNGKeyArray):
        dim = config.dim
        keys = iter(jax.random.split(key, 8))
        self.patch_embed = nn.PatchEmbed(
            config.in_channels, dim, config.patch_size, use_bias=not config.pre_norm, key=next(keys)
        )
        self.class_token = _init(next(keys), (1, dim)) if config.class_token else None
        self.registers = _init(next(keys), (config.registers, dim)) if config.registers else None
        self.positions = _init(next(keys), (config.positions, dim)) if config.learned_positions else None
        self.frequencies = _mixed_frequencies(config, key=next(keys)) if config.rotary == "mixed" else None
        self.dropout = nn.Dropout(config.dropout)
        norm = partial(nn.LayerNorm, dim, eps=config.norm_eps)
        self.pre_norm = norm() if config.pre_norm else None
        self.blocks = nn.Stack(lambda key: _block(config, key=key), config.depth, key=next(keys))
        self.norm = norm() if config.final_norm else None
        self.attention_pool = _attention_pool(config, key=next(keys)) if config.pool == "map" else None
        self.fc_norm = norm() if config.fc_norm else None
        head = partial(nn.Linear, dim, config.num_classes, init=partial(normal, std=0.02 * 0.001))
        self.head = head(key=next(keys)) if config.num_classes else None
        self.config = config

    @typed
    def features(
        self, x: Float[Array, "height width {self.config.in_channels}"], *, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, "tokens dim"], ...]:
        """All tokens after the last block and the final norm: class and register tokens come first."""
        config = self.config
        if self.positions is not None and x.shape[:2] != (config.image_size, config.image_size):
            raise TypeError(
                f"Eva: x is an array of shape {x.shape} and dtype {x.dtype}, expected a float array of shape "
                f"({config.image_size}, {config.image_size}, {config.in_channels}); resize it, or create the model "
                f"with `image_size={x.shape[0]}`"
            )
        key_dropout, key_blocks = nn.split_key(key, 2)
        tokens = self.patch_embed(x)
        prefix = [each for each in (self.class_token, self.registers) if each is not None]
        if self.positions is not None and config.prefix_positions:
            tokens = jnp.concatenate([*prefix, tokens]) + self.positions
        else:
            tokens = tokens if self.positions is None else tokens + self.positions
            tokens = jnp.concatenate([*prefix, tokens])
        tokens = self.dropout(tokens, key=key_dropout)
        tokens = tokens if self.pre_norm is None else self.pre_norm(tokens)
        height, width = (side // config.patch_size for side in x.shape[:2])
        angles = None if config.rotary in ("none", "mixed") else _angles(config, height, width)

        def step(block: nn.TransformerBlock[nn.Attention], tokens: Array, layer: Any) -> tuple[Array, None]:
            depth, frequencies, key = layer
            turned = angles if frequencies is None else _mixed_angles(config, height, width, frequencies)
            return block(tokens, depth, attention=partial(block.attention, rotary=turned), key=key), None

        depths = jnp.linspace(0.0, 1.0, config.depth)
        frequencies = None if self.frequencies is None else jnp.moveaxis(self.frequencies, 1, 0)
        keys = None if key_blocks is None else jax.random.split(key_blocks, config.depth)
        tokens, _ = self.blocks.scan(step, tokens, (depths, frequencies, keys))
        return (tokens if self.norm is None else self.norm(tokens),)

    @typed
    def __call__(
        self, x: Float[Array, "height width {self.config.in_channels}"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, " out"]:
        tokens = self.features(x, key=key)[-1]
        if self.attention_pool is not None:
            pooled = self.attention_pool(tokens)
        else:
            pooled = tokens[0] if self.config.pool == "token" else jnp.mean(tokens[self.config.prefix :], axis=0)
        pooled = pooled if self.fc_norm is None else self.fc_norm(pooled)
        return pooled if self.head is None else self.head(pooled)


def _places(config: EvaConfig, patches: int) -> Float[np.ndarray, " patches"]:
    """Where the patches of a row, or of a column, lie."""
    if config.rotary == "centred":
        centres = np.arange(0.5, patches, dtype=np.float32) / np.float32(patches)
        return np.float32(2 * pi) * (2 * centres - 1)
    places = np.arange(patches, dtype=np.float32) + np.float32(config.rotary_offset)
    return places if config.rotary_grid is None else places / np.float32(patches) * np.float32(config.rotary_grid)


def _angles(config: EvaConfig, height: int, width: int) -> Float[Array, "tokens half_dim_head"]:
    """By how much each token's queries and keys turn; those before the image's don't."""
    angles = nn.rotary_angles_2d(
        height,
        width,
        config.dim // config.heads,
        base=config.rotary_base,
        rows=jnp.asarray(_places(config, height)),
        columns=jnp.asarray(_places(config, width)),
        columns_first=config.rotary_columns_first,
    )
    return jnp.pad(angles, ((config.prefix, 0), (0, 0)))


def _mixed_angles(
    config: EvaConfig, height: int, width: int, frequencies: Float[Array, "2 heads half_dim_head"]
) -> Float[Array, "heads tokens half_dim_head"]:
    """By how much each head turns them in a layer that has learned these frequencies."""
    rows, columns = np.indices((height, width), dtype=np.float32).reshape(2, -1)
    first, second = (columns, rows) if config.rotary_columns_first else (rows, columns)
    angles = first[:, None] * frequencies[0, :, None] + second[:, None] * frequencies[1, :, None]
    return jnp.pad(angles, ((0, 0), (config.prefix, 0), (0, 0)))


def _mixed_frequencies(config: EvaConfig, *, key: PRNGKeyArray) -> Float[Array, "2 depth heads half_dim_head"]:
    """Those of a grid, in a direction drawn for each head."""
    dim_head = config.dim // config.heads
    exponents = np.arange(0, dim_head, 4, dtype=np.float32) / dim_head
    sizes = (1 / config.rotary_base**exponents).astype(np.float32)
    direction = uniform(key, (config.depth, config.heads, 1), pi)
    cosine, sine = jnp.cos(direction), jnp.sin(direction)
    pairs = ((cosine, -sine), (sine, cosine))  # the second half of a head turns at a right angle to the first
    return jnp.stack([jnp.concatenate([first * sizes, second * sizes], axis=-1) for first, second in pairs])


def _attention_pool(config: EvaConfig, *, key: PRNGKeyArray) -> nn.AttentionPool:
    key_pool, key_mlp = jax.random.split(key)
    heads = config.heads if config.pool_heads is None else config.pool_heads
    mlp = nn.MLP(config.dim, 4 * config.dim, activation=nn.gelu, init=_init, key=key_mlp)
    norm = partial(nn.LayerNorm, eps=config.norm_eps)
    return nn.AttentionPool(config.dim, heads, mlp=mlp, norm=norm, init=_init, key=key_pool)


VARIANTS = {name: EvaConfig(**fields) for name, fields in ROWS.items()}

FAMILY = Family(
    Eva,
    EvaConfig,
    VARIANTS,
    UPSTREAMS,
    sharding=SHARDING,
    adapters={"num_classes": adapt.new_head, "in_channels": adapt.mix_channels, "image_size": adapt.resample_positions},
)
