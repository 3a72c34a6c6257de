"""How torchvision, timm and transformers write a ResNet down: names of tensors, and options."""

from typing import Any

from eqzoo.checkpoint import BATCH_NORM, Rule, prefixed, staged
from eqzoo.models._family import Option, Options, Upstream, count_labels

_BLOCK = (
    Rule(r"conv(\d)\.weight", "convs.{0-1}.conv.weight"),
    *prefixed(r"bn(\d)\.", "convs.{0-1}.norm.", BATCH_NORM),
    Rule(r"se\.fc(\d)\.(weight|bias)", "attention.fc{0}.{1}"),
    Rule(r"se\.conv\.weight", "attention.weight"),
    Rule(r"downsample\.0\.weight", "shortcut.conv.weight"),
    *prefixed(r"downsample\.1\.", "shortcut.norm.", BATCH_NORM),
    Rule(r"downsample\.1\.weight", "pooled_shortcut.conv.weight"),
    *prefixed(r"downsample\.2\.", "pooled_shortcut.norm.", BATCH_NORM),
)

# torchvision and timm use the same names; where a model lacks a rule's target, the next rule that fits counts.
TIMM = (
    Rule(r"conv1\.weight", "stem.conv.conv.weight"),
    *prefixed(r"bn1\.", "stem.conv.norm.", BATCH_NORM),
    Rule(r"conv1\.0\.weight", "stem.conv1.conv.weight"),
    *prefixed(r"conv1\.1\.", "stem.conv1.norm.", BATCH_NORM),
    Rule(r"conv1\.3\.weight", "stem.conv2.conv.weight"),
    *prefixed(r"conv1\.4\.", "stem.conv2.norm.", BATCH_NORM),
    Rule(r"conv1\.6\.weight", "stem.conv3.conv.weight"),
    *prefixed(r"bn1\.", "stem.conv3.norm.", BATCH_NORM),
    Rule(r"maxpool\.0\.weight", "stem_pool.conv.weight"),
    *prefixed(r"maxpool\.1\.", "stem_pool.norm.", BATCH_NORM),
    *staged(r"layer(\d)\.", "stages.{0-1}.", _BLOCK),
    Rule(r"fc\.(weight|bias)", "head.{0}"),
)

_TRANSFORMERS_BLOCK = (
    Rule(r"layer\.(\d)\.convolution\.weight", "convs.{0}.conv.weight"),
    *prefixed(r"layer\.(\d)\.normalization\.", "convs.{0}.norm.", BATCH_NORM),
    Rule(r"shortcut\.convolution\.weight", "shortcut.conv.weight"),
    *prefixed(r"shortcut\.normalization\.", "shortcut.norm.", BATCH_NORM),
)

TRANSFORMERS_BODY = (
    Rule(r"embedder\.embedder\.convolution\.weight", "stem.conv.conv.weight"),
    *prefixed(r"embedder\.embedder\.normalization\.", "stem.conv.norm.", BATCH_NORM),
    *staged(r"encoder\.stages\.(\d)\.layers\.", "stages.{0}.", _TRANSFORMERS_BLOCK),
)
TRANSFORMERS = (*prefixed(r"resnet\.", "", TRANSFORMERS_BODY), Rule(r"classifier\.1\.(weight|bias)", "head.{0}"))

TIMM_OPTIONS = Options(
    {
        "layers": "depths",
        "channels": "widths",
        "cardinality": "cardinality",
        "base_width": "base_width",
        "stem_type": Option("stem", {"": "conv7", "deep": "deep", "deep_tiered": "tiered"}),
        "stem_width": "stem_width",
        "replace_stem_pool": Option("stem_pool", {False: "max", True: "conv"}),
        "block_reduce_first": "reduce_first",
        "avg_down": Option("shortcut", {False: "conv", True: "pool"}),
        "down_kernel_size": "shortcut_kernel",
        "norm_layer": Option("norm_groups", {"batchnorm2d": 0, "groupnorm": 32}),
        "output_stride": "output_stride",
        "in_chans": "in_channels",
        "num_classes": "num_classes",
    },
    fixed={"global_pool": "avg", "act_layer": "relu"},
    ignored=(r"drop_(path_|block_)?rate", "zero_init_last"),
)


def _prepare_transformers(options: dict[str, Any]) -> dict[str, Any]:
    """transformers states how many channels a stage puts out."""
    options = {"layer_type": "bottleneck", "hidden_sizes": [256, 512, 1024, 2048], **options}
    options = count_labels(options, classifier="ResNetForImageClassification", body="ResNetModel")
    sizes = options["hidden_sizes"]
    if options["layer_type"] == "bottleneck":
        if any(size % 4 for size in sizes):
            raise ValueError(f"hidden_sizes={sizes} of a bottleneck are not supported; eqzoo has multiples of 4")
        sizes = [size // 4 for size in sizes]
    return {**options, "widths": sizes}


def _restore_transformers(options: dict[str, Any]) -> dict[str, Any]:
    expansion = 4 if options["layer_type"] == "bottleneck" else 1
    return {**options, "hidden_sizes": [expansion * width for width in options.pop("widths")]}


TRANSFORMERS_OPTIONS = Options(
    {
        "layer_type": Option("block", {"basic": "basic", "bottleneck": "bottleneck"}),
        "depths": "depths",
        "widths": "widths",
        "num_channels": "in_channels",
        "num_labels": "num_classes",
    },
    fixed={
        "embedding_size": 64,
        "hidden_act": "relu",
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
    },
    lenient=True,
    prepare=_prepare_transformers,
    restore=_restore_transformers,
)

_IN_TORCHVISION = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d", "wide_resnet50_2", "wide_resnet101_2"),
)

UPSTREAMS = {
    "torchvision": Upstream(TIMM, Options({"num_classes": "num_classes"}), names=_IN_TORCHVISION),
    "timm": Upstream(TIMM, TIMM_OPTIONS, names=("*",)),
    "transformers": Upstream(
        TRANSFORMERS,
        TRANSFORMERS_OPTIONS,
        names=("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
        model_type="resnet",
        architecture="ResNetForImageClassification",
        base="resnet50",
    ),
    "transformers_body": Upstream(TRANSFORMERS_BODY),
}
