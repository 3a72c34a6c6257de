"""How timm and transformers write an EVA down: names of tensors, and options."""

from typing import Any

from eqzoo.checkpoint import SPLIT, Drop, Rule, prefixed
from eqzoo.models._family import Option, Options, Upstream
from eqzoo.models.vision._vit_upstream import ATTENTION_POOL, UNBATCH, as_square, exact_ratio

_QKV = ("attention.query.{0}", "attention.key.{0}", "attention.value.{0}")

_ONE_MATRIX = (
    Rule(r"attn\.qkv\.(weight|bias)", _QKV, SPLIT),
    Rule(r"attn\.q_bias", "attention.query.bias"),  # where keys have none
    Rule(r"attn\.v_bias", "attention.value.bias"),
)
_THREE_MATRICES = (
    Rule(r"attn\.q_proj\.(weight|bias)", "attention.query.{0}"),
    Rule(r"attn\.k_proj\.(weight|bias)", "attention.key.{0}"),
    Rule(r"attn\.v_proj\.(weight|bias)", "attention.value.{0}"),
)
_PACKED_GATES = (Rule(r"mlp\.fc1\.(weight|bias)", ("mlp.gate.{0}", "mlp.up.{0}"), SPLIT),)
_SEPARATE_GATES = (
    Rule(r"mlp\.fc1_g\.(weight|bias)", "mlp.gate.{0}"),
    Rule(r"mlp\.fc1_x\.(weight|bias)", "mlp.up.{0}"),
)

_BLOCK = (
    Rule(r"norm(\d)\.(weight|bias)", "norm{0}.{1}"),
    Rule(r"attn\.norm\.(weight|bias)", "attention.out_norm.{0}"),
    Rule(r"attn\.proj\.(weight|bias)", "attention.out.{0}"),
    Rule(r"gamma_(\d)", "scale{0}.weight"),
    Rule(r"mlp\.(fc1|norm|fc2)\.(weight|bias)", "mlp.{0}.{1}"),
    Rule(r"mlp\.fc2\.(weight|bias)", "mlp.down.{0}"),
)


def _timm(*block: Rule) -> tuple[Rule, ...]:
    """The rules of a timm model of such blocks."""
    return (
        Rule(r"patch_embed\.proj\.(weight|bias)", "patch_embed.conv.{0}"),
        Rule(r"cls_token", "class_token", UNBATCH),
        Rule(r"reg_token", "registers", UNBATCH),
        Rule(r"pos_embed", "positions", UNBATCH),
        Rule(r"rope\.freqs", "frequencies"),
        Rule(r"norm_pre\.(weight|bias)", "pre_norm.{0}"),
        *prefixed(r"blocks\.(\d+)\.", "blocks[{0}].", block),
        *prefixed(r"attn_pool\.", "", ATTENTION_POOL),
        Rule(r"(norm|fc_norm|head)\.(weight|bias)", "{0}.{1}"),
    )


TIMM = _timm(*_BLOCK, *_ONE_MATRIX, *_PACKED_GATES)
TIMM_GATED = _timm(*_BLOCK, *_ONE_MATRIX, *_SEPARATE_GATES)
TIMM_SEPARATE = _timm(*_BLOCK, *_THREE_MATRICES, *_SEPARATE_GATES)

_DINOV3_BLOCK = (
    Rule(r"norm(\d)\.(weight|bias)", "norm{0}.{1}"),
    Rule(r"attention\.q_proj\.(weight|bias)", "attention.query.{0}"),
    Rule(r"attention\.k_proj\.(weight|bias)", "attention.key.{0}"),
    Rule(r"attention\.v_proj\.(weight|bias)", "attention.value.{0}"),
    Rule(r"attention\.o_proj\.(weight|bias)", "attention.out.{0}"),
    Rule(r"layer_scale(\d)\.lambda1", "scale{0}.weight"),
    Rule(r"mlp\.up_proj\.(weight|bias)", "mlp.fc1.{0}"),
    Rule(r"mlp\.down_proj\.(weight|bias)", "mlp.fc2.{0}"),
    Rule(r"mlp\.(gate|up|down)_proj\.(weight|bias)", "mlp.{0}.{1}"),
)

TRANSFORMERS_DINOV3 = (
    Rule(r"embeddings\.patch_embeddings\.(weight|bias)", "patch_embed.conv.{0}"),
    Rule(r"embeddings\.cls_token", "class_token", UNBATCH),
    Rule(r"embeddings\.register_tokens", "registers", UNBATCH),
    *prefixed(r"layer\.(\d+)\.", "blocks[{0}].", _DINOV3_BLOCK),
    *prefixed(r"model\.layer\.(\d+)\.", "blocks[{0}].", _DINOV3_BLOCK),
    Rule(r"norm\.(weight|bias)", "norm.{0}"),
    Drop(r"embeddings\.mask_token"),  # it stands for patches that pretraining hides
)


def _prepare_timm(options: dict[str, Any]) -> dict[str, Any]:
    """timm normalises after average pooling, or else before, unless told otherwise; grids are square."""
    options = as_square(options, "img_size", "patch_size", "ref_feat_shape")
    if "global_pool" in options:
        options = {"use_fc_norm": options["global_pool"] == "avg", **options}
    if "use_fc_norm" in options:
        options = {"use_post_transformer_norm": not options["use_fc_norm"], **options}
    return options


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
        "num_reg_tokens": "registers",
        "use_abs_pos_emb": "learned_positions",
        "no_embed_class": Option("prefix_positions", {True: False, False: True}),
        "rope_temperature": "rotary_base",
        "ref_feat_shape": "rotary_grid",
        "rope_grid_offset": "rotary_offset",
        "rope_grid_indexing": Option("rotary_columns_first", {"ij": False, "xy": True}),
        "global_pool": Option("pool", {name: name for name in ("token", "avg", "map")}),
        "attn_pool_num_heads": "pool_heads",
        "use_post_norm": "post_norm",
        "use_pre_transformer_norm": "pre_norm",
        "use_post_transformer_norm": "final_norm",
        "use_fc_norm": "fc_norm",
        "scale_attn_inner": "attention_norm",
        "init_values": "layer_scale",
        "qkv_bias": "qkv_bias",
        "num_classes": "num_classes",
        "attn_drop_rate": "attention_dropout",
        "drop_path_rate": "drop_path",
    },
    ignored=(r"(pos_|patch_|proj_)?drop_rate", "head_init_scale", "dynamic_img_size", r"rope_\w+_coords"),
    prepare=_prepare_timm,
)

_FLOATS = ("attention_dropout", "drop_path_rate", "layerscale_value", "rope_theta")


def _prepare_dinov3(options: dict[str, Any]) -> dict[str, Any]:
    """transformers states the width inside an MLP, and three biases of which two are one in eqzoo."""
    default = {"hidden_size": 384, "intermediate_size": 1536, "num_register_tokens": 0, "layerscale_value": 1.0}
    options = {**default, "image_size": 224, "query_bias": True, "value_bias": True, **options}
    if options["query_bias"] != options["value_bias"]:
        raise ValueError("query_bias and value_bias differ, which is not supported; eqzoo has both or none")
    options = as_square(options, "image_size", "patch_size")
    activation = "silu" if options.get("use_gated_mlp") else "gelu"
    if options.get("hidden_act", activation) != activation:
        raise ValueError(f"hidden_act={options['hidden_act']!r} is not supported; eqzoo has {activation!r}")
    options |= {"mlp_ratio": exact_ratio(options["hidden_size"], options["intermediate_size"]), "mlp_multiple": 1}
    return {name: float(value) if name in _FLOATS else value for name, value in options.items()}


def _restore_dinov3(options: dict[str, Any]) -> dict[str, Any]:
    if options["layerscale_value"] is None:
        raise ValueError("transformers' DINOv3 always has layer scales, but layer_scale=None; use `eqzoo.save`")
    hidden = int(options["hidden_size"] * options.pop("mlp_ratio"))
    hidden += -hidden % options.pop("mlp_multiple")
    activation = "silu" if options["use_gated_mlp"] else "gelu"
    return {**options, "intermediate_size": hidden, "value_bias": options["query_bias"], "hidden_act": activation}


DINOV3_OPTIONS = Options(
    {
        "hidden_size": "dim",
        "num_hidden_layers": "depth",
        "num_attention_heads": "heads",
        "patch_size": "patch_size",
        "image_size": "image_size",
        "num_channels": "in_channels",
        "mlp_ratio": "mlp_ratio",
        "mlp_multiple": "mlp_multiple",
        "use_gated_mlp": Option("mlp", {False: "mlp", True: "swiglu"}),
        "num_register_tokens": "registers",
        "query_bias": "qkv_bias",
        "key_bias": "key_bias",
        "rope_theta": "rotary_base",
        "layerscale_value": "layer_scale",
        "layer_norm_eps": "norm_eps",
        "attention_dropout": "attention_dropout",
        "drop_path_rate": "drop_path",
    },
    fixed={"architectures": ["DINOv3ViTModel"], "proj_bias": True, "mlp_bias": True},
    implied={"pool": "token", "num_classes": 0},
    lenient=True,
    prepare=_prepare_dinov3,
    restore=_restore_dinov3,
)

UPSTREAMS = {
    "timm": Upstream(
        TIMM,
        TIMM_OPTIONS,
        names=(
            *("eva_giant_*", "eva02_tiny_*", "eva02_small_*", "eva02_enormous_*", "vit_*_rope_*", "vit_pe_*"),
            *("vit_tiny_*_dinov3*", "vit_small_patch16_dinov3*", "vit_base_*_dinov3*", "vit_large_*_dinov3*"),
            *("vit_small_*_lingbot", "vit_base_*_lingbot", "vit_large_*_lingbot"),
        ),
    ),
    "timm_gated": Upstream(
        TIMM_GATED,
        TIMM_OPTIONS,
        names=("vit_small_plus_*", "vit_huge_plus_*_dinov3*", "vit_7b_*", "vit_giant_*_lingbot"),
    ),
    "timm_separate": Upstream(TIMM_SEPARATE, TIMM_OPTIONS, names=("eva02_base_*", "eva02_large_*")),
    "transformers_dinov3": Upstream(
        TRANSFORMERS_DINOV3,
        DINOV3_OPTIONS,
        names=("vit_*_dinov3*",),
        model_type="dinov3_vit",
        architecture="DINOv3ViTModel",
        base="vit_small_patch16_dinov3_qkvb",
        zeros={"embeddings.mask_token": lambda config: (1, 1, config.dim)},
    ),
}
