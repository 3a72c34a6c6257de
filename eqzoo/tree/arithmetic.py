"""Arithmetic on whole trees. What is no float (a counter, a flag, a function) is taken as it is."""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, PyTree

from eqzoo.nn._precision import at_least_float32
from eqzoo.tree.diff import check_same_structure
from eqzoo.tree.measure import norm, norms
from eqzoo.tree.select import Where, is_float, is_number, select

Tree = TypeVar("Tree", bound=PyTree)


def zeros_like(tree: Tree) -> Tree:
    """Zero in the place of each number.

    ```python
    zeros_like({"W": jnp.ones(2), "activation": "relu"})  # {'W': Array([0., 0.], dtype=float32), 'activation': 'relu'}
    ```
    """
    return jax.tree.map(lambda leaf: jnp.zeros_like(leaf) if is_number(leaf) else leaf, tree)


def cast(tree: Tree, dtype: DTypeLike, *, keep: Where | None = None) -> Tree:
    """The floats of a tree as `dtype`, except for those that `keep` means (see `select`). It takes shapes, too.

    ```python
    half = cast({"W": jnp.ones((2, 2)), "norm": jnp.ones(2)}, jnp.bfloat16, keep="norm")
    str(half["W"].dtype), str(half["norm"].dtype)  # ('bfloat16', 'float32')
    ```
    """
    kept = jax.tree.map(lambda leaf: False, tree) if keep is None else select(tree, keep)

    def convert(leaf, is_kept):
        if is_kept or not is_float(leaf) or jnp.iscomplexobj(leaf):
            return leaf
        return leaf.update(dtype=dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf, dtype)

    return jax.tree.map(convert, tree, kept)


def clip_by_leaf_norm(tree: Tree, max_norm: float | Float[Array, ""]) -> Tree:
    """Each leaf, and each layer of a stack, scaled down to the norm `max_norm` if its own is larger.

    ```python
    clip_by_leaf_norm({"W": jnp.array([3.0, 4.0]), "b": jnp.array([0.5])}, 1.0)["W"]  # Array([0.6, 0.8], dtype=float32)
    ```
    """

    def clip(leaf, norm):
        if norm is None:
            return leaf
        return _scaled(leaf, _factor(norm, max_norm).reshape(norm.shape + (1,) * (jnp.ndim(leaf) - norm.ndim)))

    return jax.tree.map(clip, tree, norms(tree))


def clip_by_global_norm(tree: Tree, max_norm: float | Float[Array, ""]) -> Tree:
    """The whole tree scaled down to the norm `max_norm` if its own is larger: `optax.clip_by_global_norm` as a function
    of any tree.

    ```python
    clip_by_global_norm([jnp.array([3.0]), jnp.array([4.0]), "relu"], 1.0)[1]  # Array([0.8], dtype=float32)
    ```
    """
    factor = _factor(norm(tree), max_norm)
    return jax.tree.map(lambda leaf: _scaled(leaf, factor) if is_float(leaf) else leaf, tree)


def _factor(norm: Float[Array, "*layers"], max_norm: float | Float[Array, ""]) -> Float[Array, "*layers"]:
    return 1 / jnp.maximum(1.0, norm / max_norm)


def _scaled(leaf: Any, factor: Float[Array, "*layers"]) -> Float[Array, "..."]:
    leaf = jnp.asarray(leaf)
    return (leaf * factor).astype(leaf.dtype)


def lerp(a: Tree, b: Tree, t: float | Float[Array, ""]) -> Tree:
    """`(1 - t) * a + t * b`, float by float, in the dtypes of `a`; what is no float is that of `b`.

    ```python
    lerp({"W": jnp.zeros(2)}, {"W": jnp.ones(2)}, 0.25)  # {'W': Array([0.25, 0.25], dtype=float32)}
    ```
    """
    check_same_structure("lerp", a, b)
    return _mixed(a, b, 1 - t, t)


def ema(average: Tree, new: Tree, decay: float | Float[Array, ""]) -> Tree:
    """The next exponential moving average, `decay * average + (1 - decay) * new`: `optax.incremental_update` for any
    tree. What is no float is that of `new`; an average in half precision loses small steps, so keep it in float32.

    ```python
    ema({"W": jnp.zeros(2), "steps": 1}, {"W": jnp.ones(2), "steps": 2}, 0.75)["steps"]  # 2
    ```
    """
    check_same_structure("ema", average, new)
    return _mixed(average, new, decay, 1 - decay)


def _mixed(a: Tree, b: Tree, weight_a: Any, weight_b: Any) -> Tree:
    def mix(x, y):
        if not is_float(x):
            return y
        x, y = jnp.asarray(x), jnp.asarray(y)
        return (weight_a * at_least_float32(x) + weight_b * at_least_float32(y)).astype(x.dtype)

    return jax.tree.map(mix, a, b)


def mean(trees: Sequence[Tree]) -> Tree:
    """The mean of like trees: of models, a soup (Wortsman et al., 2022). What is no float is that of the first.

    ```python
    mean([{"W": jnp.zeros(2)}, {"W": jnp.ones(2)}])  # {'W': Array([0.5, 0.5], dtype=float32)}
    ```
    """
    if not trees:
        raise ValueError("mean: there are no trees to take the mean of; pass at least one")
    check_same_structure("mean", *trees)

    def mean_of(first, *others):
        if not is_float(first):
            return first
        first = jnp.asarray(first)
        total = sum((at_least_float32(jnp.asarray(other)) for other in others), at_least_float32(first))
        return (total / len(trees)).astype(first.dtype)

    return jax.tree.map(mean_of, *trees)
