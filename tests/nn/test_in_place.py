"""What reads matrices where they lie computes what a copy of them would, and makes none."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqzoo
from eqzoo import nn
from eqzoo.nn.in_place import InPlace
from eqzoo.tree import cast, quantize
from tests.parity import assert_close

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8, jnp.float64)


def drawn(shape: tuple[int, ...], dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    return (10 * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def exact(*arrays: jax.Array) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(array, np.float64) for array in arrays)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("inputs", [1, 7, 32, 100, 800, 1376, 2000], ids="{} columns".format)
@pytest.mark.parametrize("axes", [(), (3,), (3, 2)], ids="{} before".format)
def test_a_matrix_times_a_vector(axes, inputs, dtype):
    with jax.enable_x64(dtype == jnp.float64):
        matrices, x = drawn((*axes, 5, inputs), dtype), drawn((inputs,), seed=1)
        index = tuple(axis - 1 for axis in axes)
        y = jax.jit(lambda matrix, x: matrix.times(x))(InPlace.of(matrices).at(*map(jnp.int32, index)), x)
        assert y.dtype == jnp.promote_types(jnp.float32, dtype)
        matrix, x = exact(matrices[index], x)
        assert_close(y, matrix @ x, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("compiled", [False, True])
def test_copies_are_the_numbers_themselves(dtype, compiled):
    matrices, numbers = drawn((3, 5, 4), dtype), jnp.array([[4, 0, 4]])
    read = lambda array: (InPlace.of(array).at(2).read(), InPlace.of(array).at(2).rows(numbers))
    whole, rows = (jax.jit(read) if compiled else read)(matrices)
    assert whole.dtype == rows.dtype == dtype
    np.testing.assert_array_equal(whole, matrices[2])
    np.testing.assert_array_equal(rows, matrices[2][numbers])
    assert InPlace.of(matrices).at(2).shape == (5, 4)


def test_bfloat16_stays_where_it_is():
    array = drawn((33, 7), jnp.bfloat16)
    assert InPlace.of(array).array.unsafe_buffer_pointer() == array.unsafe_buffer_pointer()


def test_derivatives_and_batches():
    matrices, x = drawn((2, 5, 70)) / 100, drawn((70,), seed=1) / 10
    here = lambda matrices, x: jnp.sin(InPlace.of(matrices).at(1).times(x))
    there = lambda matrices, x: jnp.sin(matrices[1] @ x)
    for derivative in (jax.grad, lambda f, **_: lambda *args: jax.jvp(f, args, args)[1]):
        of = lambda f: jax.tree.map(np.asarray, derivative(lambda *args: f(*args).sum(), argnums=(0, 1))(matrices, x))
        jax.tree.map(lambda a, b: assert_close(a, b, 1e-5), of(here), of(there))
    xs = drawn((3, 70), seed=2) / 10
    assert_close(jax.vmap(here, (None, 0))(matrices, xs), np.asarray(jax.vmap(there, (None, 0))(matrices, xs)), 1e-5)


def small(dim: int = 96, depth: int = 3) -> Any:
    config = eqzoo.LlamaConfig(dim=dim, depth=depth, heads=2, kv_heads=1, hidden=2 * dim, vocab=dim)
    return eqx.filter_jit(eqzoo.Llama)(config, key=jax.random.key(0))


MODELS = {
    "float32": lambda model: model,
    "bfloat16": lambda model: cast(model, jnp.bfloat16),
    "int8": lambda model: quantize(model, "*"),
    "int8 of bfloat16": lambda model: quantize(cast(model, jnp.bfloat16), "*"),
    "lora": lambda model: eqzoo.tree.lora(model, "*", rank=2, key=jax.random.key(1)),
    "lora over int8": lambda model: eqzoo.tree.lora(quantize(model, "*"), "*", rank=2, key=jax.random.key(1)),
}


@eqx.filter_jit
def logits(model: Any, tokens: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
    hidden, cache = model.extend(tokens, cache)
    return model.logits(hidden), cache


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_computes_the_same(kind):
    model = MODELS[kind](small())
    tolerance = 2e-2 if "bfloat16" in kind else 1e-5
    other = model.empty_cache(8)
    cache = nn.in_place(other)
    for tokens in ([1, 5, 3], [8], [2]):  # several at a time read copies
        found, cache = logits(nn.in_place(model), jnp.array(tokens), cache)
        expected, other = logits(model, jnp.array(tokens), other)
        assert found.dtype == expected.dtype
        assert_close(found, np.asarray(expected, np.float32), tolerance)
    assert cache.position == 5
    for held, expected in ((cache.layers.key, other.layers.key), (cache.layers.value, other.layers.value)):
        assert held.dtype == expected.dtype
        assert_close(held.read(), np.asarray(expected, np.float32), tolerance)


@eqx.filter_jit
def several(model: Any, cache: Any) -> tuple[jax.Array, Any]:
    def step(_, carry):
        token, cache = carry
        hidden, cache = model.extend(token, cache)
        return jnp.argmax(model.logits(hidden), axis=-1).astype(jnp.int32), cache

    return jax.lax.fori_loop(0, 4, step, (jnp.array([1]), cache))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_a_loop_over_tokens_copies_no_matrix(kind):
    model = MODELS[kind](small(dim=768, depth=2))
    memory = lambda *args: several.lower(*args).compile().compiled.memory_analysis().temp_size_in_bytes
    assert (
        memory(nn.in_place(model), nn.in_place(model.empty_cache(16)))
        < 768 * 768
        < memory(model, model.empty_cache(16))
    )


def test_what_is_in_place_stays_as_it_is():
    model = nn.in_place(small())
    cache = nn.in_place(model.empty_cache(4))
    assert eqx.tree_equal(nn.in_place((model, cache)), (model, cache))


def test_the_program_is_as_large_for_many_layers_as_for_few():
    def size(depth: int) -> int:
        step = lambda model: model.extend(jnp.array([1]), nn.in_place(model.empty_cache(8)))[0]
        return str(eqx.filter_make_jaxpr(step)(nn.in_place(small(depth=depth)))[0]).count("\n")

    assert size(2) == size(12)
