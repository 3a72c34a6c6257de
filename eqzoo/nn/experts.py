"""Mixtures of experts: each token is seen by a few of many networks, as a router chooses."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from eqzoo.nn._init import Init
from eqzoo.nn._precision import at_least_float32
from eqzoo.nn.in_place import is_in_place
from eqzoo.nn.linear import GatedMLP, Linear
from eqzoo.nn.stack import Stack

Tree = TypeVar("Tree")


class Experts(eqx.Module):
    """The sum of `top_k` experts' outputs for each token, weighted by a softmax over all (Shazeer et al., 2017).

    The weights add up to one if they are `normalised`. No token is dropped, however many choose one expert. A single
    token reads the weights of the experts it chose and no others; several go through every expert in turn, whose output
    counts with a weight that is zero for most. That needs no memory for the tokens' way to their experts and back, and
    splits over devices as any MLP does, but multiplies by more weights than are needed.
    """

    router: Linear
    experts: Stack[GatedMLP]
    top_k: int = eqx.field(static=True)
    normalised: bool = eqx.field(static=True)

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        *,
        top_k: int,
        normalised: bool,
        activation: Callable[[Array], Array],
        init: Init | None = None,
        key: PRNGKeyArray,
    ):
        if not 1 <= top_k <= experts:
            raise ValueError(
                f"Experts: top_k={top_k} of {experts} experts can't be chosen; pass 1 <= top_k <= {experts}"
            )
        key_router, key_experts = jax.random.split(key)
        self.router = Linear(dim, experts, use_bias=False, init=init, key=key_router)
        make_expert = lambda key: GatedMLP(dim, hidden, activation=activation, init=init, key=key)
        self.experts = Stack(make_expert, experts, key=key_experts)
        self.top_k = top_k
        self.normalised = normalised

    def __call__(
        self, x: Float[Array, "tokens dim"], *, expert: Callable[[Int[Array, ""]], GatedMLP] | None = None
    ) -> tuple[Float[Array, "tokens dim"], Float[Array, "tokens experts"]]:
        """The output, and the router's logits, for `load_balancing_loss`.

        A single token asks `expert(number)` for each that it chose. A loop over layers passes one that takes the expert
        out of all layers' at once, for it would copy all experts of a layer whose weights it takes as a whole.
        """
        logits = self.router(x)
        weights, chosen = self._choose(logits)
        y = jnp.zeros(x.shape, weights.dtype)
        expert = partial(entry, self.experts.block) if expert is None else expert
        if len(x) == 1:
            add = lambda y, choice: (y + choice[0] * expert(choice[1])(x), None)
            y, _ = jax.lax.scan(add, y, (weights[0], chosen[0]))
        else:
            add = lambda expert, y, weights: (y + weights[:, None] * expert(x), None)
            spread = jnp.sum(jax.nn.one_hot(chosen, len(logits.T), dtype=weights.dtype) * weights[..., None], axis=1)
            y, _ = self.experts.scan(add, y, spread.T)
        return y.astype(x.dtype), logits

    def _choose(
        self, logits: Float[Array, "tokens experts"]
    ) -> tuple[Float[Array, "tokens top_k"], Int[Array, "tokens top_k"]]:
        weights, chosen = jax.lax.top_k(jax.nn.softmax(at_least_float32(logits)), self.top_k)
        return weights / jnp.sum(weights, axis=-1, keepdims=True) if self.normalised else weights, chosen


def entry(tree: Tree, *indices: Int[Array, ""] | int) -> Tree:
    """The entries at `indices` of the leading axes of a tree's arrays."""

    def take(leaf):
        if is_in_place(leaf):
            return leaf.at(*indices)
        if not eqx.is_array(leaf):
            return leaf
        rest = leaf.shape[len(indices) :]
        return jax.lax.dynamic_slice(leaf, (*indices, *[0] * len(rest)), (*[1] * len(indices), *rest)).reshape(rest)

    return jax.tree.map(take, tree, is_leaf=is_in_place)


def load_balancing_loss(logits: Float[Array, "*axes experts"], top_k: int) -> Float[Array, ""]:
    """`top_k` where all experts are chosen equally often, and more where some are preferred (Fedus et al., 2021).

    The axes before the experts are those of all tokens that count together: of a batch, of layers.
    """
    experts = logits.shape[-1]
    weights = jax.nn.softmax(at_least_float32(logits)).reshape(-1, experts)
    _, chosen = jax.lax.top_k(weights, top_k)
    often = jnp.mean(jnp.sum(jax.nn.one_hot(chosen, experts, dtype=weights.dtype), axis=1), axis=0)
    return experts * jnp.sum(often * jnp.mean(weights, axis=0))
