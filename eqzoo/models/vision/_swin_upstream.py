"""How torchvision, timm, the authors and transformers write a Swin down: names of tensors, and options."""

from functools import partial
from math import ceil
from typing import Any

import numpy as np
from jaxtyping import Shaped

from eqzoo import nn
from eqzoo.checkpoint import SPLIT, Drop, Rule, Transform, prefixed
from eqzoo.models._family import Options, Upstream, count_labels

# torchvision and timm store a head's scale with two more axes.
_PER_HEAD = Transform(lambda tensor, shapes: [tensor[:, 0, 0]], lambda parts: parts[0][:, None, None])

# Of the biases of query, key and value, V2 takes the first and the last.
_WITHOUT_KEY = Transform(
    lambda tensor, shapes: [np.split(tensor, 3)[0], np.split(tensor, 3)[2]],
    lambda parts: np.concatenate([parts[0], np.zeros_like(parts[0]), parts[1]]),
)

_QKV = ("attention.query.{0}", "attention.key.{0}", "attention.value.{0}")

_BLOCK = (
    Rule(r"norm(\d)\.(weight|bias)", "norm{0}.{1}"),
    Rule(r"attn\.qkv\.(weight|bias)", _QKV, SPLIT),
    Rule(r"attn\.proj\.(weight|bias)", "attention.out.{0}"),
    Rule(r"attn\.relative_position_bias_table", "attention.bias.table"),
    Rule(r"attn\.logit_scale", "attention.log_scale", _PER_HEAD),
    Rule(r"attn\.cpb_mlp\.0\.(weight|bias)", "attention.bias.fc1.{0}"),
    Rule(r"attn\.cpb_mlp\.2\.weight", "attention.bias.fc2.weight"),
)

_TORCHVISION_BLOCK = (
    *_BLOCK,
    Rule(r"attn\.qkv\.bias", ("attention.query_bias", "attention.value_bias"), _WITHOUT_KEY),
    Rule(r"mlp\.0\.(weight|bias)", "mlp.fc1.{0}"),
    Rule(r"mlp\.3\.(weight|bias)", "mlp.fc2.{0}"),
)

_TIMM_BLOCK = (
    *_BLOCK,
    Rule(r"attn\.q_bias", "attention.query_bias"),
    Rule(r"attn\.v_bias", "attention.value_bias"),
    Rule(r"mlp\.fc(\d)\.(weight|bias)", "mlp.fc{0}.{1}"),
)

# Blocks and mergers take turns in one list.
TORCHVISION = (
    Rule(r"features\.0\.0\.(weight|bias)", "patch_embed.{0}"),
    Rule(r"features\.0\.2\.(weight|bias)", "patch_norm.{0}"),
    *(
        rule
        for stage in range(4)
        for rule in (
            Rule(rf"features\.{2 * stage}\.(norm|reduction)\.(weight|bias)", f"stages.{stage}.merge.{{0}}.{{1}}"),
            *prefixed(rf"features\.{2 * stage + 1}\.(\d+)\.", f"stages.{stage}.blocks[{{0}}].", _TORCHVISION_BLOCK),
        )
    ),
    Rule(r"(norm|head)\.(weight|bias)", "{0}.{1}"),
    Drop(r"features\.\d\.\d+\.attn\.relative_(position_index|coords_table)"),
)

_TIMM = (
    Rule(r"patch_embed\.proj\.(weight|bias)", "patch_embed.{0}"),
    Rule(r"patch_embed\.norm\.(weight|bias)", "patch_norm.{0}"),
    *prefixed(r"layers\.(\d)\.blocks\.(\d+)\.", "stages.{0}.blocks[{1}].", _TIMM_BLOCK),
    Rule(r"norm\.(weight|bias)", "norm.{0}"),
)

TIMM = (
    *_TIMM,
    Rule(r"layers\.(\d)\.downsample\.(norm|reduction)\.(weight|bias)", "stages.{0}.merge.{1}.{2}"),
    Rule(r"head\.fc\.(weight|bias)", "head.{0}"),
)

# The authors' own files: a merger belongs to the stage before it.
MICROSOFT = (
    *_TIMM,
    Rule(r"layers\.(\d)\.downsample\.(norm|reduction)\.(weight|bias)", "stages.{0+1}.merge.{1}.{2}"),
    Rule(r"head\.(weight|bias)", "head.{0}"),
    Drop(r"layers\.\d\.blocks\.\d+\.(attn_mask|attn\.relative_(position_index|coords_table))"),
)

_TRANSFORMERS_BLOCK = (
    Rule(r"layernorm_before\.(weight|bias)", "norm1.{0}"),
    Rule(r"layernorm_after\.(weight|bias)", "norm2.{0}"),
    Rule(r"attention\.output\.dense\.(weight|bias)", "attention.out.{0}"),
    Rule(r"intermediate\.dense\.(weight|bias)", "mlp.fc1.{0}"),
    Rule(r"output\.dense\.(weight|bias)", "mlp.fc2.{0}"),
)

# What transformers writes, and what it has in memory since its version 5.
_TRANSFORMERS_V1_BLOCK = (
    *_TRANSFORMERS_BLOCK,
    Rule(r"attention\.self\.(query|key|value)\.(weight|bias)", "attention.{0}.{1}"),
    Rule(r"attention\.self\.relative_position_bias_table", "attention.bias.table"),
    Rule(r"attention\.q_proj\.(weight|bias)", "attention.query.{0}"),
    Rule(r"attention\.k_proj\.(weight|bias)", "attention.key.{0}"),
    Rule(r"attention\.v_proj\.(weight|bias)", "attention.value.{0}"),
    Rule(r"attention\.o_proj\.(weight|bias)", "attention.out.{0}"),
    Rule(r"attention\.relative_position_bias\.relative_position_bias_table", "attention.bias.table"),
    Rule(r"mlp\.fc(\d)\.(weight|bias)", "mlp.fc{0}.{1}"),
)

_TRANSFORMERS_V2_BLOCK = (
    *_TRANSFORMERS_BLOCK,
    Rule(r"attention\.self\.(query|key|value)\.weight", "attention.{0}.weight"),
    Rule(r"attention\.self\.(query|value)\.bias", "attention.{0}_bias"),
    Rule(r"attention\.self\.logit_scale", "attention.log_scale", _PER_HEAD),
    Rule(r"attention\.self\.continuous_position_bias_mlp\.0\.(weight|bias)", "attention.bias.fc1.{0}"),
    Rule(r"attention\.self\.continuous_position_bias_mlp\.2\.weight", "attention.bias.fc2.weight"),
)


def _transformers_body(block: tuple[Rule, ...]) -> tuple[Rule, ...]:
    return (
        Rule(r"embeddings\.patch_embeddings\.projection\.(weight|bias)", "patch_embed.{0}"),
        Rule(r"embeddings\.norm\.(weight|bias)", "patch_norm.{0}"),
        *prefixed(r"encoder\.layers\.(\d)\.blocks\.(\d+)\.", "stages.{0}.blocks[{1}].", block),
        Rule(r"encoder\.layers\.(\d)\.downsample\.(norm|reduction)\.(weight|bias)", "stages.{0+1}.merge.{1}.{2}"),
        Rule(r"layernorm\.(weight|bias)", "norm.{0}"),
    )


_TRANSFORMERS_V1_BODY = _transformers_body(_TRANSFORMERS_V1_BLOCK)
_TRANSFORMERS_V2_BODY = _transformers_body(_TRANSFORMERS_V2_BLOCK)
_CLASSIFIER = Rule(r"classifier\.(weight|bias)", "head.{0}")
_OLD_BUFFERS = Drop(
    r"(\w+\.)?encoder\.layers\.\d\.blocks\.\d+\.attention\.self\.relative_(position_index|coords_table)"
)

TRANSFORMERS_V1 = (*prefixed(r"swin\.", "", _TRANSFORMERS_V1_BODY), _CLASSIFIER, _OLD_BUFFERS)
TRANSFORMERS_V1_BODY = (*_TRANSFORMERS_V1_BODY, _OLD_BUFFERS)
TRANSFORMERS_V2 = (*prefixed(r"swinv2\.", "", _TRANSFORMERS_V2_BODY), _CLASSIFIER, _OLD_BUFFERS)
TRANSFORMERS_V2_BODY = (*_TRANSFORMERS_V2_BODY, _OLD_BUFFERS)


def _torchvision_buffers(config: Any) -> dict[str, Shaped[np.ndarray, "..."]]:
    """What each attention stores besides its weights: indices, and in V2 offsets."""
    buffers = {}
    for stage, (depth, window) in enumerate(zip(config.depths, config.windows, strict=True)):
        for layer in range(depth):
            attention = f"features.{2 * stage + 1}.{layer}.attn"
            buffers[f"{attention}.relative_position_index"] = nn.relative_index(window).reshape(-1)
            if config.version == 2:
                side = 2 * window - 1
                offsets = nn.log_offsets(window).reshape(1, side, side, 2)
                buffers[f"{attention}.relative_coords_table"] = offsets
    return buffers


def _one_number(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """Sizes that are stated as a pair as one number."""
    for name in names:
        if isinstance(size := options.get(name), list | tuple):
            if len(set(size)) != 1:
                raise ValueError(f"{name}={size} is not square; eqzoo's Swin has one number for both sides")
            options = {**options, name: size[0]}
    return options


def _prepare_timm(options: dict[str, Any]) -> dict[str, Any]:
    """timm has one window, a number or a pair, for all stages or for each."""
    options = _one_number(_none_for_zeros(options), "img_size", "patch_size")
    if "window_size" not in options:
        return options
    windows = options["window_size"]
    if not isinstance(windows, list | tuple) or (len(windows) == 2 and isinstance(windows[0], int)):
        windows = [windows] * len(options.get("depths", range(4)))
    squares = [_one_number({"window_size": window}, "window_size") for window in windows]
    return {**options, "window_size": [square["window_size"] for square in squares]}


def _none_for_zeros(options: dict[str, Any]) -> dict[str, Any]:
    """A pretrained window of zero is none."""
    if any(options.get("pretrained_window_sizes", ())):
        return options
    return {**options, "pretrained_window_sizes": []} if "pretrained_window_sizes" in options else options


def _zeros_for_none(options: dict[str, Any]) -> dict[str, Any]:
    if options.get("pretrained_window_sizes") == ():
        return {**options, "pretrained_window_sizes": (0,) * len(options["depths"])}
    return options


TIMM_OPTIONS = Options(
    {
        "embed_dim": "dim",
        "depths": "depths",
        "num_heads": "heads",
        "window_size": "windows",
        "pretrained_window_sizes": "pretrained_windows",
        "patch_size": "patch_size",
        "img_size": "image_size",
        "in_chans": "in_channels",
        "mlp_ratio": "mlp_ratio",
        "qkv_bias": "qkv_bias",
        "proj_drop_rate": "dropout",
        "attn_drop_rate": "attention_dropout",
        "drop_path_rate": "drop_path",
        "num_classes": "num_classes",
    },
    fixed={"global_pool": "avg", "head_dim": None, "always_partition": False, "act_layer": "gelu"},
    ignored=("drop_rate", "weight_init", "(strict|dynamic)_img_size"),
    prepare=_prepare_timm,
    restore=_zeros_for_none,
)

_TRANSFORMERS_TABLE = {
    "embed_dim": "dim",
    "depths": "depths",
    "num_heads": "heads",
    "window_size": "windows",
    "patch_size": "patch_size",
    "image_size": "image_size",
    "num_channels": "in_channels",
    "mlp_ratio": "mlp_ratio",
    "qkv_bias": "qkv_bias",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "drop_path_rate": "drop_path",
    "num_labels": "num_classes",
    "cut_windows": "cut_windows",
    "pad_first": "pad_first",
}

_FLOATS = ("mlp_ratio", "hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate")


def _prepare_transformers(options: dict[str, Any], *, classifier: str, body: str, cut: bool) -> dict[str, Any]:
    """transformers has one window for all stages, and one way to treat windows that don't fit."""
    options = {"window_size": 7, "image_size": 224, "patch_size": 4, "depths": [2, 2, 6, 2], **options}
    options = count_labels(_none_for_zeros(options), classifier=classifier, body=body)
    options = _one_number(options, "image_size", "patch_size")
    options = {name: float(value) if name in _FLOATS else value for name, value in options.items()}
    size, stages = options["image_size"], len(options["depths"])
    if cut and size // options["patch_size"] % 2 ** (stages - 1):
        raise ValueError(f"image_size={size} is not supported; eqzoo has those whose maps halve {stages - 1} times")
    return {**options, "window_size": [options["window_size"]] * stages, "cut_windows": cut, "pad_first": True}


def _restore_transformers(options: dict[str, Any], *, cut: bool) -> dict[str, Any]:
    """What upstream has no words for must make no difference to images of the model's size."""
    windows, size = options["window_size"], options["image_size"]
    if len(set(windows)) != 1:
        raise ValueError(f"transformers has one window for all stages, not windows={windows}; use `eqzoo.save`")
    maps = [ceil(size // options["patch_size"] / 2**stage) for stage in range(len(windows))]
    as_cut = options.pop("cut_windows") == cut or min(maps) >= windows[0]
    as_padded = options.pop("pad_first") or all(side % min(windows[0], side) == 0 for side in maps)
    if not (as_cut and as_padded):
        raise ValueError(
            f"transformers treats maps that windows of {windows[0]} don't divide in another way, and image_size={size} "
            f"gives maps of {maps}; use `eqzoo.save`"
        )
    return {**_zeros_for_none(options), "window_size": windows[0]}


def _transformers_options(version: int, name: str) -> Options:
    cut = version == 2
    table = {**_TRANSFORMERS_TABLE, "pretrained_window_sizes": "pretrained_windows"}
    return Options(
        table if version == 2 else _TRANSFORMERS_TABLE,
        fixed={"hidden_act": "gelu", "use_absolute_embeddings": False, "layer_norm_eps": 1e-5},
        lenient=True,
        prepare=partial(
            _prepare_transformers, classifier=f"{name}ForImageClassification", body=f"{name}Model", cut=cut
        ),
        restore=partial(_restore_transformers, cut=cut),
    )


UPSTREAMS = {
    "torchvision": Upstream(
        TORCHVISION,
        Options({"num_classes": "num_classes", "image_size": "image_size"}),
        names=("swin_[tsb]", "swin_v2_?"),
        buffers=_torchvision_buffers,
    ),
    "timm": Upstream(TIMM, TIMM_OPTIONS, names=("swin_*_patch4_*", "swin_s3_*", "swinv2_*")),
    "microsoft": Upstream(MICROSOFT),
    "transformers_v1": Upstream(
        TRANSFORMERS_V1,
        _transformers_options(1, "Swin"),
        names=("swin_*_patch4_*",),
        model_type="swin",
        architecture="SwinForImageClassification",
        base="swin_tiny_patch4_window7_224",
    ),
    "transformers_v1_body": Upstream(TRANSFORMERS_V1_BODY),
    "transformers_v2": Upstream(
        TRANSFORMERS_V2,
        _transformers_options(2, "Swinv2"),
        names=("swinv2_*",),
        model_type="swinv2",
        architecture="Swinv2ForImageClassification",
        base="swinv2_tiny_window8_256",
    ),
    "transformers_v2_body": Upstream(TRANSFORMERS_V2_BODY),
}
