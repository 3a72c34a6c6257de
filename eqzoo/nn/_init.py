"""Weight initialisers. Everything eqzoo draws goes through here.

The numbers are the same eagerly, under `jit`, under `vmap` and sharded. That holds because each one is random bits
followed by operations whose rounding a compiler can't change.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod, sqrt

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from eqzoo._memory import aligned

Init = Callable[[PRNGKeyArray, Sequence[int]], Float[Array, "..."]]
Sampler = Callable[[PRNGKeyArray], Float[Array, " chunk"]]

_CHUNK = 2**16


def uniform(key: PRNGKeyArray, shape: Sequence[int], bound: float) -> Float[Array, "..."]:
    """Uniform in [-bound, bound)."""
    return _scaled_draw(_uniform, key, shape, bound)


def normal(key: PRNGKeyArray, shape: Sequence[int], std: float) -> Float[Array, "..."]:
    # One factor behind `erf_inv`: `jit` would round two as one.
    return _scaled_draw(_normal_without_factor, key, shape, std * sqrt(2))


def _uniform(key: PRNGKeyArray) -> Float[Array, " chunk"]:
    return jax.random.uniform(key, (_CHUNK,), jnp.float32, -1.0, 1.0)


def _normal_without_factor(key: PRNGKeyArray) -> Float[Array, " chunk"]:
    above_minus_one = np.nextafter(np.float32(-1), np.float32(0))
    return jax.lax.erf_inv(jax.random.uniform(key, (_CHUNK,), jnp.float32, above_minus_one, 1.0))


@partial(jax.jit, static_argnums=0)
def _chunk(sampler: Sampler, key: PRNGKeyArray, index: Int[Array, ""] | int) -> Float[Array, " chunk"]:
    return sampler(jax.random.fold_in(key, index))


def _scaled_draw(sampler: Sampler, key: PRNGKeyArray, shape: Sequence[int], scale: float) -> Float[Array, "..."]:
    """`scale` times as many numbers as fill `shape`.

    They come in chunks of one size, so that a model drawn eagerly compiles one small program, not one for each shape.
    """
    size = prod(shape)
    indices = range(-(-size // _CHUNK))
    if is_traced(key):
        chunks = jax.vmap(lambda index: _chunk(sampler, key, index))(jnp.arange(len(indices)))
        return scale * chunks.reshape(-1)[:size].reshape(shape)
    numbers = aligned((size,), np.float32)
    for index in indices:
        part = numbers[index * _CHUNK : (index + 1) * _CHUNK]
        np.multiply(np.asarray(_chunk(sampler, key, index))[: part.size], np.float32(scale), out=part)
    return jax.device_put(numbers.reshape(shape))


def constant(size: int, value: float) -> Float[Array, " size"]:
    """`size` times the same number; eagerly, `jnp.full` would compile a program for each size."""
    return jax.device_put(np.broadcast_to(np.float32(value), size))  # which takes no memory until it is computed with


def is_traced(key: Shaped[Array, "..."]) -> bool:
    """Whether a transformation such as `jit` or `vmap` is looking at the key, so that it has no value yet."""
    return isinstance(key, Tracer)


def kaiming_fan_out(key: PRNGKeyArray, shape: Sequence[int]) -> Float[Array, "..."]:
    """He et al. (2015) for ReLU, by the number of outputs: what torchvision's and timm's convolutions start from."""
    return normal(key, shape, sqrt(2 / (shape[0] * prod(shape[2:]))))


def kaiming_fan_out_of_groups(groups: int) -> Init:
    """As `kaiming_fan_out`, by the number of outputs of one of a convolution's groups, as TensorFlow counts them."""
    return lambda key, shape: normal(key, shape, sqrt(2 * groups / (shape[0] * prod(shape[2:]))))


def kaiming_uniform(key: PRNGKeyArray, shape: Sequence[int]) -> Float[Array, "..."]:
    """He et al. (2015) for ReLU, uniform, by the number of inputs."""
    return uniform(key, shape, sqrt(6 / prod(shape[1:])))


def xavier(key: PRNGKeyArray, shape: Sequence[int]) -> Float[Array, "..."]:
    """Glorot and Bengio (2010): uniform, by the number of inputs and outputs together."""
    return uniform(key, shape, sqrt(6 / ((shape[0] + shape[1]) * prod(shape[2:]))))


def torch_default(key: PRNGKeyArray, shape: Sequence[int], fan_in: int) -> Float[Array, "..."]:
    """What torch's Linear and Conv2d start from, weight and bias alike: uniform in +-1/sqrt(fan_in)."""
    return uniform(key, shape, 1 / sqrt(fan_in))


def weight_and_bias(
    key: PRNGKeyArray, shape: Sequence[int], init: Init | None, *, use_bias: bool
) -> tuple[Float[Array, "..."], Float[Array, " out"] | None]:
    """A layer's start: torch's default, or `init` for the weight and zeros for the bias."""
    if init is not None:
        return init(key, shape), constant(shape[0], 0.0) if use_bias else None
    key_weight, key_bias = jax.random.split(key)
    fan_in = prod(shape[1:])
    return torch_default(key_weight, shape, fan_in), torch_default(key_bias, shape[:1], fan_in) if use_bias else None
