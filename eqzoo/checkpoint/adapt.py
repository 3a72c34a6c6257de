"""Adapters: a checkpoint's weight turned into that of a model with another head, other channels or another image size.

Each takes the weight, the leaf it is for, and the configs before and after. A family names the adapter of each
config field that `load` can change; nothing is adapted that wasn't asked for.
"""

import math
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Num


def new_head(weight: Any, leaf: jax.ShapeDtypeStruct, old: Any, new: Any) -> Num[np.ndarray, "..."]:
    """All zeros: the first prediction is uniform, and nothing is left of the classes of before."""
    return np.zeros(leaf.shape, leaf.dtype)


def mix_channels(
    weight: Float[np.ndarray, "out in height width"], leaf: jax.ShapeDtypeStruct, old: Any, new: Any
) -> Float[np.ndarray, "out new_in height width"]:
    """A first convolution that sees other channels: one gets the sum of all, more get those of RGB in turn, scaled."""
    channels, wanted = old.in_channels, new.in_channels
    wide = weight.astype(np.float32)
    if wanted == 1:
        mixed = wide.sum(axis=1, keepdims=True)
    elif channels == 3:
        mixed = np.concatenate([wide] * math.ceil(wanted / 3), axis=1)[:, :wanted] * np.float32(3 / wanted)
    else:
        raise ValueError(
            f"in_channels={wanted} is made of a checkpoint's 3 channels, but this one has {channels}; "
            f"load it with in_channels=1, or as it is"
        )
    return mixed.astype(weight.dtype)


def resample_positions(
    weight: Float[np.ndarray, "old dim"], leaf: jax.ShapeDtypeStruct, old: Any, new: Any
) -> Float[np.ndarray, "new dim"]:
    """A table of positions for another image size: those of `positioned_prefix` tokens stay, a grid follows."""
    prefix = old.positioned_prefix
    return np.concatenate([weight[:prefix], resample_grid(weight[prefix:], leaf.shape[0] - prefix)])


def resample_grid(table: Float[np.ndarray, "old dim"], positions: int) -> Float[np.ndarray, "new dim"]:
    """A table of positions on a square grid, resampled to one of `positions` (antialiased bicubic, as timm does)."""
    old, new = math.isqrt(len(table)), math.isqrt(positions)
    grid = table.astype(np.float32).reshape(old, old, -1)
    resized = jax.image.resize(grid, (new, new, grid.shape[-1]), "bicubic", antialias=True)
    return np.asarray(resized).reshape(positions, -1).astype(table.dtype)


def resample_offsets(table: Float[np.ndarray, "old heads"], offsets: int) -> Float[np.ndarray, "new heads"]:
    """A table of all offsets in a square window for one of another size, as timm does.

    The old offsets are laid over the new window in steps that grow geometrically from its centre; between them, numbers
    are interpolated linearly.
    """
    old, new = math.isqrt(len(table)), math.isqrt(offsets)
    ratio = _ratio_that_spans(old // 2, new // 2)
    steps = np.cumsum([0.0, *(ratio**step for step in range(old // 2))])
    places = np.concatenate([-steps[:0:-1], steps]).astype(np.float32)
    wanted = np.arange(new) - new // 2
    weights = np.stack([np.interp(wanted, places, row) for row in np.eye(old)], axis=1).astype(np.float32)
    grid = table.astype(np.float32).reshape(old, old, -1)
    resized = np.einsum("ai,bj,ijh->abh", weights, weights, grid)
    return resized.reshape(offsets, -1).astype(table.dtype)


def _ratio_that_spans(steps: int, length: int) -> float:
    """The ratio of a geometric series of so many steps, the first of which is 1, that comes to `length`."""
    low, high = 1.01, 1.5
    ratio = low
    while high - low > 1e-6:
        ratio = (low + high) / 2
        if (1 - ratio**steps) / (1 - ratio) > length:
            high = ratio
        else:
            low = ratio
    return ratio
