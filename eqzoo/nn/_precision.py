import jax.numpy as jnp
from jaxtyping import Array, Float


def at_least_float32(x: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    """Half precision widened to float32; float64 stays as it is."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
