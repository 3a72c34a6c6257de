"""What losses and metrics share."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped


def check_same_shape(
    function: str, name: str, array: Shaped[Array, "..."], expected: tuple[int, ...], remedy: str
) -> None:
    """Raise a `ValueError` for another shape than expected: one that merely broadcasts would count wrongly."""
    if array.shape != expected:
        raise ValueError(f"{function}: {name} has shape {array.shape}, expected {expected}; {remedy}")


def label_logit(logits: Float[Array, "*batch classes"], labels: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
    """The logit of each label, NaN for a label that is no class."""
    index = jnp.where(labels < 0, logits.shape[-1], labels)  # a negative index would count from the end
    return jnp.take_along_axis(logits, index[..., None], axis=-1, mode="fill", fill_value=jnp.nan)[..., 0]


def weighted_sum(values: Array, weight: Float[Array, "..."], axis: int | None = None) -> Float[Array, "..."]:
    """The sum of `values` times `weight`; what has weight 0 counts nowhere, even if it is NaN."""
    return jnp.sum(jnp.where(weight == 0, 0, values * weight), axis=axis)
