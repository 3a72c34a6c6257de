"""Weight initialisers. Everything eqzoo draws goes through here.

The numbers are the same eagerly, under `jit`, under `vmap` and sharded. That holds because each one is random bits
followed by operations whose rounding a compiler can't change.
"""

from collections.abc import Callable, Sequence
from math import prod, sqrt

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

Init = Callable[[PRNGKeyArray, Sequence[int]], Float[Array, "..."]]


def uniform(key: PRNGKeyArray, shape: Sequence[int], bound: float) -> Float[Array, "..."]:
    """Uniform in [-bound, bound)."""
    return bound * jax.random.uniform(key, shape, jnp.float32, -1.0, 1.0)


def normal(key: PRNGKeyArray, shape: Sequence[int], std: float) -> Float[Array, "..."]:
    # Not `std * jax.random.normal`: that ends in two factors, which `jit` would round as one.
    above_minus_one = np.nextafter(np.float32(-1), np.float32(0))
    return std * sqrt(2) * jax.lax.erf_inv(jax.random.uniform(key, shape, jnp.float32, above_minus_one, 1.0))


def trunc_normal(key: PRNGKeyArray, shape: Sequence[int], std: float) -> Float[Array, "..."]:
    """Normal, cut off at two standard deviations before scaling."""
    return std * jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)


def kaiming_fan_out(key: PRNGKeyArray, shape: Sequence[int]) -> Float[Array, "..."]:
    """He et al. (2015) for ReLU, by the number of outputs: what torchvision's and timm's convolutions start from."""
    return normal(key, shape, sqrt(2 / (shape[0] * prod(shape[2:]))))


def torch_default(key: PRNGKeyArray, shape: Sequence[int], fan_in: int) -> Float[Array, "..."]:
    """What torch's Linear and Conv2d start from, weight and bias alike: uniform in +-1/sqrt(fan_in)."""
    return uniform(key, shape, 1 / sqrt(fan_in))


def weight_and_bias(
    key: PRNGKeyArray, shape: Sequence[int], init: Init | None, *, use_bias: bool
) -> tuple[Float[Array, "..."], Float[Array, " out"] | None]:
    """A layer's start: torch's default, or `init` for the weight and zeros for the bias."""
    if init is not None:
        return init(key, shape), jnp.zeros(shape[0], jnp.float32) if use_bias else None
    key_weight, key_bias = jax.random.split(key)
    fan_in = prod(shape[1:])
    return torch_default(key_weight, shape, fan_in), torch_default(key_bias, shape[:1], fan_in) if use_bias else None
