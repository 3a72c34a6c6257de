"""Every family under JAX's transformations, alone and together: the numbers stay the same."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import eqzoo
from eqzoo.tree import leaves_with_paths
from tests.contract.table import assert_close, cast, error, jitted_train, jitted_train_step, matches, randomised, train


def test_jit_is_eager(subject, step):
    ys, state = train(*subject[1:])
    assert_close((ys, state), (step.outputs, step.state), 1e-5)


def test_vmap_is_a_loop(subject, predictions):
    call = eqx.filter_jit(subject.frozen)
    assert_close(jnp.stack([call(x) for x in subject.xs]), predictions, 1e-5)


def test_per_example_gradients(subject):
    """`vmap(grad)` gives what a loop does, and its mean is the gradient of the mean."""

    @eqx.filter_jit
    def gradients(model, xs):
        parameters, static = eqx.partition(model, eqx.is_inexact_array)
        loss = lambda parameters, x: error(eqx.combine(parameters, static)(x))
        mean = lambda parameters: jnp.mean(jax.vmap(loss, in_axes=(None, 0))(parameters, xs))
        gradient = lambda x: jax.grad(loss)(parameters, x)
        return jax.vmap(gradient)(xs), jax.lax.map(gradient, xs), jax.grad(mean)(parameters)

    each, looped, together = jax.device_get(gradients(subject.frozen, subject.xs))
    assert_close(each, looped, 1e-4)
    assert_close(jax.tree.map(lambda leaf: leaf.mean(axis=0), each), together, 1e-4)


def test_scan_is_unrolled(subject, step):
    unrolled = eqzoo.nn.scan_options(subject.model, unroll=100)
    assert_close(jitted_train_step(unrolled, *subject[2:]), tuple(step), 1e-4)


def test_remat_is_plain(subject, step):
    rematerialised = eqzoo.nn.scan_options(subject.model, remat=True)
    assert_close(jitted_train_step(rematerialised, *subject[2:]), tuple(step), 1e-4)


def test_bfloat16(subject, step):
    """Weights and input in bfloat16: so is the output, near float32's; running statistics stay in float32."""
    model, xs = cast((subject.model, subject.xs), jnp.bfloat16)
    ys, state = jitted_train(model, subject.state, xs, subject.keys)
    assert ys.dtype == jnp.bfloat16
    assert_close(ys, step.outputs, 0.1)
    assert [leaf.dtype for leaf in jax.tree.leaves(state)] == [leaf.dtype for leaf in jax.tree.leaves(subject.state)]
    assert not jax.tree.leaves(state) or assert_close(state, step.state, 0.05) is None


def test_ensemble(subject):
    """Models made by `filter_vmap` over keys are those made alone, and compute what they compute."""
    keys = jax.random.split(jax.random.key(3), 2)
    axes = (eqx.if_array(0), eqx.if_array(0), None)
    together = eqx.filter_jit(eqx.filter_vmap(subject.row.make))(keys)
    outputs = eqx.filter_jit(eqx.filter_vmap(_predict, in_axes=axes))(*together, subject.xs)
    predict = eqx.filter_jit(_predict)
    for index, key in enumerate(keys):
        alone = subject.row.make(key)
        member = jax.tree.map(lambda leaf, index=index: leaf[index] if eqx.is_array(leaf) else leaf, together)
        assert eqx.tree_equal(member, alone)
        assert_close(outputs[index], predict(*alone, subject.xs), 1e-5)


def _predict(model, state, xs):
    return jax.vmap(eqzoo.freeze(model, state))(xs)


def test_one_trace(subject):
    """Weights, statistics, inputs and keys are arguments of the compiled program; a model made anew shares it."""
    traces = 0

    @eqx.filter_jit
    def forward(*arguments):
        nonlocal traces
        traces += 1
        return train(*arguments)[0]

    outputs = [forward(*subject[1:])]
    for seed in (4, 5):
        model, state = randomised(subject.row, seed)
        keys = jax.random.split(jax.random.key(seed), len(subject.keys))
        outputs.append(forward(model, state, subject.row.batch(seed), keys))
    assert traces == 1
    assert not np.array_equal(outputs[1], outputs[2])


def test_derivatives(subject):
    """In float64: gradient, forward mode and finite differences agree, and the Hessian is symmetric.

    Forward over reverse mode multiplies by the Hessian, reverse over forward mode by its transpose.
    """
    _, model, state, xs, keys = subject
    with jax.enable_x64(True):
        parameters, static = eqx.partition(model, eqx.is_inexact_array)
        parameters, state, xs = cast((parameters, state, xs), jnp.float64)
        point, unflatten = ravel_pytree(parameters)
        direction = jax.random.normal(jax.random.key(6), point.shape, jnp.float64)

        @jax.jit
        def derivatives(point, direction, state, xs, keys):
            loss = lambda point: error(train(eqx.combine(unflatten(point), static), state, xs, keys)[0])
            along = lambda point: jax.jvp(loss, (point,), (direction,))[1]
            slope, transposed_product = jax.value_and_grad(along)(point)
            gradient, product = jax.jvp(jax.grad(loss), (point,), (direction,))
            step = 1e-8 * direction  # so short that no ReLU switches on the way
            after, before = jax.lax.map(loss, jnp.stack([point + step, point - step]))
            return gradient, slope, (after - before) / 2e-8, product, transposed_product

        gradient, slope, finite, product, transposed_product = derivatives(point, direction, state, xs, keys)
        assert abs(gradient @ direction - finite) <= 1e-6 * abs(finite)
        assert abs(gradient @ direction - slope) <= 1e-9 * abs(slope)
        assert jnp.isfinite(product).all()
        assert jnp.abs(product).max() > 0
        assert jnp.abs(product - transposed_product).max() <= 1e-9 * jnp.abs(product).max()


def test_gradient_reaches_every_leaf(subject, exact_step):
    """Finite everywhere and not zero for any leaf, nor for any layer of a stack."""
    gradients = jax.device_get(exact_step.gradients)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradients))
    for path, leaf in leaves_with_paths(gradients):
        layers = leaf.reshape(*leaf.shape[: path.count("[*]")], -1)
        assert np.isfinite(leaf).all(), path
        reached = bool((np.abs(layers).max(axis=-1) > 1e-12 * largest).all())
        assert reached != matches(subject.row.vanishing, path), path
