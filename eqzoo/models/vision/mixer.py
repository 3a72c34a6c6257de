"""Networks of perceptrons that mix tokens by position instead of by content: MLP-Mixer (Tolstikhin et al., 2021, arXiv
2105.01601), ResMLP (Touvron et al., 2021, 2105.03404), gMLP (Liu et al., 2021, 2105.08050), and timm's gMixer.

Upstream: timm `mlp_mixer.py`. A model has one image size, for which its matrices over the tokens are made. Deviation:
biases start at 0, which timm draws with a deviation of 1e-6.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
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
from eqzoo.models.vision._mixer_upstream import UPSTREAMS
from eqzoo.nn._init import normal, uniform, xavier

_nearly_zeros = partial(normal, std=1e-6)


@dataclass(frozen=True, kw_only=True)
class MixerConfig:
    """`mlp_ratio` says how wide the perceptrons over tokens and over channels are, both relative to `dim`; ResMLP and
    gMLP have the latter only. `gated` makes a Mixer's perceptrons gated ones. `layer_scale` is what ResMLP's scales
    start from; the others have none."""

    dim: int
    depth: int
    block: Literal["mixer", "resmlp", "gmlp"] = "mixer"
    patch_size: int = 16
    image_size: int = 224
    in_channels: int = 3
    mlp_ratio: float | tuple[float, float] = (0.5, 4.0)
    gated: bool = False
    activation: Literal["gelu", "silu"] = "gelu"
    layer_scale: float | None = None
    stem_norm: bool = False
    mlp_dropout: float = 0.0
    dropout: float = 0.0
    drop_path: float = 0.0
    num_classes: int = 1000

    def __post_init__(self):
        check_choices(self)
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size={self.image_size} is not a multiple of patch_size={self.patch_size}; "
                f"the nearest below is {self.image_size // self.patch_size * self.patch_size}"
            )
        if isinstance(self.mlp_ratio, tuple) and self.block != "mixer":
            raise ValueError(f"mlp_ratio={self.mlp_ratio} is a pair, but block={self.block!r} takes one number")
        if self.gated and self.block != "mixer":
            raise ValueError(f"gated=True is for block='mixer', not {self.block!r}; leave it at False")
        if (self.layer_scale is not None) != (self.block == "resmlp") or self.layer_scale == 0:
            raise ValueError(
                f"layer_scale={self.layer_scale} doesn't go with block={self.block!r}; "
                f"give 'resmlp' a small number other than 0, and the others None"
            )
        if (self.gated or self.block == "gmlp") and any(hidden % 2 for hidden in self.hidden):
            raise ValueError(
                f"mlp_ratio={self.mlp_ratio} makes perceptrons of widths {self.hidden}, which a gate can't halve; "
                f"choose it so that they are even"
            )

    @property
    def tokens(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def hidden(self) -> tuple[int, int]:
        """The widths of the perceptrons over tokens and over channels."""
        tokens, channels = self.mlp_ratio if isinstance(self.mlp_ratio, tuple) else (self.mlp_ratio, self.mlp_ratio)
        return int(self.dim * tokens), int(self.dim * channels)


def _lecun(key: PRNGKeyArray, shape: Sequence[int]) -> Float[Array, "..."]:
    return normal(key, shape, 1 / sqrt(shape[1] * shape[2] * shape[3]))


def _zeros(key: PRNGKeyArray, shape: Sequence[int]) -> Float[Array, "..."]:
    return jnp.zeros(shape, jnp.float32)


def _perceptron(config: MixerConfig, dim: int, hidden: int, *, key: PRNGKeyArray) -> nn.MLP | nn.GatedMLP:
    """A gated one's `hidden` counts gate and value, drawn like one matrix; its gates start open."""
    options: dict[str, Any] = {"activation": nn.activation(config.activation), "dropout": config.mlp_dropout}
    if not config.gated:
        return nn.MLP(dim, hidden, init=xavier, key=key, **options)
    key_mlp, key_gate, key_down = jax.random.split(key, 3)
    init = lambda key, shape: uniform(key, shape, sqrt(6 / (dim + hidden)))
    mlp = nn.GatedMLP(dim, hidden // 2, use_bias=True, init=init, key=key_mlp, **options)
    gate, down = _nearly_zeros(key_gate, mlp.gate.weight.shape), xavier(key_down, mlp.down.weight.shape)
    parts = lambda mlp: (mlp.gate.weight, mlp.gate.bias, mlp.down.weight)
    return eqx.tree_at(parts, mlp, (gate, jnp.ones(hidden // 2, jnp.float32), down))


class MixerBlock(eqx.Module):
    """A perceptron over the tokens of each channel, then one over the channels of each token."""

    norm1: nn.LayerNorm
    tokens: nn.MLP | nn.GatedMLP
    norm2: nn.LayerNorm
    channels: nn.MLP | nn.GatedMLP
    drop_path: nn.DropPath

    def __init__(self, config: MixerConfig, *, key: PRNGKeyArray):
        key_tokens, key_channels = jax.random.split(key)
        self.norm1 = nn.LayerNorm(config.dim, eps=1e-6)
        self.tokens = _perceptron(config, config.tokens, config.hidden[0], key=key_tokens)
        self.norm2 = nn.LayerNorm(config.dim, eps=1e-6)
        self.channels = _perceptron(config, config.dim, config.hidden[1], key=key_channels)
        self.drop_path = nn.DropPath(config.drop_path)

    def __call__(self, x: Float[Array, "tokens dim"], *, key: PRNGKeyArray | None = None) -> Float[Array, "tokens dim"]:
        key_tokens, key_path1, key_channels, key_path2 = nn.split_key(key, 4)
        x = x + self.drop_path(self.tokens(self.norm1(x).T, key=key_tokens).T, key=key_path1)
        return x + self.drop_path(self.channels(self.norm2(x), key=key_channels), key=key_path2)


class Affine(eqx.Module):
    """ResMLP's substitute for a norm: a factor and an offset per channel."""

    alpha: Float[Array, " dim"]
    beta: Float[Array, " dim"]

    def __init__(self, dim: int):
        self.alpha = jnp.ones(dim, jnp.float32)
        self.beta = jnp.zeros(dim, jnp.float32)

    def __call__(self, x: Float[Array, "*axes dim"]) -> Float[Array, "*axes dim"]:
        return x * self.alpha.astype(x.dtype) + self.beta.astype(x.dtype)


class ResMLPBlock(eqx.Module):
    """A matrix over the tokens of each channel, then a perceptron over the channels of each token."""

    norm1: Affine
    tokens: nn.Linear
    scale1: nn.LayerScale
    norm2: Affine
    channels: nn.MLP | nn.GatedMLP
    scale2: nn.LayerScale
    drop_path: nn.DropPath

    def __init__(self, config: MixerConfig, *, key: PRNGKeyArray):
        key_tokens, key_channels = jax.random.split(key)
        assert config.layer_scale is not None
        self.norm1 = Affine(config.dim)
        self.tokens = nn.Linear(config.tokens, config.tokens, init=xavier, key=key_tokens)
        self.scale1 = nn.LayerScale(config.dim, config.layer_scale)
        self.norm2 = Affine(config.dim)
        self.channels = _perceptron(config, config.dim, config.hidden[1], key=key_channels)
        self.scale2 = nn.LayerScale(config.dim, config.layer_scale)
        self.drop_path = nn.DropPath(config.drop_path)

    def __call__(self, x: Float[Array, "tokens dim"], *, key: PRNGKeyArray | None = None) -> Float[Array, "tokens dim"]:
        key_path1, key_channels, key_path2 = nn.split_key(key, 3)
        x = x + self.drop_path(self.scale1(self.tokens(self.norm1(x).T).T), key=key_path1)
        return x + self.drop_path(self.scale2(self.channels(self.norm2(x), key=key_channels)), key=key_path2)


class SpatialGate(eqx.Module):
    """Multiplies one half of the channels by the other half, mixed over the tokens; at first by about one."""

    norm: nn.LayerNorm
    tokens: nn.Linear

    def __init__(self, dim: int, tokens: int, *, key: PRNGKeyArray):
        self.norm = nn.LayerNorm(dim // 2)
        linear = nn.Linear(tokens, tokens, init=_nearly_zeros, key=key)
        self.tokens = eqx.tree_at(lambda linear: linear.bias, linear, jnp.ones(tokens, jnp.float32))

    def __call__(self, x: Float[Array, "tokens dim"]) -> Float[Array, "tokens half_dim"]:
        kept, gate = jnp.split(x, 2, axis=-1)
        return kept * self.tokens(self.norm(gate).T).T


class GMLPBlock(eqx.Module):
    """A perceptron over channels, with a gate inside that mixes tokens."""

    norm: nn.LayerNorm
    fc1: nn.Linear
    gate: SpatialGate
    fc2: nn.Linear
    dropout: nn.Dropout
    drop_path: nn.DropPath
    activation: Callable[[Array], Array] = eqx.field(static=True)

    def __init__(self, config: MixerConfig, *, key: PRNGKeyArray):
        key1, key_gate, key2 = jax.random.split(key, 3)
        _, hidden = config.hidden
        self.norm = nn.LayerNorm(config.dim, eps=1e-6)
        self.fc1 = nn.Linear(config.dim, hidden, init=xavier, key=key1)
        self.gate = SpatialGate(hidden, config.tokens, key=key_gate)
        self.fc2 = nn.Linear(hidden // 2, config.dim, init=xavier, key=key2)
        self.dropout = nn.Dropout(config.mlp_dropout)
        self.drop_path = nn.DropPath(config.drop_path)
        self.activation = nn.activation(config.activation)

    def __call__(self, x: Float[Array, "tokens dim"], *, key: PRNGKeyArray | None = None) -> Float[Array, "tokens dim"]:
        key_hidden, key_out, key_path = nn.split_key(key, 3)
        y = self.dropout(self.activation(self.fc1(self.norm(x))), key=key_hidden)
        y = self.dropout(self.fc2(self.gate(y)), key=key_out)
        return x + self.drop_path(y, key=key_path)


_BLOCKS = {"mixer": MixerBlock, "resmlp": ResMLPBlock, "gmlp": GMLPBlock}


class Mixer(eqx.Module):
    patch_embed: nn.PatchEmbed
    stem_norm: nn.LayerNorm | Affine | None
    blocks: nn.Stack[MixerBlock | ResMLPBlock | GMLPBlock]
    norm: nn.LayerNorm | Affine
    dropout: nn.Dropout
    head: nn.Linear | None
    config: MixerConfig = eqx.field(static=True)

    def __init__(self, config: MixerConfig, *, key: PRNGKeyArray):
        key_patch, key_blocks, key_head = jax.random.split(key, 3)
        norm = Affine if config.block == "resmlp" else partial(nn.LayerNorm, eps=1e-6)
        self.patch_embed = nn.PatchEmbed(config.in_channels, config.dim, config.patch_size, init=_lecun, key=key_patch)
        self.stem_norm = norm(config.dim) if config.stem_norm else None
        block = partial(_BLOCKS[config.block], config)
        self.blocks = nn.Stack(lambda key: block(key=key), config.depth, key=key_blocks)
        self.norm = norm(config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.dim, config.num_classes, init=_zeros, key=key_head) if config.num_classes else None
        self.config = config

    @typed
    def features(
        self,
        x: Float[Array, "{self.config.image_size} {self.config.image_size} {self.config.in_channels}"],
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "tokens dim"], ...]:
        """The tokens after the last block and the final norm."""
        tokens = self.patch_embed(x)
        tokens = tokens if self.stem_norm is None else self.stem_norm(tokens)
        return (self.norm(self.blocks(tokens, key=key)),)

    @typed
    def __call__(
        self,
        x: Float[Array, "{self.config.image_size} {self.config.image_size} {self.config.in_channels}"],
        *,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, " out"]:
        key_features, key_dropout = nn.split_key(key, 2)
        pooled = jnp.mean(self.features(x, key=key_features)[-1], axis=0)
        pooled = self.dropout(pooled, key=key_dropout)
        return pooled if self.head is None else self.head(pooled)


_gmixer = partial(MixerConfig, mlp_ratio=(1.0, 4.0), gated=True, activation="silu")
_resmlp = partial(MixerConfig, block="resmlp", mlp_ratio=4.0)
_gmlp = partial(MixerConfig, block="gmlp", mlp_ratio=6.0)

VARIANTS = {
    "mixer_s32_224": MixerConfig(dim=512, depth=8, patch_size=32),
    "mixer_s16_224": MixerConfig(dim=512, depth=8),
    "mixer_b32_224": MixerConfig(dim=768, depth=12, patch_size=32),
    "mixer_b16_224": MixerConfig(dim=768, depth=12),
    "mixer_l32_224": MixerConfig(dim=1024, depth=24, patch_size=32),
    "mixer_l16_224": MixerConfig(dim=1024, depth=24),
    "gmixer_12_224": _gmixer(dim=384, depth=12),
    "gmixer_24_224": _gmixer(dim=384, depth=24),
    "resmlp_12_224": _resmlp(dim=384, depth=12, layer_scale=1e-4),
    "resmlp_24_224": _resmlp(dim=384, depth=24, layer_scale=1e-5),
    "resmlp_36_224": _resmlp(dim=384, depth=36, layer_scale=1e-6),
    "resmlp_big_24_224": _resmlp(dim=768, depth=24, patch_size=8, layer_scale=1e-6),
    "gmlp_ti16_224": _gmlp(dim=128, depth=30),
    "gmlp_s16_224": _gmlp(dim=256, depth=30),
    "gmlp_b16_224": _gmlp(dim=512, depth=30),
}

SHARDING = (
    (r"blocks.*\.(fc1|up|gate|tokens)\.weight", P("model", "fsdp")),
    (r"blocks.*\.(fc2|down)\.weight", P("fsdp", "model")),
    (r"patch_embed\.conv\.weight", P(("model", "fsdp"))),
    (r"head\.weight", P("model", "fsdp")),
)

FAMILY = Family(
    Mixer,
    MixerConfig,
    VARIANTS,
    UPSTREAMS,
    sharding=SHARDING,
    adapters={"num_classes": adapt.new_head, "in_channels": adapt.mix_channels},
)
