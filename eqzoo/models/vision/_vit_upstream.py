"""How torchvision, timm and transformers write a ViT down: names of tensors, and options."""

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from math import inf, nextafter
from typing import Any

import numpy as np

from eqzoo.checkpoint import SPLIT, Drop, Rule, Transform, prefixed
from eqzoo.models._family import Option, Options, Upstream, count_labels
from eqzoo.models.vision._vit_variants import ROWS

# Upstream's tokens and positions have a batch axis of one.
UNBATCH = Transform(lambda tensor, shapes: [tensor.squeeze(0)], lambda parts: parts[0][None])

_QKV = ("attention.query.{0}", "attention.key.{0}", "attention.value.{0}")

_TORCHVISION_BLOCK = (
    Rule(r"ln_(\d)\.(weight|bias)", "norm{0}.{1}"),
    Rule(r"self_attention\.in_proj_(weight|bias)", _QKV, SPLIT),
    Rule(r"self_attention\.out_proj\.(weight|bias)", "attention.out.{0}"),
    Rule(r"mlp\.0\.(weight|bias)", "mlp.fc1.{0}"),
    Rule(r"mlp\.3\.(weight|bias)", "mlp.fc2.{0}"),
    Rule(r"mlp\.linear_(\d)\.(weight|bias)", "mlp.fc{0}.{1}"),  # an older naming
)

TORCHVISION = (
    Rule(r"conv_proj\.(weight|bias)", "patch_embed.conv.{0}"),
    Rule(r"class_token", "class_token", UNBATCH),
    Rule(r"encoder\.pos_embedding", "positions", UNBATCH),
    *prefixed(r"encoder\.layers\.encoder_layer_(\d+)\.", "blocks[{0}].", _TORCHVISION_BLOCK),
    Rule(r"encoder\.ln\.(weight|bias)", "norm.{0}"),
    Rule(r"heads\.head\.(weight|bias)", "head.{0}"),
)

_TIMM_ATTENTION = (
    Rule(r"attn\.qkv\.(weight|bias)", _QKV, SPLIT),
    Rule(r"attn\.q_norm\.(weight|bias)", "attention.query_norm.{0}"),
    Rule(r"attn\.k_norm\.(weight|bias)", "attention.key_norm.{0}"),
    Rule(r"attn\.norm\.(weight|bias)", "attention.out_norm.{0}"),
    Rule(r"attn\.proj\.(weight|bias)", "attention.out.{0}"),
)

_DIFFERENTIAL = (
    Rule(r"lambda_q(\d)", "attention.query_factor{0}"),
    Rule(r"lambda_k(\d)", "attention.key_factor{0}"),
    Rule(r"sub_norm\.weight", "attention.head_norm.weight"),
)

_MLP = Rule(r"mlp\.(fc1|norm|fc2)\.(weight|bias)", "mlp.{0}.{1}")
_PACKED_MLP = (
    Rule(r"mlp\.fc1\.(weight|bias)", ("mlp.gate.{0}", "mlp.up.{0}"), SPLIT),
    Rule(r"mlp\.norm\.(weight|bias)", "mlp.norm.{0}"),
    Rule(r"mlp\.fc2\.(weight|bias)", "mlp.down.{0}"),
)
_GATED_MLP = (
    Rule(r"mlp\.fc1_g\.(weight|bias)", "mlp.gate.{0}"),
    Rule(r"mlp\.fc1_x\.(weight|bias)", "mlp.up.{0}"),
    *_PACKED_MLP[1:],
)

_TIMM_BLOCK = (
    Rule(r"norm(\d)\.(weight|bias)", "norm{0}.{1}"),
    *_TIMM_ATTENTION,
    *prefixed(r"attn\.", "", _DIFFERENTIAL),
    Rule(r"ls(\d)\.gamma", "scale{0}.weight"),
)

_TIMM_PARALLEL = (
    Rule(r"in_norm\.(weight|bias)", "norm.{0}"),
    Rule(r"in_proj\.(weight|bias)", ("fc1.{0}", *_QKV), SPLIT),
    Rule(r"mlp_bias", "fc1.bias"),  # where queries, keys and values have none
    Rule(r"q_norm\.(weight|bias)", "attention.query_norm.{0}"),
    Rule(r"k_norm\.(weight|bias)", "attention.key_norm.{0}"),
    Rule(r"ls\.gamma", "scale.weight"),
)
_SEPARATE_OUT = (
    Rule(r"attn_out_proj\.(weight|bias)", "attention.out.{0}"),
    Rule(r"mlp_out_proj\.(weight|bias)", "fc2.{0}"),
)

SPLIT_COLUMNS = Transform(
    lambda tensor, shapes: np.split(tensor, np.cumsum([shape[1] for shape in shapes])[:-1], axis=1),
    lambda parts: np.concatenate(parts, axis=1),
)
_JOINT_OUT = (
    Rule(r"out_proj\.weight", ("attention.out.weight", "fc2.weight"), SPLIT_COLUMNS),
    Rule(r"out_proj\.bias", "attention.out.bias"),
)

_TIMM_TWIN = (
    Rule(r"attns\.(\d)\.norm\.(weight|bias)", "attentions.{0}.norm.{1}"),
    Rule(
        r"attns\.(\d)\.attn\.qkv\.(weight|bias)",
        tuple(f"attentions.{{0}}.layer.{part}.{{1}}" for part in ("query", "key", "value")),
        SPLIT,
    ),
    Rule(r"attns\.(\d)\.attn\.proj\.(weight|bias)", "attentions.{0}.layer.out.{1}"),
    Rule(r"attns\.(\d)\.attn\.q_norm\.(weight|bias)", "attentions.{0}.layer.query_norm.{1}"),
    Rule(r"attns\.(\d)\.attn\.k_norm\.(weight|bias)", "attentions.{0}.layer.key_norm.{1}"),
    Rule(r"attns\.(\d)\.ls\.gamma", "attentions.{0}.scale.weight"),
    Rule(r"ffns\.(\d)\.norm\.(weight|bias)", "mlps.{0}.norm.{1}"),
    Rule(r"ffns\.(\d)\.mlp\.(fc\d)\.(weight|bias)", "mlps.{0}.layer.{1}.{2}"),
    Rule(r"ffns\.(\d)\.ls\.gamma", "mlps.{0}.scale.weight"),
)

ATTENTION_POOL = (
    Rule(r"latent", "attention_pool.latent.weight", UNBATCH),
    Rule(r"q\.(weight|bias)", "attention_pool.query.{0}"),
    Rule(r"kv\.(weight|bias)", ("attention_pool.key.{0}", "attention_pool.value.{0}"), SPLIT),
    Rule(r"proj\.(weight|bias)", "attention_pool.out.{0}"),
    Rule(r"norm\.(weight|bias)", "attention_pool.norm.{0}"),
    Rule(r"mlp\.(fc1|fc2)\.(weight|bias)", "attention_pool.mlp.{0}.{1}"),
)


def _timm(*block: Rule) -> tuple[Rule, ...]:
    """The rules of a timm model of such blocks."""
    return (
        Rule(r"patch_embed\.proj\.(weight|bias)", "patch_embed.conv.{0}"),
        Rule(r"patch_embed\.norm\.(weight|bias)", "embed_norm.{0}"),
        Rule(r"cls_token", "class_token", UNBATCH),
        Rule(r"dist_token", "distillation_token", UNBATCH),
        Rule(r"reg_token", "registers", UNBATCH),
        Rule(r"pos_embed", "positions", UNBATCH),
        Rule(r"norm_pre\.(weight|bias)", "pre_norm.{0}"),
        *prefixed(r"blocks\.(\d+)\.", "blocks[{0}].", block),
        *prefixed(r"attn_pool\.", "", ATTENTION_POOL),
        Rule(r"(norm|fc_norm|head)\.(weight|bias)", "{0}.{1}"),
        Rule(r"head_dist\.(weight|bias)", "distillation_head.{0}"),
    )


TIMM = _timm(*_TIMM_BLOCK, _MLP, *_PACKED_MLP)
TIMM_GATED = _timm(*_TIMM_BLOCK, *_GATED_MLP)
TIMM_PARALLEL = _timm(*_TIMM_PARALLEL, *_SEPARATE_OUT)
TIMM_PARALLEL_DIFFERENTIAL = _timm(*_TIMM_PARALLEL, *_DIFFERENTIAL, *_JOINT_OUT)
TIMM_TWIN = _timm(*_TIMM_TWIN)

# What transformers writes, and what it has in memory since its version 5.
_TRANSFORMERS_ATTENTION = (
    Rule(r"attention\.attention\.(query|key|value)\.(weight|bias)", "attention.{0}.{1}"),
    Rule(r"attention\.output\.dense\.(weight|bias)", "attention.out.{0}"),
    Rule(r"attention\.q_proj\.(weight|bias)", "attention.query.{0}"),
    Rule(r"attention\.k_proj\.(weight|bias)", "attention.key.{0}"),
    Rule(r"attention\.v_proj\.(weight|bias)", "attention.value.{0}"),
    Rule(r"attention\.o_proj\.(weight|bias)", "attention.out.{0}"),
)

_TRANSFORMERS_BLOCK = (
    *_TRANSFORMERS_ATTENTION,
    Rule(r"layernorm_before\.(weight|bias)", "norm1.{0}"),
    Rule(r"layernorm_after\.(weight|bias)", "norm2.{0}"),
    Rule(r"intermediate\.dense\.(weight|bias)", "mlp.fc1.{0}"),
    Rule(r"output\.dense\.(weight|bias)", "mlp.fc2.{0}"),
    Rule(r"mlp\.fc(\d)\.(weight|bias)", "mlp.fc{0}.{1}"),
)

_DINOV2_BLOCK = (
    *_TRANSFORMERS_ATTENTION,
    Rule(r"norm(\d)\.(weight|bias)", "norm{0}.{1}"),
    Rule(r"layer_scale(\d)\.lambda1", "scale{0}.weight"),
    Rule(r"mlp\.fc(\d)\.(weight|bias)", "mlp.fc{0}.{1}"),
    Rule(r"mlp\.weights_in\.(weight|bias)", ("mlp.gate.{0}", "mlp.up.{0}"), SPLIT),
    Rule(r"mlp\.weights_out\.(weight|bias)", "mlp.down.{0}"),
    Rule(r"mlp\.(gate|up|down)_proj\.(weight|bias)", "mlp.{0}.{1}"),
)

_TRANSFORMERS_ENDS = (
    Rule(r"embeddings\.patch_embeddings\.projection\.(weight|bias)", "patch_embed.conv.{0}"),
    Rule(r"embeddings\.cls_token", "class_token", UNBATCH),
    Rule(r"embeddings\.distillation_token", "distillation_token", UNBATCH),
    Rule(r"embeddings\.register_tokens", "registers", UNBATCH),
    Rule(r"embeddings\.position_embeddings", "positions", UNBATCH),
    Rule(r"layernorm\.(weight|bias)", "norm.{0}"),
)

_TRANSFORMERS = (
    *_TRANSFORMERS_ENDS,
    *prefixed(r"encoder\.layer\.(\d+)\.", "blocks[{0}].", _TRANSFORMERS_BLOCK),
    *prefixed(r"layers\.(\d+)\.", "blocks[{0}].", _TRANSFORMERS_BLOCK),
)

# The mask token stands for patches that pretraining hides. The pooler is one more layer on the class token that neither
# a classifier nor DINOv2 has.
_UNUSED = Drop(r"(\w+\.)?(embeddings\.mask_token|pooler\.dense\.(weight|bias))")

TRANSFORMERS_VIT = (
    *prefixed(r"vit\.", "", _TRANSFORMERS),
    Rule(r"classifier\.(weight|bias)", "head.{0}"),
    _UNUSED,
)
TRANSFORMERS_DEIT = (
    *prefixed(r"deit\.", "", _TRANSFORMERS),
    Rule(r"cls_classifier\.(weight|bias)", "head.{0}"),
    Rule(r"distillation_classifier\.(weight|bias)", "distillation_head.{0}"),
    _UNUSED,
)
TRANSFORMERS_BODY = (*_TRANSFORMERS, _UNUSED)
TRANSFORMERS_DINOV2 = (
    *_TRANSFORMERS_ENDS,
    *prefixed(r"encoder\.layer\.(\d+)\.", "blocks[{0}].", _DINOV2_BLOCK),
    _UNUSED,
)

_SIGLIP_BLOCK = (
    Rule(r"layer_norm(\d)\.(weight|bias)", "norm{0}.{1}"),
    Rule(r"self_attn\.q_proj\.(weight|bias)", "attention.query.{0}"),
    Rule(r"self_attn\.k_proj\.(weight|bias)", "attention.key.{0}"),
    Rule(r"self_attn\.v_proj\.(weight|bias)", "attention.value.{0}"),
    Rule(r"self_attn\.out_proj\.(weight|bias)", "attention.out.{0}"),
    _MLP,
)

_SIGLIP_POOL = (
    Rule(r"probe", "latent.weight", UNBATCH),
    Rule(r"attention\.in_proj_(weight|bias)", ("query.{0}", "key.{0}", "value.{0}"), SPLIT),
    Rule(r"attention\.out_proj\.(weight|bias)", "out.{0}"),
    Rule(r"layernorm\.(weight|bias)", "norm.{0}"),
    _MLP,
)

TRANSFORMERS_SIGLIP = (
    Rule(r"embeddings\.patch_embedding\.(weight|bias)", "patch_embed.conv.{0}"),
    Rule(r"embeddings\.position_embedding\.weight", "positions"),
    *prefixed(r"encoder\.layers\.(\d+)\.", "blocks[{0}].", _SIGLIP_BLOCK),
    Rule(r"post_layernorm\.(weight|bias)", "norm.{0}"),
    *prefixed(r"head\.", "attention_pool.", _SIGLIP_POOL),
)
# SigLIP as a whole, of which eqzoo has the image tower, and that tower from before transformers 5.
TRANSFORMERS_SIGLIP_WHOLE = (
    *prefixed(r"vision_model\.", "", TRANSFORMERS_SIGLIP),
    Drop(r"text_model\..*"),
    Drop(r"logit_(scale|bias)"),
    Drop(r"(vision_model\.)?embeddings\.position_ids"),
)


def as_square(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """Sizes that are stated as a pair as one number."""
    for name in names:
        if isinstance(size := options.get(name), list | tuple):
            if len(set(size)) != 1:
                raise ValueError(f"{name}={size} is not square; eqzoo's ViT takes square images")
            options = {**options, name: size[0]}
    return options


TORCHVISION_OPTIONS = Options({"num_classes": "num_classes", "image_size": "image_size"})


def _prepare_timm(options: dict[str, Any]) -> dict[str, Any]:
    """timm normalises after average pooling unless told otherwise."""
    options = as_square(options, "img_size", "patch_size")
    return {"fc_norm": options["global_pool"] == "avg", **options} if "global_pool" in options else options


_ATTENTION_KIND = Option("attention", {"": "softmax", "attn": "softmax", "diff": "differential"})

TIMM_OPTIONS = Options(
    {
        "embed_dim": "dim",
        "depth": "depth",
        "num_heads": "heads",
        "patch_size": "patch_size",
        "img_size": "image_size",
        "in_chans": "in_channels",
        "mlp_ratio": "mlp_ratio",
        "class_token": "class_token",
        "reg_tokens": "registers",
        "no_embed_class": Option("prefix_positions", {True: False, False: True}),
        "global_pool": Option("pool", {name: name for name in ("token", "avg", "map")}),
        "pool_include_prefix": "pool_prefix",
        "final_norm": "final_norm",
        "fc_norm": "fc_norm",
        "pre_norm": "pre_norm",
        "qk_norm": "qk_norm",
        "scale_attn_norm": "attention_norm",
        "scale_mlp_norm": "mlp_norm",
        "init_values": "layer_scale",
        "qkv_bias": "qkv_bias",
        "proj_bias": "proj_bias",
        "attn_layer": _ATTENTION_KIND,
        "act_layer": Option("activation", {name: name for name in ("gelu", "gelu_tanh", "quick_gelu", "silu")}),
        "num_classes": "num_classes",
        "attn_drop_rate": "attention_dropout",
        "drop_path_rate": "drop_path",
    },
    fixed={"pos_embed": "learn"},
    ignored=(r"(pos_|patch_|proj_)?drop_rate", "weight_init", "fix_init", "dynamic_img_size", "strict_img_size"),
    prepare=_prepare_timm,
)

_TRANSFORMERS_TABLE = {
    "hidden_size": "dim",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "patch_size": "patch_size",
    "image_size": "image_size",
    "num_channels": "in_channels",
    "mlp_ratio": "mlp_ratio",
    "qkv_bias": "qkv_bias",
    "hidden_act": Option(
        "activation",
        {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"}
        | {"quick_gelu": "quick_gelu", "silu": "silu"},
    ),
    "layer_norm_eps": "norm_eps",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}

_FLOATS = ("mlp_ratio", "layerscale_value", "hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate")


def _plain_numbers(options: dict[str, Any]) -> dict[str, Any]:
    """One number for a square, and floats for what JSON may have as integers."""
    options = as_square(options, "image_size", "patch_size")
    return {name: float(value) if name in _FLOATS else value for name, value in options.items()}


def _prepare_transformers(options: dict[str, Any], *, classifier: str, body: str) -> dict[str, Any]:
    """transformers states the width inside an MLP."""
    options = {"hidden_size": 768, "intermediate_size": 3072, "layer_norm_eps": 1e-12, **options}
    options = _plain_numbers(count_labels(options, classifier=classifier, body=body))
    return {**options, "mlp_ratio": exact_ratio(options["hidden_size"], options["intermediate_size"])}


def exact_ratio(dim: int, hidden: int) -> float:
    """The ratio by which a model of width `dim` has MLPs of exactly the width `hidden`."""
    ratio = hidden / dim
    return ratio if int(dim * ratio) == hidden else nextafter(ratio, inf)


def _restore_transformers(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "intermediate_size": int(options["hidden_size"] * options.pop("mlp_ratio"))}


def _transformers_options(classifier: str, body: str) -> Options:
    return Options(
        {**_TRANSFORMERS_TABLE, "num_labels": "num_classes"},
        lenient=True,
        prepare=partial(_prepare_transformers, classifier=classifier, body=body),
        restore=_restore_transformers,
    )


def _prepare_dinov2(options: dict[str, Any], *, patch_size: int) -> dict[str, Any]:
    """The ratio of gated MLPs becomes that of the width of gate and value together."""
    default = {"image_size": 224, "patch_size": patch_size, "layerscale_value": 1.0, "use_swiglu_ffn": False}
    options = _plain_numbers({**default, "hidden_size": 768, "mlp_ratio": 4, **options})
    if options["use_swiglu_ffn"]:
        packed = 2 * _dinov2_gated(options["hidden_size"], options["mlp_ratio"])
        options |= {"hidden_act": "silu", "mlp_ratio": exact_ratio(options["hidden_size"], packed)}
    return options


def _dinov2_gated(dim: int, ratio: int | float) -> int:
    """How wide transformers makes DINOv2's gated MLPs."""
    return (int(int(dim * ratio) * 2 / 3) + 7) // 8 * 8


def _restore_dinov2(options: dict[str, Any]) -> dict[str, Any]:
    dim, ratio, scale = options["hidden_size"], options["mlp_ratio"], options["layerscale_value"]
    if options["use_swiglu_ffn"]:
        if options["hidden_act"] != "silu":
            raise ValueError("transformers' DINOv2 gates by SiLU only, so pass activation='silu'; or use `eqzoo.save`")
        hidden = int(dim * ratio) // 2
        ratio = next((whole for whole in range(1, 33) if _dinov2_gated(dim, whole) == hidden), ratio)
    if ratio % 1:
        raise ValueError(f"transformers' DINOv2 takes a whole number as mlp_ratio, not {ratio}; use `eqzoo.save`")
    if scale is None:
        raise ValueError("transformers' DINOv2 always has layer scales, but layer_scale=None; use `eqzoo.save`")
    return {**options, "mlp_ratio": int(ratio), "layerscale_value": float(scale), "use_mask_token": False}


# A classifier on DINOv2 sees the mean of the patches too, which eqzoo's ViT has not.
DINOV2_OPTIONS = Options(
    {
        **_TRANSFORMERS_TABLE,
        "layerscale_value": "layer_scale",
        "drop_path_rate": "drop_path",
        "use_swiglu_ffn": Option("mlp", {False: "mlp", True: "swiglu_packed"}),
    },
    fixed={"architectures": ["Dinov2Model"]},
    lenient=True,
    prepare=partial(_prepare_dinov2, patch_size=14),
    restore=_restore_dinov2,
)
DINOV2_WITH_REGISTERS_OPTIONS = replace(
    DINOV2_OPTIONS,
    table={**DINOV2_OPTIONS.table, "num_register_tokens": "registers"},
    fixed={"architectures": ["Dinov2WithRegistersModel"]},
    implied={"prefix_positions": True, "register_positions": False},
    prepare=partial(_prepare_dinov2, patch_size=16),
)


def _prepare_siglip(options: dict[str, Any]) -> dict[str, Any]:
    """Sizes that transformers leaves out, and whether the patches leave a rest of the image, which it ignores."""
    default = {"hidden_size": 768, "intermediate_size": 3072, "image_size": 224, "patch_size": 16}
    options = as_square({**default, **options}, "image_size", "patch_size")
    ratio = exact_ratio(options["hidden_size"], options["intermediate_size"])
    return {**options, "mlp_ratio": ratio, "crop": options["image_size"] % options["patch_size"] != 0}


def _restore_siglip(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in _restore_transformers(options).items() if name != "crop"}


_NOT_IN_SIGLIP = ("qkv_bias", "hidden_dropout_prob", "attention_probs_dropout_prob")
_SIGLIP_TABLE = {
    **{name: field for name, field in _TRANSFORMERS_TABLE.items() if name not in _NOT_IN_SIGLIP},
    "attention_dropout": "attention_dropout",
    "vision_use_head": Option("pool", {True: "map"}),
    "crop": "crop",
}

SIGLIP_OPTIONS = Options(
    _SIGLIP_TABLE,
    fixed={"architectures": ["SiglipVisionModel"]},
    lenient=True,
    prepare=_prepare_siglip,
    restore=_restore_siglip,
)
SIGLIP_WHOLE_OPTIONS = replace(
    SIGLIP_OPTIONS,
    fixed={},
    prepare=lambda options: _prepare_siglip({**options.get("vision_config", {})}),
)

# What kind of attention a parallel block has is its class', which no option of timm's names.
_PARALLEL_OPTIONS = replace(
    TIMM_OPTIONS, table={name: field for name, field in TIMM_OPTIONS.table.items() if field != _ATTENTION_KIND}
)

_OF_OTHER_NAMINGS = ("vit_?_[0-9]*", "aimv2_*", "vit_pwee_*", "vit_*_xp_*", "vit_dpwee_*", "vit_*_18x2_*")

UPSTREAMS = {
    "torchvision": Upstream(TORCHVISION, TORCHVISION_OPTIONS, names=_OF_OTHER_NAMINGS[:1]),
    "timm": Upstream(
        TIMM,
        TIMM_OPTIONS,
        names=tuple(name for name in ROWS if not any(fnmatchcase(name, other) for other in _OF_OTHER_NAMINGS)),
    ),
    "timm_gated": Upstream(TIMM_GATED, TIMM_OPTIONS, names=("aimv2_*",)),
    "timm_parallel": Upstream(TIMM_PARALLEL, _PARALLEL_OPTIONS, names=("vit_pwee_*", "vit_*_xp_*")),
    "timm_parallel_differential": Upstream(TIMM_PARALLEL_DIFFERENTIAL, _PARALLEL_OPTIONS, names=("vit_dpwee_*",)),
    "timm_twin": Upstream(TIMM_TWIN, TIMM_OPTIONS, names=("vit_*_18x2_*",)),
    "transformers_vit": Upstream(
        TRANSFORMERS_VIT,
        _transformers_options("ViTForImageClassification", "ViTModel"),
        names=("vit_*_patch??_224", "vit_*_patch8_224", "vit_*_patch??_384", "deit_*_patch*"),
        model_type="vit",
        architecture="ViTForImageClassification",
        base="vit_base_patch16_224",
    ),
    "transformers_deit": Upstream(
        TRANSFORMERS_DEIT,
        _transformers_options("DeiTForImageClassificationWithTeacher", "DeiTModel"),
        names=("deit_*_distilled_patch*",),
        model_type="deit",
        architecture="DeiTForImageClassificationWithTeacher",
        base="deit_base_distilled_patch16_224",
    ),
    "transformers_body": Upstream(TRANSFORMERS_BODY),
    "transformers_dinov2": Upstream(
        TRANSFORMERS_DINOV2,
        DINOV2_OPTIONS,
        names=("vit_*_patch14_dinov2",),
        model_type="dinov2",
        architecture="Dinov2Model",
        base="vit_base_patch14_dinov2",
    ),
    "transformers_dinov2_with_registers": Upstream(
        TRANSFORMERS_DINOV2,
        DINOV2_WITH_REGISTERS_OPTIONS,
        names=("vit_*_patch14_reg4_dinov2",),
        model_type="dinov2_with_registers",
        architecture="Dinov2WithRegistersModel",
        base="vit_base_patch14_reg4_dinov2",
        zeros={"embeddings.mask_token": lambda config: (1, config.dim)},
    ),
    "transformers_siglip": Upstream(
        TRANSFORMERS_SIGLIP,
        SIGLIP_OPTIONS,
        names=("vit_*_siglip_[0-9]*",),
        model_type="siglip_vision_model",
        architecture="SiglipVisionModel",
        base="vit_base_patch32_siglip_256",
    ),
    "transformers_siglip_whole": Upstream(
        TRANSFORMERS_SIGLIP_WHOLE, SIGLIP_WHOLE_OPTIONS, model_type="siglip", base="vit_base_patch32_siglip_256"
    ),
}
