"""Where two trees differ, in words."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from eqzoo.tree._level import auxiliary, children, is_leaf, join, label
from eqzoo.tree.measure import dtype_name, has_values
from eqzoo.tree.select import is_number

MOST_LINES = 10
LONGEST_TEXT = 100


class Difference(NamedTuple):
    """One way in which two trees differ. As a string: `head.weight: shape (1000, 512) | (10, 512)`.

    `kind` is "type", "only in a", "only in b", "static" (what JAX doesn't count as leaves, such as a depth),
    "shape", "dtype" or "value".
    """

    path: str
    kind: str
    a: str
    b: str

    def __str__(self) -> str:
        place = self.path or "the tree"
        if self.kind in ("only in a", "only in b"):
            return f"{place}: {self.kind}: {self.a or self.b}"
        what = "" if self.kind in ("static", "value") else f"{self.kind} "
        return f"{place}: {what}{self.a} | {self.b}"


def diff(a: PyTree, b: PyTree, *, rtol: float = 0.0, atol: float = 0.0) -> list[Difference]:
    """All differences between two trees, which are matched by the names of their parts; empty if there are none.

    Numbers differ if `|a - b| > atol + rtol * |b|`; a NaN equals a NaN. Under `jit`, where numbers aren't known yet,
    only the rest is compared.

    ```python
    found = diff({"W": jnp.zeros((3, 2)), "b": 0.5}, {"W": jnp.zeros((3, 4)), "b": 0.25})
    [str(each) for each in found]  # ['W: shape (3, 2) | (3, 4)', 'b: 0.5 | 0.25']
    ```
    """
    return list(_differences("", a, b, rtol, atol))


def check_same_structure(name: str, *trees: PyTree) -> None:
    """Raise a `ValueError` that begins with `name` unless all trees have one structure and the same shapes."""
    for index, tree in enumerate(trees[1:], start=1):
        if _form(tree) == _form(trees[0]):
            continue
        lines = [str(each) for each in diff(trees[0], tree) if each.kind not in ("dtype", "value")]
        more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
        raise ValueError(
            f"{name}: trees 0 and {index} differ (a | b); give trees of one structure with the same shapes\n  "
            + "\n  ".join([*lines[:MOST_LINES], *more])
        )


def _form(tree: PyTree) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [np.shape(leaf) if _is_array(leaf) else None for leaf in leaves]


def _differences(path: str, a: Any, b: Any, rtol: float, atol: float) -> Iterator[Difference]:
    if a is b:
        return
    if is_leaf(a) and is_leaf(b):
        yield from _between_leaves(path, a, b, rtol, atol)
        return
    below_a, below_b = dict(children(a)), dict(children(b))
    if is_leaf(a) or is_leaf(b) or type(a) is not type(b):
        yield Difference(path, "type", *_texts(a, b, _description, lambda node: str(type(node))))
        if not below_a or below_a.keys() != below_b.keys():
            return  # nothing to match
    elif isinstance(a, eqx.Module):
        for field in dataclasses.fields(a):
            if field.metadata.get("static", False):
                values = (getattr(tree, field.name, None) for tree in (a, b))
                yield from _between_statics(join(path, field.name), *values)
    elif below_a.keys() == below_b.keys():
        yield from _between_statics(path, auxiliary(a), auxiliary(b))
    for key in {**below_a, **below_b}:
        place = join(path, label(key))
        if key not in below_b:
            yield Difference(place, "only in a", _description(below_a[key]), "")
        elif key not in below_a:
            yield Difference(place, "only in b", "", _description(below_b[key]))
        else:
            yield from _differences(place, below_a[key], below_b[key], rtol, atol)


def _between_statics(path: str, a: Any, b: Any) -> Iterator[Difference]:
    if type(a) is type(b) and dataclasses.is_dataclass(a) and not isinstance(a, type):
        for field in dataclasses.fields(a):
            yield from _between_statics(join(path, field.name), getattr(a, field.name), getattr(b, field.name))
    else:
        yield from _between_objects(path, "static", a, b)


def _between_objects(path: str, kind: str, a: Any, b: Any) -> Iterator[Difference]:
    if not _equal(a, b):
        yield Difference(path, kind, *_texts(a, b, _text, repr))


def _between_leaves(path: str, a: Any, b: Any, rtol: float, atol: float) -> Iterator[Difference]:
    if _is_array(a) != _is_array(b) or is_number(a) != is_number(b):
        yield Difference(path, "type", _description(a), _description(b))
    elif not _is_array(a):
        yield from _between_objects(path, "value", a, b)
    else:
        shapes, dtypes = (np.shape(a), np.shape(b)), (dtype_name(a), dtype_name(b))
        if shapes[0] != shapes[1]:
            yield Difference(path, "shape", *map(str, shapes))
        if dtypes[0] != dtypes[1]:
            yield Difference(path, "dtype", *dtypes)
        if shapes[0] == shapes[1] and dtypes[0] == dtypes[1] and has_values(a) and has_values(b):
            yield from _between_values(path, a, b, rtol, atol)


def _between_values(path: str, a: Any, b: Any, rtol: float, atol: float) -> Iterator[Difference]:
    if jnp.issubdtype(getattr(a, "dtype", float), jax.dtypes.prng_key):
        yield from _between_objects(path, "value", *(jax.random.key_data(key).tolist() for key in (a, b)))
        return
    a, b = np.asarray(a), np.asarray(b)
    if np.array_equal(a, b):
        return
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    x, y = a.astype(wide), b.astype(wide)
    differs = ~np.isclose(x, y, rtol, atol, equal_nan=True)
    if not differs.any():
        return
    with np.errstate(invalid="ignore"):  # infinities
        distance = np.nan_to_num(np.abs(x - y), nan=np.inf, posinf=np.inf)
    worst = np.unravel_index(np.argmax(np.where(differs, distance, -1)), a.shape)
    where = f" at {list(map(int, worst))}; {differs.sum():,} of {a.size:,} differ, by at most {distance[worst]:.3g}"
    yield Difference(path, "value", str(a[worst]), str(b[worst]) + (where if a.ndim else ""))


def _is_array(leaf: Any) -> bool:
    return is_number(leaf) or hasattr(leaf, "dtype")  # a random key is no number


def _equal(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(np.all(a == b))
    except ValueError:  # arrays of other shapes
        return False


def _texts(a: Any, b: Any, text: Callable[[Any], str], longer: Callable[[Any], str]) -> tuple[str, str]:
    short = text(a), text(b)
    return short if short[0] != short[1] else (longer(a), longer(b))


def _text(value: Any) -> str:
    """A function by its name, anything else as Python writes it."""
    text = value.__qualname__ if hasattr(value, "__qualname__") else repr(value)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"


def _description(node: Any) -> str:
    if not is_leaf(node):
        return "None" if node is None else type(node).__name__
    if not _is_array(node):
        return _text(node)
    return f"{dtype_name(node)} of shape {np.shape(node)}" if hasattr(node, "shape") else f"{dtype_name(node)} {node}"
