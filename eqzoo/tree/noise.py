"""Noise on the numbers of a tree, each leaf's from a key of its own."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from math import ceil, isqrt, prod
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, PRNGKeyArray, PyTree, UInt32

from eqzoo.nn._init import is_traced
from eqzoo.tree._level import LAYERS
from eqzoo.tree.paths import paths
from eqzoo.tree.select import Where, is_float, select

Tree = TypeVar("Tree", bound=PyTree)

_BATCH = 2**24  # numbers drawn at a time, so that a large model needs little memory besides its own


def key_for(key: PRNGKeyArray, path: str) -> PRNGKeyArray:
    """The key of the leaf of that path: 64 bits of the path's SHA-256 folded in, so that no other leaf matters.

    ```python
    key_for(jax.random.key(0), "head.weight")
    ```
    """
    return _fold_in(key, _words(path))


def add_noise(tree: Tree, key: PRNGKeyArray, scale: float | Float[Array, ""], *, where: Where | None = None) -> Tree:
    """The tree with Gaussian noise of standard deviation `scale` on the floats that `where` selects (all by default).

    A leaf's noise depends on the key and the leaf's path and shape alone, and in a stack on the layer's index: when
    leaves or layers are added, the others' noise stays. With and without `jit` it is the same, to the rounding of the
    sum.

    ```python
    add_noise({"W": jnp.zeros((2, 3)), "b": jnp.zeros(3)}, jax.random.key(0), 0.1, where="W")
    ```
    """
    leaves, treedef = jax.tree.flatten(tree)
    chosen = [True] * len(leaves) if where is None else jax.tree.leaves(select(tree, where))
    meant = [index for index, leaf in enumerate(leaves) if chosen[index] and is_float(leaf)]
    names = paths(tree)
    floats = [leaf if hasattr(leaf, "shape") else jnp.asarray(leaf) for leaf in (leaves[index] for index in meant)]
    add = _noisy if any(map(is_traced, (key, *floats))) else _compiled
    noisy = add(floats, tuple(names[index] for index in meant), key, scale)
    for index, leaf in zip(meant, noisy, strict=True):
        leaves[index] = leaf
    return jax.tree.unflatten(treedef, leaves)


def _noisy(
    leaves: list[Inexact[Array, "..."]], names: tuple[str, ...], key: PRNGKeyArray, scale: float | Float[Array, ""]
) -> list[Inexact[Array, "..."]]:
    axes = [name.count(LAYERS) for name in names]
    times = Counter(leaf.shape[layers:] for leaf, layers in zip(leaves, axes, strict=True))
    alike = defaultdict(list)
    for index, (leaf, layers) in enumerate(zip(leaves, axes, strict=True)):
        shape = leaf.shape[layers:]
        form = shape if times[shape] > 1 else (_size_to_draw(prod(shape)),)
        alike[leaf.shape[:layers], form, jnp.promote_types(leaf.dtype, jnp.float32)].append(index)
    noisy = list(leaves)
    for (layers, form, dtype), indices in alike.items():
        numbers = prod(form)

        def draw(words):
            noise = jax.random.normal(_fold_in(key, words), (_size_to_draw(numbers),), dtype)
            return (scale * noise[:numbers]).reshape(form).astype(dtype)

        at_once = max(1, _BATCH // max(1, prod(layers) * numbers))
        for start in range(0, len(indices), at_once):
            batch = indices[start : start + at_once]
            words = np.stack([_layer_words(names[index], layers) for index in batch])
            for index, noise in zip(batch, _draw_all(draw, words), strict=True):
                leaf = leaves[index]
                if noise.shape != leaf.shape:
                    noise = noise.reshape(*layers, -1)[..., : prod(leaf.shape[len(layers) :])].reshape(leaf.shape)
                wide = jax.lax.convert_element_type(leaf, dtype)
                noisy[index] = jax.lax.convert_element_type(jax.lax.add(wide, noise), leaf.dtype)
    return noisy


_compiled = jax.jit(_noisy, static_argnames="names")


def _draw_all(
    draw: Callable[[UInt32[Array, " words"]], Inexact[Array, "..."]],
    words: UInt32[np.ndarray, "leaves *layers words"],
) -> list[Inexact[Array, "..."]]:
    """What `draw` draws for each leaf and layer."""
    # One loop draws for all leaves, and the result is taken apart in two steps, columns and then rows: ten thousand
    # draws, or slices at ten thousand places, would each be compiled by itself, which takes minutes.
    rows = isqrt(len(words) - 1) + 1
    columns = ceil(len(words) / rows)
    grid = np.resize(words, (columns, rows, *words.shape[1:])).swapaxes(0, 1)
    for _ in words.shape[1:]:
        draw = partial(jax.lax.map, draw)
    drawn = jax.lax.map(lambda row: tuple(draw(row)), grid)
    shape = drawn[0].shape[1:] or (1,)
    drawn = [
        column.reshape(rows * shape[0], *shape[1:]) for column in drawn
    ]  # for a slice of it is a leaf's noise as it is
    places = [(column, row * shape[0]) for column in drawn for row in range(rows)][: len(words)]
    return [jax.lax.slice_in_dim(column, start, start + shape[0]) for column, start in places]


def _size_to_draw(size: int) -> int:
    """Small leaves are drawn a little larger, so that leaves of many sizes are drawn alike."""
    return 1 << (size - 1).bit_length() if 0 < size <= 2**12 else size


def _words(path: str) -> UInt32[np.ndarray, " words"]:
    return np.frombuffer(hashlib.sha256(path.encode()).digest(), ">u4", count=2).astype(np.uint32)


def _layer_words(path: str, layers: tuple[int, ...]) -> UInt32[np.ndarray, "*layers words"]:
    """What to fold in for each layer: the words of the leaf's path and the layer's index, axis by axis."""
    indices = np.moveaxis(np.indices(layers, np.uint32), 0, -1)
    return np.concatenate([np.broadcast_to(_words(path), (*layers, 2)), indices], axis=-1)


def _fold_in(key: PRNGKeyArray, words: UInt32[Array | np.ndarray, " words"]) -> PRNGKeyArray:
    for word in words:
        key = jax.random.fold_in(key, word)
    return key
