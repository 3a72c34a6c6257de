"""How many numbers a tree holds, and how large they are."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PyTree, Shaped

from eqzoo.nn._precision import at_least_float32
from eqzoo.tree._level import LAYERS
from eqzoo.tree.paths import map_with_path
from eqzoo.tree.select import is_float, is_number

SMALL = 2**14  # numbers; larger arrays are summed faster by themselves
TOGETHER = 64  # arrays; more take XLA longer to join


class Stats(NamedTuple):
    """Statistics of a float leaf, each a number, or one number a layer if the leaf is in a stack.

    One NaN makes all of them NaN but `nonfinite`, which counts NaNs and infinities. `std` divides by the count.
    """

    min: Float[Array, "*layers"]
    max: Float[Array, "*layers"]
    mean: Float[Array, "*layers"]
    std: Float[Array, "*layers"]
    norm: Float[Array, "*layers"]
    nonfinite: Int[Array, "*layers"]


def count(tree: PyTree) -> int:
    """How many numbers are in the leaves of `tree`: in a model, the number of its parameters.

    ```python
    count([{"W": jnp.ones((3, 2)), "b": 0.5, "activation": jax.nn.relu}])  # 7
    ```
    """
    return sum(math.prod(np.shape(leaf)) for leaf in jax.tree.leaves(tree) if is_number(leaf))


def nbytes(tree: PyTree) -> int:
    """The memory that these numbers take, in bytes; the shapes alone are enough to say.

    ```python
    nbytes(jax.eval_shape(lambda: {"W": jnp.ones((3, 2), jnp.bfloat16)}))  # 12
    ```
    """
    numbers = [leaf for leaf in jax.tree.leaves(tree) if is_number(leaf)]
    return sum(math.prod(np.shape(leaf)) * jnp.result_type(leaf).itemsize for leaf in numbers)


def norm(tree: PyTree) -> Float[Array, ""]:
    """The l2 norm of all float leaves taken as one vector, at least in float32.

    It is `optax.tree.norm` for any tree, and for trees of many leaves: 10,000 compile in seconds.

    ```python
    float(norm({"W": jnp.array([3.0, 0.0]), "b": 4.0, "steps": 7}))  # 5.0
    ```
    """
    return _norm([leaf for leaf in jax.tree.leaves(tree) if is_float(leaf)])


def norms(tree: PyTree) -> PyTree[Float[Array, "..."]]:
    """`tree` with each float leaf's own l2 norm in its place, one a layer for a leaf in a stack, and None elsewhere.

    ```python
    norms({"W": jnp.array([3.0, 4.0]), "steps": 7})  # {'W': Array(5., dtype=float32), 'steps': None}
    ```
    """
    return map_with_path(lambda path, leaf: _norms(leaf, path.count(LAYERS)) if is_float(leaf) else None, tree)


def stats(tree: PyTree) -> PyTree:
    """`tree` with the `Stats` of each float leaf in its place and None elsewhere.

    ```python
    float(stats({"W": jnp.array([3.0, 4.0]), "steps": 7})["W"].mean)  # 3.5
    ```
    """
    return map_with_path(lambda path, leaf: _stats(leaf, path.count(LAYERS)) if is_float(leaf) else None, tree)


def dtype_name(leaf: Any) -> str:
    """`float32` of an array, `float` of a Python number."""
    return str(leaf.dtype) if hasattr(leaf, "dtype") else type(leaf).__name__


def has_values(leaf: Any) -> bool:
    """Whether the values of an array can be looked at: it is no shape, not traced, and not in part on another host."""
    return not isinstance(leaf, jax.ShapeDtypeStruct | Tracer) and getattr(leaf, "is_fully_addressable", True)


def _in_bundles(leaves: list[Shaped[Array, "..."]]) -> list[Shaped[Array, "..."]]:
    """The numbers of `leaves` in fewer arrays, small ones joined: XLA takes 30 ms to compile the sum of each array."""
    small = [jax.lax.reshape(leaf, (leaf.size,)) for leaf in leaves if leaf.size <= SMALL]  # faster than `ravel`
    large = [leaf for leaf in leaves if leaf.size > SMALL]
    return large + [jnp.concatenate(small[i : i + TOGETHER]) for i in range(0, len(small), TOGETHER)]


# Compiled once per shape, so that they are fast outside of `jit` too.


@jax.jit
def _norm(leaves):
    return optax.tree.norm(_in_bundles([at_least_float32(jnp.asarray(leaf)) for leaf in leaves]))


@partial(jax.jit, static_argnums=1)
def _norms(leaf, layer_axes):
    x = at_least_float32(jnp.asarray(leaf))
    return jnp.sqrt(jnp.sum(x * x, axis=tuple(range(layer_axes, x.ndim))))


@partial(jax.jit, static_argnums=1)
def _stats(leaf, layer_axes):
    x = at_least_float32(jnp.asarray(leaf))
    axes = tuple(range(layer_axes, x.ndim))
    has_nan = jnp.any(jnp.isnan(x), axes)  # which the minimum of a large array doesn't show on a CPU (JAX 0.10 to 0.12)
    return Stats(
        min=jnp.where(has_nan, jnp.nan, jnp.min(x, axes, initial=jnp.inf)),  # an empty leaf has no smallest number
        max=jnp.where(has_nan, jnp.nan, jnp.max(x, axes, initial=-jnp.inf)),
        mean=jnp.mean(x, axes),
        std=jnp.std(x, axes),
        norm=_norms(leaf, layer_axes),
        nonfinite=jnp.sum(~jnp.isfinite(x), axes),
    )
