"""Weights stored as int8: a quarter of float32's bytes, computed with as floats."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree
from jaxtyping import Int8 as Int8Array

from eqzoo.nn import Conv2d, Embedding, Linear
from eqzoo.nn._precision import at_least_float32
from eqzoo.nn.in_place import is_in_place
from eqzoo.nn.linear import product
from eqzoo.tree.paths import leaves_with_paths
from eqzoo.tree.select import Where, select

Tree = TypeVar("Tree")

_LAYERS = (Linear, Conv2d, Embedding, eqx.nn.Linear)


class Int8(eqx.Module):
    """A layer whose weight is stored as int8, with a `scale` for each output channel (of an embedding, each token).

    A weight is rounded to the nearest of 255 steps between minus and plus the channel's largest, so it is off by half
    a scale at most. The layer computes with `layer.weight * scale`, in the dtype that its own weight had: the scale's.

    ```python
    layer = Int8(eqzoo.nn.Linear(4, 2, key=jax.random.key(0)))
    layer.layer.weight.dtype, layer.scale.shape  # (dtype('int8'), (2, 1))
    layer(jnp.ones(4)).shape  # (2,)
    ```
    """

    layer: Any
    scale: Float[Array, "..."]

    def __init__(self, layer: Any):
        steps, self.scale = _rounded(layer.weight, (-3, -2, -1) if isinstance(layer, Conv2d) else (-1,))
        self.layer = _with_weight(layer, steps)

    @property
    def weight(self) -> Float[Array, "..."]:
        steps = self.layer.weight.read() if is_in_place(self.layer.weight) else self.layer.weight
        return (steps * at_least_float32(self.scale)).astype(self.scale.dtype)

    @property
    def bias(self) -> Float[Array, "..."] | None:
        return self.layer.bias

    def __call__(self, *args: Any, **kwargs: Any) -> Float[Array, "..."]:
        return (self._in_place() if is_in_place(self.layer.weight) else _dequantized(self))(*args, **kwargs)

    def scores(self, x: Float[Array, "*axes dim"]) -> Float[Array, "*axes tokens_known"]:
        """Those of an embedding."""
        return self._scaled(x) if is_in_place(self.layer.weight) else product(self.weight, x)

    def _in_place(self) -> Callable[..., Float[Array, "..."]]:
        """The layer, computing with the steps as they are and scaling what comes out."""
        if isinstance(self.layer, Embedding):
            return lambda tokens: (self.layer.weight.rows(tokens) * self.scale[tokens]).astype(self.scale.dtype)
        return lambda x: self._scaled(x) if self.bias is None else self._scaled(x) + self.bias

    def _scaled(self, x: Float[Array, "*axes in"]) -> Float[Array, "*axes out"]:
        y = product(self.layer.weight, at_least_float32(x)) * self.scale[:, 0]
        return y.astype(jnp.promote_types(x.dtype, self.scale.dtype))


@partial(jax.jit, static_argnums=1)
def _rounded(
    weight: Float[Array, "..."], inputs: tuple[int, ...]
) -> tuple[Int8Array[Array, "..."], Float[Array, "..."]]:
    """The weight in steps of a scale, and the scale, which is one for all `inputs` axes."""
    wide = at_least_float32(weight)
    scale = (jnp.max(jnp.abs(wide), axis=inputs, keepdims=True) / 127).astype(weight.dtype)
    # The steps are of the scale as it is stored, so that its own rounding is no error of the weights. Without the
    # barrier, XLA would skip the rounding to bfloat16.
    scale = jax.lax.optimization_barrier(jnp.where(scale == 0, 1, scale))
    return jnp.clip(jnp.round(wide / scale), -127, 127).astype(jnp.int8), scale


def quantize(model: Tree, where: Where) -> Tree:
    """The model with the layers whose weight `where` selects (see `select`; `"*"` means all) wrapped in `Int8`.

    Outputs move by one or two hundredths. The int8 weights have no gradient; the rest can be trained as before, or with
    `lora`. `eqzoo.save` writes such a model and `eqzoo.load` reads it back.

    ```python
    model, _ = eqzoo.create("mlp", key=jax.random.key(0))
    small = quantize(model, eqzoo.nn.Linear)
    small.head.layer.weight.dtype  # dtype('int8')
    small(jnp.ones((28, 28, 1))).shape  # (10,)
    ```
    """
    chosen = select(model, where)
    stored = {f"{path}.layer.weight" for path in stored_as_int8(model)}
    again = [path for path, is_chosen in leaves_with_paths(chosen) if is_chosen and path in stored]
    if again:
        raise ValueError(f"quantize: {again[0]} is int8 already; leave it out of `where`, or `dequantize` first")
    result = quantize_chosen(model, chosen)
    if len(stored_as_int8(result)) == len(stored):
        raise ValueError(
            f"quantize: nothing selected is the weight of an eqzoo.nn.Linear, Conv2d or Embedding, or an "
            f"eqx.nn.Linear; here one could quantize {_examples(model)}"
        )
    return result


def dequantize(model: Tree) -> Tree:
    """`quantize` undone: every layer has a float weight again, rounded.

    ```python
    model, _ = eqzoo.create("mlp", key=jax.random.key(0))
    small = quantize(model, "head")
    rounded = dequantize(small)
    jnp.all(jnp.abs(rounded.head.weight - model.head.weight) <= 0.501 * small.head.scale)  # Array(True, dtype=bool)
    ```
    """
    return jax.tree.map(lambda node: _dequantized(node) if _is_int8(node) else node, model, is_leaf=_is_int8)


def stored_as_int8(model: PyTree) -> list[str]:
    """The path of each layer whose weight is stored as int8."""
    return [path for path, node in leaves_with_paths(model, is_leaf=_is_int8) if _is_int8(node)]


def quantize_chosen(model: Tree, chosen: PyTree[bool]) -> Tree:
    """The model, or its shapes, with the layers whose weight is true in `chosen` wrapped in `Int8`."""

    def wrap(node, chosen):
        if not isinstance(node, _LAYERS) or not chosen.weight:
            return node
        return eqx.filter_eval_shape(Int8, node) if isinstance(node.weight, jax.ShapeDtypeStruct) else Int8(node)

    return jax.tree.map(wrap, model, chosen, is_leaf=lambda node: isinstance(node, _LAYERS))


def _with_weight(layer: Any, weight: Array) -> Any:
    return eqx.tree_at(lambda layer: layer.weight, layer, weight)


def _dequantized(node: Int8) -> Any:
    return _with_weight(node.layer, node.weight)


def _is_int8(node: Any) -> bool:
    return isinstance(node, Int8)


def _examples(model: PyTree) -> str:
    is_layer = lambda node: isinstance(node, (*_LAYERS, Int8))
    found = [path for path, node in leaves_with_paths(model, is_leaf=is_layer) if isinstance(node, _LAYERS)]
    return (", ".join(found[:5]) or "nothing") + (f" and {len(found) - 5} more" if len(found) > 5 else "")
