"""Dotted paths to leaves: `head.weight`, `stages.0.first.convs.1.conv.weight`, `blocks[*].attention.query.weight`.

`[*]` stands for the leading layer axis of a `Stack`: one leaf that holds that weight of every layer.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jaxtyping import PyTree

from eqzoo.nn import Stack


def leaves_with_paths(tree: PyTree, *, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """Each leaf with its dotted path, in the order of `jax.tree.leaves`.

    ```python
    leaves_with_paths({"layers": [1.0, 2.0]})  # [('layers.0', 1.0), ('layers.1', 2.0)]
    ```
    """
    return list(_walk(tree, "", is_leaf))


def paths(tree: PyTree, *, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """The dotted path of each leaf, in the order of `jax.tree.leaves`.

    ```python
    paths([{"W": 1.0, "b": 2.0}, {"W": 3.0}])  # ['0.W', '0.b', '1.W']
    ```
    """
    return [path for path, _ in leaves_with_paths(tree, is_leaf=is_leaf)]


def _walk(tree: PyTree, prefix: str, is_leaf: Callable[[Any], bool] | None) -> Iterator[tuple[str, Any]]:
    stop = lambda node: isinstance(node, Stack) or (is_leaf is not None and is_leaf(node))
    for key_path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=stop)[0]:
        path = (
            prefix + ("." if prefix and key_path else "") + jax.tree_util.keystr(key_path, simple=True, separator=".")
        )
        if isinstance(node, Stack) and not (is_leaf is not None and is_leaf(node)):
            yield from _walk(node.block, path + "[*]", is_leaf)
        else:
            yield path, node


def map_with_path(
    function: Callable[[str, Any], Any], tree: PyTree, *, is_leaf: Callable[[Any], bool] | None = None
) -> PyTree:
    """`jax.tree.map` whose function also gets the leaf's path.

    ```python
    map_with_path(lambda path, leaf: 0.0 if path.endswith("b") else leaf, {"W": 1.0, "b": 2.0})  # {'W': 1.0, 'b': 0.0}
    ```
    """
    treedef = jax.tree.structure(tree, is_leaf=is_leaf)
    return jax.tree.unflatten(
        treedef, [function(path, leaf) for path, leaf in leaves_with_paths(tree, is_leaf=is_leaf)]
    )
