"""Many trees as one: an ensemble has the structure of its members, and arrays with one more axis."""

from collections.abc import Sequence
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from eqzoo.tree.diff import check_same_structure, diff
from eqzoo.tree.paths import leaves_with_paths
from eqzoo.tree.select import is_array

Tree = TypeVar("Tree", bound=PyTree)


def stack(trees: Sequence[Tree]) -> Tree:
    """One tree whose arrays lead with an axis of the given trees. `eqx.filter_vmap` calls an ensemble of models:

    ```python
    members = [eqx.nn.Linear(3, 2, key=jax.random.key(seed)) for seed in range(5)]
    call = eqx.filter_vmap(lambda member, x: member(x), in_axes=(eqx.if_array(0), None))
    call(stack(members), jnp.ones(3)).shape  # (5, 2)
    ```
    """
    if not trees:
        raise ValueError("stack: there are no trees to stack; pass at least one")
    check_same_structure("stack", *trees)
    arrays, others = zip(*(eqx.partition(tree, is_array) for tree in trees), strict=True)
    for index, other in enumerate(others[1:], start=1):
        if found := diff(others[0], other):
            raise ValueError(f"stack: trees 0 and {index} differ (a | b) in what is no array: {found[0]}")
    return eqx.combine(jax.tree.map(lambda *leaves: jnp.stack(leaves), *arrays), others[0])


def unstack(tree: Tree) -> list[Tree]:
    """`stack` undone: the trees along the leading axis of all arrays. Of a `Stack`'s block, these are the layers.

    ```python
    [each["W"].shape for each in unstack({"W": jnp.ones((3, 2)), "activation": "relu"})]  # [(2,), (2,), (2,)]
    ```
    """
    named = [(path, leaf) for path, leaf in leaves_with_paths(tree) if is_array(leaf)]
    if not named:
        raise ValueError("unstack: the tree holds no arrays, so there is no axis to take apart")
    (first, array), *_ = named
    for path, leaf in named:
        if leaf.shape[:1] != array.shape[:1] or leaf.ndim == 0:
            raise ValueError(
                f"unstack: all arrays must lead with one axis of the same length, but {first or 'the leaf'} has shape "
                f"{array.shape} and {path or 'the leaf'} has shape {leaf.shape}"
            )
    take = lambda index: jax.tree.map(lambda leaf: leaf[index] if is_array(leaf) else leaf, tree)
    return [take(index) for index in range(array.shape[0])]
