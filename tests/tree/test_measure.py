"""Counts, bytes, norms and statistics: those of numpy, one a layer in stacks, for any tree and any float dtype."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import eqzoo
from eqzoo import nn
from eqzoo.tree.measure import SMALL, Stats, count, nbytes, norm, norms, stats
from eqzoo.tree.paths import leaves_with_paths
from tests.contract.table import KINDS, randomised

FAMILIES = pytest.mark.parametrize("row", KINDS, ids=lambda row: row.model.__name__)
ANYTHING = {
    "W": jnp.ones((3, 2)),
    "half": jnp.ones(4, jnp.bfloat16),
    "codes": np.ones(5, np.int8),
    "rate": 0.5,
    "none": None,
    "flag": True,
    "function": jax.nn.relu,
    "key": jax.random.key(0),
    "shape": jax.ShapeDtypeStruct((7, 1), jnp.float16),
}


def numbers(shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def l2(leaves):
    return math.sqrt(sum(np.sum(np.asarray(leaf, np.float64) ** 2) for leaf in leaves))


def test_count_and_bytes_are_of_numbers_only():
    assert count(ANYTHING) == 6 + 4 + 5 + 1 + 7
    assert nbytes(ANYTHING) == 6 * 4 + 4 * 2 + 5 * 1 + 1 * 4 + 7 * 2
    assert (count(None), nbytes([]), count(jnp.ones((2, 3)))) == (0, 0, 6)


def test_count_is_the_published_number_of_parameters():
    model, _ = eqx.filter_eval_shape(lambda: eqzoo.create("resnet18", key=jax.random.key(0)))
    assert count(model) == 11_689_512
    assert nbytes(model) == 4 * 11_689_512


@FAMILIES
def test_norm_is_that_of_all_floats_as_one_vector(row):
    model, state = randomised(row, seed=0)
    floats = [leaf for leaf in jax.tree.leaves((model, state)) if eqx.is_inexact_array(leaf)]
    expected = l2(floats)
    assert norm((model, state)) == pytest.approx(expected, rel=1e-6)
    assert eqx.filter_jit(norm)((model, state)) == pytest.approx(expected, rel=1e-6)


def test_norm_of_small_and_large_leaves_of_several_dtypes():
    large, small, half = numbers(SMALL + 1), [numbers((3, i), i) for i in range(200)], numbers(50, dtype=jnp.bfloat16)
    tree = {"large": large, "small": small, "half": half, "rate": 0.3, "steps": 10**6, "flag": True, "none": None}
    for function in (norm, jax.jit(norm)):
        result = function(tree)
        assert result == pytest.approx(l2([large, *small, half, 0.3]), rel=1e-6)
        assert result.dtype == jnp.float32
    assert norm([]) == 0


def test_norm_sums_half_precision_in_float32():
    ones = jnp.ones(10_010, jnp.bfloat16)  # in bfloat16, the norm would be 100
    for found in (norm(ones), norms(ones), stats(ones).norm):
        assert found == pytest.approx(math.sqrt(10_010), rel=1e-6)
        assert found.dtype == jnp.float32
    assert norm([1 + 2**-10, ones[:1]]) == pytest.approx(math.hypot(1 + 2**-10, 1), rel=1e-6)
    assert stats(ones).mean.dtype == jnp.float32


def test_gradient_of_norm_is_the_direction():
    tree = {"W": jnp.asarray(numbers((3, 2))), "b": jnp.asarray(numbers(4, 1))}
    gradient = jax.grad(norm)(tree)
    for ours, leaf in zip(jax.tree.leaves(gradient), jax.tree.leaves(tree), strict=True):
        np.testing.assert_allclose(ours, leaf / l2(jax.tree.leaves(tree)), rtol=1e-5)


def test_ten_thousand_leaves_are_summed_in_bundles():
    tree = [np.ones((1 + i % 100, 1 + i // 100), np.float32) for i in range(10_000)]
    program = str(jax.make_jaxpr(norm)(tree))
    assert program.count("reduce_sum") < 200  # XLA would take minutes for 10,000


def test_large_leaves_are_not_copied():
    tree = [np.ones(SMALL + 1, np.float32)] * 3
    assert "concatenate" not in str(jax.make_jaxpr(norm)(tree))


def test_norm_of_a_sharded_tree():
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    tree = {"rows": numbers((16, 3)), "columns": numbers((3, 8), 1), "whole": numbers(5, 2), "large": numbers(2**15, 3)}
    specs = {"rows": P("data"), "columns": P(None, "data"), "whole": P(), "large": P("data")}
    sharded = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), tree, specs)
    assert norm(sharded) == pytest.approx(l2(jax.tree.leaves(tree)), rel=1e-6)


@FAMILIES
@pytest.mark.parametrize("transform", [lambda function: function, eqx.filter_jit], ids=["eager", "jit"])
def test_norms_and_statistics_are_one_a_layer_in_stacks(row, transform):
    model, _ = randomised(row, seed=1)
    ours, all_norms = transform(stats)(model), transform(norms)(model)
    measured = dict(leaves_with_paths(ours, is_leaf=lambda node: isinstance(node, Stats)))
    normed = dict(leaves_with_paths(all_norms))
    floats = {path: leaf for path, leaf in leaves_with_paths(model) if eqx.is_inexact_array(leaf)}
    assert measured.keys() == normed.keys() == floats.keys()
    for path, leaf in floats.items():
        layers = path.count("[*]")
        x = np.asarray(leaf, np.float64)
        axes = tuple(range(layers, x.ndim))
        expected = Stats(
            x.min(axes), x.max(axes), x.mean(axes), x.std(axes), np.sqrt((x**2).sum(axes)), np.zeros(x.shape[:layers])
        )
        for name, value, wanted in zip(Stats._fields, measured[path], expected, strict=True):
            assert value.shape == x.shape[:layers], path
            np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-5, err_msg=f"{name} of {path}")
        np.testing.assert_allclose(normed[path], expected.norm, rtol=1e-5)


def test_stacks_in_stacks_have_an_axis_each():
    make = lambda key: nn.Stack(lambda key: nn.Linear(2, 3, key=key), 4, key=key)
    found = norms(nn.Stack(make, 5, key=jax.random.key(0)))
    assert found.block.block.weight.shape == (5, 4)
    assert found.block.block.bias.shape == (5, 4)


def test_a_python_number_in_a_stack_has_no_layers():
    class Scaled(eqx.Module):
        rate: float
        scale: jax.Array

    stack = nn.Stack(lambda key: Scaled(0.5, jax.random.normal(key, ())), 3, key=jax.random.key(0))
    found = stats(stack).block
    assert found.rate.mean.shape == ()
    assert found.scale.mean.shape == (3,)


def test_what_is_not_finite_is_counted_and_shows():
    found = stats([jnp.array([[1.0, jnp.nan], [jnp.inf, 2.0]]), jnp.array([1.0, -jnp.inf])])
    assert found[0].nonfinite == 2
    assert all(jnp.isnan(value) for value in found[0][:5])
    assert (found[1].nonfinite, found[1].min, found[1].max) == (1, -jnp.inf, 1)


@pytest.mark.parametrize("shape", [(300, 70), (3, 300, 70)])
def test_a_nan_among_many_numbers_shows(shape):
    found = stats(jnp.ones(shape).at[..., 100, 3].set(jnp.nan))
    assert all(jnp.isnan(value) for value in found[:5])


def test_an_empty_leaf_has_no_smallest_number():
    found = stats({"empty": jnp.zeros((0, 3))})["empty"]
    assert (found.min, found.max, found.norm, found.nonfinite) == (jnp.inf, -jnp.inf, 0, 0)
    assert jnp.isnan(found.mean)
