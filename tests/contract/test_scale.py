"""Every family on many devices and at great depth: the same numbers, and no larger a program."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from eqzoo._registry import family_of
from eqzoo.sharding import batch_sharding, make_mesh, shard, shard_batch
from eqzoo.tree import leaves_with_paths
from tests.contract.table import ROWS, assert_close, cast, jitted_train_step, matches, train_step


def test_sharded_is_unsharded(subject, exact_step):
    """Outputs, gradients and new batch statistics of a training step don't depend on where the numbers live."""
    mesh = make_mesh(data=2, fsdp=2, model=2)
    with jax.enable_x64(True):
        model, state, xs = cast(subject[1:4], jnp.float64)
        parts = shard(model, mesh), shard(state, mesh), shard_batch(xs, mesh)
        keys = jax.device_put(subject.keys, batch_sharding(mesh))
        leaves = [leaf for leaf in jax.tree.leaves(parts[0]) if eqx.is_array(leaf)]
        assert not all(leaf.is_fully_replicated for leaf in leaves)
        assert_close(jitted_train_step(*parts, keys), tuple(exact_step), 1e-9)


def test_every_matrix_has_a_sharding_rule(row):
    """Or is listed in the table as one that each device keeps a copy of."""
    model, _ = row.skeleton()
    rules = family_of(model).sharding
    for path, leaf in leaves_with_paths(model):
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.ndim - path.count("[*]") >= 2:
            covered = any(matches(pattern, path) for pattern, _ in rules)
            assert covered != matches(row.replicated, path), path


DEEP = [row for row in ROWS if hasattr(row.config, "depth") or hasattr(row.config, "depths")]


@pytest.mark.parametrize("row", DEEP, ids=lambda row: row.model.__name__)
def test_program_does_not_grow_with_depth(row):
    """The gradient at 48 layers has as many equations as at 6."""
    assert _gradient_equations(row, 48) == _gradient_equations(row, 6)


def _gradient_equations(row, depth: int) -> int:
    stages = getattr(row.config, "depths", None)
    change = {"depth": depth} if stages is None else {"depths": (depth,) * len(stages)}
    model, state = row.skeleton(dataclasses.replace(row.config, **change))
    xs, keys = jax.eval_shape(lambda: (row.batch(0), jax.random.split(jax.random.key(0), 8)))
    arrays, static = eqx.partition((model, state, xs, keys), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    gradient = lambda arrays: eqx.filter(train_step(*eqx.combine(arrays, static)), eqx.is_array)
    return _equations(jax.make_jaxpr(gradient)(arrays).jaxpr)


def _equations(jaxpr) -> int:
    return sum(1 + sum(map(_equations, jaxprs_in_params(equation.params))) for equation in jaxpr.eqns)
