"""Convolution over tokens."""

import operator
from functools import reduce

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from eqzoo.nn._init import Init, weight_and_bias


class CausalConv1d(eqx.Module):
    """A depthwise convolution of which each token sees itself and the `kernel - 1` tokens before it.

    The weight keeps the layout of `torch.nn.Conv1d` with as many groups as channels. With `init`, that draws the weight
    and the bias starts at zero; without, both start as torch's do.
    """

    weight: Float[Array, "channels 1 kernel"]
    bias: Float[Array, " channels"] | None

    def __init__(
        self, channels: int, kernel: int, *, use_bias: bool = True, init: Init | None = None, key: PRNGKeyArray
    ):
        self.weight, self.bias = weight_and_bias(key, (channels, 1, kernel), init, use_bias=use_bias)

    def __call__(
        self,
        x: Float[Array, "tokens channels"],
        before: Float[Array, "kernel_less_one channels"],
        *,
        count: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "tokens channels"], Float[Array, "kernel_less_one channels"]]:
        """The convolved tokens, given those `before` them (zeros, if there are none), and what is `before` the next.

        Of the tokens, the first `count` (by default, all) are real, and padding follows them.
        """
        tokens, kernel = x.shape[0], self.weight.shape[-1]
        inputs = jnp.concatenate([before.astype(x.dtype), x])
        y = reduce(operator.add, (inputs[k : k + tokens] * self.weight[:, 0, k] for k in range(kernel)))
        last = jax.lax.dynamic_slice_in_dim(inputs, tokens if count is None else count, kernel - 1)
        return y if self.bias is None else y + self.bias, last.astype(before.dtype)
