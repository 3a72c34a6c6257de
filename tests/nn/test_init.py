"""The initialisers draw the right distributions, and the same numbers however they are compiled."""

from math import sqrt

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eqzoo import nn
from eqzoo.nn import _init

INITIALISERS = {
    "uniform": lambda key, shape: _init.uniform(key, shape, 0.173),
    "normal": lambda key, shape: _init.normal(key, shape, 0.0217),
    "torch_default": lambda key, shape: _init.torch_default(key, shape, 35),
    "kaiming_fan_out": _init.kaiming_fan_out,
    "kaiming_uniform": _init.kaiming_uniform,
}


@pytest.mark.usefixtures("compile_as_users_do")
@pytest.mark.parametrize("name", INITIALISERS)
@pytest.mark.parametrize("shape", [(64, 47), (16, 5, 3, 3)])
def test_same_bits_eagerly_and_under_jit_vmap_and_sharding(name, shape):
    def draw(key):
        return INITIALISERS[name](key, shape)

    keys = jax.random.split(jax.random.key(3), 5)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    sharded = jax.jit(draw, out_shardings=sharding)(keys[2])
    eager = np.asarray(draw(keys[2]))
    assert len(sharded.sharding.device_set) == 8
    np.testing.assert_array_equal(jax.jit(draw)(keys[2]), eager)
    np.testing.assert_array_equal(jax.vmap(draw)(keys)[2], eager)
    np.testing.assert_array_equal(jax.jit(jax.vmap(draw))(keys)[2], eager)
    np.testing.assert_array_equal(sharded, eager)


def test_a_layer_of_another_size_starts_without_another_compilation(caplog):
    def make(size):
        key = jax.random.key(0)
        return nn.Stack(lambda key: nn.ConvNorm(size, size, 3, key=key), 2, key=key), nn.Linear(size, 7, key=key)

    def compiled():
        return [message for message in caplog.messages if message.startswith("Compiling")]

    make(3)
    with jax.log_compiles():
        make(5)
        assert compiled() == []
        jnp.ones(4099)
    assert compiled()  # as a test that looked elsewhere wouldn't see


@pytest.mark.parametrize("name", INITIALISERS)
def test_float32_even_where_float64_is_the_default(name):
    with jax.enable_x64(True):
        assert INITIALISERS[name](jax.random.key(0), (3, 2)).dtype == np.float32


def quantiles(x):
    return np.quantile(np.asarray(x, np.float64), [0.001, 0.05, 0.25, 0.5, 0.75, 0.95, 0.999])


STANDARD_NORMAL = np.array([-3.0902, -1.6449, -0.6745, 0, 0.6745, 1.6449, 3.0902])


def test_normal_has_the_quantiles_of_a_normal_distribution():
    x = _init.normal(jax.random.key(0), (1000, 1000), 0.5)
    np.testing.assert_allclose(quantiles(x), 0.5 * STANDARD_NORMAL, atol=0.01)
    assert 4.5 * 0.5 < np.max(np.abs(x)) < 6 * 0.5


def test_uniform_fills_its_bounds():
    x = _init.uniform(jax.random.key(0), (1000, 1000), 0.5)
    np.testing.assert_allclose(quantiles(x), [-0.499, -0.45, -0.25, 0, 0.25, 0.45, 0.499], atol=0.002)
    assert -0.5 <= np.min(x) < -0.49999
    assert 0.49999 < np.max(x) < 0.5


def test_torch_default_is_uniform_within_one_over_the_root_of_fan_in():
    x = _init.torch_default(jax.random.key(0), (100, 100), 16)
    assert 0.249 < np.max(np.abs(x)) <= 0.25
    assert abs(np.std(x) - 0.25 / sqrt(3)) < 0.002


@pytest.mark.parametrize("shape", [(50, 2000), (10, 400, 5, 1)])
def test_kaiming_fan_out_has_variance_two_over_the_outputs_of_one_input(shape):
    x = _init.kaiming_fan_out(jax.random.key(0), shape)
    assert abs(np.std(x) - 0.2) < 0.002


@pytest.mark.parametrize("shape", [(400, 16), (400, 4, 2, 2)])
def test_weight_and_bias_start_as_torchs_do_by_default(shape):
    weight, bias = _init.weight_and_bias(jax.random.key(0), shape, None, use_bias=True)
    assert (weight.shape, bias.shape) == (shape, (400,))
    for parameter in (weight, bias):
        assert 0.24 < np.max(np.abs(parameter)) <= 0.25
        assert abs(np.std(parameter) - 0.25 / sqrt(3)) < 0.01
    assert abs(np.corrcoef(weight.reshape(400, -1)[:, 0], bias)[0, 1]) < 0.2


def test_weight_and_bias_start_from_init_and_zeros_when_it_is_given():
    weight, bias = _init.weight_and_bias(
        jax.random.key(0), (4, 3), lambda key, shape: jnp.full(shape, 2.0), use_bias=True
    )
    np.testing.assert_array_equal(weight, np.full((4, 3), 2.0))
    np.testing.assert_array_equal(bias, np.zeros(4))


@pytest.mark.parametrize("init", [None, _init.kaiming_fan_out])
def test_no_bias_on_request(init):
    assert _init.weight_and_bias(jax.random.key(0), (4, 3), init, use_bias=False)[1] is None


def test_fan_out_of_groups_counts_the_outputs_of_one_group():
    weight = _init.kaiming_fan_out_of_groups(64)(jax.random.key(0), (128, 1, 5, 5))
    assert weight.std() == pytest.approx(sqrt(2 / (2 * 25)), rel=0.05)


def test_kaiming_uniform_is_torchs_for_relu():
    weight = _init.kaiming_uniform(jax.random.key(0), (40, 20, 3, 3))
    bound = sqrt(6 / (20 * 9))
    assert 0.99 * bound < jnp.abs(weight).max() <= bound


def test_xavier_is_uniform_by_inputs_and_outputs():
    weight = _init.xavier(jax.random.key(0), (40, 20, 3, 3))
    bound = sqrt(6 / (60 * 9))
    assert 0.99 * bound < jnp.abs(weight).max() <= bound
