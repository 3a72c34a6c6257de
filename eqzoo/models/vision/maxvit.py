"""MaxViT (Tu et al., 2022, arXiv 2204.01697): in each block a convolution, attention inside windows, and attention over
a coarse grid that reaches across the whole image.

Upstream: torchvision `maxvit.py`. Deviations: sides of an image may differ (torchvision's grid takes squares).
"""

from dataclasses import dataclass
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import typed
from eqzoo.checkpoint import adapt
from eqzoo.models._family import Family
from eqzoo.models.vision._maxvit_upstream import UPSTREAMS
from eqzoo.nn._init import normal

_init = partial(normal, std=0.02)
_ConvNorm = partial(nn.ConvNorm, eps=1e-3, momentum=0.01, init=_init)


@dataclass(frozen=True, kw_only=True)
class MaxViTConfig:
    """One width and depth a stage. `window` is the side of windows and grids alike; `squeeze` and `expansion` size the
    inner channels of a convolution, relative to those it puts out."""

    depths: tuple[int, ...] = (2, 2, 5, 2)
    widths: tuple[int, ...] = (64, 128, 256, 512)
    stem_width: int = 64
    dim_head: int = 32
    window: int = 7
    squeeze: float = 0.25
    expansion: float = 4.0
    mlp_ratio: int = 4
    in_channels: int = 3
    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: float = 0.2
    num_classes: int = 1000

    def __post_init__(self):
        if len(self.depths) != len(self.widths):
            raise ValueError(
                f"depths={self.depths} and widths={self.widths} differ in length; give one of each a stage"
            )
        for width in self.widths:
            if width % self.dim_head:
                raise ValueError(
                    f"widths={self.widths} holds {width}, no multiple of dim_head={self.dim_head}; round it"
                )

    @property
    def multiple(self) -> int:
        """What both sides of an image are multiples of."""
        return self.window * 2 ** (1 + len(self.depths))


class Stem(eqx.Module):
    conv1: nn.ConvNorm
    conv2: nn.Conv2d

    def __init__(self, in_channels: int, width: int, *, key: PRNGKeyArray):
        key1, key2 = jax.random.split(key)
        self.conv1 = _ConvNorm(in_channels, width, 3, stride=2, activation=nn.gelu, key=key1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, init=_init, key=key2)

    def __call__(
        self, x: Float[Array, "height width channels"], state: eqx.nn.State
    ) -> tuple[Float[Array, "out_height out_width out"], eqx.nn.State]:
        x, state = self.conv1(x, state)
        return self.conv2(x), state


class MBConv(eqx.Module):
    """An inverted bottleneck with squeeze-and-excitation, normalised first, beside a shortcut."""

    norm: nn.BatchNorm
    convs: tuple[nn.ConvNorm, nn.ConvNorm]
    squeeze_excite: nn.SqueezeExcite
    project: nn.Conv2d
    shortcut: nn.Conv2d | None
    drop_path: nn.DropPath

    def __init__(self, config: MaxViTConfig, in_channels: int, width: int, *, stride: int, key: PRNGKeyArray):
        key1, key2, key_se, key_project, key_shortcut = jax.random.split(key, 5)
        inner = int(width * config.expansion)
        self.norm = nn.BatchNorm(in_channels, eps=1e-3, momentum=0.01)
        self.convs = (
            _ConvNorm(in_channels, inner, 1, activation=nn.gelu, key=key1),
            _ConvNorm(inner, inner, 3, stride=stride, groups=inner, activation=nn.gelu, key=key2),
        )
        self.squeeze_excite = nn.SqueezeExcite(
            inner, int(width * config.squeeze), activation=jax.nn.silu, init=_init, key=key_se
        )
        self.project = nn.Conv2d(inner, width, 1, init=_init, key=key_project)
        self.shortcut = nn.Conv2d(in_channels, width, 1, init=_init, key=key_shortcut) if stride > 1 else None
        self.drop_path = nn.DropPath(config.drop_path)

    def __call__(
        self,
        x: Float[Array, "height width channels"],
        state: eqx.nn.State,
        depth: Float[Array, ""],
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "out_height out_width out"], eqx.nn.State]:
        y, state = self.norm(x, state)
        for conv in self.convs:
            y, state = conv(y, state)
        y = self.drop_path(self.project(self.squeeze_excite(y)), depth, key=key)
        if self.shortcut is not None:
            x = self.shortcut(nn.avg_pool(x, 3, stride=2, padding=1))
        return x + y, state


class PartitionAttention(eqx.Module):
    """A transformer block on the windows of a map, or (`grid`) on as many tokens that lie evenly across all of it."""

    norm1: nn.LayerNorm
    attention: nn.WindowAttention
    norm2: nn.LayerNorm
    mlp: nn.MLP
    dropout: nn.Dropout
    drop_path: nn.DropPath
    window: int = eqx.field(static=True)
    grid: bool = eqx.field(static=True)

    def __init__(self, config: MaxViTConfig, dim: int, *, grid: bool, key: PRNGKeyArray):
        key_attention, key_mlp = jax.random.split(key)
        self.norm1 = nn.LayerNorm(dim)
        self.attention = nn.WindowAttention(
            dim,
            dim // config.dim_head,
            config.window,
            scale=dim**-0.5,  # by all channels, as upstream has it, not by a head's
            out_dropout=config.attention_dropout,
            init=_init,
            key=key_attention,
        )
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.MLP(dim, dim * config.mlp_ratio, activation=nn.gelu, init=_init, key=key_mlp)
        self.dropout = nn.Dropout(config.dropout)
        self.drop_path = nn.DropPath(config.drop_path)
        self.window = config.window
        self.grid = grid

    def __call__(
        self, x: Float[Array, "height width dim"], depth: Float[Array, ""], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "height width dim"]:
        key_attention, key_path1, key_dropout, key_path2 = nn.split_key(key, 4)
        height, width, _ = x.shape
        cell = (height // self.window, width // self.window) if self.grid else (self.window, self.window)
        swap = lambda windows: jnp.swapaxes(windows, 0, 1) if self.grid else windows
        y = swap(nn.partition_windows(x, cell))
        y = y + self.drop_path(self.attention(self.norm1(y), key=key_attention), depth, key=key_path1)
        y = y + self.drop_path(self.dropout(self.mlp(self.norm2(y)), key=key_dropout), depth, key=key_path2)
        return nn.merge_windows(swap(y), cell, (height, width))


class Block(eqx.Module):
    mbconv: MBConv
    windows: PartitionAttention
    grid: PartitionAttention

    def __init__(self, config: MaxViTConfig, in_channels: int, width: int, *, stride: int, key: PRNGKeyArray):
        key_conv, key_windows, key_grid = jax.random.split(key, 3)
        self.mbconv = MBConv(config, in_channels, width, stride=stride, key=key_conv)
        self.windows = PartitionAttention(config, width, grid=False, key=key_windows)
        self.grid = PartitionAttention(config, width, grid=True, key=key_grid)

    def __call__(
        self,
        x: Float[Array, "height width channels"],
        state: eqx.nn.State,
        depth: Float[Array, ""],
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "out_height out_width out"], eqx.nn.State]:
        key_conv, key_windows, key_grid = nn.split_key(key, 3)
        x, state = self.mbconv(x, state, depth, key=key_conv)
        return self.grid(self.windows(x, depth, key=key_windows), depth, key=key_grid), state


class MaxViT(eqx.Module):
    stem: Stem
    stages: tuple[nn.Stage[Block], ...]
    norm: nn.LayerNorm
    pre_head: nn.Linear
    head: nn.Linear | None
    config: MaxViTConfig = eqx.field(static=True)

    def __init__(self, config: MaxViTConfig, *, key: PRNGKeyArray):
        key_stem, key_pre_head, key_head, *stage_keys = jax.random.split(key, 3 + len(config.depths))
        self.stem = Stem(config.in_channels, config.stem_width, key=key_stem)
        stages, channels = [], config.stem_width
        for width, depth, key_stage in zip(config.widths, config.depths, stage_keys, strict=True):
            first = lambda key: Block(config, channels, width, stride=2, key=key)
            rest = lambda key: Block(config, width, width, stride=1, key=key)
            stages.append(nn.Stage(first, rest, depth, key=key_stage))
            channels = width
        self.stages = tuple(stages)
        self.norm = nn.LayerNorm(channels)
        self.pre_head = nn.Linear(channels, channels, init=_init, key=key_pre_head)
        head = partial(nn.Linear, channels, config.num_classes, use_bias=False, init=_init, key=key_head)
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
        """The feature map of each stage, at 1/4, 1/8, 1/16 and 1/32 of the image's size."""
        (height, width, _), multiple = x.shape, self.config.multiple
        if height % multiple or width % multiple:
            raise ValueError(
                f"MaxViT: windows of {self.config.window} don't divide the maps of an image of {height}x{width}; "
                f"resize it to multiples of {multiple}"
            )
        maps = []
        y, state = self.stem(x, state)
        keys = nn.split_key(key, len(self.stages))
        for stage, depths, key_stage in zip(self.stages, nn.block_depths(self.config.depths), keys, strict=True):
            y, state = stage.with_state(y, state, each=depths, key=key_stage)
            maps.append(y)
        return tuple(maps), state

    @typed
    def __call__(
        self,
        x: Float[Array, "height width {self.config.in_channels}"],
        state: eqx.nn.State,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, " out"], eqx.nn.State]:
        maps, state = self.features(x, state, key=key)
        pooled = jnp.tanh(self.pre_head(self.norm(nn.global_avg_pool(maps[-1]))))
        return pooled if self.head is None else self.head(pooled), state


VARIANTS = {"maxvit_t": MaxViTConfig()}

SHARDING = (
    (r"stages.*\.(query|key|value|fc1|project|shortcut)\.weight", P("model", "fsdp")),
    (r"stages.*\.(out|fc2)\.weight", P("fsdp", "model")),
    (r".*(conv|conv2)\.weight", P("model", "fsdp")),
    (r"(pre_head|head)\.weight", P("model", "fsdp")),
)

FAMILY = Family(
    MaxViT,
    MaxViTConfig,
    VARIANTS,
    UPSTREAMS,
    sharding=SHARDING,
    adapters={"num_classes": adapt.new_head, "in_channels": adapt.mix_channels},
)
