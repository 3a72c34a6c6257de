"""Semantic segmentation on a dilated backbone: FCN (Long et al., 2015, arXiv 1411.4038) and DeepLabV3 (Chen et al.,
2017, arXiv 1706.05587), and for small devices LR-ASPP (Howard et al., 2019, arXiv 1905.02244).

Upstream: torchvision `segmentation/`. A class for every pixel is read off the backbone's last map, and the answer is
resized to the image's size. Deviations: none.
"""

from dataclasses import dataclass
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import check_choices, typed
from eqzoo.checkpoint import BATCH_NORM, Rule, Transform, adapt, prefixed
from eqzoo.models._backbone import feature_channels, feature_maps, make_backbone
from eqzoo.models._family import Family, Options, Upstream
from eqzoo.models.vision import _resnet_upstream as resnet
from eqzoo.models.vision.mobilenet import TORCHVISION_V3_LARGE_FEATURES


@dataclass(frozen=True, kw_only=True)
class SegmenterConfig:
    """`backbone` is the name of a classifier of the zoo, of whose maps `read` says which they are: the last of each
    size, or the first. `decoder` is FCN's, DeepLabV3's or LR-ASPP's. It takes the last map; LR-ASPP adds what it reads
    off the map of index `side`. Beside the others, an `aux_head` reads that map in training, which helps the backbone
    learn."""

    backbone: str
    decoder: Literal["fcn", "aspp", "lraspp"]
    output_stride: Literal[8, 16, 32] = 8
    read: Literal["features", "first_features"] = "features"
    side: int = -2
    aux_head: bool = False
    dropout: float = 0.1
    pyramid_dropout: float = 0.5
    in_channels: int = 3
    num_classes: int = 21

    def __post_init__(self):
        check_choices(self)
        if self.aux_head and self.decoder == "lraspp":
            raise ValueError(
                "aux_head=True is not for decoder='lraspp', which reads the side map itself; leave aux_head out"
            )


class FCNDecoder(eqx.Module):
    """A 3x3 convolution to a quarter of the channels."""

    conv: nn.ConvNorm
    dropout: nn.Dropout
    out_channels: int = eqx.field(static=True)

    def __init__(self, in_channels: int, dropout: float, *, key: PRNGKeyArray):
        self.out_channels = in_channels // 4
        self.conv = nn.ConvNorm(in_channels, self.out_channels, 3, activation=jax.nn.relu, key=key)
        self.dropout = nn.Dropout(dropout)

    def __call__(
        self, x: Float[Array, "height width channels"], state: eqx.nn.State, *, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, "height width out"], eqx.nn.State]:
        x, state = self.conv(x, state)
        return self.dropout(x, key=key), state


class PyramidDecoder(eqx.Module):
    """Atrous spatial pyramid pooling: the map through a 1x1 convolution, through 3x3 convolutions of growing dilation,
    and as its average, side by side; then a 3x3 convolution."""

    pointwise: nn.ConvNorm
    dilated: tuple[nn.ConvNorm, ...]
    pooled: nn.ConvNorm
    project: nn.ConvNorm
    dropout: nn.Dropout
    last: nn.ConvNorm
    out_channels: int = eqx.field(static=True)

    def __init__(
        self,
        in_channels: int,
        dropout: float,
        *,
        out_channels: int = 256,
        dilations: tuple[int, ...] = (12, 24, 36),
        key: PRNGKeyArray,
    ):
        relu = jax.nn.relu
        key_point, key_pooled, key_project, key_last, *keys = jax.random.split(key, 4 + len(dilations))
        self.pointwise = nn.ConvNorm(in_channels, out_channels, 1, activation=relu, key=key_point)
        self.dilated = tuple(
            nn.ConvNorm(in_channels, out_channels, 3, dilation=dilation, activation=relu, key=key)
            for dilation, key in zip(dilations, keys, strict=True)
        )
        self.pooled = nn.ConvNorm(in_channels, out_channels, 1, activation=relu, key=key_pooled)
        branches = 2 + len(dilations)
        self.project = nn.ConvNorm(branches * out_channels, out_channels, 1, activation=relu, key=key_project)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.ConvNorm(out_channels, out_channels, 3, activation=relu, key=key_last)
        self.out_channels = out_channels

    def __call__(
        self, x: Float[Array, "height width channels"], state: eqx.nn.State, *, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, "height width out"], eqx.nn.State]:
        branches = []
        for conv in (self.pointwise, *self.dilated):
            y, state = conv(x, state)
            branches.append(y)
        y, state = self.pooled(nn.global_avg_pool(x)[None, None], state)
        branches.append(jnp.broadcast_to(y, (*x.shape[:2], y.shape[2])))
        y, state = self.project(jnp.concatenate(branches, axis=-1), state)
        return self.last(self.dropout(y, key=key), state)


class LiteDecoder(eqx.Module):
    """LR-ASPP: the map through a 1x1 convolution, each channel gated by the map's average."""

    conv: nn.ConvNorm
    gate: nn.Linear
    out_channels: int = eqx.field(static=True)

    def __init__(self, in_channels: int, *, out_channels: int = 128, key: PRNGKeyArray):
        key_conv, key_gate = jax.random.split(key)
        self.conv = nn.ConvNorm(in_channels, out_channels, 1, activation=jax.nn.relu, key=key_conv)
        self.gate = nn.Linear(in_channels, out_channels, use_bias=False, key=key_gate)
        self.out_channels = out_channels

    def __call__(
        self, x: Float[Array, "height width channels"], state: eqx.nn.State, *, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, "height width out"], eqx.nn.State]:
        y, state = self.conv(x, state)
        return y * jax.nn.sigmoid(self.gate(nn.global_avg_pool(x))), state


class Segmenter(eqx.Module):
    backbone: eqx.Module
    decoder: FCNDecoder | PyramidDecoder | LiteDecoder
    head: nn.Linear | None
    side_head: nn.Linear | None
    aux_decoder: FCNDecoder | None
    aux_head: nn.Linear | None
    config: SegmenterConfig = eqx.field(static=True)

    def __init__(self, config: SegmenterConfig, *, key: PRNGKeyArray):
        key_backbone, key_decoder, key_head, key_aux, key_side = jax.random.split(key, 5)
        self.backbone = make_backbone(
            config.backbone, in_channels=config.in_channels, output_stride=config.output_stride, key=key_backbone
        )
        channels = feature_channels(self.backbone, read=config.read)
        if not -len(channels) <= config.side < len(channels):
            raise ValueError(f"side={config.side} is no index of the {len(channels)} maps of {config.backbone!r}")
        side, last, classes = channels[config.side], channels[-1], config.num_classes
        if config.decoder == "fcn":
            self.decoder = FCNDecoder(last, config.dropout, key=key_decoder)
        elif config.decoder == "aspp":
            self.decoder = PyramidDecoder(last, config.pyramid_dropout, key=key_decoder)
        else:
            self.decoder = LiteDecoder(last, key=key_decoder)
        self.head = nn.Linear(self.decoder.out_channels, classes, key=key_head) if classes else None
        self.side_head = self.aux_decoder = self.aux_head = None
        if config.decoder == "lraspp":
            self.side_head = nn.Linear(side, classes, key=key_side) if classes else None
        elif config.aux_head:
            self.aux_decoder = FCNDecoder(side, config.dropout, key=key_aux)
            self.aux_head = nn.Linear(side // 4, classes, key=key_side) if classes else None
        self.config = config

    @typed
    def features(
        self,
        x: Float[Array, "height width {self.config.in_channels}"],
        state: eqx.nn.State,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[tuple[Float[Array, "_ _ _"], ...], eqx.nn.State]:
        """The backbone's maps, one a stage, and what the decoder makes of the last."""
        key_backbone, key_decoder = nn.split_key(key, 2)
        maps, state = feature_maps(self.backbone, x, state, read=self.config.read, key=key_backbone)
        decoded, state = self.decoder(maps[-1], state, key=key_decoder)
        if self.config.decoder == "lraspp":
            decoded = nn.resize_bilinear(decoded, maps[self.config.side].shape[:2])
        return (*maps, decoded), state

    @typed
    def logits_with_auxiliary(
        self,
        x: Float[Array, "height width {self.config.in_channels}"],
        state: eqx.nn.State,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[tuple[Float[Array, "height width _"], ...], eqx.nn.State]:
        """The logits of every pixel, and in training those of the auxiliary head, if there is one."""
        key_features, key_aux = nn.split_key(key, 2)
        (*maps, decoded), state = self.features(x, state, key=key_features)
        side = maps[self.config.side]
        logits = decoded if self.head is None else self.head(decoded)
        found = [logits if self.side_head is None else logits + self.side_head(side)]
        if self.aux_decoder is not None and not self.aux_decoder.dropout.inference:
            y, state = self.aux_decoder(side, state, key=key_aux)
            found.append(y if self.aux_head is None else self.aux_head(y))
        return tuple(nn.resize_bilinear(each, x.shape[:2]) for each in found), state

    @typed
    def __call__(
        self,
        x: Float[Array, "height width {self.config.in_channels}"],
        state: eqx.nn.State,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "height width out"], eqx.nn.State]:
        (logits, *_), state = self.logits_with_auxiliary(x, state, key=key)
        return logits, state


_MOBILE: dict[str, Any] = {
    "backbone": "mobilenet_v3_large",
    "output_stride": 16,
    "read": "first_features",
    "side": -4,
}

VARIANTS = {
    "fcn_resnet50": SegmenterConfig(backbone="resnet50", decoder="fcn"),
    "fcn_resnet101": SegmenterConfig(backbone="resnet101", decoder="fcn"),
    "deeplabv3_resnet50": SegmenterConfig(backbone="resnet50", decoder="aspp"),
    "deeplabv3_resnet101": SegmenterConfig(backbone="resnet101", decoder="aspp"),
    "deeplabv3_mobilenet_v3_large": SegmenterConfig(decoder="aspp", **_MOBILE),
    "lraspp_mobilenet_v3_large": SegmenterConfig(decoder="lraspp", **_MOBILE),
}

# A linear layer at every pixel is a 1x1 convolution upstream.
PIXELWISE = Transform(lambda tensor, shapes: [tensor[:, :, 0, 0]], lambda parts: parts[0][:, :, None, None])


def _conv_norm(source: str, target: str) -> tuple[Rule, ...]:
    return (
        Rule(rf"{source}0\.weight", f"{target}conv.weight"),
        *prefixed(rf"{source}1\.", f"{target}norm.", BATCH_NORM),
    )


def _classifier(source: str, target: str) -> tuple[Rule, ...]:
    return (
        Rule(rf"{source}\.weight", f"{target}.weight", PIXELWISE),
        Rule(rf"{source}\.bias", f"{target}.bias"),
    )


_DECODERS = (
    *_conv_norm(r"classifier\.", "decoder.conv."),
    *_classifier(r"classifier\.4", "head"),
    *_conv_norm(r"classifier\.0\.convs\.0\.", "decoder.pointwise."),
    *(rule for n in (1, 2, 3) for rule in _conv_norm(rf"classifier\.0\.convs\.{n}\.", f"decoder.dilated.{n - 1}.")),
    Rule(r"classifier\.0\.convs\.4\.1\.weight", "decoder.pooled.conv.weight"),
    *prefixed(r"classifier\.0\.convs\.4\.2\.", "decoder.pooled.norm.", BATCH_NORM),
    *_conv_norm(r"classifier\.0\.project\.", "decoder.project."),
    Rule(r"classifier\.1\.weight", "decoder.last.conv.weight"),
    *prefixed(r"classifier\.2\.", "decoder.last.norm.", BATCH_NORM),
    *_conv_norm(r"aux_classifier\.", "aux_decoder.conv."),
    *_classifier(r"aux_classifier\.4", "aux_head"),
)
_MOBILENET = prefixed(r"backbone\.", "backbone.", TORCHVISION_V3_LARGE_FEATURES)
TORCHVISION = (*prefixed(r"backbone\.", "backbone.", resnet.TIMM), *_DECODERS)
TORCHVISION_MOBILENET = (*_MOBILENET, *_DECODERS)
TORCHVISION_LITE = (
    *_MOBILENET,
    *_conv_norm(r"classifier\.cbr\.", "decoder.conv."),
    Rule(r"classifier\.scale\.1\.weight", "decoder.gate.weight", PIXELWISE),
    *_classifier(r"classifier\.high_classifier", "head"),
    *_classifier(r"classifier\.low_classifier", "side_head"),
)

SHARDING = (
    (r".*(conv\d?|fc\d|stem\.layers\.\d|decoder\.gate)\.weight", P("model", "fsdp")),
    (r"(aux_|side_)?head\.weight", P("model", "fsdp")),
)

_OPTIONS = Options({"num_classes": "num_classes", "aux_loss": "aux_head"})

FAMILY = Family(
    Segmenter,
    SegmenterConfig,
    VARIANTS,
    upstreams={
        "torchvision": Upstream(TORCHVISION, _OPTIONS, names=("*_resnet*",)),
        "torchvision_mobilenet": Upstream(TORCHVISION_MOBILENET, _OPTIONS, names=("deeplabv3_mobilenet*",)),
        "torchvision_lite": Upstream(
            TORCHVISION_LITE, Options({"num_classes": "num_classes"}), names=("lraspp_mobilenet*",)
        ),
    },
    sharding=SHARDING,
    adapters={"num_classes": adapt.new_head, "in_channels": adapt.mix_channels},
)
