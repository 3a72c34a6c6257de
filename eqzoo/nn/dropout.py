"""Layers that need a key in training: dropout, and dropping a whole residual branch."""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo.nn._kept import KEPT


def split_key(key: PRNGKeyArray | None, number: int) -> tuple[PRNGKeyArray | None, ...]:
    """`jax.random.split` that hands a missing key on to the layers, which know whether they need one."""
    return (None,) * number if key is None else tuple(jax.random.split(key, number))


def _keep(layer: eqx.Module, rate: float, key: PRNGKeyArray | None) -> PRNGKeyArray:
    if key is None:
        raise ValueError(
            f"{type(layer).__name__}(rate={rate}) got no key in training mode: pass `key=` to the model, "
            f"or turn training off with `eqx.nn.inference_mode(model)`"
        )
    return key


def _check_rate(layer: eqx.Module, rate: float) -> None:
    if not 0 <= rate < 1:
        raise ValueError(f"{type(layer).__name__}: rate={rate} is not a probability below one; pass 0 <= rate < 1")


class Dropout(eqx.Module):
    """Zeroes each element with probability `rate` and scales the others up; the identity in inference mode."""

    rate: float = eqx.field(static=True)
    inference: bool

    def __init__(self, rate: float):
        _check_rate(self, rate)
        self.rate = rate
        self.inference = False

    def __call__(self, x: Float[Array, "*axes"], *, key: PRNGKeyArray | None = None) -> Float[Array, "*axes"]:
        if self.inference or self.rate == 0:
            return x
        keep = jax.random.bernoulli(_keep(self, self.rate, key), 1 - self.rate, x.shape)
        return jnp.where(keep, x / (1 - self.rate), jnp.zeros_like(x))


def block_depths(depths: Sequence[int], *, endpoint: bool = True) -> tuple[Float[Array, " depth"], ...]:
    """How deep each block of each stage lies: from 0 at the first to 1 at the last, or without `endpoint` after it."""
    every = np.linspace(0.0, 1.0, sum(depths), endpoint=endpoint, dtype=np.float32)
    return tuple(map(jnp.asarray, np.split(every, np.cumsum(depths)[:-1])))


class DropPath(eqx.Module):
    """Stochastic depth (Huang et al., 2016): drops a residual branch of one example as a whole.

    `depth` scales the rate, from 0 at the first block to 1 at the last; a stack computes it from the layer's index.
    """

    rate: float = eqx.field(static=True)
    inference: bool

    def __init__(self, rate: float):
        _check_rate(self, rate)
        self.rate = rate
        self.inference = False

    def __call__(
        self, x: Float[Array, "*axes"], depth: Float[Array, ""] | float = 1.0, *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "*axes"]:
        if self.inference or self.rate == 0:
            return x
        keep = jnp.asarray(1 - self.rate * depth, jnp.float32)
        scale = jnp.where(jax.random.bernoulli(_keep(self, self.rate, key), keep), 1 / keep, 0.0)
        return x * checkpoint_name(scale, KEPT).astype(x.dtype)
