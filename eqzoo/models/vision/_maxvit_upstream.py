"""How torchvision writes a MaxViT down: names of tensors, and what it stores besides weights."""

from typing import Any

import numpy as np
from jaxtyping import Shaped

from eqzoo import nn
from eqzoo.checkpoint import BATCH_NORM, SPLIT, Drop, Rule, prefixed, staged
from eqzoo.models._family import Options, Upstream

_MBCONV = (
    Rule(r"proj\.1\.(weight|bias)", "shortcut.{0}"),
    *prefixed(r"layers\.pre_norm\.", "norm.", BATCH_NORM),
    Rule(r"layers\.conv_a\.0\.weight", "convs.0.conv.weight"),
    *prefixed(r"layers\.conv_a\.1\.", "convs.0.norm.", BATCH_NORM),
    Rule(r"layers\.conv_b\.0\.weight", "convs.1.conv.weight"),
    *prefixed(r"layers\.conv_b\.1\.", "convs.1.norm.", BATCH_NORM),
    Rule(r"layers\.squeeze_excitation\.fc(\d)\.(weight|bias)", "squeeze_excite.fc{0}.{1}"),
    Rule(r"layers\.conv_c\.(weight|bias)", "project.{0}"),
)

_QKV = ("attention.query.{0}", "attention.key.{0}", "attention.value.{0}")

_ATTENTION = (
    Rule(r"attn_layer\.0\.(weight|bias)", "norm1.{0}"),
    Rule(r"attn_layer\.1\.to_qkv\.(weight|bias)", _QKV, SPLIT),
    Rule(r"attn_layer\.1\.merge\.(weight|bias)", "attention.out.{0}"),
    Rule(r"attn_layer\.1\.relative_position_bias_table", "attention.bias.table"),
    Rule(r"mlp_layer\.0\.(weight|bias)", "norm2.{0}"),
    Rule(r"mlp_layer\.1\.(weight|bias)", "mlp.fc1.{0}"),
    Rule(r"mlp_layer\.3\.(weight|bias)", "mlp.fc2.{0}"),
)

_BLOCK = (
    *prefixed(r"layers\.MBconv\.", "mbconv.", _MBCONV),
    *prefixed(r"layers\.window_attention\.", "windows.", _ATTENTION),
    *prefixed(r"layers\.grid_attention\.", "grid.", _ATTENTION),
)

TORCHVISION = (
    Rule(r"stem\.0\.0\.weight", "stem.conv1.conv.weight"),
    *prefixed(r"stem\.0\.1\.", "stem.conv1.norm.", BATCH_NORM),
    Rule(r"stem\.1\.0\.(weight|bias)", "stem.conv2.{0}"),
    *staged(r"blocks\.(\d)\.layers\.", "stages.{0}.", _BLOCK),
    Rule(r"classifier\.2\.(weight|bias)", "norm.{0}"),
    Rule(r"classifier\.3\.(weight|bias)", "pre_head.{0}"),
    Rule(r"classifier\.5\.weight", "head.weight"),
    Drop(r"blocks\.\d\.layers\.\d+\.layers\.(window|grid)_attention\.attn_layer\.1\.relative_position_index"),
)


def _buffers(config: Any) -> dict[str, Shaped[np.ndarray, "..."]]:
    """The indices that each attention stores."""
    return {
        f"blocks.{stage}.layers.{layer}.layers.{kind}_attention.attn_layer.1.relative_position_index": (
            nn.relative_index(config.window)
        )
        for stage, depth in enumerate(config.depths)
        for layer in range(depth)
        for kind in ("window", "grid")
    }


UPSTREAMS = {
    "torchvision": Upstream(TORCHVISION, Options({"num_classes": "num_classes"}), names=("maxvit_t",), buffers=_buffers)
}
