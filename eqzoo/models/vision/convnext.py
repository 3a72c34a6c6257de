"""ConvNeXt (Liu et al., 2022, arXiv 2201.03545), ConvNeXt V2 with its global response norm (Woo et al., 2023,
2301.00808), timm's small variants of both, and the image towers of OpenCLIP (2212.07143) and DINOv3 (2508.10104).

Upstream: torchvision `convnext.py` and timm `convnext.py`, which agree wherever both have a variant; transformers'
`ConvNextForImageClassification`, `ConvNextV2ForImageClassification`, their bodies, and `DINOv3ConvNextModel`.
Deviations: the variants that torchvision has too drop paths in training at its rates, the paper's; timm's default is 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import check_choices, typed
from eqzoo.checkpoint import adapt
from eqzoo.models._family import Family
from eqzoo.models.vision._convnext_upstream import UPSTREAMS
from eqzoo.models.vision._convnext_variants import ROWS
from eqzoo.nn._init import normal
from eqzoo.nn._precision import at_least_float32

_init = partial(normal, std=0.02)  # upstream's `trunc_normal_` cuts at +-2, a hundred deviations away


@dataclass(frozen=True, kw_only=True)
class ConvNeXtConfig:
    """`stem` is one convolution on patches, or two of stride 2 that overlap; "tiered" makes the first half as wide,
    "act" puts an activation between them. `response_norm` is what V2 adds, without `layer_scale` (None). The head
    normalises before pooling with `head_norm_first`, and has one more layer with `head_hidden`. `conv_mlp` keeps the
    MLPs' matrices as 1x1 convolutions; the mathematics is the same."""

    depths: tuple[int, ...]
    widths: tuple[int, ...]
    kernel_sizes: tuple[int, ...] = (7, 7, 7, 7)
    stem: Literal["patch", "overlap", "overlap_tiered", "overlap_act"] = "patch"
    patch_size: int = 4
    norm: Literal["layer", "rms", "simple"] = "layer"
    norm_eps: float = 1e-6
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "silu", "relu"] = "gelu"
    response_norm: bool = False
    layer_scale: float | None = 1e-6
    conv_mlp: bool = False
    head_norm_first: bool = False
    head_norm_eps: float | None = None
    head_hidden: int | None = None
    in_channels: int = 3
    dropout: float = 0.0
    drop_path: float = 0.0
    num_classes: int = 1000

    def __post_init__(self):
        check_choices(self)
        if len({len(self.depths), len(self.widths), len(self.kernel_sizes)}) > 1:
            raise ValueError(
                f"depths={self.depths}, widths={self.widths} and kernel_sizes={self.kernel_sizes} differ in length; "
                f"give one of each a stage"
            )
        if any(size % 2 == 0 for size in self.kernel_sizes):
            raise ValueError(f"kernel_sizes={self.kernel_sizes} has an even size, which has no centre; use odd ones")
        if self.stem != "patch" and self.patch_size != 4:
            raise ValueError(
                f"stem={self.stem!r} divides the image's size by 4, but patch_size={self.patch_size}; "
                f"leave it at 4 or use stem='patch'"
            )
        if self.layer_scale == 0:
            raise ValueError(
                "layer_scale=0 would silence every block; start from a small number, or pass None for none"
            )
        if self.head_norm_first and self.head_hidden is not None:
            raise ValueError(
                f"head_norm_first=True goes with a linear head only, but head_hidden={self.head_hidden}; set it to None"
            )


class SimpleNorm(eqx.Module):
    """Divides by the deviation over the last axis, and leaves the mean in (timm)."""

    weight: Float[Array, " dim"]
    eps: float = eqx.field(static=True)

    def __init__(self, dim: int, *, eps: float):
        self.weight = jnp.ones(dim, jnp.float32)
        self.eps = eps

    def __call__(self, x: Float[Array, "*axes dim"]) -> Float[Array, "*axes dim"]:
        wide = at_least_float32(x)
        variance = jnp.var(wide, axis=-1, keepdims=True, ddof=1)
        return (wide * jax.lax.rsqrt(variance + self.eps) * self.weight).astype(x.dtype)


class GlobalResponseNorm(eqx.Module):
    """Lets channels compete: each is scaled by its norm over the image, relative to that of the other channels."""

    weight: Float[Array, " dim"]
    bias: Float[Array, " dim"]

    def __init__(self, dim: int):
        self.weight = jnp.zeros(dim, jnp.float32)
        self.bias = jnp.zeros(dim, jnp.float32)

    def __call__(self, x: Float[Array, "height width dim"]) -> Float[Array, "height width dim"]:
        squares = jnp.sum(at_least_float32(x) ** 2, axis=(0, 1))
        silent = squares == 0  # where the root has no derivative
        norms = jnp.where(silent, 0, jnp.sqrt(jnp.where(silent, 1, squares)))
        relative = norms / (jnp.mean(norms) + 1e-6)
        return x + (x * (self.weight * relative) + self.bias).astype(x.dtype)


Norm = nn.LayerNorm | nn.RMSNorm | SimpleNorm
_NORMS: dict[str, Callable[..., Norm]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "simple": SimpleNorm}


def _norm(config: ConvNeXtConfig, dim: int) -> Norm:
    return _NORMS[config.norm](dim, eps=config.norm_eps)


class Stem(eqx.Module):
    """To a quarter of the image's size (or a `patch_size`th). None among the `layers` is the activation."""

    layers: tuple[nn.Conv2d | Norm | None, ...]
    activation: Callable[[Array], Array] = eqx.field(static=True)

    def __init__(self, config: ConvNeXtConfig, *, key: PRNGKeyArray):
        key1, key2 = jax.random.split(key)
        width, size = config.widths[0], config.patch_size
        norm = _norm(config, width)
        if config.stem == "patch":
            self.layers = (nn.Conv2d(config.in_channels, width, size, stride=size, init=_init, key=key1), norm)
        else:
            first = _half(width) if config.stem == "overlap_tiered" else width
            conv1 = nn.Conv2d(config.in_channels, first, 3, stride=2, padding=1, init=_init, key=key1)
            conv2 = nn.Conv2d(first, width, 3, stride=2, padding=1, init=_init, key=key2)
            self.layers = (conv1, None, conv2, norm) if config.stem == "overlap_act" else (conv1, conv2, norm)
        self.activation = nn.activation(config.activation)

    def __call__(self, x: Float[Array, "height width channels"]) -> Float[Array, "out_height out_width out"]:
        for layer in self.layers:
            x = self.activation(x) if layer is None else layer(x)
        return x


def _half(width: int) -> int:
    """The multiple of 8 nearest to half the width, but no more than a tenth below it."""
    half = nn.round_channels(width // 2)
    return half if half >= 0.9 * (width // 2) else half + 8


class Downsample(eqx.Module):
    """Between stages: to half the size."""

    norm: Norm
    conv: nn.Conv2d

    def __init__(self, config: ConvNeXtConfig, in_channels: int, out_channels: int, *, key: PRNGKeyArray):
        self.norm = _norm(config, in_channels)
        self.conv = nn.Conv2d(in_channels, out_channels, 2, stride=2, init=_init, key=key)

    def __call__(self, x: Float[Array, "height width channels"]) -> Float[Array, "out_height out_width out"]:
        return self.conv(self.norm(x))


class Block(eqx.Module):
    """A large depthwise convolution, then a multi-layer perceptron on each pixel, beside a shortcut."""

    conv: nn.Conv2d
    norm: Norm
    fc1: nn.Linear | nn.Conv2d
    response_norm: GlobalResponseNorm | None
    fc2: nn.Linear | nn.Conv2d
    scale: nn.LayerScale | None
    drop_path: nn.DropPath
    activation: Callable[[Array], Array] = eqx.field(static=True)

    def __init__(self, config: ConvNeXtConfig, dim: int, kernel_size: int, *, key: PRNGKeyArray):
        key_conv, key1, key2 = jax.random.split(key, 3)
        self.conv = nn.Conv2d(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim, init=_init, key=key_conv)
        self.norm = _norm(config, dim)
        linear = partial(nn.Conv2d, kernel_size=1) if config.conv_mlp else nn.Linear
        self.fc1 = linear(dim, 4 * dim, init=_init, key=key1)
        self.response_norm = GlobalResponseNorm(4 * dim) if config.response_norm else None
        self.fc2 = linear(4 * dim, dim, init=_init, key=key2)
        self.scale = None if config.layer_scale is None else nn.LayerScale(dim, config.layer_scale)
        self.drop_path = nn.DropPath(config.drop_path)
        self.activation = nn.activation(config.activation)

    def __call__(
        self, x: Float[Array, "height width dim"], depth: Float[Array, ""], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "height width dim"]:
        y = self.activation(self.fc1(self.norm(self.conv(x))))
        y = self.fc2(y if self.response_norm is None else self.response_norm(y))
        y = y if self.scale is None else self.scale(y)
        return x + self.drop_path(y, depth, key=key)


class Stage(eqx.Module):
    """Blocks at one size, which all but the first stage have to get to first."""

    downsample: Downsample | None
    blocks: nn.Stack[Block]

    def __init__(self, config: ConvNeXtConfig, index: int, *, key: PRNGKeyArray):
        key_downsample, key_blocks = jax.random.split(key)
        before, width = config.widths[max(index - 1, 0)], config.widths[index]
        self.downsample = Downsample(config, before, width, key=key_downsample) if index else None
        block = partial(Block, config, width, config.kernel_sizes[index])
        self.blocks = nn.Stack(lambda key: block(key=key), config.depths[index], key=key_blocks)

    def __call__(
        self, x: Float[Array, "height width channels"], depths: Float[Array, " depth"], *, key: PRNGKeyArray | None
    ) -> Float[Array, "out_height out_width out"]:
        x = x if self.downsample is None else self.downsample(x)
        return self.blocks(x, each=depths, key=key)


class ConvNeXt(eqx.Module):
    stem: Stem
    stages: tuple[Stage, ...]
    pixel_norm: Norm | None
    norm: Norm | None
    hidden: nn.Linear | None
    dropout: nn.Dropout
    head: nn.Linear | None
    config: ConvNeXtConfig = eqx.field(static=True)

    def __init__(self, config: ConvNeXtConfig, *, key: PRNGKeyArray):
        key_stem, key_hidden, key_head, *stage_keys = jax.random.split(key, 3 + len(config.depths))
        self.stem = Stem(config, key=key_stem)
        self.stages = tuple(Stage(config, index, key=key) for index, key in enumerate(stage_keys))
        dim, hidden = config.widths[-1], config.head_hidden
        eps = config.norm_eps if config.head_norm_eps is None else config.head_norm_eps
        norm = _NORMS[config.norm](dim, eps=eps)
        self.pixel_norm, self.norm = (norm, None) if config.head_norm_first else (None, norm)
        self.hidden = None if hidden is None else nn.Linear(dim, hidden, init=_init, key=key_hidden)
        self.dropout = nn.Dropout(config.dropout)
        out = dim if hidden is None else hidden
        self.head = nn.Linear(out, config.num_classes, init=_init, key=key_head) if config.num_classes else None
        self.config = config

    @typed
    def features(
        self, x: Float[Array, "height width {self.config.in_channels}"], *, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, "_ _ _"], ...]:
        """The feature map of each stage, at 1/4, 1/8, 1/16 and 1/32 of the image's size."""
        maps, keys = [], nn.split_key(key, len(self.stages))
        y = self.stem(x)
        for stage, depths, stage_key in zip(self.stages, nn.block_depths(self.config.depths), keys, strict=True):
            y = stage(y, depths, key=stage_key)
            maps.append(y)
        return tuple(maps)

    @typed
    def __call__(
        self, x: Float[Array, "height width {self.config.in_channels}"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, " out"]:
        key_features, key_dropout = nn.split_key(key, 2)
        y = self.features(x, key=key_features)[-1]
        y = nn.global_avg_pool(y if self.pixel_norm is None else self.pixel_norm(y))
        y = y if self.norm is None else self.norm(y)
        y = y if self.hidden is None else nn.gelu(self.hidden(y))
        y = self.dropout(y, key=key_dropout)
        return y if self.head is None else self.head(y)


VARIANTS = {name: ConvNeXtConfig(**fields) for name, fields in ROWS.items()}

SHARDING = (
    (r".*(fc1|hidden|head)\.weight", P("model", "fsdp")),
    (r".*fc2\.weight", P("fsdp", "model")),
    (r".*(stem\.layers\.\d|downsample\.conv)\.weight", P("model", "fsdp")),
    (r".*blocks.*\.conv\.weight", P("model")),
)

FAMILY = Family(
    ConvNeXt,
    ConvNeXtConfig,
    VARIANTS,
    UPSTREAMS,
    sharding=SHARDING,
    adapters={"num_classes": adapt.new_head, "in_channels": adapt.mix_channels},
)
