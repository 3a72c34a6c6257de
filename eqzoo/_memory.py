"""Memory that numpy fills and JAX takes over."""

import math

import numpy as np

_ALIGNMENT = 64  # bytes; on a CPU, JAX takes memory so aligned as its own


def aligned(shape: tuple[int, ...], dtype: np.dtype | type[np.generic]) -> np.ndarray:
    """An array of yet undefined numbers, which `jax.device_put` doesn't copy on a CPU."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + nbytes].view(dtype).reshape(shape)
