"""LoRA: low-rank adapters around the layers of a model (Hu et al., 2021, arXiv 2106.09685).

Upstream: PEFT's `LoraConfig`. Deviation: a grouped convolution is refused, for PEFT's adapter of one can't be merged.
"""

import json
import os
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree, Shaped

from eqzoo.checkpoint.errors import CheckpointError, listing
from eqzoo.checkpoint.formats import open_checkpoint, write_safetensors
from eqzoo.checkpoint.rules import Rule
from eqzoo.nn import Conv2d, Dropout, Embedding, Linear, conv2d
from eqzoo.nn._init import normal, torch_default
from eqzoo.tree.diff import check_same_structure
from eqzoo.tree.int8 import Int8
from eqzoo.tree.noise import key_for
from eqzoo.tree.paths import leaves_with_paths, map_with_path, paths
from eqzoo.tree.select import Where, select

Model = TypeVar("Model")

_LAYERS = (Linear, eqx.nn.Linear, Conv2d, Embedding)
_NAMES = "eqzoo.nn.Linear, eqzoo.nn.Conv2d, eqzoo.nn.Embedding, eqx.nn.Linear and these in int8"
_METADATA = "eqzoo_lora"
_RULES = (Rule(r"(.*)", "{0}"),)


class LoRA(eqx.Module):
    """A layer and a change to it of low rank, `layer(x) + alpha / rank * up(down(dropout(x)))`, called as the layer is.

    `down` has the shape (rank, in), of a convolution (rank, in, kh, kw), behind the axes of the stacks around it. It
    starts random and `up` at zero, and for an embedding the other way round, so that nothing changes at first. Both are
    float32 at least, also beside a weight in half precision. An embedding's tokens have nothing to drop out.

    ```python
    layer = LoRA(eqzoo.nn.Linear(6, 4, key=jax.random.key(0)), rank=2, key=jax.random.key(1))
    layer.down.shape, layer.up.shape, layer.weight.shape  # ((2, 6), (4, 2), (4, 6))
    ```
    """

    layer: Any
    down: Float[Array, "..."]
    up: Float[Array, "*layers out rank"]
    dropout: Dropout
    key: Shaped[Array, "..."] | None
    alpha: float = eqx.field(static=True)
    rank: int = eqx.field(static=True)

    def __init__(
        self,
        layer: Any,
        *,
        rank: int = 8,
        alpha: float = 8.0,
        dropout: float = 0.0,
        layer_axes: int = 0,
        key: PRNGKeyArray,
    ):
        plain = _plain(layer)
        if isinstance(layer, LoRA):
            raise ValueError("a layer that has an adapter can't get another; call `merge_lora` first")
        if not isinstance(plain, _LAYERS):
            raise ValueError(f"a {type(plain).__name__} can't be adapted; {_NAMES} can")
        if isinstance(plain, Conv2d) and plain.groups > 1:
            raise ValueError(f"a convolution with groups={plain.groups} can't be adapted; select layers without groups")
        if rank < 1:
            raise ValueError(f"rank={rank} leaves nothing to train; pass rank >= 1")
        layers, shape = plain.weight.shape[:layer_axes], plain.weight.shape[layer_axes:]
        dtype = jnp.promote_types(plain.weight.dtype, jnp.float32)
        if isinstance(plain, Embedding):
            tokens, dim = shape
            self.down = jnp.zeros((*layers, rank, tokens), dtype)
            self.up = normal(key, (*layers, dim, rank), 1.0).astype(dtype)
        else:
            out, *inputs = shape
            self.down = torch_default(key, (*layers, rank, *inputs), prod(inputs)).astype(dtype)
            self.up = jnp.zeros((*layers, out, rank), dtype)
        self.layer = layer
        self.dropout = Dropout(dropout)
        self.key = None
        self.alpha = alpha
        self.rank = rank

    def __call__(
        self, x: Float[Array, "*axes"] | Int[Array, "*axes"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "..."]:
        """Dropout takes the key it is given, or else the one from `lora_keys`."""
        y = self.layer(x)
        plain = _plain(self.layer)
        if isinstance(plain, Embedding):
            inner = self.down.T[x]
        elif isinstance(plain, Conv2d):
            x = self._dropped(x, key)
            inner = conv2d(x, self.down, stride=plain.stride, padding=plain.padding, dilation=plain.dilation)
        else:
            inner = jnp.atleast_1d(self._dropped(x, key)) @ self.down.T  # Equinox's "scalar" features have no axis
        change = self.alpha / self.rank * (inner @ self.up.T)
        return (y + change.reshape(y.shape)).astype(y.dtype)

    def _dropped(self, x: Float[Array, "*axes"], key: PRNGKeyArray | None) -> Float[Array, "*axes"]:
        key = self.key if key is None else key
        if key is None and self.dropout.rate > 0 and not self.dropout.inference:
            raise ValueError(
                f"LoRA(dropout={self.dropout.rate}) got no key in training mode: call the model as "
                f"`lora_keys(model, key)(x)`, or turn training off with `eqx.nn.inference_mode(model)`"
            )
        return self.dropout(x, key=key)

    def scores(self, x: Float[Array, "*axes dim"]) -> Float[Array, "*axes tokens_known"]:
        """Those of an embedding."""
        change = self.alpha / self.rank * (x @ self.up @ self.down)
        return (self.layer.scores(x) + change).astype(jnp.promote_types(x.dtype, self.layer.weight.dtype))

    @property
    def change(self) -> Float[Array, "..."]:
        """What the adapter adds to the weight."""
        plain = _plain(self.layer)
        kernel = "hw" if isinstance(plain, Conv2d) else ""
        out = "io" if isinstance(plain, Embedding) else "oi"
        product = jnp.einsum(
            f"...or,...ri{kernel}->...{out}{kernel}", self.up, self.down, precision=jax.lax.Precision.HIGHEST
        )
        return self.alpha / self.rank * product

    @property
    def weight(self) -> Float[Array, "..."]:
        """The layer's weight with the adapter merged into it."""
        weight = self.layer.weight
        return (weight + self.change).astype(weight.dtype)

    @property
    def bias(self) -> Float[Array, "..."] | None:
        return getattr(self.layer, "bias", None)


def lora(
    model: Model, where: Where, *, rank: int = 8, alpha: float = 8.0, dropout: float = 0.0, key: PRNGKeyArray
) -> Model:
    """The model with an adapter around every layer whose weight `where` means (see `select`); it computes what it did.

    Linear layers, convolutions and embeddings can be adapted, in int8 too. In a stack, each layer has its own adapter.

    ```python
    config = eqzoo.GPT2Config(dim=8, depth=3, heads=2, vocab=20, context=8)
    model = eqzoo.GPT2(config, key=jax.random.key(0))
    adapted = lora(model, ("*.query", "*.value"), rank=2, key=jax.random.key(1))
    adapted.blocks.block.attention.query.up.shape  # (3, 8, 2)
    ```
    """
    layers = leaves_with_paths(model, is_leaf=_is_layer)
    marks = jax.tree.leaves(select(model, where), is_leaf=_is_layer)
    can_be = {path: _plain(mark).weight for (path, _), mark in zip(layers, marks, strict=True) if _is_layer(mark)}
    options = {"rank": rank, "alpha": alpha, "dropout": dropout}
    chosen = {path: options for path, is_meant in can_be.items() if is_meant}
    if not chosen:
        raise ValueError(
            f"lora: `where` means the weight of no layer that can be adapted ({_NAMES}); "
            f"in this {type(model).__name__} these are {listing(list(can_be))}"
        )
    return _wrap(model, chosen, key)


def _wrap(model: Model, chosen: Mapping[str, Mapping[str, Any]], key: PRNGKeyArray) -> Model:
    def wrap(path, node):
        if path not in chosen:
            return node
        try:
            return LoRA(node, **chosen[path], layer_axes=path.count("[*]"), key=key_for(key, path))
        except ValueError as error:
            raise ValueError(f"lora: {path or 'the model'}: {error}") from error

    return map_with_path(wrap, model, is_leaf=_is_layer)


def lora_only(model: Model) -> tuple[Model, Model]:
    """The model in two parts, its adapters and all the rest. Gradients and the optimizer's state are of the first.

    ```python
    layer = eqzoo.nn.Linear(6, 4, key=jax.random.key(0))
    adapters, frozen = lora_only(lora(layer, "weight", dropout=0.1, key=jax.random.key(1)))
    optimizer = optax.adam(1e-3)
    opt_state = optimizer.init(adapters)

    @eqx.filter_jit
    def step(adapters, opt_state, frozen, xs, ys, key):
        def loss(adapters):
            model = eqx.combine(adapters, frozen)
            outputs = jax.vmap(lambda x, key: lora_keys(model, key)(x))(xs, jax.random.split(key, len(xs)))
            return jnp.mean((outputs - ys) ** 2)

        value, gradients = eqx.filter_value_and_grad(loss)(adapters)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return eqx.apply_updates(adapters, updates), opt_state, value

    xs, ys = jnp.ones((3, 6)), jnp.ones((3, 4))
    adapters, opt_state, value = step(adapters, opt_state, frozen, xs, ys, jax.random.key(2))
    model = eqx.combine(adapters, frozen)
    ```
    """
    _check_adapted("lora_only", model)
    mask = jax.tree.map(lambda node: _factor_mask(node) if _is_lora(node) else False, model, is_leaf=_is_lora)
    return eqx.partition(model, mask)


def _factor_mask(node: LoRA) -> PyTree[bool]:
    return eqx.tree_at(lambda mask: (mask.down, mask.up), jax.tree.map(lambda _: False, node), (True, True))


def lora_keys(model: Model, key: PRNGKeyArray) -> Model:
    """The model with a key for the dropout of each adapter, for one call: inside the loss, and one for each example.

    ```python
    layer = lora(eqzoo.nn.Linear(6, 4, key=jax.random.key(0)), "weight", dropout=0.5, key=jax.random.key(1))
    keys = jax.random.split(jax.random.key(2), 3)
    ys = jax.vmap(lambda x, key: lora_keys(layer, key)(x))(jnp.ones((3, 6)), keys)
    ```
    """
    _check_adapted("lora_keys", model)

    def give(path, node):
        if not _is_lora(node):
            return node
        keys = jax.random.split(key_for(key, path), node.up.shape[: path.count("[*]")])
        return eqx.tree_at(lambda node: node.key, node, keys, is_leaf=lambda leaf: leaf is None)

    return map_with_path(give, model, is_leaf=_is_lora)


def merge_lora(model: Model) -> Model:
    """The model without adapters: what each has learned becomes part of its layer's weight.

    The structure is that of the model before `lora`, except that a layer in int8 becomes one of floats.

    ```python
    layer = eqzoo.nn.Linear(6, 4, key=jax.random.key(0))
    merged = merge_lora(lora(layer, "weight", key=jax.random.key(1)))
    bool(eqx.tree_equal(merged, layer))  # True
    ```
    """
    _check_adapted("merge_lora", model)
    merge = lambda node: eqx.tree_at(_weight, _plain(node), node.weight) if _is_lora(node) else node
    return jax.tree.map(merge, model, is_leaf=_is_lora)


def unmerge_lora(merged: Model, adapted: Model) -> Model:
    """`merge_lora` undone, to rounding: in the layers, the merged numbers less what the adapters of `adapted` add.

    ```python
    adapted = lora(eqzoo.nn.Linear(6, 4, key=jax.random.key(0)), "weight", key=jax.random.key(1))
    again = unmerge_lora(merge_lora(adapted), adapted)
    bool(eqx.tree_equal(again, adapted))  # True
    ```
    """
    check_same_structure("unmerge_lora", merged, eqx.filter_eval_shape(merge_lora, adapted))

    def restore(node, part):
        if not _is_lora(node):
            return part
        layer = eqx.tree_at(_weight, part, (part.weight - node.change).astype(part.weight.dtype))
        return eqx.tree_at(lambda node: node.layer, node, layer)

    return jax.tree.map(restore, adapted, merged, is_leaf=_is_lora)


def save_lora(path: str | os.PathLike, model: Any) -> None:
    """Write the adapters alone to one `.safetensors` file, a tensor a layer.

    ```python
    adapted = lora(eqzoo.nn.Linear(6, 4, key=jax.random.key(0)), "weight", key=jax.random.key(1))
    save_lora("adapter.safetensors", adapted)
    ```
    """
    from eqzoo.checkpoint.apply import unfill  # which imports this package

    options = {
        place: {"rank": node.rank, "alpha": node.alpha, "dropout": node.dropout.rate}
        for place, node in leaves_with_paths(model, is_leaf=_is_lora)
        if _is_lora(node)
    }
    write_safetensors(path, unfill(lora_only(model)[0], _RULES), {_METADATA: json.dumps(options)})


def load_lora(path: str | os.PathLike, model: Model) -> Model:
    """The model with the adapters that `save_lora` wrote, around the same layers.

    ```python
    layer = eqzoo.nn.Linear(6, 4, key=jax.random.key(0))
    adapted = lora(layer, "weight", key=jax.random.key(1))
    save_lora("adapter.safetensors", adapted)
    bool(eqx.tree_equal(load_lora("adapter.safetensors", layer), adapted))  # True
    ```
    """
    from eqzoo.checkpoint.apply import fill, plan  # which imports this package

    tensors, metadata = open_checkpoint(path)
    if _METADATA not in metadata:
        raise CheckpointError(f"{path} holds no adapters that `save_lora` wrote; `eqzoo.load` reads whole models")
    label = f"this {type(model).__name__}"
    layers, treedef = jax.tree.flatten(model, is_leaf=_is_layer)
    places = paths(model, is_leaf=_is_layer)
    try:
        options = {place: _options(said) for place, said in json.loads(metadata[_METADATA]).items()}
        unknown = [place for place in options if place not in places]
        if unknown:
            raise ValueError(f"it has no {listing(unknown)}; load it into the model the adapters were made for")
        # Shapes only: what the metadata claims is allocated once the file's tensors bear it out.
        adapted = eqx.filter_eval_shape(lambda model: _wrap(model, options, jax.random.key(0)), model)
        adapters, rest = lora_only(adapted)
        described, held = map(_numbers, (jax.tree.leaves(adapters), tensors.values()))
        if described > 100 * held:
            raise ValueError(f"adapters of {described} numbers are described, but it holds {held}; save it again")
    except Exception as error:  # whatever goes wrong with options that came out of a file
        raise CheckpointError(f"{path} does not fit {label}: {error}"[:1000]) from error
    fit = plan(adapters, tensors, _RULES)
    if fit.problems:
        raise CheckpointError(fit.report(os.fspath(path), label))
    dtypes = {place: tensors[name].dtype for name, _, slots in fit.moves for place, _ in slots}
    adapters = map_with_path(lambda place, leaf: jax.ShapeDtypeStruct(leaf.shape, dtypes[place]), adapters)
    adapted = eqx.combine(fill(adapters, tensors, fit), rest)
    restored = [
        eqx.tree_at(lambda part: part.layer, part, layer) if place in options else layer
        for place, layer, part in zip(places, layers, treedef.flatten_up_to(adapted), strict=True)
    ]
    return jax.tree.unflatten(treedef, restored)


def _numbers(tensors: Iterable[Any]) -> int:
    return sum(prod(tensor.shape) for tensor in tensors)


def _options(said: Mapping[str, Any]) -> dict[str, Any]:
    return {"rank": int(said["rank"]), "alpha": float(said["alpha"]), "dropout": float(said["dropout"])}


def _check_adapted(name: str, model: Any) -> None:
    if not any(map(_is_lora, jax.tree.leaves(model, is_leaf=_is_lora))):
        raise ValueError(f"{name}: this {type(model).__name__} has no adapters; make them with `lora(model, where)`")


def _plain(layer: Any) -> Any:
    """The layer inside of its wrappers."""
    while isinstance(layer, LoRA | Int8):
        layer = layer.layer
    return layer


def _is_lora(node: Any) -> bool:
    return isinstance(node, LoRA)


def _is_layer(node: Any) -> bool:
    return isinstance(node, (LoRA, Int8, *_LAYERS))


def _weight(layer: Any) -> Any:
    return layer.weight
