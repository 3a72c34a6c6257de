"""Pools are torch's and timm's in value and gradient, and compose with JAX's transformations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqzoo.nn.pool import MaxPool, adaptive_avg_pool, avg_pool, blur_pool, global_avg_pool, max_pool


def image(*shape, ties=False):
    values = np.random.default_rng(0).normal(size=shape)
    return jnp.asarray(np.round(values) if ties else values, jnp.float32)


def assert_close(got, want, tolerance=1e-5):
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert np.max(np.abs(got - want)) <= tolerance * np.max(np.abs(want))


def assert_equals_torch(ours, theirs, x):
    """Value and gradient; `theirs` takes and gives channels first with a batch axis."""
    import torch

    tensor = torch.tensor(np.asarray(x), requires_grad=True)
    want = theirs(tensor.permute(2, 0, 1)[None])[0].permute(1, 2, 0)
    got, pullback = jax.vjp(ours, x)
    assert_close(got, want.detach())
    cotangent = np.random.default_rng(1).normal(size=got.shape).astype(np.float32)
    want.backward(torch.tensor(cotangent))
    assert_close(pullback(jnp.asarray(cotangent))[0], tensor.grad)


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("stride", [None, 1, (2, 3)])
@pytest.mark.parametrize(("window", "padding", "dilation"), [(2, 0, 1), (3, 1, 2), ((3, 2), (1, 0), 1), (5, 2, 1)])
def test_pools_equal_torch(window, padding, dilation, stride, ceil_mode):
    from torch.nn import functional

    options = {"stride": stride, "padding": padding, "ceil_mode": ceil_mode}
    assert_equals_torch(
        lambda x: max_pool(x, window, dilation=dilation, **options),
        lambda x: functional.max_pool2d(x, window, dilation=dilation, **options),
        image(7, 10, 2, ties=True),
    )
    for include in (False, True):
        ours = partial(avg_pool, window=window, count_include_pad=include, **options)
        torchs = partial(functional.avg_pool2d, kernel_size=window, count_include_pad=include, **options)
        assert_equals_torch(ours, torchs, image(8, 5, 2))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [(7, 10), (2, 3)])
def test_blur_pool_is_timms(size, stride):
    from timm.layers import BlurPool2d

    assert_equals_torch(partial(blur_pool, stride=stride), BlurPool2d(3, stride=stride), image(*size, 3))


@pytest.mark.parametrize("size", [(2, 5), (1, 4)])
def test_rounded_up_a_window_may_be_larger_than_the_image(size):
    """As far as torch lets it."""
    from torch.nn import functional

    x, options = image(*size, 2), {"stride": 3, "ceil_mode": True}
    assert_equals_torch(lambda x: max_pool(x, 3, **options), lambda x: functional.max_pool2d(x, 3, **options), x)
    assert_equals_torch(lambda x: avg_pool(x, 3, **options), lambda x: functional.avg_pool2d(x, 3, **options), x)
    with pytest.raises(ValueError, match="doesn't fit into an image"):
        max_pool(x, 3, stride=1, ceil_mode=True)


def test_max_pool_as_a_layer_is_torchs_and_has_no_leaves():
    from torch.nn import MaxPool2d

    for ceil_mode in (False, True):
        layer = MaxPool(3, stride=2, ceil_mode=ceil_mode)
        assert_equals_torch(layer, MaxPool2d(3, stride=2, ceil_mode=ceil_mode), image(8, 10, 2))
        assert not jax.tree.leaves(layer)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("window", "stride"), [(2, 1), (3, 2), ((2, 3), (2, 1)), (2, 3)])
def test_same_tf_equals_timm(window, stride, include):
    from timm.layers.pool2d_same import AvgPool2dSame, MaxPool2dSame

    x = image(7, 10, 2)
    assert_equals_torch(
        lambda x: max_pool(x, window, stride=stride, padding="same_tf"), MaxPool2dSame(window, stride), x
    )
    assert_equals_torch(
        lambda x: avg_pool(x, window, stride=stride, padding="same_tf", count_include_pad=include),
        AvgPool2dSame(window, stride, count_include_pad=include),
        x,
    )


@pytest.mark.parametrize("size", [1, 4, (3, 7), (9, 12)])
def test_adaptive_avg_pool_equals_torch(size):
    from torch.nn import functional

    assert_equals_torch(
        lambda x: adaptive_avg_pool(x, size), lambda x: functional.adaptive_avg_pool2d(x, size), image(7, 10, 3)
    )


def test_nan_goes_where_torchs_goes():
    import torch

    x = np.array(image(6, 6, 1))
    x[1, 1] = x[2, 2] = x[4, 5] = np.nan
    tensor = torch.tensor(x, requires_grad=True)
    want = torch.nn.functional.max_pool2d(tensor.permute(2, 0, 1)[None], 3, 2, 1)
    want.sum().backward()
    got, pullback = jax.vjp(lambda x: max_pool(x, 3, stride=2, padding=1), jnp.asarray(x))
    np.testing.assert_array_equal(got, want[0].permute(1, 2, 0).detach())
    np.testing.assert_array_equal(pullback(jnp.ones_like(got))[0], tensor.grad)


@pytest.mark.parametrize("stride", [(2, 2), (1, 4)])
def test_max_pool_transformations_equal_lax(stride):
    x = image(2, 9, 8, 3)

    def ours(x):
        return max_pool(x, 3, stride=stride, padding=1)

    def theirs(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, (3, 3, 1), (*stride, 1), ((1, 1), (1, 1), (0, 0)))

    def transformed(f):
        def loss(x):
            return jnp.sum(jnp.sin(jax.vmap(f)(x)))

        return [
            jax.grad(loss)(x),
            jax.jvp(jax.vmap(f), (x,), (x**2,))[1],
            jax.jvp(jax.grad(loss), (x,), (x**2,))[1],
            jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 3))(x),
            jax.vmap(jax.grad(lambda x: jnp.sum(f(x) ** 2)))(x),
            jax.vmap(jax.vmap(f))(x[None]),
            jax.jacfwd(f)(x[0, :3, :3]),
            jax.jacrev(f)(x[0, :3, :3]),
            jax.grad(lambda x: lax.scan(lambda total, x: (total + jnp.sum(f(x) ** 2), None), 0.0, x)[0])(x),
        ]

    for got, want in zip(jax.jit(lambda: transformed(ours))(), jax.jit(lambda: transformed(theirs))(), strict=True):
        assert_close(got, want)


def test_a_window_of_more_taps_than_a_byte_can_number():
    from torch.nn import functional

    x, options = image(20, 18, 2), {"stride": (3, 2), "padding": 1}
    assert_equals_torch(lambda x: max_pool(x, 16, **options), lambda x: functional.max_pool2d(x, 16, **options), x)


def test_only_the_largest_pixels_pass_tangents_and_cotangents_that_are_not_finite():
    x = jnp.arange(25.0).reshape(5, 5, 1)
    pool = partial(max_pool, window=3, stride=2, padding=1)
    largest = np.zeros((5, 5, 1), bool)
    largest[np.ix_([1, 3, 4], [1, 3, 4])] = True
    np.testing.assert_array_equal(jax.jvp(pool, (x,), (jnp.where(largest, 1, jnp.nan),))[1], jnp.ones((3, 3, 1)))
    (gradient,) = jax.vjp(pool, x)[1](jnp.full((3, 3, 1), jnp.inf))
    np.testing.assert_array_equal(gradient, jnp.where(largest, jnp.inf, 0))


def test_max_pool_keeps_one_small_index_for_the_backward_pass():
    _, pullback = jax.vjp(lambda x: max_pool(x, 3, stride=2, padding=1), image(16, 16, 4))
    kept = [(a.shape, a.dtype) for a in jax.tree.leaves(pullback) if hasattr(a, "nbytes") and a.nbytes > 4]
    assert kept == [((8, 8, 4), jnp.uint8)]  # but for a padding's zero, and which taps see a square of the stride


def test_means_of_bfloat16_accumulate_in_float32():
    x = jnp.ones((64, 64, 2), jnp.bfloat16).at[0, 0].set(256)
    expected = jnp.bfloat16((64 * 64 + 255) / (64 * 64))
    for pooled in (global_avg_pool(x), avg_pool(x, 64)[0, 0], adaptive_avg_pool(x, 1)[0, 0]):
        assert pooled.dtype == jnp.bfloat16
        assert jnp.all(pooled == expected)


def test_global_avg_pool_is_the_mean():
    assert_close(global_avg_pool(image(5, 7, 3)), np.mean(np.asarray(image(5, 7, 3), np.float64), (0, 1)))


def test_errors_say_what_to_do():
    x = image(4, 4, 1)
    with pytest.raises(ValueError, match=r"padding=\(2, 2\) is more than half of window=\(3, 3\)"):
        max_pool(x, 3, padding=2)
    with pytest.raises(ValueError, match=r"window of \(5, 5\) .* doesn't fit into an image of \(4, 4\)"):
        avg_pool(x, 5)
    with pytest.raises(ValueError, match='padding="same" is unknown; pass "same_tf"'):
        avg_pool(x, 2, padding="same")
