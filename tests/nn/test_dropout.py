"""Dropout and DropPath: how often, how much, and what happens without a key."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqzoo import nn


def test_dropout_zeroes_at_its_rate_and_scales_the_rest_up():
    x = jnp.full((200, 500), 3.0)
    y = np.asarray(nn.Dropout(0.3)(x, key=jax.random.key(0)))
    kept = y != 0
    assert abs(kept.mean() - 0.7) < 0.01
    np.testing.assert_allclose(y[kept], 3 / 0.7, rtol=1e-6)
    # Each element on its own: rows and columns differ in how many they keep.
    assert np.std(kept.mean(axis=0)) > 0.02
    assert np.std(kept.mean(axis=1)) > 0.01


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.DropPath(0.5)])
def test_keeps_the_dtype_and_backpropagates_only_through_what_it_kept(layer):
    x = jnp.ones((4, 8), jnp.bfloat16)
    y, gradient = jax.value_and_grad(lambda x: jnp.sum(layer(x, key=jax.random.key(1)).astype(jnp.float32)))(x)
    assert layer(x, key=jax.random.key(1)).dtype == gradient.dtype == jnp.bfloat16
    assert jnp.sum(gradient.astype(jnp.float32)) == y
    assert set(np.unique(gradient.astype(jnp.float32))) <= {0.0, 2.0}


def test_drop_path_drops_examples_as_a_whole():
    x = jnp.ones((4000, 3, 2))
    keys = jax.random.split(jax.random.key(0), 4000)
    y = np.asarray(jax.vmap(lambda x, key: nn.DropPath(0.4)(x, key=key))(x, keys)).reshape(4000, -1)
    assert (y == y[:, :1]).all()
    kept = y[:, 0] != 0
    assert abs(kept.mean() - 0.6) < 0.03
    np.testing.assert_allclose(y[kept], 1 / 0.6, rtol=1e-6)


@pytest.mark.parametrize("depth", [0.0, 0.25, 1.0])
def test_drop_path_scales_its_rate_with_depth(depth):
    keys = jax.random.split(jax.random.key(0), 4000)
    drop = jax.jit(jax.vmap(lambda key, depth: nn.DropPath(0.4)(jnp.ones(2), depth, key=key), in_axes=(0, None)))
    y = np.asarray(drop(keys, depth))[:, 0]
    kept = y != 0
    assert abs(kept.mean() - (1 - 0.4 * depth)) < (0.03 if depth else 1e-9)
    np.testing.assert_allclose(y[kept], 1 / (1 - 0.4 * depth), rtol=1e-6)


@pytest.mark.parametrize("layer", [nn.Dropout(0.3), nn.DropPath(0.3)])
def test_without_a_key_it_raises_in_training_and_is_the_identity_in_inference_mode(layer):
    x = jnp.arange(6.0)
    name = type(layer).__name__
    with pytest.raises(
        ValueError, match=rf"{name}\(rate=0.3\) got no key in training mode: pass `key=` to the model, or"
    ):
        layer(x)
    inference = eqx.nn.inference_mode(layer)
    np.testing.assert_array_equal(inference(x), x)
    np.testing.assert_array_equal(inference(x, key=jax.random.key(0)), x)


@pytest.mark.parametrize("make", [nn.Dropout, nn.DropPath])
def test_rate_zero_needs_no_key(make):
    np.testing.assert_array_equal(make(0.0)(jnp.arange(6.0)), jnp.arange(6.0))


@pytest.mark.parametrize("make", [nn.Dropout, nn.DropPath])
@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5])
def test_a_rate_that_is_no_probability_below_one_is_refused(make, rate):
    with pytest.raises(
        ValueError, match=rf"{make.__name__}: rate={rate} is not a probability below one; pass 0 <= rate"
    ):
        make(rate)


def test_split_key_hands_a_missing_key_on():
    assert nn.split_key(None, 3) == (None, None, None)
    keys = nn.split_key(jax.random.key(0), 3)
    assert len({tuple(np.asarray(jax.random.key_data(key))) for key in keys}) == 3


def test_block_depths_rise_evenly_over_all_stages():
    first, second = nn.block_depths((2, 3))
    np.testing.assert_allclose(first, [0, 0.25])
    np.testing.assert_allclose(second, [0.5, 0.75, 1])
    assert [part.tolist() for part in nn.block_depths((1,))] == [[0.0]]
