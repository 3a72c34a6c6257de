"""From one normalisation of images to another."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

_MEAN, _STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def renormalise(x: Float[Array, "height width channels"]) -> Float[Array, "height width channels"]:
    """An image normalised by ImageNet's mean and deviation as one from -1 to 1, which is what Google's networks saw.

    Other channels than RGB take its constants in turn.
    """
    scale, shift = (jnp.asarray(np.resize(each, x.shape[-1]), x.dtype) for each in (_STD / 0.5, (_MEAN - 0.5) / 0.5))
    return x * scale + shift
