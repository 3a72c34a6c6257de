"""Arithmetic on whole trees."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from eqzoo.tree.select import Where, is_float, select

Tree = TypeVar("Tree", bound=PyTree)


def cast(tree: Tree, dtype: DTypeLike, *, keep: Where | None = None) -> Tree:
    """Turn the floats of a tree into `dtype`, but for those that `keep` selects. Works on shapes too.

    ```python
    cast({"W": jnp.ones((2, 2)), "norm": jnp.ones(2)}, jnp.bfloat16, keep="norm")
    ```
    """
    kept = jax.tree.map(lambda _: False, tree) if keep is None else select(tree, keep)

    def convert(leaf, is_kept):
        if is_kept or not is_float(leaf):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(dtype=dtype)
        return leaf.astype(dtype) if hasattr(leaf, "astype") else jnp.asarray(leaf, dtype)

    return jax.tree.map(convert, tree, kept)
