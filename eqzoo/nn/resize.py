"""Images and feature maps at another size."""

import jax
import numpy as np
from jaxtyping import Array, Float

from eqzoo.nn._precision import at_least_float32


def resize_bilinear(
    x: Float[Array, "height width channels"], size: tuple[int, ...]
) -> Float[Array, "new_height new_width channels"]:
    """torch's `interpolate(mode="bilinear")` to `size`: without antialiasing, corners of pixels aligned."""
    y = jax.image.resize(at_least_float32(x), (*size, x.shape[2]), "bilinear", antialias=False)
    return y.astype(x.dtype)


def resize_nearest(
    x: Float[Array, "height width channels"], size: tuple[int, ...]
) -> Float[Array, "new_height new_width channels"]:
    """torch's `interpolate(mode="nearest")` to `size`: each new pixel is one of the old."""
    rows, columns = (np.arange(new) * old // new for new, old in zip(size, x.shape, strict=False))
    return x[rows[:, None], columns]
