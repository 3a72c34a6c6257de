"""Matrices read where they lie, to write text one token at a time on CPU.

Before it multiplies a vector by a matrix, XLA:CPU copies the matrix if a scan over layers sliced it, or if it is not of
float32. But what is elementwise it fuses: so here blocks of columns are sliced, converted, multiplied and added up in
one loop, and every number is read once, in the bytes that it is stored in.
"""

from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from eqzoo.nn._init import is_traced

_BLOCKS = 24  # with more, the loop over them runs out of registers
_NARROWEST = 32  # columns, so that the loop takes several at a time; wider ones are read out of order, and that slowly


class InPlace(eqx.Module):
    """A matrix, or several of equal shape: what `array` has at `index` of its leading axes, of which no copy is made.

    Numbers of bfloat16 are held as their bits: XLA:CPU turns a whole array of that type into float32 before it slices
    it, but widens integers as it reads them.
    """

    array: Shaped[Array, "..."]
    index: tuple[Int[Array, ""] | int, ...]
    dtype: DTypeLike = eqx.field(static=True)

    @staticmethod
    def of(array: "Shaped[Array, '...'] | InPlace") -> "InPlace":
        return array if isinstance(array, InPlace) else InPlace(_stored(array), (), array.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape[len(self.index) :]

    def at(self, *index: Int[Array, ""] | int) -> "InPlace":
        """What is at `index` of the first axes that have none yet."""
        return InPlace(self.array, (*self.index, *index), self.dtype)

    def with_entries(self, put: Callable[[Array, Array], Array], new: Shaped[Array, "..."]) -> "InPlace":
        """The array as `put(array, new)` leaves it."""
        return InPlace(put(self.array, _stored(new.astype(self.dtype))), self.index, self.dtype)

    def read(self) -> Shaped[Array, "..."]:
        """A copy."""
        return self._numbers(self._taken((0,) * len(self.shape), self.shape))

    def rows(self, numbers: Int[Array, "*axes"]) -> Shaped[Array, "*axes in"]:
        """Some rows of the matrix."""
        return self._numbers(self.array[*self.index, numbers])

    def times(self, x: Float[Array, " in"]) -> Float[Array, " out"]:
        """The matrix times a vector, in the vector's dtype or the matrix's, whichever is wider."""
        dtype = jnp.promote_types(x.dtype, self.dtype)
        if not self.index and self.array.dtype == jnp.float32:
            return self.array @ x.astype(dtype)  # which copies nothing
        x = _computed_once(x.astype(jnp.promote_types(dtype, jnp.float32)))
        # Without the barrier, XLA would cut and widen the blocks of a matrix before a loop over tokens, and keep them.
        array, x = jax.lax.optimization_barrier((self.array, x))
        pieces = _pieces_of_rows(self.shape[-1])
        matrix = InPlace(array.reshape(*array.shape[:-1], pieces, -1), self.index, self.dtype)
        x = x.reshape(pieces, -1)
        part = lambda block: matrix._columns(block) * x[:, block]
        columns = x.shape[1]
        width = min(columns, max(_NARROWEST, columns // _BLOCKS // _NARROWEST * _NARROWEST))
        whole = columns - columns % width
        blocks = [slice(start, start + width) for start in range(0, whole, width)]
        y = _sum_of_columns(reduce(add, map(part, blocks)))
        y = y if whole == columns else y + _sum_of_columns(part(slice(whole, columns)))
        return y.astype(dtype)

    def _columns(self, block: slice) -> Float[Array, "out pieces width"]:
        """A block of columns of each piece, as wide numbers."""
        taken = self._taken((0, 0, block.start), (*self.shape[:2], block.stop - block.start))
        if self.dtype == jnp.bfloat16:  # which is the upper half of a float32
            return jax.lax.bitcast_convert_type(taken.astype(jnp.uint32) << 16, jnp.float32)
        return taken.astype(jnp.promote_types(self.dtype, jnp.float32))

    def _taken(self, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Shaped[Array, "..."]:
        every = [jnp.asarray(start, jnp.int32) for start in (*self.index, *starts)]
        return jax.lax.dynamic_slice(self.array, every, (*[1] * len(self.index), *sizes)).reshape(sizes)

    def _numbers(self, array: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        return array if array.dtype == self.dtype else jax.lax.bitcast_convert_type(array, self.dtype)


def is_in_place(node: Any) -> bool:
    return isinstance(node, InPlace)


def _stored(array: Shaped[Array, "*axes"]) -> Shaped[Array, "*axes"]:
    if array.dtype != jnp.bfloat16:
        return array
    if is_traced(array):
        return jax.lax.bitcast_convert_type(array, jnp.uint16)
    return jax.device_put(np.asarray(array).view(np.uint16), may_alias=True)  # the same memory


def _computed_once(x: Float[Array, " n"]) -> Float[Array, " n"]:
    """The same numbers, which XLA:CPU would compute again for each row of a matrix, if not for this product."""
    return jnp.ones(2, x.dtype) @ jnp.stack([x, jnp.zeros_like(x)])


def _pieces_of_rows(inputs: int) -> int:
    """How many to cut rows into, so that each has up to `_BLOCKS` of the narrowest blocks, but four or more."""
    blocks = inputs // _NARROWEST
    fits = (n for n in range(1, blocks // 4 + 1) if inputs % (n * _NARROWEST) == 0 and blocks // n <= _BLOCKS)
    return next(fits, 1)


def _sum_of_columns(columns: Float[Array, "out pieces width"]) -> Float[Array, " out"]:
    """As a product, because XLA:CPU would fuse a sum with what is added, and then has no fast loop for either."""
    out, pieces, width = columns.shape
    return (columns.reshape(-1, width) @ jnp.ones(width, columns.dtype)).reshape(out, pieces).sum(1)
