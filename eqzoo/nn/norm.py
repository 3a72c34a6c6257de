"""Normalisation over the channels (last axis). Statistics are computed in float32 whatever the input's dtype."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from eqzoo.nn._init import constant
from eqzoo.nn._kept import KEPT
from eqzoo.nn._precision import at_least_float32


def _row_mean(x: Float[Array, "*axes dim"], *, spread: bool = False) -> Float[Array, "*axes columns"]:
    # XLA:CPU recomputes a reduction in every operation that uses it, but not a matmul. Spread over all columns, the
    # mean's transpose is a matmul as well. Elsewhere a matmul might round to tensor-core precision.
    dim = x.shape[-1]
    columns = dim if spread else 1
    return jax.lax.platform_dependent(
        x,
        cpu=lambda x: x @ jnp.ones((dim, 1), x.dtype) @ jnp.full((1, columns), 1 / dim, x.dtype),
        default=lambda x: jnp.broadcast_to(jnp.mean(x, axis=-1, keepdims=True), (*x.shape[:-1], columns)),
    )


def _scaled(
    x: Float[Array, "*axes dim"], eps: float, centre: bool
) -> tuple[Float[Array, "*axes dim"], Float[Array, "*axes 1"]]:
    """`x` divided by its root mean square, and the factor that did it; `centre` takes the mean off first."""
    centred = x - _row_mean(x) if centre else x
    factor = jax.lax.rsqrt(_row_mean(centred * centred) + eps)
    return centred * factor, factor


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _normalise(x: Float[Array, "*axes dim"], eps: float, centre: bool) -> Float[Array, "*axes dim"]:
    return _scaled(x, eps, centre)[0]


@_normalise.defjvp
def _normalise_jvp(
    eps: float, centre: bool, primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Float[Array, "*axes dim"], Float[Array, "*axes dim"]]:
    # Shorter than what autodiff derives, and its transpose too: four times faster on CPU.
    (x,), (dx,) = primals, tangents
    y, factor = _scaled(x, eps, centre)
    dy = dx - y * _row_mean(y * dx, spread=True)
    if centre:
        dy = dy - _row_mean(dx, spread=True)
    return y, dy * factor


class LayerNorm(eqx.Module):
    """Layer normalisation over the last axis (Ba et al., 2016)."""

    weight: Float[Array, " dim"]
    bias: Float[Array, " dim"] | None
    eps: float = eqx.field(static=True)

    def __init__(self, dim: int, *, eps: float = 1e-5, use_bias: bool = True):
        self.weight = constant(dim, 1.0)
        self.bias = constant(dim, 0.0) if use_bias else None
        self.eps = eps

    def __call__(self, x: Float[Array, "*axes dim"]) -> Float[Array, "*axes dim"]:
        y = _normalise(at_least_float32(x), self.eps, True) * self.weight
        return (y if self.bias is None else y + self.bias).astype(x.dtype)


class RMSNorm(eqx.Module):
    """Root-mean-square normalisation over the last axis (Zhang and Sennrich, 2019), or over each of its `groups`.

    With an `offset`, the weight is what comes on top of it: from 1, Gemma's go up and down.
    """

    weight: Float[Array, " dim"]
    eps: float = eqx.field(static=True)
    offset: float = eqx.field(static=True)
    groups: int = eqx.field(static=True)

    def __init__(self, dim: int, *, eps: float = 1e-6, offset: float = 0.0, groups: int = 1):
        if dim % groups:
            raise ValueError(f"RMSNorm: dim={dim} is not a multiple of groups={groups}; choose a divisor")
        self.weight = constant(dim, 1 - offset)
        self.eps = eps
        self.offset = offset
        self.groups = groups

    def __call__(self, x: Float[Array, "*axes dim"]) -> Float[Array, "*axes dim"]:
        groups = at_least_float32(x).reshape(*x.shape[:-1], self.groups, -1)
        y = _normalise(groups, self.eps, False).reshape(x.shape)
        scale = self.offset + at_least_float32(self.weight) if self.offset else self.weight
        return (y * scale).astype(x.dtype)


class GroupNorm(eqx.Module):
    """Group normalisation (Wu and He, 2018): statistics over all positions and each group of channels."""

    weight: Float[Array, " channels"]
    bias: Float[Array, " channels"]
    groups: int = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    def __init__(self, groups: int, channels: int, *, eps: float = 1e-5):
        if channels % groups:
            raise ValueError(f"GroupNorm: channels={channels} is not a multiple of groups={groups}; choose a divisor")
        self.weight = constant(channels, 1.0)
        self.bias = constant(channels, 0.0)
        self.groups = groups
        self.eps = eps

    def __call__(self, x: Float[Array, "*axes channels"]) -> Float[Array, "*axes channels"]:
        grouped = at_least_float32(x).reshape(-1, self.groups, x.shape[-1] // self.groups)
        mean = jnp.mean(grouped, axis=(0, 2), keepdims=True)
        variance = jnp.mean((grouped - mean) ** 2, axis=(0, 2), keepdims=True)
        y = ((grouped - mean) * jax.lax.rsqrt(variance + self.eps)).reshape(x.shape)
        return (y * self.weight + self.bias).astype(x.dtype)


class RunningStats(eqx.Module):
    """What a batch norm remembers; `count` is torch's `num_batches_tracked`."""

    mean: Float[Array, " channels"]
    var: Float[Array, " channels"]
    count: Int[Array, ""]


class BatchNorm(eqx.Module):
    """Batch normalisation (Ioffe and Szegedy, 2015) with torch's semantics.

    In training: normalises by the statistics of the batch (all positions, and all examples of the `vmap` axis named
    "batch") and moves the running mean and the running unbiased variance towards them. In inference mode: normalises
    by the running statistics.
    """

    weight: Float[Array, " channels"]
    bias: Float[Array, " channels"]
    running: eqx.nn.StateIndex[RunningStats]
    inference: bool
    eps: float = eqx.field(static=True)
    momentum: float = eqx.field(static=True)

    def __init__(self, channels: int, *, eps: float = 1e-5, momentum: float = 0.1):
        self.weight = constant(channels, 1.0)
        self.bias = constant(channels, 0.0)
        self.running = eqx.nn.StateIndex(
            RunningStats(constant(channels, 0.0), constant(channels, 1.0), jnp.zeros((), jnp.int32))
        )
        self.inference = False
        self.eps = eps
        self.momentum = momentum

    def __call__(
        self, x: Float[Array, "*axes channels"], state: eqx.nn.State
    ) -> tuple[Float[Array, "*axes channels"], eqx.nn.State]:
        running = state.get(self.running)
        if self.inference:
            mean, var = at_least_float32(running.mean), at_least_float32(running.var)
        else:
            mean, var, size = _batch_statistics(x)
            unbiased = var * (size / (size - 1))
            stats = RunningStats(self._moved(running.mean, mean), self._moved(running.var, unbiased), running.count + 1)
            state = state.set(self.running, stats)
        scale = jax.lax.rsqrt(var + self.eps) * self.weight
        return (x * scale + (self.bias - mean * scale)).astype(x.dtype), state

    def _moved(self, old: Float[Array, " channels"], new: Float[Array, " channels"]) -> Float[Array, " channels"]:
        return (old + self.momentum * (jax.lax.stop_gradient(new) - old)).astype(old.dtype)


def _batch_statistics(
    x: Float[Array, "*axes channels"],
) -> tuple[Float[Array, " channels"], Float[Array, " channels"], int]:
    """Mean, biased variance, and the number of values behind each."""
    try:
        batch = jax.lax.axis_size("batch")
    except NameError as error:
        raise ValueError(
            'BatchNorm in training mode found no batch: call the model under `jax.vmap(..., axis_name="batch")`, '
            "or turn training off with `eqx.nn.inference_mode(model)`"
        ) from error
    size = batch * (x.size // x.shape[-1])
    if size == 1:
        raise ValueError(
            "BatchNorm in training mode got one value per channel, whose variance is undefined: "
            "use a larger batch or image, or `eqx.nn.inference_mode(model)`"
        )
    wide = at_least_float32(x)
    axes = tuple(range(x.ndim - 1))
    # In two passes: `E[x^2] - E[x]^2` is off by 1e-5 where a channel's mean is ten times its deviation.
    mean = checkpoint_name(jax.lax.pmean(jnp.mean(wide, axes), "batch"), KEPT)
    var = checkpoint_name(jax.lax.pmean(jnp.mean((wide - mean) ** 2, axes), "batch"), KEPT)
    return mean, var, size
