"""Which leaves an optimizer treats how: what decays, what learns at which rate, what learns at all."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, PyTree

from eqzoo import nn
from eqzoo.tree.paths import leaves_with_paths, map_with_path
from eqzoo.tree.select import Where, is_float, select

_SCALES = (
    *(nn.BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LayerScale, nn.RelativeBias, nn.ContinuousBias),
    *(eqx.nn.BatchNorm, eqx.nn.GroupNorm, eqx.nn.LayerNorm, eqx.nn.RMSNorm, eqx.nn.PReLU),
)

_POSITIONS = r"frequencies|(\w+_)?pos(ition(s|al)?)?(_(emb\w*|encodings?|bias\w*|table|[hw]))?|relative_\w*bias\w*|wpe"
_NO_MATRIX = re.compile(
    r"(.*\.)?("
    r"b(_\w+)?|(\w+_)?bias(es)?(_\w+)?"  # b, b_out; bias, bias_n, in_proj_bias
    r"|(\w+_)?(scales?|gamma|beta)"
    r"|(\w+_)?(tokens?|registers?)"  # the parameter itself: `mlp_tokens.weight` is a matrix
    rf"|({_POSITIONS})(\.weight)?"
    r"|A_log"  # how quickly a state space forgets
    r")(_?\d+)?(\.\d+)*"  # b1, gamma_2, biases.0
)


def decay_mask(tree: PyTree) -> PyTree[bool]:
    """True for what weight decay should shrink: the weights of matrix products, convolutions and embeddings.

    Biases, the scales of norms and layers, tokens and tables of positions, or what computes these, stay as they are,
    also where a stack or an ensemble gives them more axes: modules tell them by type, other trees by name. optax calls
    it by itself:

    ```python
    decay_mask([{"W": jnp.ones((2, 3)), "b": jnp.ones(2)}])  # [{'W': True, 'b': False}]
    optimizer = optax.adamw(1e-3, weight_decay=0.05, mask=decay_mask)
    ```
    """

    def decays(path: str, node: Any) -> Any:
        if isinstance(node, _SCALES):
            return jax.tree.map(lambda leaf: False, node)
        return is_float(node) and np.ndim(node) - path.count("[*]") > 1 and not _NO_MATRIX.fullmatch(path)

    return map_with_path(decays, tree, is_leaf=lambda node: isinstance(node, _SCALES))


def labels(tree: PyTree, rules: Mapping[str, Where]) -> PyTree[str]:
    """A label for each float array, that of the first rule which means it, for `optax.multi_transform`.

    Everything else is None, so that the labels of a model fit `eqx.filter(model, eqx.is_inexact_array)`. Give them to
    optax as a function: labels in the shape of a model can be called like one, and optax would.

    ```python
    params = {"body": {"W": jnp.ones((2, 2)), "b": jnp.ones(2)}, "head": jnp.ones(2)}
    groups = labels(params, {"fast": "head", "slow": "*"})
    groups  # {'body': {'W': 'slow', 'b': 'slow'}, 'head': 'fast'}
    optimizer = optax.multi_transform({"fast": optax.adam(1e-3), "slow": optax.adam(1e-4)}, lambda _: groups)
    ```
    """
    masks = {label: jax.tree.leaves(select(tree, where)) for label, where in rules.items()}
    found, without = [], []
    for index, (path, leaf) in enumerate(leaves_with_paths(tree)):
        label = next((label for label, mask in masks.items() if mask[index]), None)
        found.append(label if _is_float_array(leaf) else None)
        if label is None and _is_float_array(leaf):
            without.append(path)
    if without:
        names = ", ".join(without[:3]) + (f" and {len(without) - 3} more" if len(without) > 3 else "")
        raise ValueError(f'labels: no rule selects {names}; end the rules with one for all others: {{"rest": "*"}}')
    return jax.tree.unflatten(jax.tree.structure(tree), found)


def layer_scales(model: PyTree, decay: float) -> PyTree[float | Float[np.ndarray, "_ ..."]]:
    """Layer-wise learning-rate decay (Howard and Ruder, 2018): `decay ** (last - layer)` for each float array.

    A layer is a block: one of a `Stack`, or of a list or tuple at the top. All before the first block is a layer too,
    and so is all after the last; but a final norm, the field `norm`, belongs to the last block. Within a stack, the
    scale is an array that broadcasts over its leaf. (For an ensemble, take the scales of one member: they fit.)

    ```python
    params = [{"W": jnp.ones((2, 2))}, {"W": jnp.ones((2, 2))}]
    scales = layer_scales(params, 0.5)
    scales  # [{'W': 0.5}, {'W': 1.0}]
    scale_updates = optax.stateless(lambda updates, params: jax.tree.map(lambda u, s: u * s, updates, scales))
    optimizer = optax.chain(optax.adamw(1e-3), scale_updates)
    ```
    """
    if not 0 < decay <= 1:
        raise ValueError(f"layer_scales: decay={decay} does not shrink towards the first layer; pass 0 < decay <= 1")
    parts = _parts(model)
    total = sum(part.blocks for part in parts)
    if not total:
        raise ValueError(
            f"layer_scales: a {type(model).__name__} has no layers that follow each other, neither an eqzoo.nn.Stack "
            f"nor a field that is a list or tuple of them; pass the part that has"
        )
    firsts, blocks = [], 0
    for part in parts:
        is_stem = not (blocks or part.blocks)
        is_final_norm = blocks == total and part.name == "norm"
        firsts.append(blocks if is_stem or is_final_norm else blocks + 1)
        blocks += part.blocks
    last = max([total, *(first for part, first in zip(parts, firsts, strict=True) if _has_floats(part.tree))])
    scales = []
    for part, first in zip(parts, firsts, strict=True):
        scales += [_scale(path, leaf, part, decay, last - first) for path, leaf in leaves_with_paths(part.tree)]
    return jax.tree.unflatten(jax.tree.structure(model), scales)


class _Part(NamedTuple):
    """A part of a model, the field it is, and how many blocks it holds: 0 if it is none, as a stem or a head."""

    tree: PyTree
    name: str
    blocks: int


def _parts(node: PyTree, name: str = "", *, is_block: bool = False, is_open: bool = True) -> list[_Part]:
    """All of `node` in order: taken apart where it is open or holds stacks, as a stage does; otherwise one part."""
    if isinstance(node, nn.Stack):
        return [_Part(node, name, node.depth)]
    if not (is_open or _holds_stack(node)):
        return [_Part(node, name, int(is_block and _has_floats(node)))]
    if type(node) is dict:
        raise ValueError(
            "layer_scales: a dict has no order of layers, for JAX sorts its keys; pass a list, a tuple or an eqx.Module"
        )
    is_run = type(node) in (list, tuple)
    children, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
    parts = []
    for (key_path, child), (_, after) in zip(children, [*children[1:], ((), None)], strict=True):
        parts += _parts(
            child,
            jax.tree_util.keystr(key_path, simple=True),
            is_block=is_run or (isinstance(after, nn.Stack) and type(after.block) is type(child)),
            is_open=is_open and not is_run and type(child) in (list, tuple),
        )
    return parts


def _holds_stack(node: PyTree) -> bool:
    is_stack = lambda node: isinstance(node, nn.Stack)
    return any(map(is_stack, jax.tree.leaves(node, is_leaf=is_stack)))


def _has_floats(node: PyTree) -> bool:
    return any(map(_is_float_array, jax.tree.leaves(node)))


def _scale(path: str, leaf: Any, part: _Part, decay: float, distance: int) -> float | Float[np.ndarray, "_ ..."] | None:
    """The scale of a leaf whose layer, or first layer, is `distance` layers from the last."""
    if not _is_float_array(leaf):
        return None
    if not isinstance(part.tree, nn.Stack):
        return decay**distance
    if leaf.shape[:1] != (part.blocks,):
        raise ValueError(
            f"layer_scales: {part.name}{path} of shape {leaf.shape} does not lead with its {part.blocks} layers; "
            f"of an ensemble, pass one member"
        )
    scales = np.asarray([decay ** (distance - layer) for layer in range(part.blocks)], np.float32)
    return scales.reshape(-1, *[1] * (leaf.ndim - 1))


def trainable(tree: PyTree, where: Where) -> tuple[PyTree, PyTree]:
    """`(trainable, frozen)`: the float arrays that `where` means, and everything else; each is None in the other.

    `eqx.combine(trainable, frozen)` is `tree` again, so a loss that takes both has a gradient of the first alone:

    ```python
    params = {"body": jnp.ones(2), "head": jnp.ones(2)}
    head, body = trainable(params, "head")
    loss = lambda head, body: jnp.sum(eqx.combine(head, body)["head"] ** 2)
    eqx.filter_grad(loss)(head, body)  # {'body': None, 'head': Array([2., 2.], dtype=float32)}
    ```
    """
    mask = jax.tree.map(lambda leaf, chosen: chosen and _is_float_array(leaf), tree, select(tree, where))
    return eqx.partition(tree, mask)


def freeze(tree: PyTree, where: Where) -> tuple[PyTree, PyTree]:
    """`(trainable, frozen)` with the float arrays that `where` means frozen; see `trainable`.

    The running statistics of a frozen batch norm still move; `eqx.nn.inference_mode` stops them.

    ```python
    params = {"body": jnp.ones(2), "head": jnp.ones(2), "steps": jnp.array(3)}
    head, rest = freeze(params, "body")
    head  # {'body': None, 'head': Array([1., 1.], dtype=float32), 'steps': None}
    ```
    """
    mask = jax.tree.map(lambda leaf, chosen: not chosen and _is_float_array(leaf), tree, select(tree, where))
    return eqx.partition(tree, mask)


def _is_float_array(leaf: Any) -> bool:
    """An optimizer moves arrays; a Python float, such as the rate of `eqx.nn.Dropout`, is a setting."""
    return is_float(leaf) and hasattr(leaf, "dtype")
