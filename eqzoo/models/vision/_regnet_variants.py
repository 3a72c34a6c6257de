"""The named RegNets: for each name, the numbers its widths and depths follow from, and what else sets its config."""

from typing import Any

Numbers = tuple[int, int, float, float, int]  # depth, initial width, slope, step, group size
Fields = dict[str, Any]

_X: dict[str, Numbers] = {
    "002": (13, 24, 36.44, 2.49, 8),
    "004": (22, 24, 24.48, 2.54, 16),
    "006": (16, 48, 36.97, 2.24, 24),
    "008": (16, 56, 35.73, 2.28, 16),
    "016": (18, 80, 34.01, 2.25, 24),
    "032": (25, 88, 26.31, 2.25, 48),
    "040": (23, 96, 38.65, 2.43, 40),
    "064": (17, 184, 60.83, 2.07, 56),
    "080": (23, 80, 49.56, 2.88, 120),
    "120": (19, 168, 73.36, 2.37, 112),
    "160": (22, 216, 55.59, 2.1, 128),
    "320": (23, 320, 69.86, 2.0, 168),
}
_Y: dict[str, Numbers] = {
    "002": (13, 24, 36.44, 2.49, 8),
    "004": (16, 48, 27.89, 2.09, 8),
    "006": (15, 48, 32.54, 2.32, 16),
    "008": (14, 56, 38.84, 2.4, 16),
    "016": (27, 48, 20.71, 2.65, 24),
    "032": (21, 80, 42.63, 2.66, 24),
    "040": (22, 96, 31.41, 2.24, 64),
    "064": (25, 112, 33.22, 2.27, 72),
    "080": (17, 192, 76.82, 2.19, 56),
    "120": (19, 168, 73.36, 2.37, 112),
    "160": (18, 200, 106.23, 2.48, 112),
    "320": (20, 232, 115.89, 2.53, 232),
    "640": (20, 352, 147.48, 2.4, 328),
    "1280": (27, 456, 160.83, 2.52, 264),
    "2560": (27, 640, 230.83, 2.53, 373),
}
_TORCHVISION_X = {
    "400mf": "004",
    "800mf": "008",
    "1_6gf": "016",
    "3_2gf": "032",
    "8gf": "080",
    "16gf": "160",
    "32gf": "320",
}
_TORCHVISION_Y = {**_TORCHVISION_X, "128gf": "1280"}
_TORCHVISION: Fields = {"torchvision": True}
_SE: Fields = {"squeeze_excite": 0.25}
_V: Fields = {**_SE, "pre_activation": True, "activation": "silu"}
_Z: Fields = {**_SE, "bottleneck": 4.0, "shortcut": "none", "linear_out": True, "activation": "silu"}

ROWS: dict[str, tuple[Numbers, Fields]] = {
    # torchvision
    **{f"regnet_x_{name}": (_X[size], _TORCHVISION) for name, size in _TORCHVISION_X.items()},
    **{f"regnet_y_{name}": (_Y[size], {**_TORCHVISION, **_SE}) for name, size in _TORCHVISION_Y.items()},
    # timm
    **{f"regnetx_{size}": (_X[size], {}) for size in _X},
    **{f"regnety_{size}": (_Y[size], _SE) for size in _Y},
    "regnetx_004_tv": (_X["004"], _TORCHVISION),
    "regnety_008_tv": (_Y["008"], {**_TORCHVISION, **_SE}),
    "regnety_080_tv": (_Y["080"], {**_TORCHVISION, **_SE}),
    "regnety_040_sgn": (_Y["040"], {**_SE, "group_norm": 16, "activation": "silu"}),
    "regnetv_040": (_Y["040"], _V),
    "regnetv_064": (_Y["064"], {**_V, "shortcut": "pool"}),
    "regnetz_005": ((21, 16, 10.7, 2.51, 4), {**_Z, "last_width": 1024}),
    "regnetz_040": ((28, 48, 14.5, 2.226, 8), _Z),
    "regnetz_040_h": ((28, 48, 14.5, 2.226, 8), {**_Z, "last_width": 1536}),
}
