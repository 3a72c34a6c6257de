"""MobileNet V1 to V4 (arXiv 1704.04861, 1801.04381, 1905.02244, 2404.10518), EfficientNet (1905.11946) and V2
(2104.00298), MnasNet (1807.11626), and what was found in the same space of blocks: MixNet (1907.09595), FBNet
(1812.03443, 2006.02049), Single-Path NAS (1904.02877), HardCoRe-NAS (2102.11646), TinyNet (2010.14819), LCNet
(2109.15099).

All are one network: a stem, stages of inverted residuals or their kin (`eqzoo.nn.inverted_residual`), a top, a head.
Their tables are in `_mobilenet_variants.py`.

Upstream: torchvision `mobilenetv2.py`, `mobilenetv3.py`, `efficientnet.py`, `mnasnet.py`; timm `efficientnet.py`,
`mobilenetv3.py`, `hardcorenas.py`. Deviations: none.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import typed
from eqzoo.checkpoint import BATCH_NORM, Rule, Transform, adapt, prefixed, staged
from eqzoo.models._family import Family, Option, Options, Upstream
from eqzoo.models.vision._mobilenet_config import MobileNetConfig, Run
from eqzoo.models.vision._mobilenet_variants import TIMM_NAMES, VARIANTS
from eqzoo.nn._init import Init, kaiming_fan_out, kaiming_fan_out_of_groups, uniform

Block = (
    nn.ConvBlock
    | nn.DepthwiseSeparable
    | nn.InvertedResidual
    | nn.FusedResidual
    | nn.UniversalInvertedResidual
    | nn.MobileAttention
)


class MobileNet(eqx.Module):
    """A run of like blocks stands in its stage where upstream counts its first block, and None for its others."""

    stem: nn.ConvNorm
    stages: tuple[tuple[nn.Stage | None, ...], ...]
    top_conv: nn.ConvNorm | None
    top_linear: nn.Linear | None
    top_norm: nn.BatchNorm | None
    dropout: nn.Dropout
    head: nn.Linear | None
    config: MobileNetConfig = eqx.field(static=True)

    def __init__(self, config: MobileNetConfig, *, key: PRNGKeyArray):
        key_stem, key_stages, key_top, key_head = jax.random.split(key, 4)
        conv, activation = partial(_conv_norm, config), nn.activation(config.activation)
        self.stem = conv(
            config.in_channels, config.stem_width, config.stem_kernel, stride=2, activation=activation, key=key_stem
        )
        stages, channels, total, dilation = [], config.stem_width, 2, 1
        for index, stage in enumerate(config.stages):
            blocks = []
            for number, run in enumerate(stage):
                make, before, stride = partial(_block, config, run), dilation, run.stride
                if total * stride > config.output_stride:
                    dilation, stride = dilation * stride, 1
                total *= stride
                first = dilation if config.dilate_at_once else before
                blocks.append(
                    nn.Stage(
                        lambda key: make(channels, stride, first, key=key),
                        lambda key: make(run.channels, 1, dilation, key=key),
                        run.repeats,
                        key=jax.random.fold_in(jax.random.fold_in(key_stages, index), number),
                    )
                )
                blocks += [None] * (run.repeats - 1)
                channels = run.channels
            stages.append(tuple(blocks))
        self.stages = tuple(stages)

        self.top_conv = self.top_linear = self.top_norm = None
        if config.top == "conv":
            self.top_conv = conv(channels, config.top_width, 1, activation=activation, key=key_top)
        elif config.top != "none":
            use_bias = config.top == "pooled_bias"
            self.top_linear = nn.Linear(
                channels, config.top_width, use_bias=use_bias, init=kaiming_fan_out, key=key_top
            )
            if config.top == "pooled_norm":
                self.top_norm = nn.BatchNorm(config.top_width, eps=config.norm_eps, momentum=config.norm_momentum)
        channels = channels if config.top == "none" else config.top_width
        self.dropout = nn.Dropout(config.dropout)
        self.head = (
            nn.Linear(channels, config.num_classes, init=_head_init, key=key_head) if config.num_classes else None
        )
        self.config = config

    @typed
    def features(
        self,
        x: Float[Array, "height width {self.config.in_channels}"],
        state: eqx.nn.State,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[tuple[Float[Array, "_ _ _"], ...], eqx.nn.State]:
        """The last feature map of each size: at 1/2, 1/4, 1/8, 1/16 and 1/32 of the image's, in most variants."""
        stem, maps, state = self._maps_of_runs(x, state, key=key)
        *before, last = stem, *(last for _, last in maps)
        starts = (0, *np.cumsum([len(stage) for stage in self.config.stages]))
        ends = [before[index] for index, run in enumerate(self.config.runs) if run.stride > 1 and index in starts]
        return (*ends, last), state

    @typed
    def first_features(
        self,
        x: Float[Array, "height width {self.config.in_channels}"],
        state: eqx.nn.State,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[tuple[Float[Array, "_ _ _"], ...], eqx.nn.State]:
        """The first feature map of each size, and the last of all: what torchvision's decoders read."""
        stem, maps, state = self._maps_of_runs(x, state, key=key)
        firsts = [first for (first, _), run in zip(maps, self.config.runs, strict=True) if run.stride > 1]
        return (stem, *firsts, maps[-1][1]), state

    def _maps_of_runs(
        self, x: Float[Array, "height width channels"], state: eqx.nn.State, *, key: PRNGKeyArray | None
    ) -> tuple[Array, list[tuple[Array, Array]], eqx.nn.State]:
        """The stem's map, and of each run what its first and its last block put out."""
        stem, state = self.stem(x, state)
        x, maps = stem, []
        runs = [run for stage in self.stages for run in stage if run is not None]
        depths = nn.block_depths([run.repeats for run in self.config.runs], endpoint=False)
        for run, each, key_run in zip(runs, depths, nn.split_key(key, len(runs)), strict=True):
            (first, x), state = run.first_and_last(x, state, each=each, key=key_run)
            maps.append((first, x))
        return stem, maps, state

    @typed
    def __call__(
        self,
        x: Float[Array, "height width {self.config.in_channels}"],
        state: eqx.nn.State,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, " out"], eqx.nn.State]:
        key_blocks, key_dropout = nn.split_key(key, 2)
        maps, state = self.features(x, state, key=key_blocks)
        y, state = self.pooled(maps[-1], state)
        return y if self.head is None else self.head(self.dropout(y, key=key_dropout)), state

    def pooled(
        self, x: Float[Array, "height width channels"], state: eqx.nn.State
    ) -> tuple[Float[Array, " dim"], eqx.nn.State]:
        """The last feature map through the top and the pool: what the head sees."""
        if self.top_conv is not None:
            x, state = self.top_conv(x, state)
        y = nn.global_avg_pool(x)
        if self.top_linear is not None:
            y = self.top_linear(y)
            if self.top_norm is not None:
                y, state = self.top_norm(y, state)
            y = nn.activation(self.config.activation)(y)
        return y, state


def _head_init(key: PRNGKeyArray, shape: Sequence[int]) -> Float[Array, "out in"]:
    return uniform(key, shape, 1 / sqrt(shape[0]))


def _conv_norm(
    config: MobileNetConfig,
    in_channels: int,
    out_channels: int,
    kernel: int | tuple[int, ...],
    *,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
    activation: Callable[[Array], Array] | None = None,
    init: Init | None = None,
    key: PRNGKeyArray,
) -> Any:
    """A convolution and its norm as this network has them."""
    options = {
        "stride": stride,
        "padding": None if config.padding == "centred" else config.padding,
        "dilation": dilation,
        "activation": activation,
        "eps": config.norm_eps,
        "momentum": config.norm_momentum,
        "init": kaiming_fan_out_of_groups(groups) if init is None else init,
        "key": key,
    }
    if isinstance(kernel, tuple):
        return nn.MixedConvNorm(in_channels, out_channels, kernel, depthwise=groups > 1, **options)
    return nn.ConvNorm(in_channels, out_channels, kernel, groups=groups, **options)


def _gate(
    config: MobileNetConfig, run: Run, in_channels: int, activation: Callable[[Array], Array], expansion: float
) -> Callable[..., nn.SqueezeExcite] | None:
    """What makes a block's squeeze-and-excite, of as many channels as it is told."""
    if not run.squeeze:
        return None
    ratio = run.squeeze / expansion if config.squeeze_of == "input" else run.squeeze
    chosen = activation if config.squeeze_activation is None else nn.activation(config.squeeze_activation)

    def make(channels: int, *, key: PRNGKeyArray) -> nn.SqueezeExcite:
        hidden = channels * ratio
        divisor = config.squeeze_divisor
        hidden = round(hidden) if divisor == 1 else nn.round_channels(hidden, divisor, limit=config.squeeze_limit)
        gate = nn.activation(config.squeeze_gate)
        return nn.SqueezeExcite(channels, hidden, activation=chosen, gate=gate, init=kaiming_fan_out, key=key)

    return make


def _block(
    config: MobileNetConfig, run: Run, in_channels: int, stride: int, dilation: int, *, key: PRNGKeyArray
) -> Block:
    activation = nn.activation(run.activation or config.activation)
    has_shortcut = run.shortcut and stride == 1 and in_channels == run.channels
    common: dict[str, Any] = {
        "drop_path": nn.DropPath(config.drop_path) if has_shortcut else None,
        "conv": partial(_conv_norm, config, dilation=dilation),
        "key": key,
    }
    if run.kind == "attention":
        return nn.MobileAttention(
            in_channels,
            run.channels,
            heads=run.heads,
            dim_head=run.dim_head,
            kernel=run.kernel,
            kv_stride=run.kv_stride,
            eps=config.norm_eps,
            momentum=config.norm_momentum,
            layer_scale=config.layer_scale,
            **common,
        )
    shared: dict[str, Any] = {"stride": stride, "activation": activation, **common}
    if run.kind == "conv":
        return nn.ConvBlock(in_channels, run.channels, kernel=run.kernel, **shared)
    if run.kind == "separable":
        return nn.DepthwiseSeparable(
            in_channels,
            run.channels,
            kernel=run.kernel,
            group_size=run.group_size,
            last_activation=activation if run.last_activation else None,
            squeeze_excite=_gate(config, run, in_channels, activation, 1.0),
            **shared,
        )
    hidden = nn.round_channels(in_channels * run.expansion, limit=0.9)
    if run.kind == "universal":
        return nn.UniversalInvertedResidual(
            in_channels,
            run.channels,
            hidden=hidden,
            start_kernel=run.start_kernel,
            kernel=run.kernel,
            layer_scale=config.layer_scale,
            **shared,
        )
    gate = _gate(config, run, in_channels, activation, run.expansion)
    if run.kind == "fused":
        groups = hidden // run.group_size if run.group_size > 1 else 1
        return nn.FusedResidual(
            in_channels, run.channels, hidden=hidden, kernel=run.kernel, groups=groups, squeeze_excite=gate, **shared
        )
    return nn.InvertedResidual(
        in_channels,
        run.channels,
        hidden=hidden,
        kernels=(run.start_kernel, run.kernel, run.end_kernel),
        group_size=run.group_size,
        squeeze_excite=gate,
        **shared,
    )


def _conv(source: str, target: str) -> tuple[Rule, ...]:
    """A convolution in one piece or in parts, by upstream's name."""
    return (
        Rule(rf"{source}\.weight", f"{target}.conv.weight"),
        Rule(rf"{source}\.(\d)\.weight", f"{target}.conv.convs.{{0}}.weight"),
    )


def _norm(source: str, target: str) -> tuple[Rule, ...]:
    return prefixed(rf"{source}\.", f"{target}.norm.", BATCH_NORM)


_STARTS = sorted({start for config in VARIANTS.values() for _, start, position in config.blocks if position})


def _at_every_start(source: str, target: str, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The rules of a block for each block of a stage: a run stands where upstream counts its first block."""
    number = len(re.findall(r"\(", source))
    return (
        *prefixed(rf"{source}(\d+)\.", f"{target}{{{number}}}.first.", rules),
        *(
            rule
            for start in _STARTS
            for rule in prefixed(rf"{source}(\d+)\.", f"{target}{start}.rest[{{{number}-{start + 1}}}].", rules)
        ),
    )


_TO_LINEAR = Transform(lambda tensor, shapes: [tensor[:, :, 0, 0]], lambda parts: parts[0][:, :, None, None])

# Of parts that timm calls alike, a block has one.
_TIMM_BLOCK = (
    *(*_conv("conv", "conv"), *_norm("bn1", "conv")),
    *(*_conv("conv_pw", "expand"), *_norm("bn1", "expand")),
    *(*_conv("conv_dw", "filter"), *_norm("bn2", "filter")),
    *(*_conv("conv_pwl", "project"), *_norm("bn3", "project")),
    *(*_conv("conv_dw", "depthwise"), *_norm("bn1", "depthwise")),
    *(*_conv("conv_pw", "pointwise"), *_norm("bn2", "pointwise")),
    *(*_conv("conv_exp", "fused"), *_norm("bn1", "fused")),
    *(*_conv("conv_pwl", "reduce"), *_norm("bn2", "reduce")),
    Rule(r"se\.conv_reduce\.(weight|bias)", "squeeze_excite.fc1.{0}"),
    Rule(r"se\.conv_expand\.(weight|bias)", "squeeze_excite.fc2.{0}"),
    Rule(r"(dw_start|pw_exp|dw_mid|pw_proj)\.conv\.weight", "{0}.conv.weight"),
    *prefixed(r"(dw_start|pw_exp|dw_mid|pw_proj)\.bn\.", "{0}.norm.", BATCH_NORM),
    *prefixed(r"norm\.", "norm.", BATCH_NORM),
    Rule(r"attn\.(query|key|value)\.proj\.weight", "{0}.weight", _TO_LINEAR),
    Rule(r"attn\.output\.proj\.weight", "out.weight", _TO_LINEAR),
    Rule(r"attn\.(key|value)\.down_conv\.weight", "{0}_down.conv.weight"),
    *prefixed(r"attn\.(key|value)\.norm\.", "{0}_down.norm.", BATCH_NORM),
    Rule(r"layer_scale\.gamma", "layer_scale.weight"),
)

TIMM = (
    *(*_conv("conv_stem", "stem"), *_norm("bn1", "stem")),
    *_at_every_start(r"blocks\.(\d)\.", "stages.{0}.", _TIMM_BLOCK),
    *(*_conv("conv_head", "top_conv"), *_norm("bn2", "top_conv")),
    Rule(r"conv_head\.weight", "top_linear.weight", _TO_LINEAR),
    Rule(r"conv_head\.bias", "top_linear.bias"),
    *prefixed(r"norm_head\.", "top_norm.", BATCH_NORM),
    Rule(r"classifier\.(weight|bias)", "head.{0}"),
)


def _torchvision_conv(source: str, target: str) -> tuple[Rule, ...]:
    return (Rule(rf"{source}\.0\.weight", f"{target}.conv.weight"), *_norm(rf"{source}\.1", target))


def _torchvision_gate(source: str) -> Rule:
    return Rule(rf"{source}\.(fc\d)\.(weight|bias)", "squeeze_excite.{0}.{1}")


def _torchvision_efficientnet(stages: int) -> tuple[Rule, ...]:
    """`features` are the stem, so many stages, and the top; the first stage's blocks don't expand."""
    first = (
        *_torchvision_conv(r"block\.0", "conv"),
        *_torchvision_conv(r"block\.0", "depthwise"),
        _torchvision_gate(r"block\.1"),
        *_torchvision_conv(r"block\.2", "pointwise"),
    )
    others = (
        *_torchvision_conv(r"block\.0", "expand"),
        *_torchvision_conv(r"block\.1", "filter"),
        _torchvision_gate(r"block\.2"),
        *_torchvision_conv(r"block\.3", "project"),
        *_torchvision_conv(r"block\.0", "fused"),
        *_torchvision_conv(r"block\.1", "reduce"),
    )
    return (
        *_torchvision_conv(r"features\.0", "stem"),
        *staged(r"features\.1\.", "stages.0.0.", first),
        *staged(r"features\.([2-7])\.", "stages.{0-1}.0.", others),
        *_torchvision_conv(rf"features\.{stages + 1}", "top_conv"),
        Rule(r"classifier\.1\.(weight|bias)", "head.{0}"),
    )


def _torchvision_mobilenet(name: str, block: Callable[[Run], tuple[Rule, ...]]) -> tuple[Rule, ...]:
    """The stem and then all blocks in a row, whatever their stage."""
    config = VARIANTS[name]
    runs = [run for run in config.runs for _ in range(run.repeats)]
    rules = _torchvision_conv("0", "stem")
    for number, (run, (stage, start, position)) in enumerate(zip(runs, config.blocks, strict=True), start=1):
        target = f"stages.{stage}.{start}." + (f"rest[{position - 1}]." if position else "first.")
        rules += prefixed(rf"{number}\.", target, block(run))
    return rules


def _torchvision_v2_block(run: Run) -> tuple[Rule, ...]:
    if run.kind == "separable":
        return (
            *_torchvision_conv(r"conv\.0", "depthwise"),
            *(Rule(r"conv\.1\.weight", "pointwise.conv.weight"), *_norm(r"conv\.2", "pointwise")),
        )
    return (
        *_torchvision_conv(r"conv\.0", "expand"),
        *_torchvision_conv(r"conv\.1", "filter"),
        *(Rule(r"conv\.2\.weight", "project.conv.weight"), *_norm(r"conv\.3", "project")),
    )


def _torchvision_v3_block(run: Run) -> tuple[Rule, ...]:
    if run.kind == "conv":
        return (Rule(r"0\.weight", "conv.conv.weight"), *_norm("1", "conv"))
    names = ["depthwise", "pointwise"] if run.kind == "separable" else ["expand", "filter", "project"]
    *before, last = names
    number = len(before)
    rules = [rule for index, name in enumerate(before) for rule in _torchvision_conv(rf"block\.{index}", name)]
    if run.squeeze:
        rules.append(_torchvision_gate(rf"block\.{number}"))
        number += 1
    return (*rules, *_torchvision_conv(rf"block\.{number}", last))


_TOP = len(list(VARIANTS["mobilenet_v2"].blocks)) + 1
TORCHVISION_V2 = (
    *prefixed(r"features\.", "", _torchvision_mobilenet("mobilenet_v2", _torchvision_v2_block)),
    *_torchvision_conv(rf"features\.{_TOP}", "top_conv"),
    Rule(r"classifier\.1\.(weight|bias)", "head.{0}"),
)

_V3_TOP = (Rule(r"classifier\.0\.(weight|bias)", "top_linear.{0}"), Rule(r"classifier\.3\.(weight|bias)", "head.{0}"))
TORCHVISION_V3_LARGE_FEATURES = _torchvision_mobilenet("mobilenet_v3_large", _torchvision_v3_block)
TORCHVISION_V3_LARGE = (*prefixed(r"features\.", "", TORCHVISION_V3_LARGE_FEATURES), *_V3_TOP)
TORCHVISION_V3_SMALL = (
    *prefixed(r"features\.", "", _torchvision_mobilenet("mobilenet_v3_small", _torchvision_v3_block)),
    *_V3_TOP,
)

_MNASNET_BLOCK = (
    *(Rule(r"layers\.0\.weight", "expand.conv.weight"), *_norm(r"layers\.1", "expand")),
    *(Rule(r"layers\.3\.weight", "filter.conv.weight"), *_norm(r"layers\.4", "filter")),
    *(Rule(r"layers\.6\.weight", "project.conv.weight"), *_norm(r"layers\.7", "project")),
)
TORCHVISION_MNASNET = (
    *(Rule(r"layers\.0\.weight", "stem.conv.weight"), *_norm(r"layers\.1", "stem")),
    *(Rule(r"layers\.3\.weight", "stages.0.0.first.depthwise.conv.weight"),),
    *_norm(r"layers\.4", "stages.0.0.first.depthwise"),
    *(Rule(r"layers\.6\.weight", "stages.0.0.first.pointwise.conv.weight"),),
    *_norm(r"layers\.7", "stages.0.0.first.pointwise"),
    *staged(r"layers\.(\d+)\.", "stages.{0-7}.0.", _MNASNET_BLOCK),
    *(Rule(r"layers\.14\.weight", "top_conv.conv.weight"), *_norm(r"layers\.15", "top_conv")),
    Rule(r"classifier\.1\.(weight|bias)", "head.{0}"),
)

_TIMM_ACTIVATIONS = {
    "relu": "relu",
    "relu6": "relu6",
    "silu": "silu",
    "swish": "silu",
    "hard_swish": "hard_swish",
    "gelu": "gelu",
}
TIMM_OPTIONS = Options(
    {
        "act_layer": Option("activation", _TIMM_ACTIVATIONS),
        "pad_type": Option("padding", {"": "centred", "same": "same_tf"}),
        "bn_eps": "norm_eps",
        "bn_momentum": "norm_momentum",
        "output_stride": "output_stride",
        "in_chans": "in_channels",
        "num_classes": "num_classes",
    },
    fixed={"global_pool": "avg"},
    ignored=(r"drop_(path_)?rate",),
)

SHARDING = (
    (r".*conv\.(convs\.\d\.)?weight", P("model", "fsdp")),
    (r"(.*\.(query|key|value|out)|head|top_linear)\.weight", P("model", "fsdp")),
)

_EFFICIENTNETS = (
    *("efficientnet_b[0-4]", "torchvision/efficientnet_b[5-7]", "efficientnet_v2_m", "efficientnet_v2_l"),
)
_CLASSES = Options({"num_classes": "num_classes"})

FAMILY = Family(
    MobileNet,
    MobileNetConfig,
    VARIANTS,
    upstreams={
        "timm": Upstream(TIMM, TIMM_OPTIONS, names=TIMM_NAMES),
        "torchvision": Upstream(_torchvision_efficientnet(7), _CLASSES, names=_EFFICIENTNETS),
        "torchvision_v2_s": Upstream(_torchvision_efficientnet(6), _CLASSES, names=("efficientnet_v2_s",)),
        "torchvision_mobilenet_v2": Upstream(TORCHVISION_V2, _CLASSES, names=("mobilenet_v2",)),
        "torchvision_mobilenet_v3_large": Upstream(TORCHVISION_V3_LARGE, _CLASSES, names=("mobilenet_v3_large",)),
        "torchvision_mobilenet_v3_small": Upstream(TORCHVISION_V3_SMALL, _CLASSES, names=("mobilenet_v3_small",)),
        "torchvision_mnasnet": Upstream(TORCHVISION_MNASNET, _CLASSES, names=("mnasnet[01]_*",), version=2),
    },
    sharding=SHARDING,
    adapters={"num_classes": adapt.new_head, "in_channels": adapt.mix_channels},
)
