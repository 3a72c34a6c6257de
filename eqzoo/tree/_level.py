"""A tree one level at a time, for those who look at nodes and not only at leaves."""

from typing import Any

import jax
from jaxtyping import PyTree

from eqzoo.nn import Stack

LAYERS = "[*]"  # what a path has for the layer axis of a `Stack`


def is_leaf(node: PyTree) -> bool:
    return _one_level(node).node_data() is None


def auxiliary(node: PyTree) -> Any:
    """What JAX compares of a node besides its children: the keys of a dict, the static fields of a module."""
    _, data = _one_level(node).node_data()
    return data


def children(node: PyTree) -> list[tuple[Any, PyTree]]:
    """JAX's key and the node of every child; those of a stack are the layers as one. A leaf has none."""
    if isinstance(node, Stack):
        return [(LAYERS, node.block)]
    if is_leaf(node):
        return []
    below = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)[0]
    return [(key, child) for (key,), child in below]


def label(key: Any) -> str:
    return key if key is LAYERS else jax.tree_util.keystr((key,), simple=True)


def join(path: str, more: str) -> str:
    """`head` and `weight` make `head.weight`; `blocks` and `[*]` make `blocks[*]`."""
    return path + more if not path or not more or more.startswith(LAYERS) else f"{path}.{more}"


def _one_level(node: PyTree) -> Any:
    return jax.tree.structure(node, is_leaf=lambda child: child is not node)
