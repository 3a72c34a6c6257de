"""Depth as a scan: a run of like blocks held as one block whose arrays have a leading layer axis."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jaxtyping import Array, Float, PRNGKeyArray, PyTree, Shaped

from eqzoo._memory import aligned
from eqzoo.nn._conv_primitives import CONVOLUTIONS
from eqzoo.nn._init import is_traced
from eqzoo.nn._kept import KEPT
from eqzoo.nn.cache import KVCache
from eqzoo.nn.dropout import split_key
from eqzoo.nn.in_place import InPlace, is_in_place
from eqzoo.nn.linear import Embedding, Linear

Block = TypeVar("Block")
Tree = TypeVar("Tree")


class Stack(eqx.Module, Generic[Block]):
    """`depth` blocks of one structure, run in turn by `lax.scan`: the program stays as small as one block's.

    `block` holds all layers: each of its arrays has a leading axis of length `depth`. For the backward pass, each layer
    keeps the results of its matrix products and convolutions and recomputes the rest, which takes less time than to
    store it; with `remat` it recomputes those too and keeps nothing but its input. `unroll` layers are laid out in each
    turn of the loop. `scan_options` sets both on a whole model.
    """

    block: Block
    depth: int = eqx.field(static=True)
    remat: bool = eqx.field(static=True)
    unroll: int = eqx.field(static=True)

    def __init__(self, make_block: Callable[[PRNGKeyArray], Block], depth: int, *, key: PRNGKeyArray):
        if depth < 1:
            raise ValueError(f"Stack: depth={depth} leaves no block to run; pass depth >= 1")
        self.block = _make_blocks(make_block, jax.random.split(key, depth))
        self.depth = depth
        self.remat = False
        self.unroll = 1

    def scan(self, step: Callable[[Block, Any, Any], tuple[Any, Any]], carry: Any, xs: Any = None) -> tuple[Any, Any]:
        """`carry, y = step(block, carry, x)` for each layer in turn; `xs` and the stacked `ys` lead with the layer."""
        if any(map(is_in_place, jax.tree.leaves(self.block, is_leaf=is_in_place))):
            return self._scan_in_place(step, carry, xs)
        arrays, static = eqx.partition(self.block, eqx.is_array)

        def body(carry, layer):
            arrays, x = layer
            return step(eqx.combine(arrays, static), carry, x)

        body = jax.checkpoint(body, prevent_cse=False) if self.remat else keep_products(body)
        return jax.lax.scan(body, carry, (arrays, xs), length=self.depth, unroll=self.unroll)

    def _scan_in_place(
        self, step: Callable[[Block, Any, Any], tuple[Any, Any]], carry: Any, xs: Any
    ) -> tuple[Any, Any]:
        """The loop takes no matrices along, of which it would copy each layer's, but a layer's number."""
        in_place, (block, xs) = eqx.partition((self.block, xs), is_in_place, is_leaf=is_in_place)
        arrays, static = eqx.partition(block, eqx.is_array)

        def body(carry, layer):
            number, arrays, x = layer
            matrices = jax.tree.map(lambda node: node.at(number), in_place, is_leaf=is_in_place)
            block, x = eqx.combine(matrices, (eqx.combine(arrays, static), x), is_leaf=is_in_place)
            return step(block, carry, x)

        return jax.lax.scan(body, carry, (jnp.arange(self.depth), arrays, xs))

    def __call__(
        self, x: Float[Array, "*axes"], *, each: PyTree = None, key: PRNGKeyArray | None = None
    ) -> Float[Array, "*axes"]:
        """Run `x = block(x, key=key)` for each layer with its own key, or `block(x, each[layer], key=key)`."""
        return self.scan(_stateless_step, x, (each, _layer_keys(key, self.depth)))[0]

    def with_state(
        self, x: Float[Array, "*axes"], state: eqx.nn.State, *, each: PyTree = None, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, "*axes"], eqx.nn.State]:
        """As a call, with `x, state = block(x, state, key=key)`: each layer has its own part of the state."""
        xs = (state.substate(self.block), each, _layer_keys(key, self.depth))
        x, substate = self.scan(_stateful_step, x, xs)
        return x, state.update(substate)


_PRODUCTS_AND_NAMED = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable, jax.checkpoint_policies.save_only_these_names(KEPT)
)


def keep_products(body: Callable[..., Any]) -> Callable[..., Any]:
    """The body of a scan that keeps its products and convolutions for the backward pass and recomputes the rest."""
    return jax.checkpoint(body, prevent_cse=False, policy=_is_kept)


def _is_kept(primitive: Primitive, *operands: Any, **parameters: Any) -> bool:
    return primitive in CONVOLUTIONS or _PRODUCTS_AND_NAMED(primitive, *operands, **parameters)


def _make_blocks(make_block: Callable[[PRNGKeyArray], Block], keys: Shaped[Array, "depth ..."]) -> Block:
    if is_traced(keys):
        return eqx.filter_vmap(make_block)(keys)
    # The same one by one: eagerly, a `vmap` would compile a program for every shape it draws.
    block, stacks = None, []
    for layer, key in enumerate(keys):
        block = make_block(key)
        arrays = jax.tree.leaves(eqx.filter(block, eqx.is_array))
        stacks = stacks or [aligned((len(keys), *array.shape), array.dtype) for array in arrays]
        for stack, array in zip(stacks, arrays, strict=True):
            stack[layer] = array
    arrays, static = eqx.partition(block, eqx.is_array)
    return eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), map(jax.device_put, stacks)), static)


def _layer_keys(key: PRNGKeyArray | None, depth: int) -> Shaped[Array, "depth ..."] | None:
    return None if key is None else jax.random.split(key, depth)


def _stateless_step(block, x, layer):
    each, key = layer
    return (block(x, key=key) if each is None else block(x, each, key=key)), None


def _stateful_step(block, x, layer):
    state, each, key = layer
    return block(x, state, key=key) if each is None else block(x, state, each, key=key)


class Stage(eqx.Module, Generic[Block]):
    """A block that changes the size or the width of what it gets, then a stack of blocks that keep both.

    `each` holds what the blocks are told, in arrays with a leading axis of length `depth`.
    """

    first: Block
    rest: Stack[Block] | None

    def __init__(
        self,
        make_first: Callable[[PRNGKeyArray], Block],
        make_rest: Callable[[PRNGKeyArray], Block],
        depth: int,
        *,
        key: PRNGKeyArray,
    ):
        key_first, key_rest = jax.random.split(key)
        self.first = make_first(key_first)
        self.rest = Stack(make_rest, depth - 1, key=key_rest) if depth > 1 else None

    def __call__(
        self, x: Float[Array, "*axes"], *, each: PyTree = None, key: PRNGKeyArray | None = None
    ) -> Float[Array, "*out_axes"]:
        key_first, key_rest = split_key(key, 2)
        first, rest = _first_and_rest(each)
        x, _ = _stateless_step(self.first, x, (first, key_first))
        return x if self.rest is None else self.rest(x, each=rest, key=key_rest)

    def with_state(
        self, x: Float[Array, "*axes"], state: eqx.nn.State, *, each: PyTree = None, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, "*out_axes"], eqx.nn.State]:
        (_, x), state = self.first_and_last(x, state, each=each, key=key)
        return x, state

    def first_and_last(
        self, x: Float[Array, "*axes"], state: eqx.nn.State, *, each: PyTree = None, key: PRNGKeyArray | None = None
    ) -> tuple[tuple[Float[Array, "*out_axes"], Float[Array, "*out_axes"]], eqx.nn.State]:
        """As `with_state`, and what the first block put out beside what the last did."""
        key_first, key_rest = split_key(key, 2)
        first, rest = _first_and_rest(each)
        x, state = _stateful_step(self.first, x, (state, first, key_first))
        if self.rest is None:
            return (x, x), state
        y, state = self.rest.with_state(x, state, each=rest, key=key_rest)
        return (x, y), state


def _first_and_rest(each: PyTree) -> tuple[PyTree, PyTree]:
    return jax.tree.map(lambda array: array[0], each), jax.tree.map(lambda array: array[1:], each)


def in_place(tree: Tree) -> Tree:
    """A model, or a cache, around the same numbers, which are read where they lie (see `InPlace`).

    It is for text that is written one token at a time on one CPU: faster there than a scan, which copies each layer's
    matrices, and with weights of bfloat16 or int8 faster than with float32. `eqzoo.generation` does it by itself.
    """

    def change(node):
        if isinstance(node, KVCache):
            return KVCache(InPlace.of(node.key), InPlace.of(node.value))
        if isinstance(node, Linear | Embedding):
            return eqx.tree_at(lambda node: node.weight, node, InPlace.of(node.weight))
        return node

    return jax.tree.map(change, tree, is_leaf=lambda node: isinstance(node, KVCache | Linear | Embedding))


def scan_options(model: Tree, *, remat: bool | None = None, unroll: int | None = None) -> Tree:
    """A copy of `model` whose stacks recompute (`remat`) or lay out several layers at a time (`unroll`).

    `unroll` is cut to each stack's own depth.
    """

    def change(node):
        if not isinstance(node, Stack):
            return node
        copy = object.__new__(Stack)
        new = {
            "block": scan_options(node.block, remat=remat, unroll=unroll),
            "depth": node.depth,
            "remat": node.remat if remat is None else remat,
            "unroll": node.unroll if unroll is None else min(unroll, node.depth),
        }
        for name, value in new.items():
            object.__setattr__(copy, name, value)  # static fields are out of `eqx.tree_at`'s reach
        return copy

    return jax.tree.map(change, model, is_leaf=lambda node: isinstance(node, Stack))
