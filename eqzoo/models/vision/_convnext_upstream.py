"""How torchvision, timm and transformers write a ConvNeXt down: names of tensors, and options."""

from functools import partial
from typing import Any

from eqzoo.checkpoint import Rule, Transform, prefixed
from eqzoo.models._family import Option, Options, Upstream, count_labels

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

UPSTREAMS = {
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
}
