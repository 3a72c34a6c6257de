"""Normalisation against torch: values, gradients, dtypes; and the life of a batch norm's running statistics."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eqzoo import nn
from tests.parity import array, assert_close

DIM = 12


def randomised(layer, there):
    """Both layers with the same random parameters."""
    for parameter in there.parameters():
        parameter.data = torch.randn_like(parameter) + 0.5
    layer = eqx.tree_at(lambda part: part.weight, layer, array(there.weight))
    if getattr(there, "bias", None) is not None:
        layer = eqx.tree_at(lambda part: part.bias, layer, array(there.bias))
    return layer


def row_norms():
    """The norms of a row and torch's own; eps is large enough to matter."""
    return {
        "layer": (nn.LayerNorm(DIM, eps=0.1), torch.nn.LayerNorm(DIM, eps=0.1)),
        "layer_without_bias": (nn.LayerNorm(DIM, use_bias=False), torch.nn.LayerNorm(DIM, bias=False)),
        "layer_default_eps": (nn.LayerNorm(DIM), torch.nn.LayerNorm(DIM)),
        "rms": (nn.RMSNorm(DIM, eps=0.1), torch.nn.RMSNorm(DIM, eps=0.1)),
        "rms_default_eps": (nn.RMSNorm(DIM), torch.nn.RMSNorm(DIM, eps=1e-6)),
    }


def rows(*axes, dtype=torch.float32):
    return (
        torch.randn(*axes, DIM, dtype=dtype) * torch.logspace(-2, 1, axes[0], dtype=dtype).reshape(-1, *[1] * len(axes))
        + 0.3
    ).requires_grad_()


@pytest.mark.parametrize("axes", [(6,), (4, 3)])
@pytest.mark.parametrize("name", row_norms())
def test_row_norms_are_torchs_in_value_and_gradient(name, axes):
    torch.manual_seed(0)
    here, there = row_norms()[name]
    here = randomised(here, there)
    x = rows(*axes)
    y = there(x)
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    ours, pull = jax.vjp(lambda layer, x: layer(x), here, array(x))
    gradient, dx = jax.jit(pull)(array(cotangent))
    assert_close(ours, y.detach())
    assert_close(dx, x.grad)
    assert_close(gradient.weight, there.weight.grad)
    if here.__dict__.get("bias") is not None:
        assert_close(gradient.bias, there.bias.grad)
    assert_close(jax.jit(jax.vmap(here))(array(x)), y.detach())


@pytest.mark.parametrize("name", row_norms())
def test_row_norms_derivatives_of_every_order_agree_with_plain_arithmetic_in_float64(name):
    """The layers' derivative rule is their own; here it meets autodiff of the textbook formula."""
    with jax.enable_x64(True):
        layer = row_norms()[name][0]
        layer = jax.tree.map(lambda leaf: jnp.linspace(0.5, 2, DIM) if eqx.is_array(leaf) else leaf, layer)

        def plain(x):
            mean = 0 if isinstance(layer, nn.RMSNorm) else jnp.mean(x, -1, keepdims=True)
            y = (x - mean) / jnp.sqrt(jnp.mean((x - mean) ** 2, -1, keepdims=True) + layer.eps) * layer.weight
            return y if layer.__dict__.get("bias") is None else y + layer.bias

        x = jnp.asarray(rows(3, dtype=torch.float64).detach().numpy())
        dx, ddx = (jax.random.normal(jax.random.key(seed), x.shape, jnp.float64) for seed in (1, 2))

        def derivatives(f):
            def jvp(x):
                return jax.jvp(f, (x,), (dx,))[1]

            gradient = jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))

            @jax.jit
            def evaluate(x):
                return (
                    f(x),
                    jvp(x),
                    gradient(x),
                    jax.jvp(gradient, (x,), (dx,))[1],
                    jax.grad(lambda x: jnp.sum(jvp(x) * ddx))(x),
                    jax.jvp(jvp, (x,), (ddx,))[1],
                    jax.vmap(jax.jacfwd(f))(x),
                    jax.vmap(jax.jacrev(f))(x),
                )

            return evaluate(x)

        for ours, theirs in zip(derivatives(layer), derivatives(plain), strict=True):
            assert ours.dtype == jnp.float64
            assert_close(ours, theirs, 1e-10)


def test_row_norms_are_as_exact_as_float32_allows():
    x = np.asarray(rows(64).detach()) + 10
    y = jax.vjp(nn.LayerNorm(DIM), jnp.asarray(x))[0]
    wide = x.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    # The input's own rounding: 10 has 6 decimals in float32, and the smallest row varies by 0.01.
    assert np.max(np.abs(y - expected)) < 1e-6 * 10 / 0.01


ALL = {
    "layer": lambda: nn.LayerNorm(DIM),
    "rms": lambda: nn.RMSNorm(DIM),
    "group": lambda: nn.GroupNorm(3, DIM),
}


@pytest.mark.parametrize("cast_layer", [True, False])
@pytest.mark.parametrize("name", ALL)
def test_bfloat16_in_bfloat16_out_with_float32_statistics(name, cast_layer):
    layer = ALL[name]()
    x = (100 + jax.random.normal(jax.random.key(0), (6, DIM))).astype(jnp.bfloat16)
    if name == "rms":
        x = x * 0.01
    if cast_layer:
        layer = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if eqx.is_array(leaf) else leaf, layer)
    y = layer(x)
    assert y.dtype == jnp.bfloat16
    # At 100, bfloat16 steps by a half: only the output may be rounded, not the mean or the variance.
    assert_close(y.astype(jnp.float32), layer(x.astype(jnp.float32)), 2**-8)
    gradient = jax.grad(lambda x: jnp.sum(layer(x).astype(jnp.float32) ** 3))(x)
    assert gradient.dtype == jnp.bfloat16
    assert jnp.all(jnp.isfinite(gradient.astype(jnp.float32)))


@pytest.mark.parametrize("name", ALL)
def test_large_half_precision_inputs_do_not_overflow(name):
    y = ALL[name]()(jnp.linspace(-6e4, 6e4, DIM).astype(jnp.float16))
    assert y.dtype == jnp.float16
    assert 0.9 < jnp.std(y.astype(jnp.float32)) < 1.1


@pytest.mark.parametrize("name", ["layer", "rms"])
def test_no_conditional_is_left_in_the_compiled_program(name):
    layer = ALL[name]()

    def scanned(x):
        return jnp.sum(jax.lax.scan(jax.checkpoint(lambda x, _: (layer(x), None)), x, None, length=3)[0] ** 2)

    x = jnp.ones((2, 5, DIM))
    programs = (jax.vmap(layer), jax.grad(lambda x: jnp.sum(layer(x) ** 2)), jax.grad(scanned))
    for program in programs:
        assert "platform_index" in str(jax.make_jaxpr(program)(x))
        assert " conditional(" not in jax.jit(program).lower(x).compile().as_text()


@pytest.mark.parametrize("groups", [1, 3, DIM])
def test_group_norm_is_torchs_in_value_and_gradient(groups):
    torch.manual_seed(0)
    there = torch.nn.GroupNorm(groups, DIM, eps=0.1)
    here = randomised(nn.GroupNorm(groups, DIM, eps=0.1), there)
    x = (torch.randn(2, 5, 4, DIM) * torch.logspace(-1, 1, DIM) + 0.3).requires_grad_()
    y = there(x.movedim(-1, 1)).movedim(1, -1)
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    ours, pull = jax.vjp(lambda layer, x: jax.vmap(layer)(x), here, array(x))
    gradient, dx = pull(array(cotangent))
    assert_close(ours, y.detach())
    assert_close(dx, x.grad)
    assert_close(gradient.weight, there.weight.grad)
    assert_close(gradient.bias, there.bias.grad)


def test_group_norm_defaults_to_torchs_eps_and_refuses_groups_that_do_not_divide():
    x = torch.randn(2, DIM, 5) * 0.01
    assert_close(jax.vmap(nn.GroupNorm(3, DIM))(array(x.mT)), torch.nn.GroupNorm(3, DIM)(x).detach().mT)
    with pytest.raises(ValueError, match="GroupNorm: channels=12 is not a multiple of groups=5; choose a divisor"):
        nn.GroupNorm(5, DIM)


def batch_norm_pair(**options):
    torch.manual_seed(0)
    there = torch.nn.BatchNorm2d(DIM, **options)
    here, state = eqx.nn.make_with_state(nn.BatchNorm)(DIM, **options)
    return randomised(here, there), state, there


def batched(layer, state, x):
    return jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)


def images(batch=4, size=3):
    return torch.randn(batch, size, size, DIM) * torch.logspace(-1, 1, DIM) + torch.linspace(-2, 2, DIM)


def assert_same_statistics(layer, state, there):
    running = state.get(layer.running)
    assert_close(running.mean, there.running_mean)
    assert_close(running.var, there.running_var)
    assert running.count == there.num_batches_tracked.item()
    assert running.count.dtype == jnp.int32


@pytest.mark.parametrize("options", [{}, {"eps": 0.1, "momentum": 0.3}])
def test_batch_norm_trains_as_torchs_for_three_steps_and_then_infers_the_same(options):
    here, state, there = batch_norm_pair(**options)

    @eqx.filter_jit
    def step(layer, state, x, cotangent):
        y, pull, state = eqx.filter_vjp(lambda layer, x: batched(layer, state, x), layer, x, has_aux=True)
        return y, state, pull(cotangent)

    assert_same_statistics(here, state, there)
    for _ in range(3):
        x = images().requires_grad_()
        there.zero_grad()
        y = there(x.movedim(-1, 1)).movedim(1, -1)
        cotangent = torch.randn_like(y)
        y.backward(cotangent)
        ours, state, (gradient, dx) = step(here, state, array(x), array(cotangent))
        assert_close(ours, y.detach())
        assert_close(dx, x.grad)
        assert_close(gradient.weight, there.weight.grad)
        assert_close(gradient.bias, there.bias.grad)
        assert_same_statistics(here, state, there)

    there.eval()
    x = images()
    inference = eqx.nn.inference_mode(here)
    y, after = batched(inference, state, array(x))
    assert_close(y, there(x.movedim(-1, 1)).movedim(1, -1).detach())
    assert_same_statistics(here, after, there)
    assert_close(inference(array(x)[0], state)[0], y[0])


def test_batch_norm_of_vectors_is_torchs():
    torch.manual_seed(0)
    there = torch.nn.BatchNorm1d(DIM)
    here, state = eqx.nn.make_with_state(nn.BatchNorm)(DIM)
    x = images(size=1)[:, 0, 0]
    y, state = batched(here, state, array(x))
    assert_close(y, there(x).detach())
    assert_same_statistics(here, state, there)


def test_batch_norm_jvp_and_hvp_agree_with_plain_arithmetic_in_float64():
    with jax.enable_x64(True):
        here, state = eqx.nn.make_with_state(nn.BatchNorm)(DIM)
        x = jnp.asarray(images().numpy(), jnp.float64)
        dx = jax.random.normal(jax.random.key(0), x.shape, jnp.float64)

        def plain(x):
            return (x - jnp.mean(x, (0, 1, 2))) / jnp.sqrt(jnp.var(x, (0, 1, 2)) + 1e-5)

        def derivatives(f):
            gradient = jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))
            return jax.jit(lambda x: (f(x), jax.jvp(f, (x,), (dx,))[1], jax.jvp(gradient, (x,), (dx,))[1]))(x)

        ours = derivatives(lambda x: batched(here, _copy(state), x)[0])
        for left, right in zip(ours, derivatives(plain), strict=True):
            assert left.dtype == jnp.float64
            assert_close(left, right, 1e-9)


def _copy(state):
    return jax.tree.map(lambda leaf: leaf, state)


def test_batch_norm_statistics_get_no_gradient():
    here, state = eqx.nn.make_with_state(nn.BatchNorm)(DIM)

    def running_mean(x):
        return jnp.sum(batched(here, _copy(state), x)[1].get(here.running).mean)

    np.testing.assert_array_equal(jax.grad(running_mean)(array(images())), 0.0)


def test_batch_norm_in_bfloat16_keeps_float32_statistics():
    here, state, there = batch_norm_pair()
    x = images().bfloat16()
    y, state = batched(here, state, jnp.asarray(x.float().numpy(), jnp.bfloat16))
    expected = there(x.float().movedim(-1, 1)).movedim(1, -1).detach()
    assert y.dtype == jnp.bfloat16
    assert_close(y.astype(jnp.float32), expected, 2**-8)
    assert state.get(here.running).mean.dtype == jnp.float32
    assert_same_statistics(here, state, there)


def test_batch_norm_cast_to_bfloat16_as_a_whole_keeps_its_dtypes():
    def to_half(leaf):
        return leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf

    here, state = jax.tree.map(to_half, eqx.nn.make_with_state(nn.BatchNorm)(DIM))
    x = array(images()).astype(jnp.bfloat16)
    y, after = batched(here, _copy(state), x)
    assert y.dtype == jnp.bfloat16
    assert [leaf.dtype for leaf in jax.tree.leaves(after)] == [leaf.dtype for leaf in jax.tree.leaves(state)]
    small = eqx.tree_at(lambda s: s.var, state.get(here.running), jnp.full(DIM, 1e-5, jnp.bfloat16))
    y, _ = eqx.nn.inference_mode(here)(x[0], state.set(here.running, small))
    assert_close(y.astype(jnp.float32), x[0].astype(jnp.float32) / np.sqrt(1e-5 + np.float32(small.var)), 2**-8)


def test_batch_norm_over_a_sharded_batch_equals_the_unsharded_one():
    here, state, _ = batch_norm_pair()
    x = array(images(batch=16))

    @jax.jit
    def step(x, state):
        y, pull, state = jax.vjp(lambda x: batched(here, state, x), x, has_aux=True)
        return y, pull(jnp.sin(y)), state.get(here.running)

    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    assert len(sharded.sharding.device_set) == 8
    replicated = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
    alone, spread = step(x, state), step(sharded, replicated)
    assert len(spread[0].sharding.device_set) == 8
    for left, right in zip(jax.tree.leaves(alone), jax.tree.leaves(spread), strict=True):
        assert_close(right, left)


def test_batch_norm_in_training_without_a_batch_says_how_to_get_one():
    here, state = eqx.nn.make_with_state(nn.BatchNorm)(DIM)
    message = r'found no batch: call the model under `jax.vmap\(..., axis_name="batch"\)`, or turn .*inference_mode'
    for call in (here, jax.vmap(here, in_axes=(0, None), out_axes=(0, None))):
        with pytest.raises(ValueError, match=message):
            call(jnp.ones((2, 3, DIM)), state)


def test_batch_norm_refuses_one_value_per_channel():
    here, state = eqx.nn.make_with_state(nn.BatchNorm)(DIM)
    with pytest.raises(ValueError, match="one value per channel, whose variance is undefined: use a larger batch or"):
        batched(here, state, jnp.ones((1, 1, 1, DIM)))


def test_batch_norm_is_as_exact_as_torchs_where_the_mean_is_far_from_zero():
    x = torch.randn(4, 5, 5, DIM) + 300
    there = torch.nn.BatchNorm2d(DIM)(x.movedim(-1, 1)).movedim(1, -1).detach().numpy()
    wide = x.double().numpy()
    exact = (wide - wide.mean((0, 1, 2))) / np.sqrt(wide.var((0, 1, 2)) + 1e-5)
    here, state = eqx.nn.make_with_state(nn.BatchNorm)(DIM)
    y = batched(here, state, array(x))[0]
    assert np.max(np.abs(y - exact)) <= 2 * np.max(np.abs(there - exact))


def test_batch_norm_of_a_constant_channel_is_its_bias_with_a_finite_gradient():
    here, state, _ = batch_norm_pair()
    x = jnp.full((4, 3, 3, DIM), 0.3)
    y, pull = jax.vjp(lambda x: batched(here, _copy(state), x)[0], x)
    np.testing.assert_allclose(y, jnp.broadcast_to(here.bias, y.shape), atol=1e-4)
    assert jnp.all(jnp.isfinite(pull(jnp.ones_like(y))[0]))


def test_a_norm_over_groups_is_a_norm_of_each():
    layer = eqx.tree_at(lambda layer: layer.weight, nn.RMSNorm(DIM, eps=0.1, groups=3), jnp.arange(1.0, DIM + 1))
    x = jax.random.normal(jax.random.key(0), (5, DIM))
    each = jax.vmap(nn.RMSNorm(DIM // 3, eps=0.1), in_axes=1, out_axes=1)(x.reshape(5, 3, -1)).reshape(5, DIM)
    assert_close(eqx.filter_jit(layer)(x), np.asarray(each * layer.weight))
    with pytest.raises(ValueError, match="RMSNorm: dim=12 is not a multiple of groups=5; choose a divisor"):
        nn.RMSNorm(DIM, groups=5)


def test_batch_norm_of_a_compiled_batch_has_derivatives():
    """Those are taken after `vmap` is done, where nothing names a batch."""
    layer, state = eqx.nn.make_with_state(nn.BatchNorm)(DIM)
    xs, direction = array(torch.randn(2, 4, DIM))

    @jax.jit
    def loss(xs):
        call = lambda x: layer(x, jax.tree.map(lambda leaf: leaf, state))
        return jnp.sum(jax.vmap(call, axis_name="batch", out_axes=(0, None))(xs)[0] ** 3)

    assert_close(jax.grad(loss)(xs), jax.grad(loss.__wrapped__)(xs), 1e-6)
    assert_close(jax.jvp(loss, (xs,), (direction,))[1], jnp.vdot(jax.grad(loss)(xs), direction), 1e-4)
