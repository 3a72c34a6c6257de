"""U-Net (Ronneberger et al., 2015, arXiv 1505.04597) over the maps of a classifier: from the smallest map up to the
image's size, each step joined by the backbone's map of that size.

Upstream: segmentation_models_pytorch `decoders/unet`, with its ResNets ("resnet34") and timm's ("tu-resnet34d"),
EfficientNets and mobile networks ("tu-tf_efficientnet_b0") as encoders. Deviations: none.
"""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import typed
from eqzoo.checkpoint import BATCH_NORM, Rule, adapt, prefixed
from eqzoo.models._backbone import Read, feature_maps, feature_sizes, make_backbone
from eqzoo.models._family import Family, Options, Upstream
from eqzoo.models.vision import _resnet_upstream as resnet
from eqzoo.models.vision import mobilenet
from eqzoo.nn._init import kaiming_uniform, xavier


@dataclass(frozen=True, kw_only=True)
class UNetConfig:
    """`backbone` is the name of a classifier of the zoo, `widths` the channels of each step up, from the smallest map
    to the image's size."""

    backbone: str
    widths: tuple[int, ...] = (256, 128, 64, 32, 16)
    in_channels: int = 3
    num_classes: int = 1


class UpBlock(eqx.Module):
    """Enlarges a map, puts the backbone's map of that size beside it, and passes both through two convolutions."""

    conv1: nn.ConvNorm
    conv2: nn.ConvNorm

    def __init__(self, in_channels: int, out_channels: int, *, key: PRNGKeyArray):
        key1, key2 = jax.random.split(key)
        options: dict[str, Any] = {"activation": jax.nn.relu, "init": kaiming_uniform}
        self.conv1 = nn.ConvNorm(in_channels, out_channels, 3, key=key1, **options)
        self.conv2 = nn.ConvNorm(out_channels, out_channels, 3, key=key2, **options)

    def __call__(
        self,
        x: Float[Array, "height width channels"],
        size: tuple[int, int],
        skip: Float[Array, "new_height new_width _"] | None,
        state: eqx.nn.State,
    ) -> tuple[Float[Array, "new_height new_width out"], eqx.nn.State]:
        x = nn.resize_nearest(x, size)
        x = x if skip is None else jnp.concatenate([x, skip], axis=-1)
        return nn.in_turn((self.conv1, self.conv2), x, state)


class UNet(eqx.Module):
    """`skips` has for each block how many times smaller than the image its output is, and which map it gets beside its
    input: that of this size, or None if the backbone has none."""

    backbone: eqx.Module
    blocks: tuple[UpBlock, ...]
    head: nn.Conv2d | None
    read: Read = eqx.field(static=True)
    skips: tuple[tuple[int, int | None], ...] = eqx.field(static=True)
    config: UNetConfig = eqx.field(static=True)

    def __init__(self, config: UNetConfig, *, key: PRNGKeyArray):
        key_backbone, key_head, *keys = jax.random.split(key, 2 + len(config.widths))
        self.backbone = make_backbone(config.backbone, in_channels=config.in_channels, key=key_backbone)
        self.read = "features_and_stem" if hasattr(self.backbone, "features_and_stem") else "features"
        sizes = feature_sizes(self.backbone, read=self.read)
        strides = [stride for stride, _ in sizes]
        steps = len(config.widths)
        if strides[-1] != 2**steps or any(stride not in (1, 2, 4, 8, 16, 32, 64) for stride in strides):
            raise ValueError(
                f"widths={config.widths} double the smallest map {steps} times, but {config.backbone!r} has maps at "
                f"1/{', 1/'.join(f'{stride:g}' for stride in strides)} of the image's size; give a width for each "
                f"doubling, or choose a backbone whose maps halve, such as 'resnet34'"
            )
        known = {stride: index for index, stride in enumerate(strides) if stride > 1}
        self.skips = tuple((2**step, known.get(2**step)) for step in reversed(range(steps)))
        blocks, channels = [], sizes[-1][1]
        for width, (_, index), key_block in zip(config.widths, self.skips, keys, strict=True):
            beside = 0 if index is None else sizes[index][1]
            blocks.append(UpBlock(channels + beside, width, key=key_block))
            channels = width
        self.blocks = tuple(blocks)
        classes = config.num_classes
        self.head = nn.Conv2d(channels, classes, 3, padding=1, init=xavier, key=key_head) if classes else None
        self.config = config

    @typed
    def features(
        self,
        x: Float[Array, "height width {self.config.in_channels}"],
        state: eqx.nn.State,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[tuple[Float[Array, "_ _ _"], ...], eqx.nn.State]:
        """The backbone's maps, and then those of the decoder, the last of which has the image's size."""
        maps, state = feature_maps(self.backbone, x, state, read=self.read, key=key)
        y, decoded = maps[-1], []
        for block, (stride, index) in zip(self.blocks, self.skips, strict=True):
            skip = None if index is None else maps[index]
            height, width = (x.shape[0] // stride, x.shape[1] // stride) if skip is None else skip.shape[:2]
            y, state = block(y, (height, width), skip, state)
            decoded.append(y)
        return (*maps, *decoded), state

    @typed
    def __call__(
        self,
        x: Float[Array, "height width {self.config.in_channels}"],
        state: eqx.nn.State,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "height width out"], eqx.nn.State]:
        (*_, decoded), state = self.features(x, state, key=key)
        return decoded if self.head is None else self.head(decoded), state


_RESNETS = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("resnext50_32x4d", "resnext101_32x4d", "resnext101_32x8d", "resnext101_32x16d", "resnext101_32x32d"),
)
_OF_TIMM = ("tf_efficientnet_b0", "tf_efficientnetv2_s", "mobilenetv3_large_100")

VARIANTS = {f"unet_{name}": UNetConfig(backbone=name) for name in (*_RESNETS, *_OF_TIMM)}

DECODER = (
    Rule(r"decoder\.blocks\.(\d)\.(conv\d)\.0\.weight", "blocks.{0}.{1}.conv.weight"),
    *prefixed(r"decoder\.blocks\.(\d)\.(conv\d)\.1\.", "blocks.{0}.{1}.norm.", BATCH_NORM),
    Rule(r"segmentation_head\.0\.(weight|bias)", "head.{0}"),
)
SMP = (*prefixed(r"encoder\.", "backbone.", resnet.TIMM), *DECODER)
SMP_TIMM_RESNET = (*prefixed(r"encoder\.model\.", "backbone.", resnet.TIMM), *DECODER)
SMP_TIMM_MOBILENET = (*prefixed(r"encoder\.model\.", "backbone.", mobilenet.TIMM), *DECODER)

SHARDING = ((r".*(conv\d?|fc\d|stem\.layers\.\d|head)\.(convs\.\d\.)?weight", P("model", "fsdp")),)

_OPTIONS = Options({"in_channels": "in_channels", "classes": "num_classes", "decoder_channels": "widths"})

FAMILY = Family(
    UNet,
    UNetConfig,
    VARIANTS,
    upstreams={
        "smp": Upstream(SMP, _OPTIONS, names=("unet_resne*",)),
        "smp_timm_resnet": Upstream(SMP_TIMM_RESNET, _OPTIONS),
        "smp_timm_mobilenet": Upstream(
            SMP_TIMM_MOBILENET, _OPTIONS, names=("unet_tf_efficientnet*", "unet_mobilenet*")
        ),
    },
    sharding=SHARDING,
    adapters={"num_classes": adapt.new_head, "in_channels": adapt.mix_channels},
)
