"""The cache of keys and values: what it holds, by arithmetic alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqzoo import nn

LAYERS, HEADS, DIM = 2, 3, 4


def rows(start: int, count: int) -> nn.KVCache:
    """Keys and values that tell their position."""
    positions = jnp.arange(start, start + count, dtype=jnp.float32)
    key = jnp.broadcast_to(positions[:, None], (LAYERS, HEADS, count, DIM))
    return nn.KVCache(key, key[..., :2] + 100)


def held(cache: nn.KVCache, end: int) -> dict[int, int]:
    """By place, the position that a cache of `end` tokens holds there, by its own account."""
    positions = np.asarray(cache.positions(jnp.int32(end)))
    return {place: position for place, position in enumerate(positions.tolist()) if position >= 0}


@pytest.mark.parametrize("places", [3, 5, 12])
@pytest.mark.parametrize("chunks", [[1] * 9, [4, 4, 1], [7, 2], [2, 0, 6, 1], [9]])
def test_each_place_holds_what_arithmetic_says(places, chunks):
    cache = nn.KVCache.empty(LAYERS, HEADS, places, DIM, dim_value=2, dtype=jnp.float32)
    write = jax.jit(lambda cache, new, position, count: cache.write(new, position, count))
    end = 0
    for count in chunks:
        size = max(count, 4) if count != 1 else 1
        cache = write(cache, rows(end, size), jnp.int32(end), jnp.int32(count))
        end += count
        found = held(cache, end)
        assert sorted(found.values()) == [*range(max(0, end - places), end)]
        for place in range(places):
            expected = found.get(place, 0)
            assert (cache.key[:, :, place] == expected).all()
            assert (cache.value[:, :, place] == (expected + 100 if place in found else 0)).all()


def test_a_token_that_does_not_count_is_not_written():
    cache = nn.KVCache.empty(LAYERS, HEADS, 5, DIM, dim_value=2, dtype=jnp.float32).write(rows(0, 3), jnp.int32(0))
    for size in (1, 2):
        same = cache.write(rows(7, size), jnp.int32(3), jnp.int32(0))
        np.testing.assert_array_equal(same.key, cache.key)
        np.testing.assert_array_equal(same.value, cache.value)


def test_examples_of_a_batch_have_positions_of_their_own():
    cache = nn.KVCache.empty(LAYERS, HEADS, 5, DIM, dim_value=2, dtype=jnp.float32)
    cache = jax.tree.map(lambda array: jnp.stack([array, array]), cache)
    new = jax.tree.map(lambda array: jnp.stack([array, array]), rows(9, 1))
    cache = jax.vmap(nn.KVCache.write)(cache, new, jnp.array([0, 8]))
    np.testing.assert_array_equal(cache.key[:, 0, 0, :, 0], [[9, 0, 0, 0, 0], [0, 0, 0, 9, 0]])


def test_a_cache_of_half_precision_takes_what_is_written():
    cache = nn.KVCache.empty(LAYERS, HEADS, 5, DIM, dim_value=2, dtype=jnp.bfloat16)
    for new in (rows(1, 1), rows(1, 3)):
        assert cache.write(new, jnp.int32(0)).key.dtype == jnp.bfloat16


def test_a_models_cache_counts_tokens_writes_keys_and_replaces_states():
    layers = {
        "attention": nn.KVCache.empty(LAYERS, HEADS, 5, DIM, dim_value=2, dtype=jnp.float32),
        "state": jnp.zeros(3),
    }
    cache = nn.Cache.empty(layers, 5)
    cache = cache.extend({"attention": rows(0, 4), "state": jnp.ones(3)}, 4, jnp.int32(2))
    assert (int(cache.position), cache.length) == (2, 5)
    np.testing.assert_array_equal(cache.layers["attention"].key[0, 0, :, 0], [0, 1, 0, 0, 0])
    np.testing.assert_array_equal(cache.layers["state"], jnp.ones(3))
    assert int(cache.extend({"attention": rows(0, 1), "state": jnp.ones(3)}, 1).position) == 3


def test_one_token_is_written_in_place():
    """The compiled program copies no cache that it was given for good."""
    cache = nn.KVCache.empty(12, 16, 4096, 64, dtype=jnp.float32)
    new = nn.KVCache(jnp.ones((12, 16, 1, 64)), jnp.ones((12, 16, 1, 64)))
    write = jax.jit(nn.KVCache.write, donate_argnums=0).lower(cache, new, jnp.int32(7)).compile()
    memory = write.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * cache.key.nbytes
    assert memory.temp_size_in_bytes < 0.01 * cache.key.nbytes
