"""Where a token stands: sine-cosine tables, learned tables for another image size, rotary angles."""

from dataclasses import dataclass
from math import ceil, floor, log, pi
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from eqzoo._types import check_choices
from eqzoo.nn._precision import at_least_float32


def sincos_1d(positions: Float[Array, " tokens"], dim: int, *, base: float = 10000.0) -> Float[Array, "tokens dim"]:
    """Sines, then cosines, of `positions` at geometrically falling frequencies (Vaswani et al., 2017)."""
    if dim % 2:
        raise ValueError(f"sincos_1d: dim={dim} is odd; sines and cosines come in pairs, so pass an even dim")
    angles = rotary_angles(positions, dim, base=base)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def sincos_2d(height: int, width: int, dim: int, *, base: float = 10000.0) -> Float[Array, "tokens dim"]:
    """For a grid in row-major order: the first half of `dim` encodes the column, the second the row (as in MAE)."""
    if dim % 4:
        raise ValueError(f"sincos_2d: dim={dim} is not a multiple of 4; row and column each take sines and cosines")
    rows, columns = jnp.indices((height, width), dtype=jnp.float32).reshape(2, -1)
    halves = [sincos_1d(axis, dim // 2, base=base) for axis in (columns, rows)]
    return jnp.concatenate(halves, axis=-1)


def resample_positions(
    table: Float[Array, "tokens dim"], old: tuple[int, int], new: tuple[int, int], *, prefix: int = 0
) -> Float[Array, "new_tokens dim"]:
    """A learned position table for another grid: bicubic with antialiasing, as timm resamples it.

    The first `prefix` rows (class and register tokens) have no place on the grid and stay as they are.
    """
    rows, columns = old
    if table.shape[0] != prefix + rows * columns:
        raise ValueError(
            f"resample_positions: the table has {table.shape[0]} rows, but prefix={prefix} and a grid of "
            f"{rows}x{columns} make {prefix + rows * columns}; pass the grid the table was made for"
        )
    grid = at_least_float32(table[prefix:]).reshape(rows, columns, -1)
    resized = jax.image.resize(grid, (*new, grid.shape[-1]), "cubic", antialias=True)
    return jnp.concatenate([table[:prefix], resized.reshape(-1, table.shape[1]).astype(table.dtype)])


def rotary_angles(
    positions: Float[Array, " tokens"], dim: int, *, base: float = 10000.0
) -> Float[Array, "tokens half_dim"]:
    """The angle by which each pair of a head's `dim` channels turns at each position (Su et al., 2021)."""
    if dim % 2:
        raise ValueError(f"rotary_angles: dim={dim} is odd; channels turn in pairs, so pass an even dim")
    return positions[:, None] * (1 / rotary_periods(dim, base))


def rotary_periods(dim: int, base: float) -> Float32[np.ndarray, " half_dim"]:
    """How many positions each pair of channels takes to turn by one radian."""
    # In numpy because `jit` rounds a float32 power differently from eager execution; rounded where torch rounds.
    exponents = np.arange(0, dim, 2, dtype=np.float32) / dim
    return (np.float64(base) ** exponents).astype(np.float32)


def rotary_angles_2d(
    height: int,
    width: int,
    dim: int,
    *,
    base: float = 10000.0,
    rows: Float[Array, " height"] | None = None,
    columns: Float[Array, " width"] | None = None,
    columns_first: bool = False,
) -> Float[Array, "tokens half_dim"]:
    """For a grid in row-major order: half of the pairs turn with the row, the other half with the column.

    `rows` and `columns` are where these lie, by default at 0, 1, 2...; `columns_first` has the first half turn with the
    column.
    """
    if dim % 4:
        raise ValueError(
            f"rotary_angles_2d: dim={dim} is not a multiple of 4; row and column each turn pairs of channels"
        )
    rows = jnp.arange(height, dtype=jnp.float32) if rows is None else rows
    columns = jnp.arange(width, dtype=jnp.float32) if columns is None else columns
    by_row, by_column = (rotary_angles(axis, dim // 2, base=base) for axis in (rows, columns))
    by_row, by_column = jnp.repeat(by_row, width, axis=0), jnp.tile(by_column, (height, 1))
    return jnp.concatenate([by_column, by_row] if columns_first else [by_row, by_column], axis=-1)


def rotate(
    x: Float[Array, "heads tokens dim_head"],
    angles: Float[Array, "*heads tokens half_dim_rotary"],
    *,
    interleaved: bool = False,
    scale: float = 1.0,
) -> Float[Array, "heads tokens dim_head"]:
    """Turn pairs of channels: i with i + half (Llama, GPT-NeoX), or neighbours when `interleaved` (GPT-J, EVA).

    `angles` are the same for all heads, or have a leading axis of heads. Where they are for fewer channels than there
    are, the last ones stay as they are. What turns is multiplied by `scale`.
    """
    cos, sin = ((scale * wave(angles)).astype(x.dtype) for wave in (jnp.cos, jnp.sin))
    turning = 2 * angles.shape[-1]
    x, rest = x[..., :turning], x[..., turning:]
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)
    else:
        first, second = jnp.split(x, 2, axis=-1)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """How fast the pairs of a head's channels turn: transformers' kinds of rotary positions.

    `partial` is the part of the channels that turn at all, and `base` sets their speeds. "linear" divides these by
    `factor`; "llama3" only the slow ones, which turn less than `low` times in a `context` as it was at first, and those
    of less than `high` times partly; "yarn" likewise between `slow` and `fast` turns (whole channels if `truncate`).
    "dynamic" raises the base for texts longer than `context`. "longrope" divides each speed by a factor of its own, out
    of `long` for those texts and out of `short` for others. What turns is multiplied by `scale`.
    """

    base: float = 10000.0
    kind: Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"] = "default"
    partial: float = 1.0
    factor: float = 1.0
    context: int | None = None
    scale: float = 1.0
    low: float = 1.0
    high: float = 4.0
    slow: float = 1.0
    fast: float = 32.0
    truncate: bool = True
    short: tuple[float, ...] | None = None
    long: tuple[float, ...] | None = None

    def __post_init__(self):
        check_choices(self)
        needed = [] if self.kind in ("default", "linear") else ["context"]
        needed += ["short", "long"] if self.kind == "longrope" else []
        for name in needed:
            if getattr(self, name) is None:
                raise ValueError(f"Rotary: kind={self.kind!r} needs {name}; pass it")

    def speeds(self, dim_head: int, length: int) -> Float32[np.ndarray, " half_dim_rotary"]:
        """By how much each pair turns from one position to the next, in texts of up to `length` tokens."""
        dim = int(dim_head * self.partial)
        base, context = self.base, self.context or 0
        if self.kind == "dynamic":
            grown = self.factor * max(length, context) / context - (self.factor - 1)
            base = base * grown ** (dim / (dim - 2))
        periods = rotary_periods(dim, base)
        if self.kind == "longrope":
            factors = (self.long if length > context else self.short) or ()
            if len(factors) != len(periods):
                raise ValueError(f"Rotary: longrope has {len(factors)} factors for {len(periods)} pairs of channels")
            return 1 / (np.asarray(factors, np.float32) * periods)
        if self.kind == "linear":
            return 1 / periods / np.float32(self.factor)
        if self.kind == "llama3":
            fast = 1 / periods
            turns = context * (1 / (2 * pi * (1 / fast)))  # in the order in which torch rounds
            share = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
            mixed = (1 - share) * fast / self.factor + share * fast
            return np.where(share == 0, fast / self.factor, np.where(share == 1, fast, mixed))
        if self.kind == "yarn":
            channel = lambda turns: dim * log(context / (turns * 2 * pi)) / (2 * log(base))
            first, last = channel(self.fast), channel(self.slow)
            if self.truncate:
                first, last = floor(first), ceil(last)
            first, last = max(first, 0), min(last, dim - 1)
            last = last + 0.001 if first == last else last
            keep = 1 - np.clip((np.arange(dim // 2, dtype=np.float32) - first) / (last - first), 0, 1)
            return 1 / (self.factor * periods) * (1 - keep) + 1 / periods * keep
        return 1 / periods

    def angles(
        self, positions: Int[Array, " tokens"], dim_head: int, length: int
    ) -> Float[Array, "tokens half_dim_rotary"]:
        return positions[:, None] * self.speeds(dim_head, length)
