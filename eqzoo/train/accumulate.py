"""Batches larger than memory: their gradient as that of several parts, one after the other."""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Shaped

Batch = Mapping[str, Shaped[Array, "batch ..."]]
Gradient = Callable[[Any, Any, Batch], tuple[tuple[Array, tuple[Any, PyTree]], PyTree]]


def accumulate(gradient: Gradient, parts: int) -> Gradient:
    """A function like `gradient` that takes the batch in `parts` parts, for which a part's memory is enough.

    `gradient` is `eqx.filter_value_and_grad(loss_fn, has_aux=True)` of a `loss_fn(model, state, batch)` that returns
    `(loss, (state, metrics))`, where the loss is the mean over the examples weighted by `batch["weight"]`. So is the
    loss of all parts. The state goes from one part to the next, and metrics are added up.

    ```python
    def loss_fn(model, state, batch):
        loss = jnp.sum(batch["weight"] * (model * batch["x"]) ** 2) / jnp.sum(batch["weight"])
        return loss, (state, {"examples": jnp.sum(batch["weight"])})


    gradient = accumulate(eqx.filter_value_and_grad(loss_fn, has_aux=True), parts=2)
    batch = {"x": jnp.arange(4.0), "weight": jnp.array([1.0, 1.0, 1.0, 0.0])}
    (loss, (state, metrics)), grads = gradient(jnp.array(3.0), None, batch)
    float(loss), float(grads), float(metrics["examples"])  # (15.0, 10.0, 3.0)
    ```
    """
    if parts < 1:
        raise ValueError(f"accumulate: parts={parts} leaves no part to take; pass parts >= 1")
    if parts == 1:
        return gradient

    def accumulated(model, state, batch):
        size = len(batch["weight"])
        if size % parts:
            raise ValueError(
                f"accumulate: a batch of {size} examples has no {parts} parts of one size; "
                f"choose a batch size that is a multiple of {parts}"
            )

        def add(carry, part):
            state, total = carry
            (loss, (state, metrics)), grads = gradient(model, state, part)
            weight = jnp.sum(part["weight"])
            total = jax.tree.map(lambda total, grad: total + weight * grad, total, grads)
            return (state, total), (weight, weight * loss, metrics)

        # Every part has examples of the whole batch, so that each device has its share if they are spread over several.
        strided = lambda x: jnp.swapaxes(x.reshape(size // parts, parts, *x.shape[1:]), 0, 1)
        parameters = eqx.filter(model, eqx.is_inexact_array)
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), parameters)
        (state, total), sums = jax.lax.scan(add, (state, zeros), jax.tree.map(strided, dict(batch)))
        weight, loss, metrics = jax.tree.map(lambda x: jnp.sum(x, axis=0, dtype=x.dtype), sums)
        share = 1 / jnp.where(weight == 0, 1, weight)
        grads = jax.tree.map(lambda total, parameter: (share * total).astype(parameter.dtype), total, parameters)
        return (share * loss, (state, metrics)), grads

    return accumulated
