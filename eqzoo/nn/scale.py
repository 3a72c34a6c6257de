"""Layers that rescale: a learned factor per channel, and one computed from the image itself."""

from collections.abc import Callable
from math import log2

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo.nn._init import Init, constant, weight_and_bias
from eqzoo.nn.conv import Conv2d, conv2d
from eqzoo.nn.pool import global_avg_pool


class LayerScale(eqx.Module):
    """A learned factor per channel on a residual branch (Touvron et al., 2021)."""

    weight: Float[Array, " dim"]

    def __init__(self, dim: int, init: float):
        self.weight = constant(dim, init)

    def __call__(self, x: Float[Array, "*axes dim"]) -> Float[Array, "*axes dim"]:
        return x * self.weight.astype(x.dtype)


def round_channels(channels: int | float, divisor: int = 8, *, limit: float = 0.0) -> int:
    """The multiple of `divisor` nearest to `channels`, at least one; the next if that is below `limit` of them."""
    nearest = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return nearest if nearest >= limit * channels else nearest + divisor


class SqueezeExcite(eqx.Module):
    """Rescales each channel by a gate computed from the global average (Hu et al., 2018)."""

    fc1: Conv2d
    fc2: Conv2d
    activation: Callable[[Array], Array] = eqx.field(static=True)
    gate: Callable[[Array], Array] = eqx.field(static=True)

    def __init__(
        self,
        channels: int,
        hidden: int,
        *,
        activation: Callable[[Array], Array] = jax.nn.relu,
        gate: Callable[[Array], Array] = jax.nn.sigmoid,
        init: Init | None = None,
        key: PRNGKeyArray,
    ):
        key1, key2 = jax.random.split(key)
        self.fc1 = Conv2d(channels, hidden, 1, init=init, key=key1)
        self.fc2 = Conv2d(hidden, channels, 1, init=init, key=key2)
        self.activation = activation
        self.gate = gate

    def __call__(self, x: Float[Array, "height width channels"]) -> Float[Array, "height width channels"]:
        pooled = global_avg_pool(x)[None, None]
        return x * self.gate(self.fc2(self.activation(self.fc1(pooled))))


class EfficientChannelAttention(eqx.Module):
    """Rescales each channel by a gate computed from its own and its neighbours' global averages (Wang et al., 2019).

    How many neighbours follows from the number of channels. The weight is that of torch's `Conv1d`.
    """

    weight: Float[Array, "1 1 size"]

    def __init__(self, channels: int, *, key: PRNGKeyArray):
        half = int((log2(channels) + 1) / 2)
        size = max(half // 2 * 2 + 1, 3)
        self.weight, _ = weight_and_bias(key, (1, 1, size), None, use_bias=False)

    def __call__(self, x: Float[Array, "height width channels"]) -> Float[Array, "height width channels"]:
        column = global_avg_pool(x)[:, None, None]
        scores = conv2d(column, self.weight[..., None], padding=(self.weight.shape[2] // 2, 0))
        return x * jax.nn.sigmoid(scores[:, 0, 0])
