"""The named Swins: for each name, the fields of its config."""

from typing import Any

Fields = dict[str, Any]


def _swin(dim: int, middle_depth: int, **fields: Any) -> Fields:
    """Heads of 32 channels, and depth in the third stage."""
    heads = tuple(dim // 32 * 2**stage for stage in range(4))
    return {"dim": dim, "depths": (2, 2, middle_depth, 2), "heads": heads, **fields}


def _v2(dim: int, middle_depth: int, window: int, image_size: int, **fields: Any) -> Fields:
    return _swin(dim, middle_depth, version=2, windows=(window,) * 4, image_size=image_size, **fields)


_384: Fields = {"windows": (12, 12, 12, 12), "image_size": 384}
_FROM_12: Fields = {"pretrained_windows": (12, 12, 12, 6)}
_TORCHVISION: Fields = {"cut_windows": False, "pad_first": True}

ROWS: dict[str, Fields] = {
    # torchvision
    "swin_t": _swin(96, 6, drop_path=0.2, **_TORCHVISION),
    "swin_s": _swin(96, 18, drop_path=0.3, **_TORCHVISION),
    "swin_b": _swin(128, 18, drop_path=0.5, **_TORCHVISION),
    "swin_v2_t": _v2(96, 6, 8, 256, drop_path=0.2, **_TORCHVISION),
    "swin_v2_s": _v2(96, 18, 8, 256, drop_path=0.3, **_TORCHVISION),
    "swin_v2_b": _v2(128, 18, 8, 256, drop_path=0.5, **_TORCHVISION),
    # timm
    "swin_tiny_patch4_window7_224": _swin(96, 6),
    "swin_small_patch4_window7_224": _swin(96, 18),
    "swin_base_patch4_window7_224": _swin(128, 18),
    "swin_base_patch4_window12_384": _swin(128, 18, **_384),
    "swin_large_patch4_window7_224": _swin(192, 18),
    "swin_large_patch4_window12_384": _swin(192, 18, **_384),
    "swin_s3_tiny_224": _swin(96, 6, windows=(7, 7, 14, 7)),
    "swin_s3_small_224": _swin(96, 18, windows=(14, 14, 14, 7)),
    "swin_s3_base_224": _swin(96, 30, windows=(7, 7, 14, 7)),
    "swinv2_tiny_window8_256": _v2(96, 6, 8, 256),
    "swinv2_tiny_window16_256": _v2(96, 6, 16, 256),
    "swinv2_small_window8_256": _v2(96, 18, 8, 256),
    "swinv2_small_window16_256": _v2(96, 18, 16, 256),
    "swinv2_base_window8_256": _v2(128, 18, 8, 256),
    "swinv2_base_window16_256": _v2(128, 18, 16, 256),
    "swinv2_base_window12_192": _v2(128, 18, 12, 192, num_classes=21841),
    "swinv2_base_window12to16_192to256": _v2(128, 18, 16, 256, **_FROM_12),
    "swinv2_base_window12to24_192to384": _v2(128, 18, 24, 384, **_FROM_12),
    "swinv2_large_window12_192": _v2(192, 18, 12, 192, num_classes=21841),
    "swinv2_large_window12to16_192to256": _v2(192, 18, 16, 256, **_FROM_12),
    "swinv2_large_window12to24_192to384": _v2(192, 18, 24, 384, **_FROM_12),
}
