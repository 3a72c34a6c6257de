"""The named ViTs: for each name, the fields of its config."""

from typing import Any

Fields = dict[str, Any]

_SIZES = {
    "wee": (256, 14, 4, 5.0),
    "pwee": (256, 16, 4, 5.0),
    "xsmall": (256, 10, 4),
    "little": (320, 14, 5, 5.6),
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "small deep": (384, 36, 6),
    "small pairs": (384, 18, 6),
    "medium": (512, 12, 8),
    "mediumd": (512, 20, 8),
    "betwixt": (640, 12, 10),
    "base": (768, 12, 12),
    "base of 16 heads": (768, 12, 16),
    "base pairs": (768, 18, 12),
    "plus": (896, 12, 14),
    "so150m": (896, 18, 14, 2.572),
    "so150m2": (832, 21, 13, 34 / 13),
    "large": (1024, 24, 16),
    "so400m": (1152, 27, 16, 3.7362),
    "so400m exact": (1152, 27, 16, 4304 / 1152),
    "huge": (1280, 32, 16),
    "giant": (1408, 40, 16, 48 / 11),
    "giant of beit3": (1408, 40, 16, 4.3637),
    "giant of siglip": (1536, 40, 16),
    "giant of dinov2": (1536, 40, 24, 2.66667 * 2),
    "giant of radio": (1536, 40, 24),
    "gigantic": (1664, 48, 16, 64 / 13),
    "aim large": (1024, 24, 8, 2.75),
    "aim huge": (1536, 24, 12, 2.6667),
    "aim 1b": (2048, 24, 16, 2.75),
    "aim 3b": (3072, 24, 24, 2.6667),
}


def _vits(names: str, size: str, patch_size: int, **fields: Any) -> dict[str, Fields]:
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


def _siglips(name: str, sizes: str, size: str, patch_size: int, **fields: Any) -> dict[str, Fields]:
    """Each SigLIP of these image sizes twice: pooled by attention, and averaged."""
    pooled = " ".join(f"{name}_siglip_{each}" for each in sizes.split())
    averaged = " ".join(f"{name}_siglip_gap_{each}" for each in sizes.split())
    fields = {"class_token": False, **_NONE, **fields}
    return {
        **_vits(pooled, size, patch_size, pool="map", **fields),
        **_vits(averaged, size, patch_size, pool="avg", **fields),
    }


def _aims(size: str) -> dict[str, Fields]:
    names = (f"aimv2_{size}_patch14_{each}" for each in (224, 336, 448))
    return _vits(" ".join(names), f"aim {size}", 14, **_AIM)


_NONE: Fields = {"num_classes": 0}
_DEIT3: Fields = {"prefix_positions": False, "layer_scale": 1e-6}
_DINO: Fields = {"image_size": 518, "layer_scale": 1e-5, **_NONE}
_DINO_REG4: Fields = {**_DINO, "registers": 4, "prefix_positions": False}
_PACKED: Fields = {"mlp": "swiglu_packed", "activation": "silu"}
_TIPS: Fields = {**_NONE, "image_size": 448, "layer_scale": 1.0, "registers": 1, "prefix_positions": False}
_RADIO: Fields = {**_NONE, "image_size": 512, "registers": 7, "prefix_positions": False, "final_norm": False}
_CLIP: Fields = {"pre_norm": True, "norm_eps": 1e-5}
_QUICK: Fields = {**_CLIP, "activation": "quick_gelu"}
_TANH: Fields = {"activation": "gelu_tanh"}
_MEAN: Fields = {"class_token": False, "pool": "avg"}
_MEAN_SCALED: Fields = {**_MEAN, "qkv_bias": False, "layer_scale": 1e-6}
_GAP: Fields = {**_MEAN, "prefix_positions": False, "fc_norm": True}
_REG1: Fields = {**_GAP, "registers": 1, "layer_scale": 1e-5}
_REG4: Fields = {**_GAP, "registers": 4, "layer_scale": 1e-5}
_SO150M2: Fields = {**_MEAN, "fc_norm": True, "registers": 1, "layer_scale": 1e-5, "qkv_bias": False}
_POSTNORM: Fields = {**_MEAN, "fc_norm": True, "qkv_bias": False, "layer_scale": 1e-5, "block": "postnorm"}
_BEIT3: Fields = {"attention_norm": True, "mlp_norm": True, "pool": "avg", "fc_norm": True, "norm_eps": 1e-5}
_XP: Fields = {
    "block": "parallel",
    "pre_norm": True,
    "qk_norm": True,
    "norm": "rms",
    "qkv_bias": False,
    "prefix_positions": False,
}
_AIM: Fields = {
    **_NONE,
    **_MEAN,
    "mlp": "swiglu",
    "activation": "silu",
    "norm": "rms",
    "norm_eps": 1e-5,
    "embed_norm": True,
    "qkv_bias": False,
    "proj_bias": False,
}
_TEST: Fields = {"image_size": 160, "class_token": False, "registers": 1, "layer_scale": 1e-5}

ROWS: dict[str, Fields] = {
    # torchvision
    "vit_b_16": {"dim": 768, "depth": 12, "heads": 12},
    "vit_b_32": {"dim": 768, "depth": 12, "heads": 12, "patch_size": 32},
    "vit_l_16": {"dim": 1024, "depth": 24, "heads": 16},
    "vit_l_32": {"dim": 1024, "depth": 24, "heads": 16, "patch_size": 32},
    "vit_h_14": {"dim": 1280, "depth": 32, "heads": 16, "patch_size": 14},
    # timm
    **_vits("vit_tiny_patch16_224 vit_tiny_patch16_384 deit_tiny_patch16_224", "tiny", 16),
    **_vits("vit_small_patch8_224", "small", 8, **_NONE),
    **_vits("vit_small_patch16_224 vit_small_patch16_384 deit_small_patch16_224", "small", 16),
    **_vits("vit_small_patch32_224 vit_small_patch32_384", "small", 32),
    **_vits("vit_base_patch8_224", "base", 8),
    **_vits("vit_base_patch16_224 vit_base_patch16_384 deit_base_patch16_224 deit_base_patch16_384", "base", 16),
    **_vits("vit_base_patch16_224_miil", "base", 16, image_size=224, qkv_bias=False, num_classes=11221),
    **_vits("vit_base_patch32_224 vit_base_patch32_384", "base", 32),
    **_vits("vit_base_patch16_plus_240", "plus", 16, layer_scale=1e-5),
    **_vits("vit_base_patch32_plus_256", "plus", 32, layer_scale=1e-5),
    **_vits("vit_large_patch14_224", "large", 14),
    **_vits("vit_large_patch16_224 vit_large_patch16_384", "large", 16),
    **_vits("vit_large_patch32_224", "large", 32, **_NONE),
    **_vits("vit_large_patch32_384", "large", 32),
    **_vits("vit_huge_patch14_224", "huge", 14, **_NONE),
    **_vits("vit_giant_patch14_224", "giant", 14),
    **_vits("vit_gigantic_patch14_224", "gigantic", 14),
    **_vits("deit_tiny_distilled_patch16_224", "tiny", 16, distilled=True),
    **_vits("deit_small_distilled_patch16_224", "small", 16, distilled=True),
    **_vits("deit_base_distilled_patch16_224 deit_base_distilled_patch16_384", "base", 16, distilled=True),
    **_vits("deit3_small_patch16_224 deit3_small_patch16_384", "small", 16, **_DEIT3),
    **_vits("deit3_medium_patch16_224", "medium", 16, **_DEIT3),
    **_vits("deit3_base_patch16_224 deit3_base_patch16_384", "base", 16, **_DEIT3),
    **_vits("deit3_large_patch16_224 deit3_large_patch16_384", "large", 16, **_DEIT3),
    **_vits("deit3_huge_patch14_224", "huge", 14, **_DEIT3),
    **_vits("flexivit_small", "small", 16, image_size=240, prefix_positions=False),
    **_vits("flexivit_base", "base", 16, image_size=240, prefix_positions=False),
    **_vits("flexivit_large", "large", 16, image_size=240, prefix_positions=False),
    **_vits("eva_large_patch14_196 eva_large_patch14_336", "large", 14, pool="avg", fc_norm=True),
    # of other blocks
    **_vits("vit_base_patch16_rpn_224", "base", 16, **_POSTNORM),
    **_vits("vit_small_patch16_36x1_224", "small deep", 16, layer_scale=1e-5),
    **_vits("vit_small_patch16_18x2_224", "small pairs", 16, layer_scale=1e-5, block="twin"),
    **_vits("vit_base_patch16_18x2_224", "base pairs", 16, layer_scale=1e-5, block="twin"),
    **_vits("vit_base_patch16_xp_224", "base", 16, **_XP),
    **_vits("vit_large_patch14_xp_224", "large", 14, **_XP),
    **_vits("vit_huge_patch14_xp_224", "huge", 14, **_XP),
    **_vits("vit_pwee_patch16_reg1_gap_256", "pwee", 16, **_REG1, block="parallel"),
    **_vits("vit_dwee_patch16_reg1_gap_256", "wee", 16, **_REG1, attention="differential"),
    **_vits("vit_dpwee_patch16_reg1_gap_256", "pwee", 16, **_REG1, block="parallel", attention="differential"),
    **_vits("vit_dlittle_patch16_reg1_gap_256", "little", 16, **_REG1, attention="differential"),
    # averaged
    **_vits("vit_medium_patch16_gap_240", "medium", 16, **_MEAN_SCALED, num_classes=11821),
    **_vits("vit_medium_patch16_gap_256 vit_medium_patch16_gap_384", "medium", 16, **_MEAN_SCALED),
    **_vits("vit_betwixt_patch16_gap_256", "betwixt", 16, **_MEAN_SCALED),
    **_vits("vit_base_patch16_gap_224", "base of 16 heads", 16, **_MEAN),
    **_vits("vit_huge_patch14_gap_224", "huge", 14, **_MEAN, **_NONE),
    **_vits("vit_huge_patch16_gap_448", "huge", 16, **_MEAN, **_NONE),
    **_vits("vit_giant_patch16_gap_224", "giant", 16, **_MEAN, **_NONE),
    **_vits("vit_wee_patch16_reg1_gap_256", "wee", 16, **_REG1),
    **_vits("vit_little_patch16_reg1_gap_256", "little", 16, **_REG1),
    **_vits("vit_little_patch16_reg4_gap_256", "little", 16, **_REG4),
    **_vits("vit_medium_patch16_reg1_gap_256", "medium", 16, **_REG1),
    **_vits("vit_medium_patch16_reg4_gap_256", "medium", 16, **_REG4),
    **_vits("vit_mediumd_patch16_reg4_gap_256 vit_mediumd_patch16_reg4_gap_384", "mediumd", 16, **_REG4),
    **_vits("vit_betwixt_patch16_reg1_gap_256", "betwixt", 16, **_REG1),
    **_vits("vit_betwixt_patch16_reg4_gap_256 vit_betwixt_patch16_reg4_gap_384", "betwixt", 16, **_REG4),
    **_vits("vit_base_patch16_reg4_gap_256", "base", 16, **_GAP, registers=4),
    **_vits("vit_so150m_patch16_reg4_gap_256 vit_so150m_patch16_reg4_gap_384", "so150m", 16, **_MEAN, registers=4),
    **_vits("vit_so150m_patch16_reg4_map_256", "so150m", 16, class_token=False, pool="map", registers=4),
    **_vits("vit_so150m2_patch16_reg1_gap_256 vit_so150m2_patch16_reg1_gap_384", "so150m2", 16, **_SO150M2),
    **_vits("vit_so150m2_patch16_reg1_gap_448", "so150m2", 16, **_SO150M2),
    # image towers
    **_vits("vit_xsmall_patch16_clip_224", "xsmall", 16, **_CLIP, num_classes=512),
    **_vits("vit_medium_patch32_clip_224", "medium", 32, **_CLIP, num_classes=512),
    **_vits("vit_medium_patch16_clip_224", "medium", 16, **_CLIP, num_classes=512),
    **_vits("vit_betwixt_patch32_clip_224", "betwixt", 32, **_CLIP, num_classes=512),
    **_vits("vit_base_patch16_clip_224 vit_base_patch16_clip_384", "base", 16, **_CLIP),
    **_vits("vit_base_patch16_plus_clip_240", "plus", 16, **_CLIP, num_classes=640),
    **_vits("vit_base_patch32_clip_224 vit_base_patch32_clip_384 vit_base_patch32_clip_448", "base", 32, **_CLIP),
    **_vits("vit_base_patch32_clip_256", "base", 32, **_CLIP, num_classes=512),
    **_vits("vit_large_patch14_clip_224 vit_large_patch14_clip_336", "large", 14, **_CLIP),
    **_vits("vit_huge_patch14_clip_224 vit_huge_patch14_clip_336", "huge", 14, **_CLIP),
    **_vits("vit_huge_patch14_clip_378", "huge", 14, **_CLIP, num_classes=1024),
    **_vits("vit_giant_patch14_clip_224", "giant", 14, **_CLIP, num_classes=1024),
    **_vits("vit_gigantic_patch14_clip_224 vit_gigantic_patch14_clip_378", "gigantic", 14, **_CLIP, num_classes=1280),
    **_vits("vit_base_patch16_clip_quickgelu_224", "base", 16, **_QUICK, num_classes=512),
    **_vits("vit_base_patch32_clip_quickgelu_224", "base", 32, **_QUICK, num_classes=512),
    **_vits("vit_large_patch14_clip_quickgelu_224", "large", 14, **_QUICK, num_classes=768),
    **_vits("vit_large_patch14_clip_quickgelu_336", "large", 14, **_QUICK, num_classes=768),
    **_vits("vit_huge_patch14_clip_quickgelu_224", "huge", 14, **_QUICK, num_classes=1024),
    **_vits("vit_huge_patch14_clip_quickgelu_378", "huge", 14, **_QUICK, num_classes=1024),
    **_vits("vit_gigantic_patch14_clip_quickgelu_224", "gigantic", 14, **_QUICK, num_classes=1280),
    **_siglips("vit_base_patch32", "256", "base", 32, **_TANH),
    **_siglips("vit_base_patch16", "224 256 384 512", "base", 16),
    **_siglips("vit_large_patch16", "256 384", "large", 16),
    **_siglips("vit_large_patch16", "512", "large", 16, **_TANH),
    **_siglips("vit_so400m_patch14", "224 378", "so400m", 14),
    **_siglips("vit_so400m_patch14", "384", "so400m", 14, crop=True),
    **_vits("vit_so400m_patch14_siglip_gap_448 vit_so400m_patch14_siglip_gap_896", "so400m", 14, **_MEAN, **_NONE),
    **_siglips("vit_so400m_patch16", "256 384 512", "so400m", 16, **_TANH),
    **_siglips("vit_giantopt_patch16", "256 384", "giant of siglip", 16, **_TANH),
    **_vits("vit_small_patch14_dinov2", "small", 14, **_DINO),
    **_vits("vit_base_patch14_dinov2", "base", 14, **_DINO),
    **_vits("vit_large_patch14_dinov2", "large", 14, **_DINO),
    **_vits("vit_giant_patch14_dinov2", "giant of dinov2", 14, **_DINO, **_PACKED),
    **_vits("vit_small_patch14_reg4_dinov2", "small", 14, **_DINO_REG4),
    **_vits("vit_base_patch14_reg4_dinov2", "base", 14, **_DINO_REG4),
    **_vits("vit_large_patch14_reg4_dinov2", "large", 14, **_DINO_REG4),
    **_vits("vit_giant_patch14_reg4_dinov2", "giant of dinov2", 14, **_DINO_REG4, **_PACKED),
    **_vits("vit_base_patch14_reg1_tipsv2", "base", 14, **_TIPS),
    **_vits("vit_large_patch14_reg1_tipsv2", "large", 14, **_TIPS),
    **_vits("vit_so400m_patch14_reg1_tipsv2", "so400m exact", 14, **_TIPS),
    **_vits("vit_giant_patch14_reg1_tipsv2", "giant of dinov2", 14, **_TIPS, **_PACKED),
    **_vits("vit_base_patch16_radio_v3", "base", 16, **_RADIO, layer_scale=1e-5),
    **_vits("vit_large_patch16_radio_v3", "large", 16, **_RADIO, layer_scale=1e-5),
    **_vits("vit_huge_patch16_radio_v3", "huge", 16, **_RADIO),
    **_vits("vit_giant_patch16_radio_v3", "giant of radio", 16, **_RADIO),
    **_vits("vit_so400m_patch16_radio_v4", "so400m exact", 16, **{**_RADIO, "registers": 9}),
    **_vits("vit_huge_patch16_radio_v4", "huge", 16, **{**_RADIO, "registers": 9}),
    **_vits("vit_intern300m_patch14_448", "large", 14, layer_scale=0.1, final_norm=False, **_NONE),
    **_vits("beit3_base_patch16_224", "base", 16, **_BEIT3),
    **_vits("beit3_large_patch16_224", "large", 16, **_BEIT3),
    **_vits("beit3_giant_patch14_224 beit3_giant_patch14_336", "giant of beit3", 14, **_BEIT3),
    **_aims("large"),
    **_aims("huge"),
    **_aims("1b"),
    **_aims("3b"),
    # for tests
    "test_vit": {"dim": 64, "depth": 6, "heads": 2, "mlp_ratio": 3.0, "image_size": 160},
    "test_vit2": {"dim": 64, "depth": 8, "heads": 2, "mlp_ratio": 3.0, **_TEST, "pool": "avg", "fc_norm": True},
    "test_vit3": {"dim": 96, "depth": 9, "heads": 3, "mlp_ratio": 2.0, **_TEST, "pool": "map", "pool_prefix": True},
    "test_vit4": {
        "dim": 96,
        "depth": 9,
        "heads": 3,
        "mlp_ratio": 3.0,
        **_TEST,
        "pool": "avg",
        "fc_norm": True,
        "norm": "rms",
    },
}
