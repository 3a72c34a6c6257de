"""Arithmetic on trees: the formulas, optax's where it has them, and what is no float taken as it is."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eqzoo import nn
from eqzoo.tree.arithmetic import cast, clip_by_global_norm, clip_by_leaf_norm, ema, lerp, mean, zeros_like
from eqzoo.tree.measure import norm
from tests.contract.table import KINDS, randomised

FAMILIES = pytest.mark.parametrize("row", KINDS, ids=lambda row: row.model.__name__)


def anything(seed=0):
    """A tree of everything that a tree may hold."""
    draw = np.random.default_rng(seed).standard_normal
    return {
        "W": jnp.asarray(draw((3, 2)), jnp.float32),
        "half": jnp.asarray(draw(4), jnp.bfloat16),
        "host": draw(3).astype(np.float32),
        "rate": 0.5 + seed,
        "count": jnp.asarray(seed),
        "steps": 7 + seed,
        "flag": bool(seed),
        "flags": jnp.array([bool(seed), True]),
        "key": jax.random.key(seed),
        "function": jax.nn.relu,
        "none": None,
    }


FLOATS = ("W", "half", "host", "rate")
OTHERS = ("count", "steps", "flag", "flags", "key", "function", "none")


def stack(depth, seed=0):
    layers = nn.Stack(lambda key: eqx.nn.Linear(3, 2, key=key), depth, key=jax.random.key(seed))
    return eqx.tree_at(lambda stack: stack.block.weight, layers, layers.block.weight * jnp.arange(depth)[:, None, None])


def assert_others_are(result, expected):
    for name in OTHERS:
        assert result[name] is expected[name]


def assert_dtypes_kept(result, before):
    for name in FLOATS:
        assert jnp.result_type(result[name]) == jnp.result_type(before[name])


def test_zeros_take_the_place_of_numbers_only():
    tree = anything(1)
    zeros = zeros_like(tree)
    for name in ("W", "half", "host", "rate", "count", "steps"):
        assert np.shape(zeros[name]) == np.shape(tree[name])
        assert jnp.result_type(zeros[name]) == jnp.result_type(tree[name])
        assert not np.any(zeros[name])
    for name in ("flag", "flags", "key", "function", "none"):
        assert zeros[name] is tree[name]


def test_cast_turns_floats_only():
    tree = anything() | {"complex": jnp.ones(2, jnp.complex64)}
    result = cast(tree, jnp.bfloat16)
    for name in FLOATS:
        assert result[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(result[name], jnp.asarray(tree[name]).astype(jnp.bfloat16))
    assert_others_are(result, tree)
    assert result["complex"] is tree["complex"]


@pytest.mark.parametrize("keep", ["norm", nn.LayerNorm, lambda path, leaf: path.startswith("norm")])
def test_cast_keeps_exceptions_as_they_are(keep):
    tree = {"head": nn.Linear(3, 2, key=jax.random.key(0)), "norm": nn.LayerNorm(3)}
    result = cast(tree, jnp.float16, keep=keep)
    assert result["norm"].weight is tree["norm"].weight
    assert result["head"].weight.dtype == result["head"].bias.dtype == jnp.float16
    with pytest.raises(ValueError, match="nrom"):
        cast(tree, jnp.float16, keep="nrom")


def test_cast_takes_shapes_and_works_under_jit():
    skeleton = jax.eval_shape(lambda: {"W": jnp.ones((3, 2)), "steps": jnp.arange(3)})
    half = cast(skeleton, jnp.bfloat16)
    assert half["W"] == jax.ShapeDtypeStruct((3, 2), jnp.bfloat16)
    assert half["steps"] is skeleton["steps"]
    assert jax.jit(lambda tree: cast(tree, jnp.float16))({"W": jnp.ones(2)})["W"].dtype == jnp.float16


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e3, np.inf])
@FAMILIES
def test_clip_by_global_norm_is_optaxs(row, max_norm):
    model, _ = randomised(row, seed=0)
    floats = eqx.filter(model, eqx.is_inexact_array)
    expected, _ = optax.clip_by_global_norm(max_norm).update(floats, optax.EmptyState())
    result = eqx.filter_jit(clip_by_global_norm)(model, max_norm)
    clipped = eqx.filter(result, eqx.is_inexact_array)
    for a, b, before in zip(*map(jax.tree.leaves, (clipped, expected, floats)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
        if norm(model) < max_norm:
            np.testing.assert_array_equal(a, before)
    assert norm(result) == pytest.approx(min(float(norm(model)), max_norm), rel=1e-5)
    assert jax.tree.structure(result) == jax.tree.structure(model)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_clip_by_global_norm_treats_what_is_not_finite_as_optax(bad):
    tree = {"W": jnp.array([1.0, bad]), "b": jnp.array([2.0])}
    expected, _ = optax.clip_by_global_norm(1.0).update(tree, optax.EmptyState())
    result = clip_by_global_norm(tree, 1.0)
    for name in tree:
        np.testing.assert_array_equal(result[name], expected[name])
    assert np.isnan(result["W"][1])


def test_clipped_leaves_have_the_norm_and_the_others_are_the_same():
    tree = anything() | {"small": jnp.array([0.01, 0.02]), "zero": jnp.zeros(3)}
    result = clip_by_leaf_norm(tree, 0.25)
    for name in FLOATS:
        before, after = np.asarray(tree[name], np.float64), np.asarray(result[name], np.float64)
        tolerance = 1e-2 if name == "half" else 1e-6
        assert np.linalg.norm(after) == pytest.approx(0.25, rel=tolerance)
        np.testing.assert_allclose(after, before * 0.25 / np.linalg.norm(before), rtol=tolerance)
    np.testing.assert_array_equal(result["small"], tree["small"])
    np.testing.assert_array_equal(result["zero"], tree["zero"])
    assert_others_are(result, tree)
    assert_dtypes_kept(result, tree)


def test_each_layer_of_a_stack_is_clipped_by_itself():
    layers = stack(4)
    result = eqx.filter_jit(clip_by_leaf_norm)(layers, 1.5).block
    before = np.linalg.norm(layers.block.weight.reshape(4, -1), axis=1)
    assert before.min() < 1.5 < before.max()
    np.testing.assert_allclose(np.linalg.norm(result.weight.reshape(4, -1), axis=1), np.minimum(before, 1.5), rtol=1e-6)
    assert (np.linalg.norm(result.bias, axis=1) <= 1.5).all()


def test_half_precision_norms_do_not_overflow():
    (clipped,) = clip_by_global_norm([jnp.full(4, 1e4, jnp.float16)], 1.0)
    np.testing.assert_allclose(clipped, 0.5, rtol=1e-3)
    (clipped,) = clip_by_leaf_norm([jnp.full(4, 1e4, jnp.float16)], 1.0)
    np.testing.assert_allclose(clipped, 0.5, rtol=1e-3)


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 1.5])
def test_lerp_is_between_and_takes_the_rest_from_the_second(t):
    a, b = anything(0), anything(1)
    result = lerp(a, b, t)
    for name in FLOATS:
        x, y = (np.asarray(tree[name], np.float64) for tree in (a, b))
        tolerance = 1e-2 if name == "half" else 1e-6
        np.testing.assert_allclose(
            np.asarray(result[name], np.float64), x + t * (y - x), rtol=tolerance, atol=tolerance
        )
    assert_others_are(result, b)
    assert_dtypes_kept(result, a)


def test_lerp_is_exact_at_both_ends_also_under_jit():
    a, b = ({"W": 10.0**seed * jax.random.normal(jax.random.key(seed), (500,))} for seed in (0, 7))
    for mix in (lerp, jax.jit(lerp)):
        np.testing.assert_array_equal(mix(a, b, 0.0)["W"], a["W"])
        np.testing.assert_array_equal(mix(a, b, 1.0)["W"], b["W"])


def test_ema_is_optaxs_incremental_update():
    average, new = ({"W": jax.random.normal(jax.random.key(seed), (3, 2)), "b": jnp.ones(2)} for seed in range(2))
    expected = optax.incremental_update(new, average, step_size=1 - 0.9)
    for name, leaf in jax.jit(ema)(average, new, 0.9).items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-6)


def test_ema_of_any_tree_takes_the_rest_from_the_new_one():
    average, new = anything(0), anything(1)
    result = ema(average, new, 0.75)
    for name in FLOATS:
        x, y = (np.asarray(tree[name], np.float64) for tree in (average, new))
        tolerance = 1e-2 if name == "half" else 1e-6
        np.testing.assert_allclose(
            np.asarray(result[name], np.float64), 0.75 * x + 0.25 * y, rtol=tolerance, atol=tolerance
        )
    assert_others_are(result, new)
    assert_dtypes_kept(result, average)


def test_a_float32_average_of_a_half_precision_model_keeps_small_steps():
    average, new = {"W": jnp.ones(2)}, {"W": jnp.full(2, 2, jnp.bfloat16)}
    for _ in range(10):
        average = ema(average, new, 0.999)
    assert average["W"].dtype == jnp.float32
    np.testing.assert_allclose(average["W"], 2 - 0.999**10, rtol=1e-6)


def test_mean_is_computed_in_float32_and_keeps_dtypes():
    trees = [anything(seed) for seed in range(3)]
    result = mean(trees)
    for name in FLOATS:
        expected = np.mean([np.asarray(tree[name], np.float64) for tree in trees], axis=0)
        tolerance = 1e-2 if name == "half" else 1e-6
        np.testing.assert_allclose(np.asarray(result[name], np.float64), expected, rtol=tolerance, atol=1e-6)
    assert_others_are(result, trees[0])
    assert_dtypes_kept(result, trees[0])
    many = mean([{"W": jnp.full(1, value, jnp.float16)} for value in [60000.0] * 3 + [0.0]])
    np.testing.assert_allclose(many["W"], 45000, rtol=1e-3)


@FAMILIES
def test_a_soup_of_one_model_is_that_model(row):
    model, _ = randomised(row, seed=0)
    soup = eqx.filter_jit(lambda model: mean([model, model, model, model]))(model)
    for a, b in zip(
        jax.tree.leaves(eqx.filter(soup, eqx.is_array)), jax.tree.leaves(eqx.filter(model, eqx.is_array)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert jax.tree.structure(soup) == jax.tree.structure(model)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("lerp", lambda a, b: lerp(a, b, 0.5)),
        ("ema", lambda a, b: ema(a, b, 0.5)),
        ("mean", lambda a, b: mean([a, a, b])),
    ],
)
def test_trees_that_do_not_match_are_told_apart_by_path(name, call):
    with pytest.raises(ValueError, match=rf"^{name}: (.|\n)*head\.W: shape \(2, 3\) \| \(4, 3\)"):
        call({"head": {"W": jnp.ones((2, 3))}}, {"head": {"W": jnp.ones((4, 3))}})
    with pytest.raises(ValueError, match=rf"^{name}: (.|\n)*extra"):
        call({"W": jnp.ones(2)}, {"W": jnp.ones(2), "extra": jnp.ones(2)})


def test_the_mean_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no trees"):
        mean([])


def test_all_work_with_traced_numbers():
    tree = {"W": jnp.array([3.0, 4.0])}
    traced = jax.jit(
        lambda number: (
            clip_by_global_norm(tree, number),
            clip_by_leaf_norm(tree, number),
            lerp(tree, zeros_like(tree), number),
            ema(tree, zeros_like(tree), number),
        )
    )(0.5)
    for result, expected in zip(traced, ([0.3, 0.4], [0.3, 0.4], [1.5, 2.0], [1.5, 2.0]), strict=True):
        np.testing.assert_allclose(result["W"], expected, rtol=1e-6)
