"""The transformer's block, around whatever attends and whatever follows."""

from collections.abc import Callable
from typing import Generic, TypeVar

import equinox as eqx
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo.nn.dropout import DropPath, split_key
from eqzoo.nn.linear import MLP, GatedMLP, Norm
from eqzoo.nn.norm import LayerNorm, RMSNorm
from eqzoo.nn.scale import LayerScale

Mixer = TypeVar("Mixer", bound=Callable[..., Array])


class TransformerBlock(eqx.Module, Generic[Mixer]):
    """Attention, then a multi-layer perceptron, each beside a shortcut.

    Each is normalised first, or last if `post_norm` (Liu et al., 2021). A call's `attention` stands in for the block's
    own, such as `partial(block.attention, rotary=angles)`.
    """

    norm1: LayerNorm | RMSNorm
    attention: Mixer
    scale1: LayerScale | None
    norm2: LayerNorm | RMSNorm
    mlp: MLP | GatedMLP
    scale2: LayerScale | None
    drop_path: DropPath
    post_norm: bool = eqx.field(static=True)

    def __init__(
        self,
        dim: int,
        attention: Mixer,
        mlp: MLP | GatedMLP,
        *,
        norm: Norm,
        layer_scale: float | None = None,
        drop_path: float = 0.0,
        post_norm: bool = False,
    ):
        self.norm1 = norm(dim)
        self.attention = attention
        self.scale1 = None if layer_scale is None else LayerScale(dim, layer_scale)
        self.norm2 = norm(dim)
        self.mlp = mlp
        self.scale2 = None if layer_scale is None else LayerScale(dim, layer_scale)
        self.drop_path = DropPath(drop_path)
        self.post_norm = post_norm

    def __call__(
        self,
        x: Float[Array, "tokens dim"],
        depth: Float[Array, ""],
        *,
        attention: Callable[..., Float[Array, "tokens dim"]] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "tokens dim"]:
        key_attention, key_path1, key_mlp, key_path2 = split_key(key, 4)
        y = x if self.post_norm else self.norm1(x)
        y = (self.attention if attention is None else attention)(y, key=key_attention)
        y = self.norm1(y) if self.post_norm else y
        y = y if self.scale1 is None else self.scale1(y)
        x = x + self.drop_path(y, depth, key=key_path1)
        y = x if self.post_norm else self.norm2(x)
        y = self.mlp(y, key=key_mlp)
        y = self.norm2(y) if self.post_norm else y
        y = y if self.scale2 is None else self.scale2(y)
        return x + self.drop_path(y, depth, key=key_path2)
