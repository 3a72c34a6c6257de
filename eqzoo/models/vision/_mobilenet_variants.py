"""The tables of all mobile networks, as their papers and upstream give them; see `_mobilenet_config.py`."""

from collections.abc import Sequence
from typing import Any

from eqzoo.models.vision._mobilenet_config import MobileNetConfig, Stages, scaled, table
from eqzoo.nn import round_channels

_TF: dict[str, Any] = {"padding": "same_tf", "norm_eps": 1e-3}

# MobileNet V1 and V2

_V2 = table(
    "ds_r1_k3_s1_c16",
    "ir_r2_k3_s2_e6_c24",
    "ir_r3_k3_s2_e6_c32",
    "ir_r4_k3_s2_e6_c64",
    "ir_r3_k3_s1_e6_c96",
    "ir_r3_k3_s2_e6_c160",
    "ir_r1_k3_s1_e6_c320",
)


def _v2(width: float = 1.0, depth: float = 1.0, *, fixed_ends: bool = False, **options: Any) -> MobileNetConfig:
    """With `fixed_ends`, stem and top keep their width, and the first and last stage their depth."""
    return MobileNetConfig(
        stages=scaled(_V2, width=width, depth=depth, fixed_ends=fixed_ends),
        stem_width=32 if fixed_ends else _times(32, width),
        top_width=1280 if fixed_ends else max(1280, _times(1280, width)),
        activation="relu6",
        **options,
    )


def _times(channels: int, width: float, limit: float = 0.9) -> int:
    return round_channels(channels * width, limit=limit)


_V1 = table("dsa_r1_k3_s1_c64", "dsa_r2_k3_s2_c128", "dsa_r2_k3_s2_c256", "dsa_r6_k3_s2_c512", "dsa_r2_k3_s2_c1024")


def _v1(width: float, **options: Any) -> MobileNetConfig:
    options = {"top": "none", "top_width": 0, **options}
    return MobileNetConfig(stages=scaled(_V1, width=width), stem_width=_times(32, width), activation="relu6", **options)


# MnasNet

_MNASNET = table(
    "ds_r1_k3_s1_c16_noskip",
    "ir_r3_k3_s2_e3_c24",
    "ir_r3_k5_s2_e3_c40",
    "ir_r3_k5_s2_e6_c80",
    "ir_r2_k3_s1_e6_c96",
    "ir_r4_k5_s2_e6_c192",
    "ir_r1_k3_s1_e6_c320_noskip",
)


_SEMNASNET = table(
    "ds_r1_k3_s1_c16_noskip",
    "ir_r2_k3_s2_e6_c24",
    "ir_r3_k5_s2_e3_c40_se0.25",
    "ir_r4_k3_s2_e6_c80",
    "ir_r2_k3_s1_e6_c112_se0.25",
    "ir_r3_k5_s2_e6_c160_se0.25",
    "ir_r1_k3_s1_e6_c320",
)
_MNASNET_SMALL = table(
    "ds_r1_k3_s1_c8",
    "ir_r1_k3_s2_e3_c16",
    "ir_r2_k3_s2_e6_c16",
    "ir_r4_k5_s2_e6_c32_se0.25",
    "ir_r3_k3_s1_e6_c32_se0.25",
    "ir_r3_k5_s2_e6_c88_se0.25",
    "ir_r1_k3_s1_e6_c144",
)


def _mnasnet(width: float, stages: Stages = _MNASNET, **options: Any) -> MobileNetConfig:
    return MobileNetConfig(stages=scaled(stages, width=width), stem_width=_times(32, width), **options)


# MobileNetV3

_V3_LARGE = table(
    "ds_r1_k3_s1_c16_nre",
    "ir_r1_k3_s2_e4_c24_nre ir_r1_k3_s1_e3_c24_nre",
    "ir_r3_k5_s2_e3_c40_se0.25_nre",
    "ir_r1_k3_s2_e6_c80 ir_r1_k3_s1_e2.5_c80 ir_r2_k3_s1_e2.3_c80",
    "ir_r2_k3_s1_e6_c112_se0.25",
    "ir_r3_k5_s2_e6_c160_se0.25",
    "cn_r1_k1_s1_c960",
)
_V3_SMALL = table(
    "ds_r1_k3_s2_c16_se0.25_nre",
    "ir_r1_k3_s2_e4.5_c24_nre ir_r1_k3_s1_e3.67_c24_nre",
    "ir_r1_k5_s2_e4_c40_se0.25 ir_r2_k5_s1_e6_c40_se0.25",
    "ir_r2_k5_s1_e3_c48_se0.25",
    "ir_r3_k5_s2_e6_c96_se0.25",
    "cn_r1_k1_s1_c576",
)
_V3: dict[str, Any] = {
    "stem_width": 16,
    "top": "pooled_bias",
    "activation": "hard_swish",
    "squeeze_of": "expanded",
    "squeeze_divisor": 8,
    "squeeze_activation": "relu",
    "squeeze_gate": "hard_sigmoid",
}
_V3_SMALL_TOP: dict[str, Any] = {**_V3, "top_width": 1024}

# EfficientNet

_B0 = table(
    "ds_r1_k3_s1_c16_se0.25",
    "ir_r2_k3_s2_e6_c24_se0.25",
    "ir_r2_k5_s2_e6_c40_se0.25",
    "ir_r3_k3_s2_e6_c80_se0.25",
    "ir_r3_k5_s1_e6_c112_se0.25",
    "ir_r4_k5_s2_e6_c192_se0.25",
    "ir_r1_k3_s1_e6_c320_se0.25",
)


# Width and depth of B0 to B8
_SIZES = ((1.0, 1.0), (1.0, 1.1), (1.1, 1.2), (1.2, 1.4), (1.4, 1.8), (1.6, 2.2), (1.8, 2.6), (2.0, 3.1), (2.2, 3.6))


def _efficientnet(
    width: float, depth: float, *, divisor: int = 8, group_size: int = 1, **options: Any
) -> MobileNetConfig:
    stages = scaled(_B0, width=width, depth=depth, divisor=divisor)
    return MobileNetConfig(
        stages=tuple(tuple(run._replace(group_size=group_size) for run in stage) for stage in stages),
        stem_width=round_channels(32 * width, divisor, limit=0.9),
        top_width=round_channels(1280 * width, divisor, limit=0.9),
        activation="silu",
        **options,
    )


# EfficientNetV2

_V2_S = table(
    "cn_r2_k3_s1_c24_skip",
    "er_r4_k3_s2_e4_c48",
    "er_r4_k3_s2_e4_c64",
    "ir_r6_k3_s2_e4_c128_se0.25",
    "ir_r9_k3_s1_e6_c160_se0.25",
    "ir_r15_k3_s2_e6_c256_se0.25",
)
_V2_M = table(
    "cn_r3_k3_s1_c24_skip",
    "er_r5_k3_s2_e4_c48",
    "er_r5_k3_s2_e4_c80",
    "ir_r7_k3_s2_e4_c160_se0.25",
    "ir_r14_k3_s1_e6_c176_se0.25",
    "ir_r18_k3_s2_e6_c304_se0.25",
    "ir_r5_k3_s1_e6_c512_se0.25",
)
_V2_L = table(
    "cn_r4_k3_s1_c32_skip",
    "er_r7_k3_s2_e4_c64",
    "er_r7_k3_s2_e4_c96",
    "ir_r10_k3_s2_e4_c192_se0.25",
    "ir_r19_k3_s1_e6_c224_se0.25",
    "ir_r25_k3_s2_e6_c384_se0.25",
    "ir_r7_k3_s1_e6_c640_se0.25",
)
_V2_SM: dict[str, Any] = {"stem_width": 24, "activation": "silu"}
_V2_LX: dict[str, Any] = {"stem_width": 32, "activation": "silu"}

_V2_XL = table(
    "cn_r4_k3_s1_c32_skip",
    "er_r8_k3_s2_e4_c64",
    "er_r8_k3_s2_e4_c96",
    "ir_r16_k3_s2_e4_c192_se0.25",
    "ir_r24_k3_s1_e6_c256_se0.25",
    "ir_r32_k3_s2_e6_c512_se0.25",
    "ir_r8_k3_s1_e6_c640_se0.25",
)
_V2_BASE = table(
    "cn_r1_k3_s1_c16_skip",
    "er_r2_k3_s2_e4_c32",
    "er_r2_k3_s2_e4_c48",
    "ir_r3_k3_s2_e4_c96_se0.25",
    "ir_r5_k3_s1_e6_c112_se0.25",
    "ir_r8_k3_s2_e6_c192_se0.25",
)
# Of before Google published its own.
_V2_RW = (*table("er_r2_k3_s1_c24"), *_V2_S[1:-1], *table("ir_r15_k3_s2_e6_c272_se0.25"))


def _efficientnet_v2(
    stages: Stages, width: float, depth: float | Sequence[float], *, top: int = 1280, limit: float = 0.9, **options: Any
) -> MobileNetConfig:
    return MobileNetConfig(
        stages=scaled(stages, width=width, depth=depth, limit=limit),
        stem_width=_times(32 if stages is _V2_BASE else 24, width, limit),
        top_width=_times(top, width, limit),
        activation="silu",
        **options,
    )


_TEST = table(
    "cn_r1_k3_s1_c16_skip",
    "er_r1_k3_s2_e4_c24",
    "er_r1_k3_s2_e4_c32",
    "ir_r1_k3_s2_e4_c48_se0.25",
    "ir_r1_k3_s2_e4_c64_se0.25",
)

# EfficientNet-Lite, -EdgeTPU, TinyNet; MobileNet-EdgeTPU

_LITE = tuple(tuple(run._replace(squeeze=0.0) for run in stage) for stage in _B0)


def _lite(width: float, depth: float, **options: Any) -> MobileNetConfig:
    return MobileNetConfig(
        stages=scaled(_LITE, width=width, depth=depth, fixed_ends=True), activation="relu6", **options
    )


_EDGE = table(
    "er_r1_k3_s1_e4_c24_noskip",
    "er_r2_k3_s2_e8_c32",
    "er_r4_k3_s2_e8_c48",
    "ir_r5_k5_s2_e8_c96",
    "ir_r4_k5_s1_e8_c144",
    "ir_r2_k5_s2_e8_c192",
)


def _edge(width: float, depth: float, **options: Any) -> MobileNetConfig:
    """The first block expands as if the stem had as many channels as it puts out itself."""
    (stage, *others), stem_width = scaled(_EDGE, width=width, depth=depth), _times(32, width)
    first = stage[0]._replace(repeats=1, expansion=stage[0].expansion * stage[0].channels / stem_width)
    rest = [stage[0]._replace(repeats=stage[0].repeats - 1)] if stage[0].repeats > 1 else []
    return MobileNetConfig(
        stages=((first, *rest), *others), stem_width=stem_width, top_width=_times(1280, width), **options
    )


def _tinynet(width: float, depth: float) -> MobileNetConfig:
    return MobileNetConfig(stages=scaled(_B0, width=width, depth=depth, rounded=True), activation="silu")


_EDGETPU = table(
    "cn_r1_k1_s1_c16",
    "er_r1_k3_s2_e8_c32 er_r3_k3_s1_e4_c32",
    "er_r1_k3_s2_e8_c48 er_r3_k3_s1_e4_c48",
    "ir_r1_k3_s2_e8_c96 ir_r3_k3_s1_e4_c96",
    "ir_r1_k3_s1_e8_c96_noskip ir_r3_k3_s1_e4_c96",
    "ir_r1_k5_s2_e8_c160 ir_r3_k5_s1_e4_c160",
    "ir_r1_k3_s1_e8_c192",
)


def _edgetpu_v2(widths: tuple[int, ...], *, group_size: int = 64, **options: Any) -> MobileNetConfig:
    a, b, c, d, e, f, g = widths
    gs = group_size
    stages = table(
        f"cn_r1_k1_s1_c{a}",
        f"er_r1_k3_s2_e8_c{b} er_r1_k3_s1_e4_gs{gs}_c{b}",
        f"er_r1_k3_s2_e8_c{c} er_r1_k3_s1_e4_gs{gs}_c{c} er_r1_k3_s1_e4_c{c} er_r1_k3_s1_e4_gs{gs}_c{c}",
        f"er_r1_k3_s2_e8_c{d} ir_r3_k3_s1_e4_c{d}",
        f"ir_r1_k3_s1_e8_c{e} ir_r3_k3_s1_e4_c{e}",
        f"ir_r1_k3_s2_e8_c{f} ir_r3_k3_s1_e4_c{f}",
        f"ir_r1_k3_s1_e8_c{g}",
    )
    return MobileNetConfig(stages=stages, **options)


# FBNet-C, Single-Path NAS, MixNet

_FBNET_C = table(
    "ir_r1_k3_s1_c16",
    "ir_r1_k3_s2_e6_c24 ir_r2_k3_s1_c24",
    "ir_r1_k5_s2_e6_c32 ir_r1_k5_s1_e3_c32 ir_r1_k5_s1_e6_c32 ir_r1_k3_s1_e6_c32",
    "ir_r1_k5_s2_e6_c64 ir_r1_k5_s1_e3_c64 ir_r2_k5_s1_e6_c64",
    "ir_r3_k5_s1_e6_c112 ir_r1_k5_s1_e3_c112",
    "ir_r4_k5_s2_e6_c184",
    "ir_r1_k3_s1_e6_c352",
)
_SPNASNET = table(
    "ds_r1_k3_s1_c16_noskip",
    "ir_r3_k3_s2_e3_c24",
    "ir_r1_k5_s2_e6_c40 ir_r3_k3_s1_e3_c40",
    "ir_r1_k5_s2_e6_c80 ir_r3_k3_s1_e3_c80",
    "ir_r1_k5_s1_e6_c96 ir_r3_k5_s1_e3_c96",
    "ir_r4_k5_s2_e6_c192",
    "ir_r1_k3_s1_e6_c320_noskip",
)
_MIXNET_S = table(
    "ds_r1_k3_s1_c16",
    "ir_r1_k3_a1.1_p1.1_s2_e6_c24 ir_r1_k3_a1.1_p1.1_s1_e3_c24",
    "ir_r1_k3.5.7_s2_e6_c40_se0.5_nsw ir_r3_k3.5_a1.1_p1.1_s1_e6_c40_se0.5_nsw",
    "ir_r1_k3.5.7_p1.1_s2_e6_c80_se0.25_nsw ir_r2_k3.5_p1.1_s1_e6_c80_se0.25_nsw",
    "ir_r1_k3.5.7_a1.1_p1.1_s1_e6_c120_se0.5_nsw ir_r2_k3.5.7.9_a1.1_p1.1_s1_e3_c120_se0.5_nsw",
    "ir_r1_k3.5.7.9.11_s2_e6_c200_se0.5_nsw ir_r2_k3.5.7.9_p1.1_s1_e6_c200_se0.5_nsw",
)
_MIXNET_M = table(
    "ds_r1_k3_s1_c24",
    "ir_r1_k3.5.7_a1.1_p1.1_s2_e6_c32 ir_r1_k3_a1.1_p1.1_s1_e3_c32",
    "ir_r1_k3.5.7.9_s2_e6_c40_se0.5_nsw ir_r3_k3.5_a1.1_p1.1_s1_e6_c40_se0.5_nsw",
    "ir_r1_k3.5.7_s2_e6_c80_se0.25_nsw ir_r3_k3.5.7.9_a1.1_p1.1_s1_e6_c80_se0.25_nsw",
    "ir_r1_k3_s1_e6_c120_se0.5_nsw ir_r3_k3.5.7.9_a1.1_p1.1_s1_e3_c120_se0.5_nsw",
    "ir_r1_k3.5.7.9_s2_e6_c200_se0.5_nsw ir_r3_k3.5.7.9_p1.1_s1_e6_c200_se0.5_nsw",
)


def _mixnet(stages: Stages, stem: int, width: float = 1.0, depth: float = 1.0, **options: Any) -> MobileNetConfig:
    stages = scaled(stages, width=width, depth=depth, rounded=True)
    return MobileNetConfig(stages=stages, stem_width=_times(stem, width), top_width=1536, **options)


# FBNetV3, LCNet, HardCoRe-NAS: blocks of MobileNetV3

_FBNET_B = table(
    "ds_r2_k3_s1_c16",
    "ir_r1_k5_s2_e4_c24 ir_r3_k5_s1_e2_c24",
    "ir_r1_k5_s2_e5_c40_se0.25 ir_r4_k5_s1_e3_c40_se0.25",
    "ir_r1_k5_s2_e5_c72 ir_r4_k3_s1_e3_c72",
    "ir_r1_k3_s1_e5_c120_se0.25 ir_r5_k5_s1_e3_c120_se0.25",
    "ir_r1_k3_s2_e6_c184_se0.25 ir_r5_k5_s1_e4_c184_se0.25 ir_r1_k5_s1_e6_c224_se0.25",
    "cn_r1_k1_s1_c1344",
)
_FBNET_D = table(
    "ds_r2_k3_s1_c16",
    "ir_r1_k3_s2_e5_c24 ir_r5_k3_s1_e2_c24",
    "ir_r1_k5_s2_e4_c40_se0.25 ir_r4_k3_s1_e3_c40_se0.25",
    "ir_r1_k3_s2_e5_c72 ir_r4_k3_s1_e3_c72",
    "ir_r1_k3_s1_e5_c128_se0.25 ir_r6_k5_s1_e3_c128_se0.25",
    "ir_r1_k3_s2_e6_c208_se0.25 ir_r5_k5_s1_e5_c208_se0.25 ir_r1_k5_s1_e6_c240_se0.25",
    "cn_r1_k1_s1_c1440",
)
_FBNET_G = table(
    "ds_r3_k3_s1_c24",
    "ir_r1_k5_s2_e4_c40 ir_r4_k5_s1_e2_c40",
    "ir_r1_k5_s2_e4_c56_se0.25 ir_r4_k5_s1_e3_c56_se0.25",
    "ir_r1_k5_s2_e5_c104 ir_r4_k3_s1_e3_c104",
    "ir_r1_k3_s1_e5_c160_se0.25 ir_r8_k5_s1_e3_c160_se0.25",
    "ir_r1_k3_s2_e6_c264_se0.25 ir_r6_k5_s1_e5_c264_se0.25 ir_r2_k5_s1_e6_c288_se0.25",
    "cn_r1_k1_s1_c1728",
)
_FBNET: dict[str, Any] = {
    "top": "pooled",
    "top_width": 1984,
    "activation": "hard_swish",
    "squeeze_divisor": 8,
    "squeeze_limit": 0.95,
    "squeeze_gate": "hard_sigmoid",
}
_LCNET = table(
    "dsa_r1_k3_s1_c32",
    "dsa_r2_k3_s2_c64",
    "dsa_r2_k3_s2_c128",
    "dsa_r1_k3_s2_c256 dsa_r1_k5_s1_c256",
    "dsa_r4_k5_s1_c256",
    "dsa_r2_k5_s2_c512_se0.25",
)


def _lcnet(width: float) -> MobileNetConfig:
    stages = scaled(_LCNET, width=width)
    return MobileNetConfig(stages=stages, **{**_V3, "stem_width": _times(16, width), "squeeze_divisor": 1})


def _v3(stages: Stages, width: float = 1.0, depth: float = 1.0, **options: Any) -> MobileNetConfig:
    stem = 16 if width < 0.75 else _times(16, width)
    return MobileNetConfig(stages=scaled(stages, width=width, depth=depth), **{**_V3, "stem_width": stem, **options})


def _minimal(stages: Stages) -> Stages:
    """All kernels 3, no gates, one activation."""
    plain = lambda run: run._replace(kernel=min(run.kernel, 3), squeeze=0.0, activation=None)
    return tuple(tuple(map(plain, stage)) for stage in stages)


_V3_RW: dict[str, Any] = {"top": "pooled", "squeeze_divisor": 1, "squeeze_activation": None}
_V3_RW_STAGES = (*table("ds_r1_k3_s1_c16_nre_noskip"), *_V3_LARGE[1:])


def _hardcorenas(*stages: str) -> MobileNetConfig:
    every = ("ds_r1_k3_s1_c16_nre", *stages, "cn_r1_k1_s1_c960")
    return MobileNetConfig(stages=table(*every), **{**_V3, "stem_width": 32})


# MobileNetV4

_V4_SMALL = table(
    "cn_r1_k3_s2_c32 cn_r1_k1_s1_c32",
    "cn_r1_k3_s2_c96 cn_r1_k1_s1_c64",
    "uir_r1_a5_k5_s2_e3_c96 uir_r4_a0_k3_s1_e2_c96 uir_r1_a3_k0_s1_e4_c96",
    "uir_r1_a3_k3_s2_e6_c128 uir_r1_a5_k5_s1_e4_c128 uir_r1_a0_k5_s1_e4_c128 uir_r1_a0_k5_s1_e3_c128"
    " uir_r2_a0_k3_s1_e4_c128",
    "cn_r1_k1_s1_c960",
)
_V4_MEDIUM = table(
    "er_r1_k3_s2_e4_c48",
    "uir_r1_a3_k5_s2_e4_c80 uir_r1_a3_k3_s1_e2_c80",
    "uir_r1_a3_k5_s2_e6_c160 uir_r2_a3_k3_s1_e4_c160 uir_r1_a3_k5_s1_e4_c160 uir_r1_a3_k3_s1_e4_c160"
    " uir_r1_a3_k0_s1_e4_c160 uir_r1_a0_k0_s1_e2_c160 uir_r1_a3_k0_s1_e4_c160",
    "uir_r1_a5_k5_s2_e6_c256 uir_r1_a5_k5_s1_e4_c256 uir_r2_a3_k5_s1_e4_c256 uir_r1_a0_k0_s1_e4_c256"
    " uir_r1_a3_k0_s1_e4_c256 uir_r1_a3_k5_s1_e2_c256 uir_r1_a5_k5_s1_e4_c256 uir_r2_a0_k0_s1_e4_c256"
    " uir_r1_a5_k0_s1_e2_c256",
    "cn_r1_k1_s1_c960",
)
_V4_LARGE = table(
    "er_r1_k3_s2_e4_c48",
    "uir_r1_a3_k5_s2_e4_c96 uir_r1_a3_k3_s1_e4_c96",
    "uir_r1_a3_k5_s2_e4_c192 uir_r3_a3_k3_s1_e4_c192 uir_r1_a3_k5_s1_e4_c192 uir_r5_a5_k3_s1_e4_c192"
    " uir_r1_a3_k0_s1_e4_c192",
    "uir_r4_a5_k5_s2_e4_c512 uir_r1_a5_k0_s1_e4_c512 uir_r1_a5_k3_s1_e4_c512 uir_r2_a5_k0_s1_e4_c512"
    " uir_r1_a5_k3_s1_e4_c512 uir_r1_a5_k5_s1_e4_c512 uir_r3_a5_k0_s1_e4_c512",
    "cn_r1_k1_s1_c960",
)


_V4_HYBRID_MEDIUM = table(
    "er_r1_k3_s2_e4_c48",
    "uir_r1_a3_k5_s2_e4_c80 uir_r1_a3_k3_s1_e2_c80",
    "uir_r1_a3_k5_s2_e6_c160 uir_r1_a0_k0_s1_e2_c160 uir_r1_a3_k3_s1_e4_c160 uir_r1_a3_k5_s1_e4_c160"
    " mqa_r1_k3_h4_s1_v2_d64_c160 uir_r1_a3_k3_s1_e4_c160 mqa_r1_k3_h4_s1_v2_d64_c160 uir_r1_a3_k0_s1_e4_c160"
    " mqa_r1_k3_h4_s1_v2_d64_c160 uir_r1_a3_k3_s1_e4_c160 mqa_r1_k3_h4_s1_v2_d64_c160 uir_r1_a3_k0_s1_e4_c160",
    "uir_r1_a5_k5_s2_e6_c256 uir_r1_a5_k5_s1_e4_c256 uir_r2_a3_k5_s1_e4_c256 uir_r1_a0_k0_s1_e2_c256"
    " uir_r1_a3_k5_s1_e2_c256 uir_r1_a0_k0_s1_e2_c256 uir_r1_a0_k0_s1_e4_c256 mqa_r1_k3_h4_s1_d64_c256"
    " uir_r1_a3_k0_s1_e4_c256 mqa_r1_k3_h4_s1_d64_c256 uir_r1_a5_k5_s1_e4_c256 mqa_r1_k3_h4_s1_d64_c256"
    " uir_r1_a5_k0_s1_e4_c256 mqa_r1_k3_h4_s1_d64_c256 uir_r1_a5_k0_s1_e4_c256",
    "cn_r1_k1_s1_c960",
)
_V4_HYBRID_LARGE = table(
    "er_r1_k3_s2_e4_c48",
    "uir_r1_a3_k5_s2_e4_c96 uir_r1_a3_k3_s1_e4_c96",
    "uir_r1_a3_k5_s2_e4_c192 uir_r3_a3_k3_s1_e4_c192 uir_r1_a3_k5_s1_e4_c192 uir_r2_a5_k3_s1_e4_c192"
    " mqa_r1_k3_h8_s1_v2_d48_c192 uir_r1_a5_k3_s1_e4_c192 mqa_r1_k3_h8_s1_v2_d48_c192 uir_r1_a5_k3_s1_e4_c192"
    " mqa_r1_k3_h8_s1_v2_d48_c192 uir_r1_a5_k3_s1_e4_c192 mqa_r1_k3_h8_s1_v2_d48_c192 uir_r1_a3_k0_s1_e4_c192",
    "uir_r4_a5_k5_s2_e4_c512 uir_r1_a5_k0_s1_e4_c512 uir_r1_a5_k3_s1_e4_c512 uir_r2_a5_k0_s1_e4_c512"
    " uir_r1_a5_k3_s1_e4_c512 uir_r1_a5_k5_s1_e4_c512 mqa_r1_k3_h8_s1_d64_c512 uir_r1_a5_k0_s1_e4_c512"
    " mqa_r1_k3_h8_s1_d64_c512 uir_r1_a5_k0_s1_e4_c512 mqa_r1_k3_h8_s1_d64_c512 uir_r1_a5_k0_s1_e4_c512"
    " mqa_r1_k3_h8_s1_d64_c512 uir_r1_a5_k0_s1_e4_c512",
    "cn_r1_k1_s1_c960",
)
_HYBRID: dict[str, Any] = {"layer_scale": 1e-5}


def _v4(stages: Stages, stem: int, width: float = 1.0, **options: Any) -> MobileNetConfig:
    return MobileNetConfig(stages=scaled(stages, width=width), stem_width=stem, top="pooled_norm", **options)


# torchvision states dropout and momentum.
_TV: dict[str, Any] = {"dropout": 0.2}
_TV_MNASNET: dict[str, Any] = {"dropout": 0.2, "norm_momentum": 1 - 0.9997}
_TV_SLOW: dict[str, Any] = {"norm_eps": 1e-3, "norm_momentum": 0.01}

_IN_TORCHVISION: dict[str, MobileNetConfig] = {
    "mobilenet_v2": _v2(**_TV),
    "mobilenet_v3_large": MobileNetConfig(stages=_V3_LARGE, dilate_at_once=True, **_V3, **_TV, **_TV_SLOW),
    "mobilenet_v3_small": MobileNetConfig(stages=_V3_SMALL, dilate_at_once=True, **_V3_SMALL_TOP, **_TV, **_TV_SLOW),
    "mnasnet0_5": _mnasnet(0.5, **_TV_MNASNET),
    "mnasnet0_75": _mnasnet(0.75, **_TV_MNASNET),
    "mnasnet1_0": _mnasnet(1.0, **_TV_MNASNET),
    "mnasnet1_3": _mnasnet(1.3, **_TV_MNASNET),
    "efficientnet_b0": _efficientnet(1.0, 1.0, dropout=0.2, drop_path=0.2),
    "efficientnet_b1": _efficientnet(1.0, 1.1, dropout=0.2, drop_path=0.2),
    "efficientnet_b2": _efficientnet(1.1, 1.2, dropout=0.3, drop_path=0.2),
    "efficientnet_b3": _efficientnet(1.2, 1.4, dropout=0.3, drop_path=0.2),
    "efficientnet_b4": _efficientnet(1.4, 1.8, dropout=0.4, drop_path=0.2),
    "torchvision/efficientnet_b5": _efficientnet(1.6, 2.2, dropout=0.4, drop_path=0.2, **_TV_SLOW),
    "torchvision/efficientnet_b6": _efficientnet(1.8, 2.6, dropout=0.5, drop_path=0.2, **_TV_SLOW),
    "torchvision/efficientnet_b7": _efficientnet(2.0, 3.1, dropout=0.5, drop_path=0.2, **_TV_SLOW),
    "efficientnet_v2_s": MobileNetConfig(stages=_V2_S, **_V2_SM, norm_eps=1e-3, dropout=0.2, drop_path=0.2),
    "efficientnet_v2_m": MobileNetConfig(stages=_V2_M, **_V2_SM, norm_eps=1e-3, dropout=0.3, drop_path=0.2),
    "efficientnet_v2_l": MobileNetConfig(stages=_V2_L, **_V2_LX, norm_eps=1e-3, dropout=0.4, drop_path=0.2),
}

_IN_TIMM: dict[str, MobileNetConfig] = {
    "mobilenetv1_100": _v1(1.0),
    "mobilenetv1_100h": _v1(1.0, top="conv", top_width=1024),
    "mobilenetv1_125": _v1(1.25),
    "mobilenetv2_035": _v2(0.35),
    "mobilenetv2_050": _v2(0.5),
    "mobilenetv2_075": _v2(0.75),
    "mobilenetv2_100": _v2(1.0),
    "mobilenetv2_140": _v2(1.4),
    "mobilenetv2_110d": _v2(1.1, 1.2, fixed_ends=True),
    "mobilenetv2_120d": _v2(1.2, 1.4, fixed_ends=True),
    "mnasnet_050": _mnasnet(0.5),
    "mnasnet_075": _mnasnet(0.75),
    "mnasnet_100": _mnasnet(1.0),
    "mnasnet_140": _mnasnet(1.4),
    "semnasnet_050": _mnasnet(0.5, _SEMNASNET),
    "semnasnet_075": _mnasnet(0.75, _SEMNASNET),
    "semnasnet_100": _mnasnet(1.0, _SEMNASNET),
    "semnasnet_140": _mnasnet(1.4, _SEMNASNET),
    "mnasnet_small": MobileNetConfig(stages=_MNASNET_SMALL, stem_width=8),
    "fbnetc_100": MobileNetConfig(stages=_FBNET_C, stem_width=16, top_width=1984, norm_eps=1e-3),  # as it was trained
    "spnasnet_100": MobileNetConfig(stages=_SPNASNET),
    "timm/efficientnet_b5": _efficientnet(1.6, 2.2),
    "timm/efficientnet_b6": _efficientnet(1.8, 2.6),
    "timm/efficientnet_b7": _efficientnet(2.0, 3.1),
    "efficientnet_b8": _efficientnet(2.2, 3.6),
    "efficientnet_l2": _efficientnet(4.3, 5.3),
    "efficientnet_b0_g16_evos": _efficientnet(1.0, 1.0, divisor=16, group_size=16),
    **{f"tf_efficientnet_b{n}": _efficientnet(*size, **_TF) for n, size in enumerate(_SIZES)},
    "tf_efficientnet_l2": _efficientnet(4.3, 5.3, **_TF),
    "efficientnet_es": _edge(1.0, 1.0),
    "efficientnet_es_pruned": _edge(1.0, 1.0),
    "efficientnet_em": _edge(1.0, 1.1),
    "efficientnet_el": _edge(1.2, 1.4),
    "efficientnet_el_pruned": _edge(1.2, 1.4),
    "tf_efficientnet_es": _edge(1.0, 1.0, **_TF),
    "tf_efficientnet_em": _edge(1.0, 1.1, **_TF),
    "tf_efficientnet_el": _edge(1.2, 1.4, **_TF),
    **{f"efficientnet_lite{n}": _lite(*size) for n, size in enumerate(_SIZES[:5])},
    **{f"tf_efficientnet_lite{n}": _lite(*size, **_TF) for n, size in enumerate(_SIZES[:5])},
    "efficientnetv2_rw_t": _efficientnet_v2(_V2_S, 0.8, 0.9),
    "efficientnetv2_rw_s": _efficientnet_v2(_V2_RW, 1.0, 1.0, top=1792),
    "efficientnetv2_rw_m": _efficientnet_v2(_V2_RW, 1.2, (1.2, 1.2, 1.2, 1.2, 1.6, 1.6), top=1792),
    "efficientnetv2_s": MobileNetConfig(stages=_V2_S, **_V2_SM),
    "efficientnetv2_m": MobileNetConfig(stages=_V2_M, **_V2_SM),
    "efficientnetv2_l": MobileNetConfig(stages=_V2_L, **_V2_LX),
    "efficientnetv2_xl": MobileNetConfig(stages=_V2_XL, **_V2_LX),
    "tf_efficientnetv2_s": MobileNetConfig(stages=_V2_S, **_V2_SM, **_TF),
    "tf_efficientnetv2_m": MobileNetConfig(stages=_V2_M, **_V2_SM, **_TF),
    "tf_efficientnetv2_l": MobileNetConfig(stages=_V2_L, **_V2_LX, **_TF),
    "tf_efficientnetv2_xl": MobileNetConfig(stages=_V2_XL, **_V2_LX, **_TF),
    **{
        f"tf_efficientnetv2_b{n}": _efficientnet_v2(_V2_BASE, *size, limit=0.0, **_TF)
        for n, size in enumerate(_SIZES[:4])
    },
    "test_efficientnet": MobileNetConfig(stages=_TEST, stem_width=24, top_width=256, activation="silu"),
    "mixnet_s": _mixnet(_MIXNET_S, 16),
    "mixnet_m": _mixnet(_MIXNET_M, 24),
    "mixnet_l": _mixnet(_MIXNET_M, 24, 1.3),
    "mixnet_xl": _mixnet(_MIXNET_M, 24, 1.6, 1.2),
    "mixnet_xxl": _mixnet(_MIXNET_M, 24, 2.4, 1.3),
    "tf_mixnet_s": _mixnet(_MIXNET_S, 16, **_TF),
    "tf_mixnet_m": _mixnet(_MIXNET_M, 24, **_TF),
    "tf_mixnet_l": _mixnet(_MIXNET_M, 24, 1.3, **_TF),
    "tinynet_a": _tinynet(1.0, 1.2),
    "tinynet_b": _tinynet(0.75, 1.1),
    "tinynet_c": _tinynet(0.54, 0.85),
    "tinynet_d": _tinynet(0.54, 0.695),
    "tinynet_e": _tinynet(0.51, 0.6),
    "mobilenet_edgetpu_100": MobileNetConfig(stages=_EDGETPU),
    "mobilenet_edgetpu_v2_xs": _edgetpu_v2((16, 32, 48, 96, 144, 160, 192)),
    "mobilenet_edgetpu_v2_s": _edgetpu_v2((24, 48, 64, 128, 160, 192, 256), stem_width=64, stem_kernel=5),
    "mobilenet_edgetpu_v2_m": _edgetpu_v2(
        (32, 64, 80, 160, 192, 240, 320), stem_width=64, stem_kernel=5, top_width=1344
    ),
    "mobilenet_edgetpu_v2_l": _edgetpu_v2(
        (32, 64, 96, 192, 240, 256, 384), group_size=128, stem_width=64, stem_kernel=7, top_width=1408
    ),
    "mobilenetv3_large_075": _v3(_V3_LARGE, 0.75),
    "mobilenetv3_large_100": _v3(_V3_LARGE),
    "mobilenetv3_large_150d": _v3(_V3_LARGE, 1.5, 1.2),
    "mobilenetv3_small_050": _v3(_V3_SMALL, 0.5, top_width=1024),
    "mobilenetv3_small_075": _v3(_V3_SMALL, 0.75, top_width=1024),
    "mobilenetv3_small_100": _v3(_V3_SMALL, top_width=1024),
    "mobilenetv3_rw": _v3(_V3_RW_STAGES, **_V3_RW, norm_eps=1e-3),
    "tf_mobilenetv3_large_075": _v3(_V3_LARGE, 0.75, **_TF),
    "tf_mobilenetv3_large_100": _v3(_V3_LARGE, **_TF),
    "tf_mobilenetv3_large_minimal_100": _v3(_minimal(_V3_LARGE), activation="relu", **_TF),
    "tf_mobilenetv3_small_075": _v3(_V3_SMALL, 0.75, top_width=1024, **_TF),
    "tf_mobilenetv3_small_100": _v3(_V3_SMALL, top_width=1024, **_TF),
    "tf_mobilenetv3_small_minimal_100": _v3(_minimal(_V3_SMALL), top_width=1024, activation="relu", **_TF),
    "fbnetv3_b": MobileNetConfig(stages=_FBNET_B, stem_width=16, **_FBNET),
    "fbnetv3_d": MobileNetConfig(stages=_FBNET_D, stem_width=24, **_FBNET),
    "fbnetv3_g": MobileNetConfig(stages=_FBNET_G, stem_width=32, **_FBNET),
    "lcnet_035": _lcnet(0.35),
    "lcnet_050": _lcnet(0.5),
    "lcnet_075": _lcnet(0.75),
    "lcnet_100": _lcnet(1.0),
    "lcnet_150": _lcnet(1.5),
    "hardcorenas_a": _hardcorenas(
        "ir_r1_k5_s2_e3_c24_nre ir_r1_k5_s1_e3_c24_nre_se0.25",
        "ir_r1_k5_s2_e3_c40_nre ir_r1_k5_s1_e6_c40_nre_se0.25",
        "ir_r2_k5_s2_e6_c80_se0.25",
        "ir_r2_k5_s1_e6_c112_se0.25",
        "ir_r2_k5_s2_e6_c192_se0.25",
    ),
    "hardcorenas_b": _hardcorenas(
        "ir_r1_k5_s2_e3_c24_nre ir_r1_k5_s1_e3_c24_nre_se0.25 ir_r1_k3_s1_e3_c24_nre",
        "ir_r3_k5_s2_e3_c40_nre",
        "ir_r2_k5_s2_e3_c80 ir_r2_k3_s1_e3_c80",
        "ir_r1_k5_s1_e3_c112 ir_r3_k3_s1_e3_c112",
        "ir_r2_k5_s2_e6_c192_se0.25 ir_r1_k3_s1_e3_c192_se0.25",
    ),
    "hardcorenas_c": _hardcorenas(
        "ir_r1_k5_s2_e3_c24_nre ir_r1_k5_s1_e3_c24_nre_se0.25",
        "ir_r4_k5_s2_e3_c40_nre",
        "ir_r1_k5_s2_e4_c80 ir_r1_k5_s1_e6_c80_se0.25 ir_r2_k3_s1_e3_c80",
        "ir_r1_k5_s1_e6_c112_se0.25 ir_r3_k3_s1_e3_c112",
        "ir_r2_k5_s2_e6_c192_se0.25 ir_r1_k3_s1_e3_c192_se0.25",
    ),
    "hardcorenas_d": _hardcorenas(
        "ir_r2_k5_s2_e3_c24_nre_se0.25",
        "ir_r1_k5_s2_e3_c40_nre_se0.25 ir_r1_k5_s1_e4_c40_nre_se0.25 ir_r1_k3_s1_e3_c40_nre_se0.25",
        "ir_r1_k5_s2_e4_c80_se0.25 ir_r3_k3_s1_e3_c80_se0.25",
        "ir_r1_k3_s1_e4_c112_se0.25 ir_r1_k5_s1_e4_c112_se0.25 ir_r1_k3_s1_e3_c112_se0.25 ir_r1_k5_s1_e3_c112_se0.25",
        "ir_r3_k5_s2_e6_c192_se0.25 ir_r1_k3_s1_e6_c192_se0.25",
    ),
    "hardcorenas_e": _hardcorenas(
        "ir_r2_k5_s2_e3_c24_nre_se0.25",
        "ir_r1_k5_s2_e6_c40_nre_se0.25 ir_r2_k5_s1_e4_c40_nre_se0.25 ir_r1_k3_s1_e3_c40_nre_se0.25",
        "ir_r1_k5_s2_e4_c80_se0.25 ir_r1_k3_s1_e6_c80_se0.25",
        "ir_r3_k5_s1_e6_c112_se0.25 ir_r1_k5_s1_e3_c112_se0.25",
        "ir_r3_k5_s2_e6_c192_se0.25 ir_r1_k3_s1_e6_c192_se0.25",
    ),
    "hardcorenas_f": _hardcorenas(
        "ir_r2_k5_s2_e3_c24_nre_se0.25",
        "ir_r2_k5_s2_e6_c40_nre_se0.25",
        "ir_r2_k5_s2_e6_c80_se0.25 ir_r2_k3_s1_e3_c80_se0.25",
        "ir_r1_k3_s1_e6_c112_se0.25 ir_r2_k5_s1_e6_c112_se0.25 ir_r1_k3_s1_e3_c112_se0.25",
        "ir_r2_k5_s2_e6_c192_se0.25 ir_r2_k3_s1_e6_c192_se0.25",
    ),
    "mobilenetv4_conv_small_035": _v4(_V4_SMALL, 32, 0.35),
    "mobilenetv4_conv_small_050": _v4(_V4_SMALL, 32, 0.5),
    "mobilenetv4_conv_small": _v4(_V4_SMALL, 32),
    "mobilenetv4_conv_medium": _v4(_V4_MEDIUM, 32),
    "mobilenetv4_conv_large": _v4(_V4_LARGE, 24),
    "mobilenetv4_hybrid_medium": _v4(_V4_HYBRID_MEDIUM, 32, **_HYBRID),
    "mobilenetv4_hybrid_medium_075": _v4(_V4_HYBRID_MEDIUM, 32, 0.75, **_HYBRID),
    "mobilenetv4_hybrid_large": _v4(_V4_HYBRID_LARGE, 24, activation="gelu", **_HYBRID),
    "mobilenetv4_hybrid_large_075": _v4(_V4_HYBRID_LARGE, 24, 0.75, activation="gelu", **_HYBRID),
}

_IN_BOTH = ("efficientnet_b0", "efficientnet_b1", "efficientnet_b2", "efficientnet_b3", "efficientnet_b4")

VARIANTS = {**_IN_TORCHVISION, **_IN_TIMM}
TIMM_NAMES = (*_IN_BOTH, *_IN_TIMM)
