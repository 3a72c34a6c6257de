"""`stack` and `unstack` undo each other; a stacked model is an ensemble, and a `Stack`'s block is its layers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqzoo import nn
from eqzoo.tree.ensemble import stack, unstack
from tests.contract.table import KINDS, assert_close, randomised

KEY = jax.random.key(0)
FAMILIES = pytest.mark.parametrize("row", KINDS, ids=lambda row: row.model.__name__)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if eqx.is_array(x) and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)
        else:
            assert x == y


@FAMILIES
def test_unstack_undoes_stack_also_under_jit(row):
    members = [randomised(row, seed)[0] for seed in range(2)]
    for together in (stack(members), eqx.filter_jit(stack)(members)):
        for leaf, before in zip(jax.tree.leaves(together), jax.tree.leaves(members[0]), strict=True):
            assert not eqx.is_array(before) or leaf.shape == (2, *before.shape)
        apart = unstack(together)
        assert len(apart) == 2
        for member, before in zip(apart, members, strict=True):
            assert_same(member, before)


def test_an_ensemble_is_its_members_one_by_one():
    members = [eqx.nn.MLP(3, 2, 4, 2, key=key) for key in jax.random.split(KEY, 5)]
    x = jnp.array([1.0, -2.0, 3.0])
    outputs = eqx.filter_vmap(lambda member, x: member(x), in_axes=(eqx.if_array(0), None))(stack(members), x)
    np.testing.assert_allclose(outputs, jnp.stack([member(x) for member in members]), rtol=1e-5, atol=1e-6)


def test_layers_of_a_stack_run_one_by_one_are_the_stack():
    (row,) = (row for row in KINDS if row.model.__name__ == "ViT")
    model, _ = randomised(row, seed=0)
    blocks = eqx.nn.inference_mode(model).blocks
    x = jax.random.normal(KEY, (5, row.config.dim))
    depths = jnp.arange(float(row.config.depth))
    y = x
    for layer, depth in zip(unstack(blocks.block), depths, strict=True):
        y = layer(y, depth)
    assert_close(y, blocks(x, each=depths), 1e-5)
    assert np.abs(y - x).max() > 0.1


def test_a_tree_of_any_kind_of_leaves():
    fixed = {"relu": jax.nn.relu, "rate": 0.5, "none": None}
    numbers = lambda seed: {"W": jnp.full(2, seed), "host": np.full(2, seed), "flag": jnp.array(seed > 0)}
    trees = [fixed | numbers(seed) | {"key": jax.random.key(seed)} for seed in range(3)]
    together = stack(trees)
    assert together["W"].shape == together["host"].shape == (3, 2)
    assert together["key"].shape == together["flag"].shape == (3,)
    assert (together["relu"], together["rate"], together["none"]) == (jax.nn.relu, 0.5, None)
    assert_same(unstack(together)[2], trees[2] | {"host": jnp.full(2, 2)})


def test_one_axis_of_a_stack_in_a_stack():
    block = lambda key: nn.Stack(lambda key: eqx.nn.Linear(2, 2, key=key), 3, key=key)
    outer = nn.Stack(block, 4, key=KEY)
    layers = unstack(outer.block)
    assert [layer.block.weight.shape for layer in layers] == [(3, 2, 2)] * 4
    np.testing.assert_array_equal(layers[2].block.weight, outer.block.block.weight[2])


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"W": jnp.ones(3), "rate": 0.5}, r"W: shape \(2,\) \| \(3,\)"),
        ({"W": jnp.ones(2), "rate": 0.25}, r"rate: 0.5 \| 0.25"),
        ({"W": jnp.ones(2)}, r"rate: only in a"),
        ({"W": jnp.ones(2), "rate": jnp.array(0.5)}, "rate"),
    ],
)  # fmt: skip
def test_trees_that_do_not_match_are_told_apart(second, message):
    with pytest.raises(ValueError, match=rf"^stack: (.|\n)*{message}"):
        stack([{"W": jnp.ones(2), "rate": 0.5}, second])


def test_models_of_other_settings_are_told_apart():
    with pytest.raises(ValueError, match=r"(?s)^stack: .*use_bias"):
        stack([eqx.nn.Linear(2, 2, key=KEY), eqx.nn.Linear(2, 2, use_bias=False, key=KEY)])


def test_what_cannot_be_stacked_or_taken_apart_is_a_sentence():
    with pytest.raises(ValueError, match=r"^stack: there are no trees"):
        stack([])
    with pytest.raises(ValueError, match=r"^unstack: the tree holds no arrays"):
        unstack({"rate": 0.5})
    with pytest.raises(ValueError, match=r"^unstack: .* a\.W has shape \(2, 3\) and b has shape \(4,\)"):
        unstack({"a": {"W": jnp.ones((2, 3))}, "b": jnp.ones(4)})
    with pytest.raises(ValueError, match=r"^unstack: .* b has shape \(\)"):
        unstack({"a": jnp.ones(2), "b": jnp.ones(())})
