"""Noise on the numbers of a tree, each leaf's from a key of its own."""

import hashlib
from collections import defaultdict
from math import ceil, isqrt, prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, PRNGKeyArray, PyTree, UInt32

from eqzoo.tree.paths import leaves_with_paths
from eqzoo.tree.select import Where, is_float, select

Tree = TypeVar("Tree", bound=PyTree)

_BATCH = 2**24


def key_for(key: PRNGKeyArray, path: str) -> PRNGKeyArray:
    """The key of the leaf of that path: 64 bits of the path's SHA-256 folded in, so that no other leaf matters.

    ```python
    key_for(jax.random.key(0), "head.weight")
    ```
    """
    return _fold_in(key, _words(path))


def add_noise(tree: Tree, key: PRNGKeyArray, scale: float | Float[Array, ""], *, where: Where | None = None) -> Tree:
    """Add Gaussian noise of standard deviation `scale` to the floats that `where` selects, or to all.

    A leaf's noise depends on the key and the leaf's path and shape alone, and in a stack on the layer's index: when
    leaves or layers are added, the others' noise stays. With and without `jit` it is the same, to the rounding of the
    sum.

    ```python
    add_noise({"W": jnp.zeros((2, 3)), "b": jnp.zeros(3)}, jax.random.key(0), 0.1, where="W")
    ```
    """
    treedef = jax.tree.structure(tree)
    named = leaves_with_paths(tree)
    chosen = [True] * len(named) if where is None else jax.tree.leaves(select(tree, where))
    meant = {path: leaf for (path, leaf), is_chosen in zip(named, chosen, strict=True) if is_chosen and is_float(leaf)}
    noisy = _add_noise(meant, key, scale)
    return jax.tree.unflatten(treedef, [noisy.get(path, leaf) for path, leaf in named])


@jax.jit
def _add_noise(
    leaves: dict[str, Inexact[Array, "..."]], key: PRNGKeyArray, scale: float | Float[Array, ""]
) -> dict[str, Inexact[Array, "..."]]:
    alike = defaultdict(list)
    for path, leaf in leaves.items():
        axes = path.count("[*]")
        size = _size_to_draw(prod(leaf.shape[axes:]))
        alike[leaf.shape[:axes], size, _at_least_float32(leaf.dtype)].append(path)
    noisy = {}
    for (layers, size, dtype), paths in alike.items():
        at_once = max(1, _BATCH // max(1, prod(layers) * size))
        for start in range(0, len(paths), at_once):
            batch = paths[start : start + at_once]
            words = np.stack([_layer_words(path, layers) for path in batch])
            for path, noise in zip(batch, _draw(key, words, size, dtype), strict=True):
                leaf = leaves[path]
                noise = noise[:, : prod(leaf.shape[len(layers) :])].reshape(leaf.shape)
                noisy[path] = (leaf + scale * noise).astype(leaf.dtype)
    return noisy


def _draw(
    key: PRNGKeyArray, words: UInt32[np.ndarray, "leaves layers words"], size: int, dtype: Any
) -> list[Inexact[Array, "layers size"]]:
    """Standard normal numbers for each leaf and layer."""
    # One loop draws for all leaves, and the result is taken apart in two steps, rows within columns: ten thousand
    # draws, or slices at ten thousand places, would each be compiled by itself, which takes minutes.
    columns = isqrt(len(words) - 1) + 1
    grid = np.resize(words, (ceil(len(words) / columns), columns, *words.shape[1:]))
    draw_layer = lambda words: jax.random.normal(_fold_in(key, words), (size,), dtype)
    draw_leaf = lambda words: jax.lax.map(draw_layer, words)
    drawn = jax.lax.map(lambda row: tuple(jax.lax.map(draw_leaf, row)), grid)
    return [drawn[index % columns][index // columns] for index in range(len(words))]


def _size_to_draw(size: int) -> int:
    """Small leaves are drawn a little larger, so that leaves of many sizes are drawn alike."""
    return 1 << (size - 1).bit_length() if 0 < size <= 2**12 else size


def _at_least_float32(dtype: Any) -> Any:
    return dtype if dtype.itemsize >= 4 else jnp.dtype(jnp.float32)


def _words(path: str) -> UInt32[np.ndarray, " words"]:
    return np.frombuffer(hashlib.sha256(path.encode()).digest(), ">u4", count=2).astype(np.uint32)


def _layer_words(path: str, layers: tuple[int, ...]) -> UInt32[np.ndarray, "layers words"]:
    """What to fold in for each layer: the words of the leaf's path and the layer's index, axis by axis."""
    indices = np.indices(layers, np.uint32).reshape(len(layers), prod(layers)).T
    return np.concatenate([np.broadcast_to(_words(path), (prod(layers), 2)), indices], axis=1)


def _fold_in(key: PRNGKeyArray, words: UInt32[Array | np.ndarray, " words"]) -> PRNGKeyArray:
    for word in words:
        key = jax.random.fold_in(key, word)
    return key
