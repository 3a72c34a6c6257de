"""Which leaves of a tree are meant."""

import difflib
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from eqzoo.tree.paths import leaves_with_paths, paths

Where = str | re.Pattern[str] | type | Callable[[str, Any], bool] | tuple["Where", ...]


def select(tree: PyTree, where: Where) -> PyTree[bool]:
    """True for the numbers of `tree` that `where` means, in a tree of the same structure. `where` is

    - a glob on paths, `"*.attention.*"`, that means a leaf or a whole part of the tree: `"head"` is `head.weight` and
      `head.bias`. In a stack's `blocks[*]`, the brackets are literal;
    - a regex, `re.compile(r".*norm\\d\\.weight")`, that matches the whole path of a leaf;
    - a type, `eqzoo.nn.LayerNorm`: all leaves inside of modules of it;
    - a predicate of path and leaf, `lambda path, leaf: leaf.ndim > 1`;
    - a tuple of these: any of them.

    What is no number (a flag, a function) is never selected. A glob or regex that finds nothing is an error, and so is
    a type, unless something else in the tuple finds what it means.

    ```python
    select([{"W": 1.0, "b": 2.0}], "*.W")  # [{'W': True, 'b': False}]
    ```
    """
    parts = jax.tree.leaves(where)
    masks = [_selected(tree, part) for part in parts]
    found = [any(each) for each in zip(*masks, strict=True)] if parts else []
    for part, mask in zip(parts, masks, strict=True):
        is_optional = any(found) if isinstance(part, type) else not isinstance(part, str | re.Pattern)
        if not any(mask) and not is_optional:
            raise ValueError(_nothing_found(tree, part))
    if not parts:
        raise ValueError(f"select: where={where!r} means nothing; pass a glob, a regex, a type or a predicate")
    return jax.tree.unflatten(jax.tree.structure(tree), found)


def _selected(tree: PyTree, part: Any) -> list[bool]:
    if isinstance(part, type):
        is_it = lambda node: isinstance(node, part)
        inside = jax.tree.map(
            lambda node: jax.tree.map(lambda leaf: is_it(node) and is_number(leaf), node), tree, is_leaf=is_it
        )
        return jax.tree.leaves(inside)
    if isinstance(part, str | re.Pattern):
        pattern = _glob(part) if isinstance(part, str) else part
        return [is_number(leaf) and pattern.fullmatch(path) is not None for path, leaf in leaves_with_paths(tree)]
    if callable(part):
        return [is_number(leaf) and bool(part(path, leaf)) for path, leaf in leaves_with_paths(tree)]
    raise ValueError(f"select: where={part!r} is none of these: a glob, a regex, a type, a predicate of path and leaf")


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, JAX's or numpy's, of numbers or anything else."""
    return isinstance(leaf, jax.Array | np.ndarray)


def is_number(leaf: Any) -> bool:
    """Whether a leaf is an array of numbers, the shape of one, or a Python number; flags and random keys are none."""
    is_array = isinstance(leaf, jax.ShapeDtypeStruct) or eqx.is_array_like(leaf)
    return is_array and jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), np.number)


def is_float(leaf: Any) -> bool:
    """Whether a leaf is a number that has a gradient."""
    return is_number(leaf) and jnp.issubdtype(jnp.result_type(leaf), np.inexact)


def _glob(pattern: str) -> re.Pattern[str]:
    translated = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.compile(rf"{translated}([.\[].*)?", re.DOTALL)


def _nothing_found(tree: PyTree, where: str | re.Pattern[str] | type) -> str:
    if isinstance(where, type):
        return f"select: the tree holds no {where.__module__}.{where.__qualname__} with numbers in it"
    pattern = where if isinstance(where, str) else where.pattern
    known = list(dict.fromkeys(paths(tree)))
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3) or known[:3]
    return (
        f"select: no number's path matches {pattern!r}; the nearest are {', '.join(near) or 'none: the tree is empty'}"
    )
