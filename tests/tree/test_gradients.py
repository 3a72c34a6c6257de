"""Per-example gradients are a loop's, their private mean is optax's, and `hvp` multiplies by the Hessian."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import eqzoo
from eqzoo import nn
from eqzoo.tree.gradients import hvp, per_example_grads, private_mean
from eqzoo.tree.noise import add_noise
from eqzoo.tree.paths import leaves_with_paths
from tests.contract.table import KINDS, assert_close, error, randomised

KEY = jax.random.key(0)


class Layer(eqx.Module):
    linear: nn.Linear

    def __call__(self, x, *, key):
        return jnp.tanh(self.linear(x))


class Layered(eqx.Module):
    """A stack of two layers beside what has no gradient: an activation, an integer."""

    layers: nn.Stack[Layer]
    bias: jax.Array
    steps: jax.Array
    activation: object

    def __init__(self, *, key):
        self.layers = nn.Stack(lambda key: Layer(nn.Linear(3, 3, key=key)), 2, key=key)
        self.bias = jnp.ones(3)
        self.steps = jnp.array(5)
        self.activation = jax.nn.tanh

    def __call__(self, x):
        return self.activation(self.layers(x) + self.bias) * self.steps


def loss(model, example):
    return jnp.sum((model(example["x"]) - example["y"]) ** 2)


def batch(size, seed=0):
    keys = jax.random.split(jax.random.key(seed))
    sizes = jnp.linspace(0.01, 2, size)[:, None]  # so that some gradients are small and some large
    return {name: sizes * jax.random.normal(key, (size, 3)) for name, key in zip("xy", keys, strict=True)}


def per_example(size, seed=0):
    return per_example_grads(loss)(Layered(key=KEY), batch(size, seed))


def norms(gradients):
    """Each example's, in float64."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(gradients)]
    return np.sqrt(sum((leaf**2).sum(axis=tuple(range(1, leaf.ndim))) for leaf in leaves))


def clipped_mean(gradients, max_norm):
    """By hand, in float64."""
    factors = np.minimum(1, max_norm / norms(gradients))
    return jax.tree.map(lambda leaf: np.tensordot(factors, np.asarray(leaf, np.float64), 1) / len(factors), gradients)


def test_per_example_gradients_are_those_of_a_loop():
    model, examples = Layered(key=KEY), batch(5)
    each = eqx.filter_jit(per_example_grads(loss))(model, examples)
    assert {path: leaf.shape for path, leaf in leaves_with_paths(each)} == {
        "layers[*].linear.weight": (5, 2, 3, 3),
        "layers[*].linear.bias": (5, 2, 3),
        "bias": (5, 3),
    }
    for index in range(5):
        alone = eqx.filter_grad(loss)(model, jax.tree.map(lambda leaf: leaf[index], examples))
        assert_close(jax.tree.map(lambda leaf: leaf[index], each), alone, 1e-5)


def test_their_mean_is_the_gradient_of_the_mean_loss():
    model, examples = Layered(key=KEY), batch(5)
    mean_loss = lambda model: jnp.mean(jax.vmap(lambda example: loss(model, example))(examples))
    mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), per_example_grads(loss)(model, examples))
    assert_close(mean, eqx.filter_grad(mean_loss)(model), 1e-5)


def test_an_example_may_have_several_parts_its_own_key_and_what_is_no_array():
    def noisy(model, x, key, scale, target):
        return scale * model @ (x + jax.random.normal(key, x.shape)) if target is None else 0.0

    xs, keys = jnp.arange(6.0).reshape(2, 3), jax.random.split(KEY, 2)
    each = per_example_grads(noisy)(jnp.ones(3), np.asarray(xs), keys, 2.0, None)
    expected = 2 * (xs + jnp.stack([jax.random.normal(key, (3,)) for key in keys]))
    np.testing.assert_allclose(each, expected, rtol=1e-5)


def test_private_mean_without_noise_is_optax():
    gradients = per_example(6)
    max_norm = float(np.median(norms(gradients)))  # half of the examples are clipped
    ours = eqx.filter_jit(private_mean)(gradients, KEY, max_norm=max_norm, noise_multiplier=0.0)
    aggregate = optax.contrib.differentially_private_aggregate(max_norm, 0.0, key=KEY)
    theirs, _ = aggregate.update(gradients, aggregate.init(gradients))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    assert_close(ours, theirs, 1e-6)
    assert_close(ours, clipped_mean(gradients, max_norm), 1e-5)


def test_private_mean_has_the_noise_of_optax():
    """The standard deviation over leaves and keys is max_norm * noise_multiplier / examples, for both."""
    gradients = [jnp.zeros((4, 5, 8)), {"W": jnp.zeros((4, 30)), "b": jnp.zeros((4, 30))}]
    expected = 0.7 * 1.3 / 4

    def theirs(key):
        aggregate = optax.contrib.differentially_private_aggregate(0.7, 1.3, key=key)
        return aggregate.update(gradients, aggregate.init(gradients))[0]

    ours = lambda key: private_mean(gradients, key, max_norm=0.7, noise_multiplier=1.3)
    keys = jax.random.split(KEY, 200)
    for draw in (ours, theirs):
        for leaf in jax.tree.leaves(jax.vmap(draw)(keys)):
            assert abs(leaf.std() / expected - 1) < 4 / np.sqrt(2 * leaf.size)
            assert abs(leaf.mean() / expected) < 4 / np.sqrt(leaf.size)


def test_the_noise_is_that_of_the_leafs_path_and_every_layer_has_its_own():
    gradients = jax.tree.map(jnp.zeros_like, per_example(4))
    mean = private_mean(gradients, KEY, max_norm=2.0, noise_multiplier=0.5)
    expected = add_noise(jax.tree.map(lambda leaf: leaf[0], gradients), KEY, 1.0)
    assert_close(mean, jax.tree.map(lambda leaf: leaf / 4, expected), 1e-6)
    first, second = mean.layers.block.linear.weight
    assert not np.allclose(first, second)
    other = private_mean(gradients, jax.random.key(1), max_norm=2.0, noise_multiplier=0.5)
    assert not np.allclose(mean.bias, other.bias)


def test_one_example_moves_the_mean_by_no_more_than_its_clipped_norm():
    """Even a huge one; the norm is over everything of the example: all leaves, all layers."""
    gradients = per_example(4)
    huge = jax.tree.map(lambda leaf: leaf.at[2].multiply(1e8), gradients)
    without = jax.tree.map(lambda leaf: leaf.at[2].set(0), gradients)
    means = [private_mean(tree, KEY, max_norm=0.5, noise_multiplier=0.0) for tree in (huge, without)]
    moved = optax.tree.norm(jax.tree.map(jnp.subtract, *means))
    assert abs(moved - 0.5 / 4) < 1e-6


def test_private_mean_of_an_ensemble():
    """Examples first, then members: an example's norm is over all members."""
    members = eqx.filter_vmap(lambda key: Layered(key=key))(jax.random.split(KEY, 3))
    total = lambda members, example: jnp.sum(eqx.filter_vmap(loss, in_axes=(eqx.if_array(0), None))(members, example))
    gradients = per_example_grads(total)(members, batch(5))
    assert gradients.layers.block.linear.weight.shape == (5, 3, 2, 3, 3)
    max_norm = float(np.median(norms(gradients)))
    mean = private_mean(gradients, KEY, max_norm=max_norm, noise_multiplier=0.0)
    assert_close(mean, clipped_mean(gradients, max_norm), 1e-5)


def test_private_mean_in_bfloat16_computes_in_float32():
    gradients = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), per_example(64))
    max_norm = float(np.median(norms(gradients)))
    mean = private_mean(gradients, KEY, max_norm=max_norm, noise_multiplier=0.0)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), clipped_mean(gradients, max_norm))
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(mean))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, mean, rounded)))


def test_private_mean_multiplies_in_full_precision():
    """Where a matrix product rounds its operands by default, a clipped gradient could be longer than max_norm."""
    program = jax.make_jaxpr(lambda g: private_mean(g, KEY, max_norm=1.0, noise_multiplier=0.0))(jnp.ones((4, 3)))
    assert str(program).count("precision=(Precision.HIGHEST") == str(program).count("dot_general") == 1


def test_private_mean_leaves_alone_what_is_no_gradient():
    tree = {"g": jnp.ones((2, 3)), "steps": jnp.array(4), "activation": jax.nn.relu, "none": None}
    mean = private_mean(tree, KEY, max_norm=10.0, noise_multiplier=0.0)
    assert mean["g"].shape == (3,)
    assert mean["steps"] is tree["steps"]
    assert mean["activation"] is jax.nn.relu


@pytest.mark.parametrize(
    ("gradients", "said"),
    [
        ({"a": jnp.ones((2, 3)), "b": jnp.ones((4, 3))}, r"'a' has shape \(2, 3\) and 'b' has shape \(4, 3\)"),
        ({"a": jnp.ones((2, 3)), "b": jnp.ones(())}, r"'b' has shape \(\); pass what per_example_grads gives"),
        ({"a": jnp.ones((0, 3))}, r"at least one, but 'a' has shape \(0, 3\)"),
        ({"a": jax.nn.relu}, "the tree holds no gradients"),
    ],
)
def test_private_mean_says_what_is_wrong(gradients, said):
    with pytest.raises(ValueError, match=f"^private_mean: .*{said}"):
        private_mean(gradients, KEY, max_norm=1.0, noise_multiplier=1.0)


def test_hvp_is_the_hessian_times_the_vector():
    """`a` enters linearly: its part of the product is zero, not absent."""
    model = {"a": jnp.array([1.0, 2.0]), "w": jnp.array([[0.5, -1.0], [2.0, 0.3]]), "steps": 3, "activation": jnp.tanh}
    curved = lambda model, x: jnp.sum(model["activation"](model["w"] @ x)) ** 3 + jnp.sum(model["a"])
    parameters, static = eqx.partition(model, eqx.is_inexact_array)
    point, unravel = ravel_pytree(parameters)
    x, direction = jnp.array([0.3, -0.8]), jnp.arange(1.0, 7.0)
    hessian = jax.hessian(lambda point: curved(eqx.combine(unravel(point), static), x))(point)
    product = eqx.filter_jit(hvp(curved))(model, unravel(direction), x)
    assert jax.tree.structure(product) == jax.tree.structure(parameters)
    np.testing.assert_allclose(ravel_pytree(product)[0], hessian @ direction, rtol=1e-5)


def test_hvp_takes_the_model_itself_for_vector_and_refuses_another_tree():
    model = Layered(key=KEY)
    example = jax.tree.map(lambda leaf: leaf[1], batch(2))
    filtered = hvp(loss)(model, eqx.filter(model, eqx.is_inexact_array), example)
    assert eqx.tree_equal(hvp(loss)(model, model, example), filtered)
    with pytest.raises(ValueError, match="^hvp: "):
        hvp(loss)(model, eqx.tree_at(lambda m: m.bias, model, jnp.ones(4)), example)
    with pytest.raises(ValueError, match="^hvp: "):
        hvp(loss)(model, {"bias": jnp.ones(3)}, example)


@pytest.mark.parametrize("row", KINDS, ids=lambda row: row.model.__name__)
def test_hvp_of_a_family_of_each_kind(row):
    """Forward over reverse mode equals reverse over forward mode: the gradient of the slope along the vector."""
    model = eqzoo.freeze(*randomised(row, seed=0))
    parameters, static = eqx.partition(model, eqx.is_inexact_array)
    vector = jax.tree.map(lambda leaf: jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape), parameters)
    loss = lambda model, x: error(model(x))

    @eqx.filter_jit
    def products(parameters, vector, x):
        value = lambda parameters: loss(eqx.combine(parameters, static), x)
        slope = lambda parameters: jax.jvp(value, (parameters,), (vector,))[1]
        return hvp(loss)(eqx.combine(parameters, static), vector, x), jax.grad(slope)(parameters)

    product, expected = products(parameters, vector, row.batch(1)[0])
    assert optax.tree.norm(expected) > 0
    assert_close(product, expected, 1e-3)
