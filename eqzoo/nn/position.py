"""Where a token stands: sine-cosine tables, learned tables for another image size, rotary angles."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

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
    # In numpy because `jit` rounds a float32 power differently from eager execution; rounded where torch rounds.
    exponents = np.arange(0, dim, 2, dtype=np.float32) / dim
    return positions[:, None] * (1 / (np.float64(base) ** exponents).astype(np.float32))


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
    angles: Float[Array, "*heads tokens half_dim_head"],
    *,
    interleaved: bool = False,
) -> Float[Array, "heads tokens dim_head"]:
    """Turn pairs of channels: i with i + half (Llama, GPT-NeoX), or neighbours when `interleaved` (GPT-J, EVA).

    `angles` are the same for all heads, or have a leading axis of heads.
    """
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return turned.reshape(x.shape)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
