"""CausalConv1d against torch's Conv1d, whole and in pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from eqzoo import nn
from tests.parity import array, assert_close, randomise

X = np.random.default_rng(0).standard_normal((11, 6)).astype(np.float32)
run = jax.jit(lambda conv, x, before, count: conv(x, before, count=count))


def pair(kernel: int, use_bias: bool) -> tuple[nn.CausalConv1d, torch.nn.Conv1d]:
    upstream = torch.nn.Conv1d(6, 6, kernel, padding=kernel - 1, groups=6, bias=use_bias)
    randomise(upstream, 0)
    conv = object.__new__(nn.CausalConv1d)
    object.__setattr__(conv, "weight", array(upstream.weight))
    object.__setattr__(conv, "bias", array(upstream.bias) if use_bias else None)
    return conv, upstream


@pytest.mark.parametrize(("kernel", "use_bias"), [(4, True), (1, True), (3, False)])
def test_output_and_gradients_are_torchs(kernel, use_bias):
    conv, upstream = pair(kernel, use_bias)
    x = torch.from_numpy(X).requires_grad_()
    theirs = upstream(x.T[None])[0, :, : len(X)].T
    theirs.sin().sum().backward()
    start = jnp.zeros((kernel - 1, 6))
    forward = lambda conv, x: jnp.sum(jnp.sin(run(conv, x, start, None)[0]))
    gradient, along_x = jax.jit(jax.grad(forward, argnums=(0, 1)))(conv, jnp.asarray(X))
    assert_close(run(conv, jnp.asarray(X), start, None)[0], theirs, 1e-6)
    assert_close(along_x, x.grad, 1e-5)
    assert_close(gradient.weight, upstream.weight.grad, 1e-5)
    assert use_bias == (gradient.bias is not None)
    assert gradient.bias is None or assert_close(gradient.bias, upstream.bias.grad, 1e-5) is None


def test_in_pieces_with_padding():
    """Also in pieces shorter than the kernel, and of nothing but padding, which leaves no trace."""
    conv, _ = pair(4, True)
    x, before, found, start = jnp.asarray(X), jnp.zeros((3, 6)), [], 0
    whole, last = run(conv, x, before, None)
    for count in (1, 0, 5, 2, 3):
        piece = jnp.concatenate([x[start : start + count], jnp.full((5 - count, 6), jnp.nan)])
        y, before = run(conv, piece, before, jnp.int32(count))
        found.append(y[:count])
        start += count
    np.testing.assert_allclose(jnp.concatenate(found), whole, rtol=1e-6)
    np.testing.assert_array_equal(before, last)
    np.testing.assert_array_equal(before, X[-3:])


def test_starts_as_torchs_does():
    conv = nn.CausalConv1d(500, 4, key=jax.random.key(0))
    upstream = torch.nn.Conv1d(500, 500, 4, groups=500)
    for ours, theirs in ((conv.weight, upstream.weight), (conv.bias, upstream.bias)):
        theirs = theirs.detach().numpy()
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(np.abs(ours).max(), np.abs(theirs).max(), rtol=0.02)
        np.testing.assert_allclose(np.std(ours), theirs.std(), rtol=0.1)
