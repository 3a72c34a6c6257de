"""The named EVAs: for each name, the fields of its config."""

from typing import Any

Fields = dict[str, Any]

_SIZES = {
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "medium": (512, 12, 8),
    "mediumd": (512, 20, 8),
    "betwixt": (640, 12, 10),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
    "large of 23": (1024, 23, 16),
    "huge_plus": (1280, 32, 20),
    "giant": (1408, 40, 16, 6144 / 1408),
    "giant of lingbot": (1536, 40, 24, 4 * 2 / 3),
    "gigantic": (1536, 50, 16, 8960 / 1536),
    "gigantic of 47": (1536, 47, 16, 8960 / 1536),
    "enormous": (1792, 64, 16, 15360 / 1792),
    "7b": (4096, 40, 32, 2.0),
}


def _evas(names: str, size: str, patch_size: int, **fields: Any) -> dict[str, Fields]:
    """The same fields for all `names`, but for the image size, which their last number is if no field says it."""
    shape = dict(zip(("dim", "depth", "heads", "mlp_ratio"), _SIZES[size], strict=False))
    return {
        name: {
            **shape,
            "patch_size": patch_size,
            **({} if "image_size" in fields else {"image_size": int(name.rpartition("_")[2])}),
            **fields,
        }
        for name in names.split()
    }


def _ropes(size: str) -> dict[str, Fields]:
    """RoPE-ViT: with axial or mixed frequencies, with and without learned positions."""
    name = f"vit_{size}_patch16_rope"
    axial: Fields = {**_TOKEN, **_COLUMNS, "rotary_base": 100.0, "layer_scale": 1e-5, "key_bias": True}
    mixed: Fields = {**axial, "rotary": "mixed", "rotary_base": 10.0}
    learned: Fields = {"learned_positions": True, "prefix_positions": False}
    bare: Fields = {"learned_positions": False}
    return {
        **_evas(f"{name}_224", size, 16, **axial, **bare),
        **_evas(f"{name}_mixed_224", size, 16, **mixed, **bare),
        **_evas(f"{name}_ape_224", size, 16, **axial, **learned),
        **_evas(f"{name}_mixed_ape_224", size, 16, **mixed, **learned),
    }


_TOKEN: Fields = {"pool": "token", "final_norm": True, "fc_norm": False}
_COLUMNS: Fields = {"rotary": "grid", "rotary_columns_first": True}
_ROTARY: Fields = {"rotary": "grid", "rotary_grid": 16}
_EVA02: Fields = {**_ROTARY, "mlp": "swiglu", "mlp_ratio": 4 * 2 / 3}
_EVA02_NORMED: Fields = {**_EVA02, "mlp_norm": True}
_EVA02_CLIP: Fields = {**_EVA02_NORMED, **_TOKEN, "attention_norm": True}
_NONE: Fields = {"num_classes": 0}
_REG1: Fields = {**_ROTARY, "layer_scale": 1e-5, "class_token": False, "registers": 1, "learned_positions": False}
_PE: Fields = {**_COLUMNS, "pre_norm": True, "norm_eps": 1e-5, "key_bias": True, "fc_norm": False}
_PE_CORE: Fields = {**_PE, "pool": "map", "final_norm": True, "pool_heads": 8}
_PE_LANG: Fields = {**_PE, **_NONE, "rotary_grid": 32, "layer_scale": 0.1}
_PE_SPATIAL: Fields = {**_PE, **_NONE, "rotary_grid": 32, "rotary_offset": 1.0}
_DINOV3: Fields = {
    "rotary": "centred",
    "rotary_base": 100.0,
    "learned_positions": False,
    "image_size": 256,
    "registers": 4,
    "layer_scale": 1e-5,
    "norm_eps": 1e-5,
    "final_norm": True,
    "fc_norm": False,
    "qkv_bias": False,
    **_NONE,
}
_DINOV3_BIASED: Fields = {**_DINOV3, "qkv_bias": True}
_GATED: Fields = {"mlp": "swiglu", "mlp_multiple": 8}
_LINGBOT: Fields = {**_DINOV3_BIASED, "image_size": 512, "pool": "token"}

ROWS: dict[str, Fields] = {
    **_evas("eva_giant_patch14_224 eva_giant_patch14_336 eva_giant_patch14_560", "giant", 14),
    **_evas("eva_giant_patch14_clip_224", "giant", 14, **_TOKEN, num_classes=1024),
    **_evas("eva02_tiny_patch14_224", "tiny", 14, **_EVA02, **_NONE),
    **_evas("eva02_small_patch14_224", "small", 14, **_EVA02, **_NONE),
    **_evas("eva02_base_patch14_224", "base", 14, **_EVA02_NORMED, **_NONE),
    **_evas("eva02_large_patch14_224", "large", 14, **_EVA02_NORMED, **_NONE),
    **_evas("eva02_tiny_patch14_336", "tiny", 14, **_EVA02),
    **_evas("eva02_small_patch14_336", "small", 14, **_EVA02),
    **_evas("eva02_base_patch14_448", "base", 14, **_EVA02_NORMED),
    **_evas("eva02_large_patch14_448", "large", 14, **_EVA02_NORMED),
    **_evas("eva02_base_patch16_clip_224", "base", 16, **_EVA02_CLIP, num_classes=512),
    **_evas("eva02_large_patch14_clip_224 eva02_large_patch14_clip_336", "large", 14, **_EVA02_CLIP, num_classes=768),
    **_evas("eva02_enormous_patch14_clip_224", "enormous", 14, **_TOKEN, post_norm=True, num_classes=1024),
    **_evas("vit_medium_patch16_rope_reg1_gap_256", "medium", 16, **_REG1),
    **_evas("vit_mediumd_patch16_rope_reg1_gap_256", "mediumd", 16, **_REG1, qkv_bias=False),
    **_evas("vit_betwixt_patch16_rope_reg4_gap_256", "betwixt", 16, **{**_REG1, "registers": 4}),
    **_evas("vit_base_patch16_rope_reg1_gap_256", "base", 16, **_REG1),
    **_ropes("small"),
    **_ropes("base"),
    **_ropes("large"),
    **_evas("vit_pe_core_tiny_patch16_384", "tiny", 16, **_PE_CORE, rotary_grid=24, rotary_offset=1.0, num_classes=512),
    **_evas(
        "vit_pe_core_small_patch16_384", "small", 16, **_PE_CORE, rotary_grid=24, rotary_offset=1.0, num_classes=512
    ),
    **_evas(
        "vit_pe_core_base_patch16_224", "base", 16, **_PE_CORE, rotary_grid=14, rotary_offset=1.0, num_classes=1024
    ),
    **_evas(
        "vit_pe_core_large_patch14_336", "large", 14, **_PE_CORE, rotary_grid=24, rotary_offset=1.0, num_classes=1024
    ),
    **_evas(
        "vit_pe_core_gigantic_patch14_448",
        "gigantic",
        14,
        **_PE_CORE,
        rotary_grid=32,
        class_token=False,
        num_classes=1280,
    ),
    **_evas("vit_pe_lang_large_patch14_448", "large of 23", 14, **_PE_LANG, rotary_offset=1.0),
    **_evas("vit_pe_lang_gigantic_patch14_448", "gigantic of 47", 14, **_PE_LANG, class_token=False),
    **_evas("vit_pe_spatial_tiny_patch16_512", "tiny", 16, **_PE_SPATIAL),
    **_evas("vit_pe_spatial_small_patch16_512", "small", 16, **_PE_SPATIAL),
    **_evas("vit_pe_spatial_base_patch16_512", "base", 16, **_PE_SPATIAL),
    **_evas("vit_pe_spatial_large_patch14_448", "large", 14, **_PE_SPATIAL),
    **_evas("vit_pe_spatial_gigantic_patch14_448", "gigantic", 14, **_PE_LANG, class_token=False),
    **_evas("vit_small_patch16_dinov3", "small", 16, **_DINOV3),
    **_evas("vit_small_plus_patch16_dinov3", "small", 16, **_DINOV3, **_GATED),
    **_evas("vit_base_patch16_dinov3", "base", 16, **_DINOV3),
    **_evas("vit_large_patch16_dinov3", "large", 16, **_DINOV3),
    **_evas("vit_huge_plus_patch16_dinov3", "huge_plus", 16, **_DINOV3, **_GATED),
    **_evas("vit_7b_patch16_dinov3", "7b", 16, **_DINOV3, **{**_GATED, "mlp_multiple": 64}),
    **_evas("vit_tiny_patch16_dinov3_qkvb", "tiny", 16, **_DINOV3_BIASED),
    **_evas("vit_small_patch16_dinov3_qkvb", "small", 16, **_DINOV3_BIASED),
    **_evas("vit_small_plus_patch16_dinov3_qkvb", "small", 16, **_DINOV3_BIASED, **_GATED),
    **_evas("vit_base_patch16_dinov3_qkvb", "base", 16, **_DINOV3_BIASED),
    **_evas("vit_large_patch16_dinov3_qkvb", "large", 16, **_DINOV3_BIASED),
    **_evas("vit_huge_plus_patch16_dinov3_qkvb", "huge_plus", 16, **_DINOV3_BIASED, **_GATED),
    **_evas("vit_small_patch16_lingbot", "small", 16, **_LINGBOT),
    **_evas("vit_base_patch16_lingbot", "base", 16, **_LINGBOT),
    **_evas("vit_large_patch16_lingbot", "large", 16, **_LINGBOT),
    **_evas("vit_giant_patch16_lingbot", "giant of lingbot", 16, **{**_LINGBOT, "qkv_bias": False}, **_GATED),
}
