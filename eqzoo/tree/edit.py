"""Other values in the place of parts of a tree, by path."""

import dataclasses
import difflib
import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import product
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from eqzoo.tree._level import LAYERS, children, join, label
from eqzoo.tree.diff import check_same_structure
from eqzoo.tree.select import is_array, is_number

Tree = TypeVar("Tree", bound=PyTree)

_LAYER_INDEX = re.compile(r"\[(\*|\d+)\]")


def replace(tree: Tree, values: Mapping[str, Any]) -> Tree:
    """The tree with other values at the given paths, of leaves or of whole parts, also where it has None.

    In a stack, `blocks[*].norm1.weight` means that of all layers and `blocks[3].norm1.weight` that of one. An array
    takes the place of one of its shape only, and what is put into one layer has to be like what was there.

    ```python
    replace({"body": [1.0, 2.0], "head": None}, {"body.1": 5.0, "head": {"W": 3.0}})
    ```
    """
    by_place = defaultdict(list)
    for path in values:
        by_place[_place(path)].append(path)
    _check_disjoint(by_place)
    above = {step for place in by_place for step in _above(place)}
    missing = dict.fromkeys(values)

    def edited(node: Any, place: str) -> Any:
        for path in by_place.get(place, ()):
            missing.pop(path, None)
            node = _whole(path, node, values[path]) if path == place else _with_layer(path, node, values[path])
        if place in values or place not in above:
            return node
        parts, treedef = jax.tree.flatten(node, is_leaf=lambda part: part is not node)
        places = [join(place, label(key)) for key, _ in children(node)]
        if not places:  # a leaf
            return node
        return jax.tree.unflatten(treedef, map(edited, parts, places))

    new = edited(tree, "")
    if missing:
        raise ValueError(_not_found(tree, next(iter(missing))))
    return new


def _whole(path: str, old: Any, new: Any) -> Any:
    if is_number(old) and is_number(new) and np.shape(old) != np.shape(new):
        raise ValueError(f"replace: {path} has the shape {np.shape(old)}, but its new value {np.shape(new)}")
    return new


def _with_layer(path: str, old: PyTree, new: PyTree) -> PyTree:
    """`old` holds all layers, `new` goes into those that the path says."""
    layers = tuple(slice(None) if layer == "*" else int(layer) for layer in _LAYER_INDEX.findall(path))

    def read(leaf):
        if not is_array(leaf):
            return leaf
        for layer, depth in zip(layers, leaf.shape, strict=False):
            if isinstance(layer, int) and layer >= depth:
                raise ValueError(f"replace: there is no {path}; the stack has {depth} layers, from 0 to {depth - 1}")
        return leaf[layers]

    def write(leaf, part):
        if is_array(leaf):
            return jnp.asarray(leaf).at[layers].set(jnp.asarray(part, leaf.dtype))
        if leaf is not part and leaf != part:
            raise ValueError(f"replace: {path}: all layers of a stack share what is no array: {leaf}, not {part}")
        return leaf

    check_same_structure(f"replace: {path}", jax.tree.map(read, old), new)
    return jax.tree.map(write, old, new)


def _place(path: str) -> str:
    """Where the path of a layer is in the tree: in the leaf of all layers."""
    return _LAYER_INDEX.sub(LAYERS, path)


def _above(place: str) -> list[str]:
    """The places on the way to one."""
    return ["", *(place[: step.start()] for step in re.finditer(r"\.|\[\*\]", place))]


def _is_within(path: str, place: str) -> bool:
    return not place or path == place or path.startswith((f"{place}.", f"{place}["))


def _check_disjoint(by_place: Mapping[str, list[str]]) -> None:
    for place, paths in by_place.items():
        near = [path for step in [*_above(place), place] for path in by_place.get(step, ())]
        for path, other in product(paths, near):
            layers = zip(_LAYER_INDEX.findall(path), _LAYER_INDEX.findall(other), strict=False)
            if path != other and all(a == b or "*" in (a, b) for a, b in layers):
                raise ValueError(f"replace: {other!r} and {path!r} overlap; give only one of them")


def _not_found(tree: PyTree, path: str) -> str:
    node, place, below = tree, "", dict[str, Any]()
    while True:
        below = {join(place, label(key)): child for key, child in children(node)}
        step = next((each for each in below if _is_within(_place(path), each)), None)
        if step is None:
            break
        node, place = below[step], step
    fields = dataclasses.fields(node) if isinstance(node, eqx.Module) else ()
    for field in fields:
        if field.metadata.get("static") and _is_within(path, join(place, field.name)):
            return (
                f"replace: {path} is static: it belongs to the structure of {place or 'the tree'}, "
                f"so make a new {type(node).__name__} with the value that you want"
            )
    near = difflib.get_close_matches(path, below, n=3, cutoff=0.3) or list(below)[:3]
    has = f"has {', '.join(near)}" if near else "is None" if node is None else "is a leaf"
    return f"replace: there is no {path}; {place or 'the tree'} {has}"
