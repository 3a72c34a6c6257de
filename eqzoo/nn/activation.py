"""Activations, and the names that configs give them.

The GELUs run in float32: below -2, half precision has no digits left of `1 + erf` and `1 + tanh`.
"""

from collections.abc import Callable
from math import sqrt

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from eqzoo.nn._precision import at_least_float32


def gelu(x: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    """The exact GELU. Through `erf`: `jax.nn.gelu(approximate=False)` goes through `erfc`, twice as slow on CPU."""
    wide = at_least_float32(x)
    return (0.5 * wide * (1 + jax.lax.erf(wide * sqrt(0.5)))).astype(x.dtype)


def gelu_tanh(x: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    """GELU by the tanh approximation; GPT-2's `gelu_new`."""
    return jax.nn.gelu(at_least_float32(x), approximate=True).astype(x.dtype)


def quick_gelu(x: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    """CLIP's GELU."""
    return x * jax.nn.sigmoid(1.702 * x)


def mish(x: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    return x * jnp.tanh(jax.nn.softplus(x))


class ReLU(eqx.Module):
    """ReLU as a layer, for networks that are one sequence."""

    def __call__(self, x: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
        return jax.nn.relu(x)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "leaky_relu": jax.nn.leaky_relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "silu": jax.nn.silu,
    "hard_swish": jax.nn.hard_swish,
    "mish": mish,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "hard_sigmoid": jax.nn.hard_sigmoid,
}


def activation(name: str) -> Callable[[Array], Array]:
    """The function a config names."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name!r} is unknown; choose one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
