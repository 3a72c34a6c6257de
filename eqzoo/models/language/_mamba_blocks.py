"""What Mamba and Mamba-2 have in common."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from eqzoo import nn
from eqzoo.nn._init import uniform

Mixer = TypeVar("Mixer", bound=Callable[..., Any])


class State(NamedTuple):
    """What a block keeps: the last inputs of its convolution, and the state of its state space."""

    inputs: Float[Array, "*layers kernel_less_one channels"]
    state: Float[Array, "..."]

    @staticmethod
    def empty(inputs: Sequence[int], state: Sequence[int], *, dtype: DTypeLike | None, own: DTypeLike) -> "State":
        """Zeros of two shapes and a `dtype`; by default the model's `own`, but float32 at least for the state."""
        wide = jnp.promote_types(own, jnp.float32)
        return State(
            jnp.zeros(inputs, own if dtype is None else dtype), jnp.zeros(state, wide if dtype is None else dtype)
        )


class Block(eqx.Module, Generic[Mixer]):
    norm: nn.RMSNorm
    mixer: Mixer

    def __call__(
        self, x: Float[Array, "tokens dim"], before: State, count: Int[Array, ""] | None
    ) -> tuple[Float[Array, "tokens dim"], State]:
        # The sum may be wider than the weights, and what each block adds to it is computed as narrow as they are.
        y, after = self.mixer(self.norm(x.astype(self.norm.weight.dtype)), before, count)
        return x + y.astype(x.dtype), after


def time_step_bias(key: PRNGKeyArray, size: int) -> Float[Array, " size"]:
    """Biases whose softplus lies between 0.001 and 0.1, evenly by its logarithm."""
    # Out of a table made by numpy because `jit` rounds logarithms differently from eager execution.
    steps = np.geomspace(1e-3, 1e-1, 4096)
    table = jnp.asarray(steps + np.log(-np.expm1(-steps)), jnp.float32)
    return table[((uniform(key, (size,), 1.0) + 1) * (len(steps) // 2)).astype(jnp.int32)]
