"""The named ConvNeXts: for each name, the fields of its config."""

from typing import Any

Fields = dict[str, Any]


def _convnext(width: int, *depths: int, **fields: Any) -> Fields:
    return {"depths": depths, "widths": (width, 2 * width, 4 * width, 8 * width), **fields}


_V2: Fields = {"response_norm": True, "layer_scale": None}
_CONV: Fields = {"conv_mlp": True}
_TEST: Fields = {"widths": (32, 64, 96, 128), "depths": (1, 1, 1, 1), "norm_eps": 1e-5}

ROWS: dict[str, Fields] = {
    # torchvision and timm
    "convnext_tiny": _convnext(96, 3, 3, 9, 3, drop_path=0.1),
    "convnext_small": _convnext(96, 3, 3, 27, 3, drop_path=0.4),
    "convnext_base": _convnext(128, 3, 3, 27, 3, drop_path=0.5),
    "convnext_large": _convnext(192, 3, 3, 27, 3, drop_path=0.5),
    # timm
    "convnext_zepto_rms": _convnext(32, 2, 2, 4, 2, norm="simple", **_CONV),
    "convnext_zepto_rms_ols": _convnext(32, 2, 2, 4, 2, norm="simple", stem="overlap_act", **_CONV),
    "convnext_atto": _convnext(40, 2, 2, 6, 2, **_CONV),
    "convnext_atto_ols": _convnext(40, 2, 2, 6, 2, stem="overlap_tiered", **_CONV),
    "convnext_atto_rms": _convnext(40, 2, 2, 6, 2, norm="rms", **_CONV),
    "convnext_femto": _convnext(48, 2, 2, 6, 2, **_CONV),
    "convnext_femto_ols": _convnext(48, 2, 2, 6, 2, stem="overlap_tiered", **_CONV),
    "convnext_pico": _convnext(64, 2, 2, 6, 2, **_CONV),
    "convnext_pico_ols": _convnext(64, 2, 2, 6, 2, stem="overlap_tiered", **_CONV),
    "convnext_nano": _convnext(80, 2, 2, 8, 2, **_CONV),
    "convnext_nano_ols": _convnext(80, 2, 2, 8, 2, stem="overlap", **_CONV),
    "convnext_tiny_hnf": _convnext(96, 3, 3, 9, 3, head_norm_first=True, **_CONV),
    "convnext_large_mlp": _convnext(192, 3, 3, 27, 3, head_hidden=1536),
    "convnext_xlarge": _convnext(256, 3, 3, 27, 3),
    "convnext_xxlarge": _convnext(384, 3, 4, 30, 3, norm_eps=1e-5),
    "convnextv2_atto": _convnext(40, 2, 2, 6, 2, **_V2, **_CONV),
    "convnextv2_femto": _convnext(48, 2, 2, 6, 2, **_V2, **_CONV),
    "convnextv2_pico": _convnext(64, 2, 2, 6, 2, **_V2, **_CONV),
    "convnextv2_nano": _convnext(80, 2, 2, 8, 2, **_V2, **_CONV),
    "convnextv2_tiny": _convnext(96, 3, 3, 9, 3, **_V2),
    "convnextv2_small": _convnext(96, 3, 3, 27, 3, **_V2),
    "convnextv2_base": _convnext(128, 3, 3, 27, 3, **_V2),
    "convnextv2_large": _convnext(192, 3, 3, 27, 3, **_V2),
    "convnextv2_huge": _convnext(352, 3, 3, 27, 3, **_V2),
    "test_convnext": {**_TEST, "depths": (1, 2, 4, 2), "widths": (24, 32, 48, 64), "activation": "gelu_tanh"},
    "test_convnext2": {**_TEST, "activation": "gelu_tanh"},
    "test_convnext3": {**_TEST, "activation": "silu", "kernel_sizes": (7, 5, 5, 3)},
}
