"""A key gives one model, wherever and however it is made. Compiled as users compile, for that is what could differ."""

import equinox as eqx
import jax
import numpy as np
import pytest

from eqzoo.sharding import make_mesh, shardings
from eqzoo.tree import leaves_with_paths

pytestmark = pytest.mark.usefixtures("compile_as_users_do")


def test_initialisation_is_the_same_everywhere(row):
    """Eagerly, and under `jit` with each weight made where it belongs: bit for bit."""
    key, mesh = jax.random.key(8), make_mesh(data=2, fsdp=2, model=2)
    make = lambda key: eqx.filter(row.make(key), eqx.is_array)
    eager = make(key)
    sharded = jax.jit(make, out_shardings=tuple(shardings(part, mesh) for part in eager))(key)
    for (path, leaf), other in zip(leaves_with_paths(eager), jax.tree.leaves(sharded), strict=True):
        assert np.array_equal(leaf, other), path
