"""All that changes in training, in one tree."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PRNGKeyArray, PyTree


class TrainState(eqx.Module):
    """Everything that a training step takes and returns: the model, the state of its stateful layers (empty for a model
    that has none), the optimizer's state, the number of steps done and a random key.

    A step makes the next one from it. If it donates its arguments, what went into it can't be used again.

    ```python
    model, state = eqzoo.create("mlp", hidden=(8,), image_size=4, key=jax.random.key(0))
    optimizer = optax.adam(1e-3)
    train_state = TrainState.create(model, state, optimizer, key=jax.random.key(1))


    @eqx.filter_jit(donate="all")
    def step(train_state, image):
        key = jax.random.fold_in(train_state.key, train_state.step)
        grads = eqx.filter_grad(lambda model: jnp.sum(model(image, key=key) ** 2))(train_state.model)
        updates, opt_state = optimizer.update(grads, train_state.opt_state)
        model = eqx.apply_updates(train_state.model, updates)
        return TrainState(model, train_state.state, opt_state, train_state.step + 1, train_state.key)


    train_state = step(train_state, jnp.ones((4, 4, 1)))
    assert train_state.step == 1
    ```
    """

    model: Any
    state: eqx.nn.State
    opt_state: PyTree
    step: Int[Array, ""]
    key: PRNGKeyArray

    @classmethod
    def create(
        cls, model: Any, state: eqx.nn.State, optimizer: optax.GradientTransformation, *, key: PRNGKeyArray
    ) -> "TrainState":
        """Before the first step."""
        opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        # Some optimizers start with one array in two places, which can't be donated.
        opt_state = jax.tree.map(lambda leaf: leaf.copy() if eqx.is_array(leaf) else leaf, opt_state)
        return cls(model, state, opt_state, jnp.zeros((), jnp.int32), key)
