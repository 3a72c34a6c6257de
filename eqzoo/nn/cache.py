"""What a decoder keeps of the tokens it has seen, so that each further one costs no more than itself."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from eqzoo.nn.in_place import InPlace, is_in_place


class KVCache(eqx.Module):
    """The keys and values of one attention layer, or of several along leading axes.

    Position p lives in place `p % places`. So a cache with a place for every token keeps them all, and one with fewer
    keeps the last ones, as a sliding window needs them; what a place holds follows from the number of tokens so far.
    """

    key: Float[Array, "*layers kv_heads places dim_head"] | InPlace
    value: Float[Array, "*layers kv_heads places dim_value"] | InPlace

    @staticmethod
    def empty(
        layers: int, kv_heads: int, places: int, dim_head: int, *, dim_value: int | None = None, dtype: DTypeLike
    ) -> "KVCache":
        dim_value = dim_head if dim_value is None else dim_value
        shapes = ((layers, kv_heads, places, dim) for dim in (dim_head, dim_value))
        return KVCache(*(jnp.zeros(shape, dtype) for shape in shapes))

    def read(self) -> tuple[Float[Array, "kv_heads places dim_head"], Float[Array, "kv_heads places dim_value"]]:
        """The keys and the values of one layer, as arrays."""
        return _array(self.key), _array(self.value)

    def positions(self, end: Int[Array, ""]) -> Int[Array, " places"]:
        """The position that each place holds after `end` tokens; below zero where it holds none."""
        places = self.key.shape[-2]
        return end - 1 - (end - 1 - jnp.arange(places)) % places

    def write(self, new: "KVCache", position: Int[Array, ""], count: Int[Array, ""] | None = None) -> "KVCache":
        """With the first `count` (by default, all) of `new`'s tokens at `position` and after it."""
        if new.key.shape[-2] == 1:
            put = partial(_put_token, position=position, count=count)
        else:
            held = self.positions(position + (new.key.shape[-2] if count is None else count))
            put = partial(_put_tokens, position=position, held=held)
        return KVCache(_written(put, self.key, new.key), _written(put, self.value, new.value))


def _array(held: Any) -> Array:
    return held.read() if is_in_place(held) else held


def _written(put: Callable[[Array, Array], Array], old: Any, new: Any) -> Any:
    return old.with_entries(put, new) if is_in_place(old) else put(old, new)


def _put_token(old: Array, new: Array, position: Int[Array, ""], count: Int[Array, ""] | None) -> Array:
    """In place."""
    place = position % old.shape[-2]
    new = new.astype(old.dtype)
    if count is not None:
        new = jnp.where(count > 0, new, jax.lax.dynamic_slice_in_dim(old, place, 1, axis=-2))
    return jax.lax.dynamic_update_slice_in_dim(old, new, place, axis=-2)


def _put_tokens(old: Array, new: Array, position: Int[Array, ""], held: Int[Array, " places"]) -> Array:
    rows = jnp.clip(held - position, 0, new.shape[-2] - 1)
    return jnp.where((held >= position)[:, None], jnp.take(new, rows, axis=-2).astype(old.dtype), old)


class Cache(eqx.Module):
    """What the layers of a model keep, after `position` tokens of the at most `length` that it was made for.

    `layers` is any tree of `KVCache`s and of arrays (the states of recurrent layers).
    """

    layers: PyTree
    position: Int[Array, ""]
    length: int = eqx.field(static=True)

    @staticmethod
    def empty(layers: PyTree, length: int) -> "Cache":
        return Cache(layers, jnp.zeros((), jnp.int32), length)

    def extend(self, new: PyTree, tokens: int, count: Int[Array, ""] | None = None) -> "Cache":
        """After `tokens` more, of which `count` are real.

        `new` has the structure of `layers`: for a `KVCache` one of the new tokens only, for an array what replaces it.
        """
        is_leaf = lambda node: isinstance(node, KVCache)
        put = lambda old, new: old.write(new, self.position, count) if is_leaf(old) else new
        layers = jax.tree.map(put, self.layers, new, is_leaf=is_leaf)
        return Cache(layers, self.position + (tokens if count is None else count), self.length)
