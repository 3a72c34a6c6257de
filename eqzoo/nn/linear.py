"""Matrix products over the last axis: linear layers, embeddings, and the two-layer networks made of them."""

from collections.abc import Callable

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from eqzoo.nn._init import Init, normal, weight_and_bias
from eqzoo.nn.dropout import Dropout, split_key
from eqzoo.nn.in_place import InPlace
from eqzoo.nn.norm import LayerNorm, RMSNorm

Norm = Callable[[int], LayerNorm | RMSNorm]


def product(weight: Float[Array, "out in"] | InPlace, x: Float[Array, "*axes in"]) -> Float[Array, "*axes out"]:
    """`x @ weight.T` over the last axis of `x`."""
    if x.size > x.shape[-1]:
        return x @ (weight.read() if isinstance(weight, InPlace) else weight).T
    # For one row, `weight @ x` reads the weights in their own order: 2.8 times faster on CPU.
    row = x.reshape(-1)
    return (weight.times(row) if isinstance(weight, InPlace) else weight @ row).reshape(*x.shape[:-1], -1)


class Linear(eqx.Module):
    """`x @ weight.T + bias` over the last axis of an array with any leading axes.

    With `init`, that draws the weight and the bias starts at zero; without, both start as torch's do.
    """

    weight: Float[Array, "out in"] | InPlace
    bias: Float[Array, " out"] | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        init: Init | None = None,
        key: PRNGKeyArray,
    ):
        self.weight, self.bias = weight_and_bias(key, (out_features, in_features), init, use_bias=use_bias)

    def __call__(self, x: Float[Array, "*axes in"]) -> Float[Array, "*axes out"]:
        y = product(self.weight, x)
        return y if self.bias is None else y + self.bias


class Embedding(eqx.Module):
    """A table of vectors, one per token."""

    weight: Float[Array, "tokens_known dim"] | InPlace

    def __init__(self, size: int, dim: int, *, std: float = 0.02, key: PRNGKeyArray):
        self.weight = normal(key, (size, dim), std)

    def __call__(self, tokens: Int[Array, "*axes"]) -> Float[Array, "*axes dim"]:
        return self.weight.rows(tokens) if isinstance(self.weight, InPlace) else self.weight[tokens]

    def scores(self, x: Float[Array, "*axes dim"]) -> Float[Array, "*axes tokens_known"]:
        """The product with each token's vector: the logits of a model whose head is tied to its embedding."""
        return product(self.weight, x)


class MLP(eqx.Module):
    """Two linear layers with an activation, and perhaps a norm made by `norm`, between them."""

    fc1: Linear
    norm: LayerNorm | RMSNorm | None
    fc2: Linear
    dropout: Dropout
    activation: Callable[[Array], Array] = eqx.field(static=True)

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        activation: Callable[[Array], Array],
        use_bias: bool = True,
        norm: Norm | None = None,
        dropout: float = 0.0,
        init: Init | None = None,
        key: PRNGKeyArray,
    ):
        key1, key2 = jax.random.split(key)
        self.fc1 = Linear(dim, hidden, use_bias=use_bias, init=init, key=key1)
        self.norm = None if norm is None else norm(hidden)
        self.fc2 = Linear(hidden, dim, use_bias=use_bias, init=init, key=key2)
        self.dropout = Dropout(dropout)
        self.activation = activation

    def __call__(self, x: Float[Array, "*axes dim"], *, key: PRNGKeyArray | None = None) -> Float[Array, "*axes dim"]:
        key_hidden, key_out = split_key(key, 2)
        hidden = self.dropout(self.activation(self.fc1(x)), key=key_hidden)
        hidden = hidden if self.norm is None else self.norm(hidden)
        return self.dropout(self.fc2(hidden), key=key_out)


class GatedMLP(eqx.Module):
    """`down(activation(gate(x)) * up(x))`: SwiGLU with SiLU, GeGLU with GELU (Shazeer, 2020).

    With `norm`, the product is normalised (sub-LN; EVA-02).
    """

    gate: Linear
    up: Linear
    norm: LayerNorm | RMSNorm | None
    down: Linear
    dropout: Dropout
    activation: Callable[[Array], Array] = eqx.field(static=True)

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        activation: Callable[[Array], Array],
        use_bias: bool = False,
        norm: Norm | None = None,
        dropout: float = 0.0,
        init: Init | None = None,
        key: PRNGKeyArray,
    ):
        key_gate, key_up, key_down = jax.random.split(key, 3)
        self.gate = Linear(dim, hidden, use_bias=use_bias, init=init, key=key_gate)
        self.up = Linear(dim, hidden, use_bias=use_bias, init=init, key=key_up)
        self.norm = None if norm is None else norm(hidden)
        self.down = Linear(hidden, dim, use_bias=use_bias, init=init, key=key_down)
        self.dropout = Dropout(dropout)
        self.activation = activation

    def __call__(self, x: Float[Array, "*axes dim"], *, key: PRNGKeyArray | None = None) -> Float[Array, "*axes dim"]:
        key_hidden, key_out = split_key(key, 2)
        hidden = self.dropout(self.activation(self.gate(x)) * self.up(x), key=key_hidden)
        hidden = hidden if self.norm is None else self.norm(hidden)
        return self.dropout(self.down(hidden), key=key_out)
