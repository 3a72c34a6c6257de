"""Gradients beyond the batch's mean: those of each example, their private mean, products with the Hessian."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from eqzoo.nn._precision import at_least_float32
from eqzoo.tree.diff import check_same_structure
from eqzoo.tree.noise import add_noise
from eqzoo.tree.paths import leaves_with_paths


def per_example_grads(loss: Callable[..., Float[Array, ""]]) -> Callable[..., PyTree]:
    """From `loss(model, *example)`, a function of `(model, *batch)` that gives `eqx.filter_grad`'s gradient of each
    example. All arrays of the batch and of the gradients lead with the example axis; the mean over it is the gradient
    of the mean loss.

    ```python
    model = eqx.nn.Linear(3, "scalar", key=jax.random.key(0))
    loss = lambda model, x, y: (model(x) - y) ** 2
    gradients = per_example_grads(loss)(model, jnp.ones((5, 3)), jnp.arange(5.0))
    gradients.weight.shape  # (5, 1, 3)
    ```
    """

    def gradients(model, *batch):
        return eqx.filter_vmap(lambda *example: eqx.filter_grad(loss)(model, *example))(*batch)

    return gradients


def private_mean(
    gradients: PyTree,
    key: PRNGKeyArray,
    *,
    max_norm: float | Float[Array, ""],
    noise_multiplier: float | Float[Array, ""],
) -> PyTree:
    """The mean of per-example gradients as differentially private SGD takes it (Abadi et al., 2016): each example's
    whole gradient clipped to norm `max_norm`, noise of standard deviation `noise_multiplier * max_norm` added to their
    sum, divided by the number of examples. It is `optax.contrib.differentially_private_aggregate` as a function; each
    leaf, and each layer of a stack, draws its noise from a key of its path.

    ```python
    gradients = {"weight": jnp.ones((5, 3, 2)), "bias": jnp.ones((5, 3))}
    mean = private_mean(gradients, jax.random.key(0), max_norm=1.0, noise_multiplier=1.1)
    mean["weight"].shape  # (3, 2)
    ```
    """
    floats, rest = eqx.partition(gradients, eqx.is_inexact_array)
    examples = _number_of_examples(floats)
    with jax.default_matmul_precision("highest"):  # a rounded factor would let an example exceed `max_norm`
        total, _ = optax.per_example_global_norm_clip(jax.tree.map(at_least_float32, floats), max_norm)
    total = add_noise(total, key, max_norm * noise_multiplier)
    mean = jax.tree.map(lambda total, leaf: (total / examples).astype(leaf.dtype), total, floats)
    return eqx.combine(mean, rest)


def hvp(loss: Callable[..., Float[Array, ""]]) -> Callable[..., PyTree]:
    """From `loss(model, *args)`, a function of `(model, vector, *args)` that multiplies the Hessian with respect to the
    float arrays of `model` by `vector`, a tree like them. It costs about two gradients and never forms the Hessian.

    ```python
    model = eqx.nn.MLP(2, "scalar", 8, 1, key=jax.random.key(0))
    ones = jax.tree.map(jnp.ones_like, eqx.filter(model, eqx.is_inexact_array))
    product = hvp(lambda model, x: model(x) ** 2)(model, ones, jnp.ones(2))
    ```
    """

    def product(model: PyTree, vector: PyTree, *args: Any) -> PyTree:
        parameters, static = eqx.partition(model, eqx.is_inexact_array)
        vector = eqx.filter(vector, eqx.is_inexact_array)
        check_same_structure("hvp", parameters, vector)
        gradient = lambda parameters: eqx.filter_grad(loss)(eqx.combine(parameters, static), *args)
        # `eqx.filter_jvp` would give None, not zero, for a leaf that the loss is linear in.
        return jax.jvp(gradient, (parameters,), (vector,))[1]

    return product


def _number_of_examples(gradients: PyTree) -> int:
    named = leaves_with_paths(gradients)
    if not named:
        raise ValueError("private_mean: the tree holds no gradients; pass what per_example_grads gives")
    path, first = named[0]
    for other, leaf in named:
        if leaf.shape[:1] != first.shape[:1] or leaf.shape[:1] in ((), (0,)):
            raise ValueError(
                f"private_mean: all gradients must lead with an axis of the same examples, at least one, but {path!r} "
                f"has shape {first.shape} and {other!r} has shape {leaf.shape}; pass what per_example_grads gives"
            )
    return first.shape[0]
