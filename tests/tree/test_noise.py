"""Noise: of the asked size, independent from leaf to leaf and layer to layer, and each leaf's own whatever else is
in the tree."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqzoo
from eqzoo import nn
from eqzoo.tree.noise import add_noise, key_for
from eqzoo.tree.paths import leaves_with_paths
from tests.contract.table import KINDS, randomised

KEY = jax.random.key(0)
SIZE = 2000
FAMILIES = pytest.mark.parametrize("row", KINDS, ids=lambda row: row.model.__name__)


class Block(eqx.Module):
    weight: jax.Array
    inner: nn.Stack[eqx.nn.Linear] | None

    def __init__(self, size, *, inner=0, key):
        self.weight = jnp.zeros(size)
        linear = lambda key: eqx.nn.Linear(3, 2, use_bias=False, key=key)
        self.inner = nn.Stack(linear, inner, key=key) if inner else None


def stack(depth, size=SIZE, inner=0):
    return nn.Stack(lambda key: Block(size, inner=inner, key=key), depth, key=KEY)


def zeros(tree):
    return jax.tree.map(lambda leaf: jnp.zeros_like(leaf) if eqx.is_inexact_array(leaf) else leaf, tree)


def arrays(tree):
    return jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))


def assert_equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_keys_differ_by_path_and_by_key_and_use_64_bits_of_its_digest():
    data = lambda key: tuple(np.asarray(jax.random.key_data(key)).tolist())
    keys = {data(key_for(key, path)) for key in jax.random.split(KEY, 2) for path in ("a", "b", "a.b", "a[*]")}
    assert len(keys) == 8
    digest = (0xCA978112, 0xCA1BBDCA)  # SHA-256 of "a" begins with these
    expected = jax.random.fold_in(jax.random.fold_in(KEY, np.uint32(digest[0])), np.uint32(digest[1]))
    assert data(key_for(KEY, "a")) == data(expected)
    assert data(jax.jit(key_for, static_argnums=1)(KEY, "a")) == data(expected)


def test_leaves_of_one_shape_and_layers_of_a_stack_are_uncorrelated():
    tree = {"same": [jnp.zeros(SIZE)] * 30, "other": [jnp.zeros((SIZE // 4, 5)) for _ in range(9)], "stack": stack(12)}
    rows = [leaf.reshape(-1, leaf.shape[-1]) if leaf.shape[1:] == (SIZE,) else leaf.reshape(1, -1)[:, :SIZE]
            for leaf in arrays(add_noise(tree, KEY, 1.0))]  # fmt: skip
    correlation = np.corrcoef(np.concatenate(rows))
    assert len(correlation) == 30 + 9 + 12
    assert np.abs(correlation - np.eye(len(correlation))).max() < 4 / np.sqrt(SIZE)


def test_layers_of_a_stack_in_a_stack_are_uncorrelated():
    class Outer(eqx.Module):
        inner: nn.Stack[Block]

    outer = nn.Stack(lambda key: Outer(stack(3)), 4, key=KEY)
    (noise,) = arrays(add_noise(outer, KEY, 1.0))
    assert noise.shape == (4, 3, SIZE)
    correlation = np.corrcoef(noise.reshape(12, SIZE))
    assert np.abs(correlation - np.eye(12)).max() < 4 / np.sqrt(SIZE)


@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_noise_is_gaussian_of_the_asked_standard_deviation(scale):
    noise = np.concatenate([leaf.ravel() for leaf in add_noise([jnp.zeros((100, 90)), jnp.zeros(7000)], KEY, scale)])
    error = 4 / np.sqrt(noise.size)
    assert abs(noise.mean() / scale) < error
    assert abs(noise.std() / scale - 1) < error
    assert abs(np.mean(noise**4) / (3 * scale**4) - 1) < 5 * error
    assert abs(np.mean(np.abs(noise) < scale) - 0.6827) < error


def test_it_is_added_to_what_is_there():
    tree = {"W": jnp.full(5, 2.0)}
    np.testing.assert_allclose(add_noise(tree, KEY, 0.1)["W"] - 2, add_noise(zeros(tree), KEY, 0.1)["W"], atol=1e-6)


def test_another_key_gives_other_noise_and_the_same_key_the_same():
    tree = {"W": jnp.zeros(SIZE)}
    first, again, other = (add_noise(tree, key, 1.0)["W"] for key in (KEY, KEY, jax.random.key(1)))
    np.testing.assert_array_equal(first, again)
    assert abs(np.corrcoef(first, other)[0, 1]) < 4 / np.sqrt(SIZE)


def test_noise_is_the_numbers_of_the_leafs_own_key():
    tree = {"W": jnp.zeros((3, 4)), "blocks": stack(2, size=8)}
    noisy = add_noise(tree, KEY, 1.0)
    drawn = jax.random.normal(key_for(KEY, "W"), (16,))[:12].reshape(3, 4)
    np.testing.assert_allclose(noisy["W"], drawn, rtol=1e-6)
    for layer in range(2):
        key = jax.random.fold_in(key_for(KEY, "blocks[*].weight"), layer)
        np.testing.assert_allclose(noisy["blocks"].block.weight[layer], jax.random.normal(key, (8,)), rtol=1e-6)


@pytest.mark.parametrize(
    ("small", "large", "old"),
    [
        ([jnp.zeros(5)] * 3, [jnp.zeros(5)] * 20, lambda tree: tree[:3]),
        ({"b": jnp.zeros(5)}, {"a": jnp.zeros(5), "b": jnp.zeros(5), "c": jnp.zeros(7)}, lambda tree: tree["b"]),
        (zeros(stack(3, 5, inner=2)), zeros(stack(7, 5, inner=2)), lambda tree: [x[:3] for x in arrays(tree)]),
        (zeros(stack(2, 5, inner=2)), zeros(stack(2, 5, inner=4)), lambda tree: tree.block.inner.block.weight[:, :2]),
    ],
    ids=["list", "dict", "deeper stack", "deeper inner stack"],
)  # fmt: skip
def test_old_leaves_keep_their_noise_when_layers_are_added(small, large, old):
    assert_equal(old(add_noise(small, KEY, 1.0)), old(add_noise(large, KEY, 1.0)))


def test_noise_does_not_depend_on_which_leaves_are_drawn_together(monkeypatch):
    tree = [jnp.zeros(size) for size in (5, 6, 7, 8, 9, 5000, 5000)] + [zeros(stack(3, 8))]
    together = add_noise(tree, KEY, 1.0)
    monkeypatch.setattr("eqzoo.tree.noise._BATCH", 16)
    assert_equal(add_noise([*tree, jnp.zeros(8)], KEY, 1.0)[:-1], together)
    alone = add_noise(tree, KEY, 1.0, where=lambda path, _: path in ("6", "7[*].weight"))
    assert_equal(alone[6:], together[6:])


@FAMILIES
def test_jit_changes_nothing_but_the_rounding_of_the_sum(row):
    model, _ = randomised(row, seed=0)
    jitted = eqx.filter_jit(add_noise)
    one, tenth = jnp.float32(1), jnp.float32(0.1)
    assert_equal(arrays(add_noise(zeros(model), KEY, one)), arrays(jitted(zeros(model), KEY, one)))
    noisy, noisy_jit = add_noise(model, KEY, tenth), jitted(model, KEY, tenth)
    for leaf, other, before in zip(arrays(noisy), arrays(noisy_jit), arrays(model), strict=True):
        np.testing.assert_allclose(leaf, other, atol=3e-7 * np.abs(before).max())
        assert (leaf != before).any()
    assert jax.tree.structure(noisy) == jax.tree.structure(model)


def test_half_precision_is_rounded_once():
    before = 1 + 0.1 * jax.random.normal(KEY, (500,))
    half = add_noise([before.astype(jnp.bfloat16)], KEY, 0.01)[0]
    full = add_noise([before.astype(jnp.bfloat16).astype(jnp.float32)], KEY, 0.01)[0]
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half, full.astype(jnp.bfloat16))


def test_only_the_floats_that_where_selects_get_noise():
    tree = {"W": jnp.zeros(3), "b": jnp.zeros(3), "steps": jnp.arange(3)}
    noisy = add_noise(tree, KEY, 1.0, where=("W", "steps"))
    assert noisy["b"] is tree["b"]
    assert noisy["steps"] is tree["steps"]
    np.testing.assert_array_equal(noisy["W"], add_noise(tree, KEY, 1.0)["W"])
    with pytest.raises(ValueError, match="nothing_here"):
        add_noise(tree, KEY, 1.0, where="nothing_here")


def test_what_is_no_float_stays():
    tree = {"count": jnp.arange(3), "flag": True, "flags": jnp.ones(2, bool), "key": KEY, "relu": jax.nn.relu, "n": 3,
            "none": None, "empty": jnp.zeros((0, 2)), "rate": 0.5}  # fmt: skip
    noisy = add_noise(tree, KEY, 1.0)
    assert all(noisy[name] is tree[name] for name in tree.keys() - {"empty", "rate"})
    assert noisy["empty"].shape == (0, 2)
    assert noisy["rate"] != 0.5
    assert noisy["rate"].dtype == jnp.float32


def test_leaves_whose_paths_read_alike_keep_their_values():
    noisy = add_noise({"a.b": jnp.zeros(3), "a": {"b": jnp.full((2, 2), 100.0)}}, KEY, 1.0)
    assert noisy["a.b"].shape == (3,)
    assert (noisy["a"]["b"] > 90).all()


def test_filtered_gradients_with_holes():
    model, _ = eqzoo.create("mlp", num_classes=3, image_size=2, in_channels=3, hidden=(4,), key=KEY)
    grads = eqx.filter_grad(lambda model: model(jnp.ones((2, 2, 3))).sum())(eqx.nn.inference_mode(model))
    noisy = add_noise(grads, KEY, 1.0)
    assert jax.tree.structure(noisy) == jax.tree.structure(grads)
    assert [path for path, _ in leaves_with_paths(noisy)] == [path for path, _ in leaves_with_paths(grads)]
    assert all((a != b).all() for a, b in zip(arrays(noisy), arrays(grads), strict=True))


def test_under_vmap_each_key_and_each_scale_is_its_own():
    keys, scales = jax.random.split(KEY, 3), jnp.array([1.0, 2.0, 4.0])
    tree = [jnp.zeros(4), jnp.zeros(4), stack(2, 4)]
    mapped = eqx.filter_vmap(add_noise, in_axes=(None, 0, 0))(tree, keys, scales)
    for index in range(3):
        alone = add_noise(tree, keys[index], scales[index])
        for a, b in zip(arrays(mapped), arrays(alone), strict=True):
            np.testing.assert_allclose(a[index], b, rtol=1e-6)


def test_the_derivative_by_the_scale_is_the_noise_itself():
    noise = add_noise([jnp.zeros(6)], KEY, 1.0)[0]
    derivative = jax.jacfwd(lambda scale: add_noise([jnp.ones(6)], KEY, scale)[0])(0.3)
    np.testing.assert_allclose(derivative, noise, rtol=1e-6)


def test_a_thousand_leaves_compile_to_as_many_small_sums():
    tree = [{"W": jnp.zeros((8, 8)), "b": jnp.zeros(8)} for _ in range(500)]
    text = jax.jit(lambda tree: add_noise(tree, KEY, 1.0)).lower(tree).as_text()
    assert text.count("stablehlo.while") < 30  # a loop that draws, for each shape and not for each leaf


def test_empty_leaves_stay_empty():
    tree = {"a": jnp.ones((3, 0)), "b": jnp.ones((3, 0)), "c": jnp.ones(0), "d": jnp.ones(2)}
    noisy = add_noise(tree, KEY, 1.0)
    assert [leaf.shape for leaf in jax.tree.leaves(noisy)] == [(3, 0), (3, 0), (0,), (2,)]
