"""How timm writes a Mixer down: names of tensors, and options."""

from typing import Any

from eqzoo.checkpoint import SPLIT, Rule, Transform, prefixed
from eqzoo.models._family import Options, Upstream

# Upstream's factors and offsets have axes for the batch and the tokens.
_ROW = Transform(lambda tensor, shapes: [tensor.reshape(shapes[0])], lambda parts: parts[0][None, None])

_AFFINE = (Rule(r"(alpha|beta)", "{0}", _ROW),)

_PERCEPTRON = (
    Rule(r"fc(\d)\.(weight|bias)", "fc{0}.{1}"),
    Rule(r"fc1\.(weight|bias)", ("up.{0}", "gate.{0}"), SPLIT),
    Rule(r"fc2\.(weight|bias)", "down.{0}"),
)

_BLOCK = (
    Rule(r"norm(\d)\.(weight|bias)", "norm{0}.{1}"),
    *prefixed(r"norm(\d)\.", "norm{0}.", _AFFINE),
    *prefixed(r"mlp_(tokens|channels)\.", "{0}.", _PERCEPTRON),
    Rule(r"linear_tokens\.(weight|bias)", "tokens.{0}"),
    Rule(r"ls(\d)", "scale{0}.weight"),
    Rule(r"norm\.(weight|bias)", "norm.{0}"),
    Rule(r"mlp_channels\.fc(\d)\.(weight|bias)", "fc{0}.{1}"),
    Rule(r"mlp_channels\.gate\.norm\.(weight|bias)", "gate.norm.{0}"),
    Rule(r"mlp_channels\.gate\.proj\.(weight|bias)", "gate.tokens.{0}"),
)

TIMM = (
    Rule(r"stem\.proj\.(weight|bias)", "patch_embed.conv.{0}"),
    Rule(r"stem\.norm\.(weight|bias)", "stem_norm.{0}"),
    *prefixed(r"stem\.norm\.", "stem_norm.", _AFFINE),
    *prefixed(r"blocks\.(\d+)\.", "blocks[{0}].", _BLOCK),
    *prefixed(r"norm\.", "norm.", _AFFINE),
    Rule(r"(norm|head)\.(weight|bias)", "{0}.{1}"),
)


def _prepare(options: dict[str, Any]) -> dict[str, Any]:
    """timm may state a square as a pair; and JSON knows no tuples, and writes whole numbers as integers."""
    options = dict(options)
    for name in ("img_size", "patch_size"):
        if isinstance(size := options.get(name), list | tuple):
            if len({*size}) != 1:
                raise ValueError(f"{name}={size} is not square; eqzoo's Mixer takes square images")
            options[name] = size[0]
    if "mlp_ratio" in options:
        ratio = options["mlp_ratio"]
        options["mlp_ratio"] = tuple(map(float, ratio)) if isinstance(ratio, list | tuple) else float(ratio)
    return options


# The kinds of blocks, perceptrons, norms and activations are classes upstream, which no JSON can name.
TIMM_OPTIONS = Options(
    {
        "embed_dim": "dim",
        "num_blocks": "depth",
        "patch_size": "patch_size",
        "img_size": "image_size",
        "in_chans": "in_channels",
        "mlp_ratio": "mlp_ratio",
        "stem_norm": "stem_norm",
        "drop_rate": "dropout",
        "proj_drop_rate": "mlp_dropout",
        "drop_path_rate": "drop_path",
        "num_classes": "num_classes",
    },
    fixed={"global_pool": "avg"},
    ignored=("nlhb",),
    prepare=_prepare,
)

UPSTREAMS = {"timm": Upstream(TIMM, TIMM_OPTIONS, names=("*",))}
