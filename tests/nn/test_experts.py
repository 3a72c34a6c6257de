"""Experts against a sum over tokens and choices, one by one."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqzoo import nn, tree

KEY = jax.random.key(0)


@eqx.filter_jit
def make(top_k: int, normalised: bool) -> nn.Experts:
    init = lambda key, shape: jax.random.normal(key, shape)
    return nn.Experts(6, 5, 4, top_k=top_k, normalised=normalised, activation=jax.nn.silu, init=init, key=KEY)


def plainly(layer: nn.Experts, x: jax.Array) -> np.ndarray:
    expert = lambda number: jax.tree.map(lambda leaf: leaf[number] if eqx.is_array(leaf) else leaf, layer.experts.block)
    result = np.zeros(x.shape)
    for token, row in enumerate(x):
        weights = np.asarray(jax.nn.softmax(layer.router(row)), np.float64)
        chosen = np.argsort(-weights)[: layer.top_k]
        total = weights[chosen].sum() if layer.normalised else 1.0
        result[token] = sum(weights[number] / total * np.asarray(expert(number)(row)) for number in chosen)
    return result


call = eqx.filter_jit(lambda layer, x: layer(x))


@pytest.mark.parametrize(("top_k", "normalised"), [(1, False), (2, True), (2, False), (4, True)])
def test_each_token_is_the_weighted_sum_of_its_experts(top_k, normalised):
    layer, x = make(top_k, normalised), jax.random.normal(jax.random.key(1), (7, 6))
    y, logits = call(layer, x)
    np.testing.assert_allclose(y, plainly(layer, x), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(logits, x @ layer.router.weight.T, rtol=1e-5, atol=1e-5)
    alone = jnp.concatenate([call(layer, row[None])[0] for row in x])
    np.testing.assert_allclose(alone, y, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jax.vmap(layer)(x[:, None])[0][:, 0], alone, rtol=1e-5, atol=1e-5)


def test_all_tokens_may_choose_one_expert():
    """None is dropped."""
    layer = make(1, False)
    layer = eqx.tree_at(lambda layer: layer.router.weight, layer, jnp.zeros((4, 6)).at[2].set(1.0))
    x = jnp.abs(jax.random.normal(jax.random.key(1), (9, 6)))
    np.testing.assert_allclose(call(layer, x)[0], plainly(layer, x), rtol=1e-4, atol=1e-4)


def test_gradients_of_one_token_and_of_several_agree():
    layer, x = make(2, True), jax.random.normal(jax.random.key(1), (5, 6))
    total = lambda layer, xs: sum(jnp.sum(layer(x)[0] ** 2) for x in xs)
    together, alone = (eqx.filter_jit(eqx.filter_grad(total))(layer, xs) for xs in ([x], [*x[:, None]]))
    for ours, theirs in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        assert np.abs(theirs).max() > 0
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)


def test_one_token_reads_only_the_experts_it_chose():
    """Whatever the others hold, such as no numbers."""
    layer, x = make(2, True), jax.random.normal(jax.random.key(1), (1, 6))
    expected, logits = call(layer, x)
    chosen = np.argsort(-np.asarray(logits[0]))[:2]
    spoil = lambda leaf: jnp.full_like(leaf, jnp.nan).at[chosen].set(leaf[chosen]) if eqx.is_array(leaf) else leaf
    spoilt = eqx.tree_at(lambda layer: layer.experts.block, layer, jax.tree.map(spoil, layer.experts.block))
    np.testing.assert_array_equal(call(spoilt, x)[0], expected)


def test_half_precision_is_summed_in_single():
    layer = tree.cast(make(4, True), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (6, 6), jnp.bfloat16)
    y, _ = call(layer, x)
    assert y.dtype == jnp.bfloat16
    single = tree.cast(layer, jnp.float32)
    exact = np.asarray(call(single, x.astype(jnp.float32))[0])
    assert np.abs(np.asarray(y, np.float32) - exact).max() < 0.02 * np.abs(exact).max()


def test_a_balanced_choice_has_the_least_loss():
    even = 9.0 * jnp.eye(4)
    np.testing.assert_allclose(nn.load_balancing_loss(even, 1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(nn.load_balancing_loss(even[None, :, None], 1), 1.0, rtol=1e-5)
    assert nn.load_balancing_loss(9.0 * jnp.eye(4)[jnp.array([0, 0, 0, 1])], 1) > 2
    assert nn.load_balancing_loss(jnp.zeros((3, 4)), 2) == 2


@pytest.mark.parametrize("top_k", [0, 5])
def test_a_choice_of_none_or_of_more_than_there_are_is_refused(top_k):
    with pytest.raises(ValueError, match=f"top_k={top_k} of 4 experts can't be chosen; pass 1 <= top_k <= 4"):
        make(top_k, True)
