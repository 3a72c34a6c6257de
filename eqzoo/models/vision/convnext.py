"""ConvNeXt (Liu et al., 2022, arXiv 2201.03545), ConvNeXt V2 with its global response norm (Woo et al., 2023,
2301.00808), timm's small variants of both, and the image towers of OpenCLIP (2212.07143) and DINOv3 (2508.10104).

Upstream: torchvision `convnext.py` and timm `convnext.py`, which agree wherever both have a variant; transformers'
`ConvNextForImageClassification`, `ConvNextV2ForImageClassification`, their bodies, and `DINOv3ConvNextModel`.
Deviations: the variants that torchvision has too drop paths in training at its rates, the paper's; timm's default is 0.
"""

from collections.abc import Callable
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
from eqzoo.checkpoint import Rule, Transform, adapt, prefixed
from eqzoo.models._family import Family, Option, Options, Upstream, count_labels
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


def _convnext(width: int, *depths: int, **options: Any) -> ConvNeXtConfig:
    return ConvNeXtConfig(depths=depths, widths=(width, 2 * width, 4 * width, 8 * width), **options)


_V2: dict[str, Any] = {"response_norm": True, "layer_scale": None}
_CONV: dict[str, Any] = {"conv_mlp": True}
_TEST: dict[str, Any] = {"widths": (32, 64, 96, 128), "depths": (1, 1, 1, 1), "norm_eps": 1e-5}

VARIANTS = {
    # torchvision and timm
    "convnext_tiny": _convnext(96, 3, 3, 9, 3, drop_path=0.1),
    "convnext_small": _convnext(96, 3, 3, 27, 3, drop_path=0.4),
    "convnext_base": _convnext(128, 3, 3, 27, 3, drop_path=0.5),
    "convnext_large": _convnext(192, 3, 3, 27, 3, drop_path=0.5),
    # timm
    "convnext_zepto_rms": _convnext(32, 2, 2, 4, 2, norm="simple", **_CONV),
    "convnext_zepto_rms_ols": _convnext(32, 2, 2, 4, 2, norm="simple", stem="overlap_act", **_CONV),
    "convnext_atto": _convnext(40, 2, 2, 6, 2, **_CONV),
    "convnext_atto_ols": _convnext(40, 2, 2, 6, 2, stem="overlap_tiered", **_CONV),
    "convnext_atto_rms": _convnext(40, 2, 2, 6, 2, norm="rms", **_CONV),
    "convnext_femto": _convnext(48, 2, 2, 6, 2, **_CONV),
    "convnext_femto_ols": _convnext(48, 2, 2, 6, 2, stem="overlap_tiered", **_CONV),
    "convnext_pico": _convnext(64, 2, 2, 6, 2, **_CONV),
    "convnext_pico_ols": _convnext(64, 2, 2, 6, 2, stem="overlap_tiered", **_CONV),
    "convnext_nano": _convnext(80, 2, 2, 8, 2, **_CONV),
    "convnext_nano_ols": _convnext(80, 2, 2, 8, 2, stem="overlap", **_CONV),
    "convnext_tiny_hnf": _convnext(96, 3, 3, 9, 3, head_norm_first=True, **_CONV),
    "convnext_large_mlp": _convnext(192, 3, 3, 27, 3, head_hidden=1536),
    "convnext_xlarge": _convnext(256, 3, 3, 27, 3),
    "convnext_xxlarge": _convnext(384, 3, 4, 30, 3, norm_eps=1e-5),
    "convnextv2_atto": _convnext(40, 2, 2, 6, 2, **_V2, **_CONV),
    "convnextv2_femto": _convnext(48, 2, 2, 6, 2, **_V2, **_CONV),
    "convnextv2_pico": _convnext(64, 2, 2, 6, 2, **_V2, **_CONV),
    "convnextv2_nano": _convnext(80, 2, 2, 8, 2, **_V2, **_CONV),
    "convnextv2_tiny": _convnext(96, 3, 3, 9, 3, **_V2),
    "convnextv2_small": _convnext(96, 3, 3, 27, 3, **_V2),
    "convnextv2_base": _convnext(128, 3, 3, 27, 3, **_V2),
    "convnextv2_large": _convnext(192, 3, 3, 27, 3, **_V2),
    "convnextv2_huge": _convnext(352, 3, 3, 27, 3, **_V2),
    "test_convnext": ConvNeXtConfig(
        depths=(1, 2, 4, 2), widths=(24, 32, 48, 64), norm_eps=1e-5, activation="gelu_tanh"
    ),
    "test_convnext2": ConvNeXtConfig(activation="gelu_tanh", **_TEST),
    "test_convnext3": ConvNeXtConfig(activation="silu", kernel_sizes=(7, 5, 5, 3), **_TEST),
}

# Upstream keeps some vectors as images of one pixel, and a matrix may be a 1x1 convolution here.
_COLUMN = Transform(lambda tensor, shapes: [tensor.reshape(shapes[0])], lambda parts: parts[0][:, None, None])
_ROW = Transform(lambda tensor, shapes: [tensor.reshape(shapes[0])], lambda parts: parts[0][None, None, None])
_MATRIX = Transform(
    lambda tensor, shapes: [tensor.reshape(shapes[0])], lambda parts: parts[0].reshape(parts[0].shape[:2])
)

_TORCHVISION_BLOCK = (
    Rule(r"block\.0\.(weight|bias)", "conv.{0}"),
    Rule(r"block\.2\.(weight|bias)", "norm.{0}"),
    Rule(r"block\.3\.(weight|bias)", "fc1.{0}"),
    Rule(r"block\.5\.(weight|bias)", "fc2.{0}"),
    Rule(r"layer_scale", "scale.weight", _COLUMN),
)

TORCHVISION = (
    Rule(r"features\.0\.(\d)\.(weight|bias)", "stem.layers.{0}.{1}"),
    *prefixed(r"features\.1\.(\d+)\.", "stages.0.blocks[{0}].", _TORCHVISION_BLOCK),
    *prefixed(r"features\.3\.(\d+)\.", "stages.1.blocks[{0}].", _TORCHVISION_BLOCK),
    *prefixed(r"features\.5\.(\d+)\.", "stages.2.blocks[{0}].", _TORCHVISION_BLOCK),
    *prefixed(r"features\.7\.(\d+)\.", "stages.3.blocks[{0}].", _TORCHVISION_BLOCK),
    *(
        Rule(rf"features\.{2 * stage}\.{number}\.(weight|bias)", f"stages.{stage}.downsample.{layer}.{{0}}")
        for stage in (1, 2, 3)
        for number, layer in enumerate(("norm", "conv"))
    ),
    Rule(r"classifier\.0\.(weight|bias)", "norm.{0}"),
    Rule(r"classifier\.2\.(weight|bias)", "head.{0}"),
)

_TIMM_BLOCK = (
    Rule(r"conv_dw\.(weight|bias)", "conv.{0}"),
    Rule(r"norm\.(weight|bias)", "norm.{0}"),
    Rule(r"mlp\.fc(\d)\.(weight|bias)", "fc{0}.{1}"),
    Rule(r"mlp\.grn\.(weight|bias)", "response_norm.{0}"),
    Rule(r"gamma", "scale.weight"),
)

TIMM = (
    Rule(r"stem\.(\d)\.(weight|bias)", "stem.layers.{0}.{1}"),
    Rule(r"stages\.(\d)\.downsample\.0\.(weight|bias)", "stages.{0}.downsample.norm.{1}"),
    Rule(r"stages\.(\d)\.downsample\.1\.(weight|bias)", "stages.{0}.downsample.conv.{1}"),
    *prefixed(r"stages\.(\d)\.blocks\.(\d+)\.", "stages.{0}.blocks[{1}].", _TIMM_BLOCK),
    Rule(r"head\.norm\.(weight|bias)", "norm.{0}"),
    Rule(r"norm_pre\.(weight|bias)", "pixel_norm.{0}"),
    Rule(r"head\.pre_logits\.fc\.(weight|bias)", "hidden.{0}"),
    Rule(r"head\.fc\.(weight|bias)", "head.{0}"),
)

_TRANSFORMERS_BLOCK = (
    Rule(r"dwconv\.(weight|bias)", "conv.{0}"),
    Rule(r"layernorm\.(weight|bias)", "norm.{0}"),
    Rule(r"pwconv(\d)\.weight", "fc{0}.weight", _MATRIX),
    Rule(r"pwconv(\d)\.bias", "fc{0}.bias"),
    Rule(r"grn\.(weight|bias)", "response_norm.{0}", _ROW),
    Rule(r"layer_scale_parameter", "scale.weight"),
)

TRANSFORMERS_BODY = (
    Rule(r"embeddings\.patch_embeddings\.(weight|bias)", "stem.layers.0.{0}"),
    Rule(r"embeddings\.layernorm\.(weight|bias)", "stem.layers.1.{0}"),
    Rule(r"encoder\.stages\.(\d)\.downsampling_layer\.0\.(weight|bias)", "stages.{0}.downsample.norm.{1}"),
    Rule(r"encoder\.stages\.(\d)\.downsampling_layer\.1\.(weight|bias)", "stages.{0}.downsample.conv.{1}"),
    *prefixed(r"encoder\.stages\.(\d)\.layers\.(\d+)\.", "stages.{0}.blocks[{1}].", _TRANSFORMERS_BLOCK),
    Rule(r"layernorm\.(weight|bias)", "norm.{0}"),
)
_TRANSFORMERS_HEAD = Rule(r"classifier\.(weight|bias)", "head.{0}")
TRANSFORMERS = (*prefixed(r"convnext\.", "", TRANSFORMERS_BODY), _TRANSFORMERS_HEAD)
TRANSFORMERS_V2 = (*prefixed(r"convnextv2\.", "", TRANSFORMERS_BODY), _TRANSFORMERS_HEAD)

_DINOV3_STAGE = (
    Rule(r"layers\.(\d+)\.depthwise_conv\.(weight|bias)", "blocks[{0}].conv.{1}"),
    Rule(r"layers\.(\d+)\.layer_norm\.(weight|bias)", "blocks[{0}].norm.{1}"),
    Rule(r"layers\.(\d+)\.pointwise_conv(\d)\.weight", "blocks[{0}].fc{1}.weight", _MATRIX),
    Rule(r"layers\.(\d+)\.pointwise_conv(\d)\.bias", "blocks[{0}].fc{1}.bias"),
    Rule(r"layers\.(\d+)\.gamma", "blocks[{0}].scale.weight"),
)

_DINOV3_STAGES = (
    Rule(r"stages\.0\.downsample_layers\.(\d)\.(weight|bias)", "stem.layers.{0}.{1}"),
    Rule(r"stages\.(\d)\.downsample_layers\.0\.(weight|bias)", "stages.{0}.downsample.norm.{1}"),
    Rule(r"stages\.(\d)\.downsample_layers\.1\.(weight|bias)", "stages.{0}.downsample.conv.{1}"),
    *prefixed(r"stages\.(\d)\.", "stages.{0}.", _DINOV3_STAGE),
)

TRANSFORMERS_DINOV3 = (
    *_DINOV3_STAGES,
    *prefixed(r"model\.", "", _DINOV3_STAGES),  # in memory, since transformers 5
    Rule(r"layer_norm\.(weight|bias)", "norm.{0}"),
)


def _prepare_timm(options: dict[str, Any]) -> dict[str, Any]:
    """timm may state one kernel size for all stages, and None where it takes a default."""
    defaults = {"norm_eps": 1e-6, "norm_layer": "layernorm", "head_hidden_size": None}
    options = {name: value or defaults.get(name, value) for name, value in options.items()}
    if isinstance(size := options.get("kernel_sizes"), int):
        options["kernel_sizes"] = 4 * (size,)
    return options


_TIMM_NORMS = {"layernorm": "layer", "rmsnorm": "rms", "simplenorm": "simple"}

TIMM_OPTIONS = Options(
    {
        "depths": "depths",
        "dims": "widths",
        "kernel_sizes": "kernel_sizes",
        "stem_type": Option("stem", {kind: kind for kind in ("patch", "overlap", "overlap_tiered", "overlap_act")}),
        # With smaller patches timm halves the size once more, with larger ones not as often.
        "patch_size": Option("patch_size", {size: size for size in (4, 3, 5, 6, 7)}),
        "norm_layer": Option("norm", _TIMM_NORMS | {f"{name}2d": ours for name, ours in _TIMM_NORMS.items()}),
        "norm_eps": "norm_eps",
        "act_layer": Option("activation", {name: name for name in ("gelu", "gelu_tanh", "quick_gelu", "silu", "relu")}),
        "use_grn": "response_norm",
        "ls_init_value": "layer_scale",
        "conv_mlp": "conv_mlp",
        "head_norm_first": "head_norm_first",
        "head_hidden_size": "head_hidden",
        "in_chans": "in_channels",
        "drop_rate": "dropout",
        "drop_path_rate": "drop_path",
        "num_classes": "num_classes",
    },
    fixed={"global_pool": "avg", "output_stride": 32, "conv_bias": True},
    ignored=("head_init_scale",),
    prepare=_prepare_timm,
)

_TRANSFORMERS_TABLE = {
    "hidden_sizes": "widths",
    "depths": "depths",
    "kernel_sizes": "kernel_sizes",
    "conv_mlp": "conv_mlp",
    "patch_size": "patch_size",
    "num_channels": "in_channels",
    "hidden_act": Option(
        "activation",
        {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"}
        | {"quick_gelu": "quick_gelu", "silu": "silu", "swish": "silu", "relu": "relu"},
    ),
    "drop_path_rate": "drop_path",
}


def _prepare_transformers(options: dict[str, Any], classifier: str | None, body: str) -> dict[str, Any]:
    """transformers has one kernel size, and writes no layer scale as 0."""
    defaults = {"hidden_sizes": (96, 192, 384, 768), "depths": (3, 3, 9, 3), "drop_path_rate": 0.0}
    options = {**defaults, **count_labels(options, classifier=classifier or body, body=body)}
    stages = len(options["depths"])
    if options.get("num_stages", stages) != stages:
        raise ValueError(f"num_stages={options['num_stages']} is not supported; eqzoo has one for each of `depths`")
    if isinstance(size := options.get("patch_size"), list | tuple):
        if len(set(size)) != 1:
            raise ValueError(f"patch_size={size} is not supported; eqzoo has square patches")
        options["patch_size"] = size[0]
    if "layer_scale_init_value" in options:
        options["layer_scale_init_value"] = options["layer_scale_init_value"] or None
    return {**options, "kernel_sizes": stages * (7,)}


def _restore_transformers(options: dict[str, Any]) -> dict[str, Any]:
    sizes = options.pop("kernel_sizes")
    if {*sizes} != {7}:
        raise ValueError(f"transformers' ConvNeXt has kernels of size 7, but kernel_sizes={sizes}; use `eqzoo.save`")
    del options["conv_mlp"]  # its linear layers are these
    if "layer_scale_init_value" in options:
        options["layer_scale_init_value"] = options["layer_scale_init_value"] or 0.0
    return {**options, "num_stages": len(options["depths"])}


def _prepare_classifier(options: dict[str, Any], *, name: str) -> dict[str, Any]:
    """The epsilon that transformers states is that of the last norm only."""
    options = _prepare_transformers(options, f"{name}ForImageClassification", f"{name}Model")
    eps = options.get("layer_norm_eps", 1e-12)
    return {**options, "layer_norm_eps": None if eps == 1e-6 else eps}


def _restore_classifier(options: dict[str, Any]) -> dict[str, Any]:
    eps = options["layer_norm_eps"]
    return _restore_transformers({**options, "layer_norm_eps": 1e-6 if eps is None else eps})


_CLASSIFIER = {**_TRANSFORMERS_TABLE, "layer_norm_eps": "head_norm_eps", "num_labels": "num_classes"}
TRANSFORMERS_OPTIONS = Options(
    {**_CLASSIFIER, "layer_scale_init_value": "layer_scale"},
    lenient=True,
    prepare=partial(_prepare_classifier, name="ConvNext"),
    restore=_restore_classifier,
)
TRANSFORMERS_V2_OPTIONS = Options(
    _CLASSIFIER,
    lenient=True,
    prepare=partial(_prepare_classifier, name="ConvNextV2"),
    restore=_restore_classifier,
)


def _restore_dinov3(options: dict[str, Any]) -> dict[str, Any]:
    if options["layer_scale_init_value"] is None:
        raise ValueError("transformers' DINOv3 always has layer scales, but layer_scale=None; use `eqzoo.save`")
    options = _restore_transformers(options)
    del options["num_stages"]
    return options


DINOV3_OPTIONS = Options(
    {**_TRANSFORMERS_TABLE, "layer_norm_eps": "norm_eps", "layer_scale_init_value": "layer_scale"},
    lenient=True,
    implied={"num_classes": 0},
    prepare=partial(_prepare_transformers, classifier=None, body="DINOv3ConvNextModel"),
    restore=_restore_dinov3,
)

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
    upstreams={
        "torchvision": Upstream(
            TORCHVISION,
            Options({"num_classes": "num_classes"}),
            names=("convnext_tiny", "convnext_small", "convnext_base", "convnext_large"),
        ),
        "timm": Upstream(TIMM, TIMM_OPTIONS, names=("*",)),
        "transformers": Upstream(
            TRANSFORMERS,
            TRANSFORMERS_OPTIONS,
            names=("convnext_tiny", "convnext_small", "convnext_base", "convnext_large", "convnext_xlarge"),
            model_type="convnext",
            architecture="ConvNextForImageClassification",
            base="convnext_tiny",
        ),
        "transformers_v2": Upstream(
            TRANSFORMERS_V2,
            TRANSFORMERS_V2_OPTIONS,
            names=("convnextv2_*",),
            model_type="convnextv2",
            architecture="ConvNextV2ForImageClassification",
            base="convnextv2_tiny",
        ),
        "transformers_body": Upstream(TRANSFORMERS_BODY),
        "transformers_dinov3": Upstream(
            TRANSFORMERS_DINOV3,
            DINOV3_OPTIONS,
            names=("convnext_tiny", "convnext_small", "convnext_base", "convnext_large"),
            model_type="dinov3_convnext",
            architecture="DINOv3ConvNextModel",
            base="convnext_tiny",
        ),
    },
    sharding=SHARDING,
    adapters={"num_classes": adapt.new_head, "in_channels": adapt.mix_channels},
)
