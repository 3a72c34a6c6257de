"""All that changes in training, in one tree."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from eqzoo.nn._precision import at_least_float32
from eqzoo.tree import ema


class Skipped(eqx.Module):
    """How many steps had gradients that were not finite and changed nothing: in all, and in a row up to the last step.

    `leaf` is the first such gradient of the last of them, as an index into `jax.tree.leaves(grads)`; -1 if there is
    none.

    ```python
    skipped = Skipped.none().next({"W": jnp.ones(2), "b": jnp.array([1.0, jnp.nan])})
    [int(count) for count in (skipped.total, skipped.in_a_row, skipped.leaf)]  # [1, 1, 1]
    skipped.check(["W", "b"], limit=10, step=1)
    ```
    """

    total: Int[Array, ""]
    in_a_row: Int[Array, ""]
    leaf: Int[Array, ""]

    @classmethod
    def none(cls) -> "Skipped":
        """Before the first step."""
        return cls(*(jnp.array(count, jnp.int32) for count in (0, 0, -1)))

    def next(self, grads: PyTree) -> "Skipped":
        """With one more step, that of these gradients; its `in_a_row` is 0 if they are finite."""
        sums = _sums(grads)
        is_fine = _is_fine(sums)
        return Skipped(
            total=self.total + ~is_fine,
            in_a_row=jnp.where(is_fine, 0, self.in_a_row + 1),
            leaf=jnp.where(is_fine, self.leaf, jnp.argmin(jnp.isfinite(sums)).astype(jnp.int32)),
        )

    def check(self, paths: Sequence[str], limit: int, step: int) -> None:
        """Raise a `FloatingPointError` if more than `limit` steps in a row, up to `step`, were skipped.

        `paths` names the gradients: `eqzoo.tree.paths(eqx.filter(model, eqx.is_inexact_array))`. It waits for the step
        that these counts come from, so look at those of a step that is done.
        """
        in_a_row = int(self.in_a_row)
        if in_a_row <= limit:
            return
        leaf = int(self.leaf)
        where = paths[leaf] if leaf < len(paths) else f"leaf {leaf}"
        raise FloatingPointError(
            f"gradients were not finite in {in_a_row} steps in a row, the last of them step {step}, first in {where}; "
            f"lower the learning rate, warm up longer, clip the gradients, or look for bad numbers in the data"
        )


class TrainState(eqx.Module):
    """Everything that a training step takes and returns: the model, the state of its stateful layers (empty for a model
    that has none), the optimizer's state, the number of steps done and a random key; if wanted, a moving average of
    model and state; and which steps were skipped.

    A step makes the next one from it. If it donates its arguments, what went into it can't be used again.

    ```python
    model, state = eqzoo.create("mlp", hidden=(8,), image_size=4, key=jax.random.key(0))
    optimizer = optax.adam(1e-3)
    train_state = TrainState.create(model, state, optimizer, key=jax.random.key(1), ema=True)


    @eqx.filter_jit(donate="all")
    def step(train_state, image):
        model, key = train_state.model, jax.random.fold_in(train_state.key, train_state.step)
        grads = eqx.filter_grad(lambda model: jnp.sum(model(image, key=key) ** 2))(model)
        updates, opt_state = optimizer.update(grads, train_state.opt_state)
        model = eqx.apply_updates(model, updates)
        return train_state.next(model, train_state.state, opt_state, grads, ema_decay=0.99)


    train_state = step(train_state, jnp.ones((4, 4, 1)))
    assert train_state.step == 1 and train_state.skipped.total == 0
    model, state = train_state.averaged
    ```
    """

    model: Any
    state: eqx.nn.State
    opt_state: PyTree
    step: Int[Array, ""]
    key: PRNGKeyArray
    ema: tuple[Any, eqx.nn.State] | None = None
    skipped: Skipped = eqx.field(default_factory=Skipped.none)

    @classmethod
    def create(
        cls,
        model: Any,
        state: eqx.nn.State,
        optimizer: optax.GradientTransformation,
        *,
        key: PRNGKeyArray,
        ema: bool = False,
    ) -> "TrainState":
        """Before the first step; with `ema`, model and state are the first average."""
        opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        # Some optimizers start with one array in two places, which can't be donated.
        opt_state = _copy(opt_state)
        average = _copy((model, state)) if ema else None
        return cls(model, state, opt_state, jnp.zeros((), jnp.int32), key, average)

    def next(
        self,
        model: Any,
        state: eqx.nn.State,
        opt_state: PyTree,
        grads: PyTree,
        *,
        ema_decay: float | Float[Array, ""] | None = None,
    ) -> "TrainState":
        """After one more step, which made these from `grads`.

        If a gradient isn't finite, all but the number of steps and `skipped` stays as it was.
        """
        if self.ema is None:
            if isinstance(ema_decay, jax.Array) or ema_decay:
                raise ValueError(f"next: ema_decay={ema_decay} of no average; make one by create(..., ema=True)")
            average = None
        elif ema_decay is None:
            raise ValueError("next: there is an average but no ema_decay; pass ema_decay=0.999, or create without ema")
        else:
            average = _averaged(self.ema, (model, state), ema_decay)
        new, old = (model, state, opt_state, average), (self.model, self.state, self.opt_state, self.ema)
        model, state, opt_state, average = _where(_is_fine(_sums(grads)), new, old)
        return TrainState(model, state, opt_state, self.step + 1, self.key, average, self.skipped.next(grads))

    @property
    def averaged(self) -> tuple[Any, eqx.nn.State]:
        """The model and state to evaluate: the average if there is one."""
        return (self.model, self.state) if self.ema is None else self.ema


def _sums(grads: PyTree) -> Float[Array, " leaves"]:
    """The sum of each leaf, which is finite if all of its numbers are, unless they are too large for any use."""
    leaves = jax.tree.leaves(grads)
    if not leaves:
        raise ValueError("grads holds no gradient at all; leave at least one array of the model trainable")
    # A sum takes a sixth of the time of a test of each number. (The maximum would not do: XLA:CPU's overlooks NaNs.)
    return jnp.stack([jnp.sum(at_least_float32(leaf)) for leaf in leaves])


def _is_fine(sums: Float[Array, " leaves"]) -> Bool[Array, ""]:
    # It could do without the root, or test each leaf. But then XLA:CPU finds the total anew wherever the result is
    # used, which takes long to compile, or copies the optimizer's moments, which takes as long as the whole update.
    return jnp.isfinite(jnp.sqrt(jnp.abs(jnp.sum(sums))))


def _copy(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.copy() if eqx.is_array(leaf) else leaf, tree)


def _averaged(average: PyTree, new: PyTree, decay: float | Float[Array, ""]) -> PyTree:
    average, static = eqx.partition(average, eqx.is_array)  # a Python float, such as a dropout rate, is a setting
    return eqx.combine(ema(average, eqx.filter(new, eqx.is_array), decay), static)


def _where(condition: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y) if eqx.is_array(x) else x, new, old)
