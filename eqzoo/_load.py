"""Loading: find a source, know which model it holds, fit its names to the model's, put its numbers in place."""

import dataclasses
import functools
import itertools
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding
from jaxtyping import Array, DTypeLike, PyTree

from eqzoo._describe import Description, describe
from eqzoo._model import _check_options, _maker, _merge, _skeleton, _split, freeze
from eqzoo._registry import family_of
from eqzoo.checkpoint.apply import Plan, Rules, _array_leaves, _is_array, _parse, fill, place_on_default_device, plan
from eqzoo.checkpoint.errors import CheckpointError
from eqzoo.checkpoint.formats import Tensor, open_checkpoint
from eqzoo.checkpoint.hub import fetch
from eqzoo.checkpoint.rules import Rule
from eqzoo.models._family import Family, changed_fields
from eqzoo.sharding import shardings
from eqzoo.tree import leaves_with_paths, map_with_path
from eqzoo.tree.int8 import quantize_chosen, stored_as_int8
from eqzoo.tree.select import select

OWN_FORMAT = (Rule(r"(.*)", "{0}"),)

_log = logging.getLogger("eqzoo")


def load(
    source: str | os.PathLike,
    *,
    name: str | None = None,
    like: PyTree = None,
    revision: str | None = None,
    entry: str | None = None,
    trainable: bool = False,
    dtype: DTypeLike | None = None,
    num_classes: int | None = None,
    image_size: int | None = None,
    in_channels: int | None = None,
    sharding: Mesh | Sharding | None = None,
) -> Any:
    """A model with pretrained weights: the frozen model, a function of one example; or, with `trainable`, the pair of
    model and state.

    `source` is a repository of timm's or transformers' on the Hugging Face hub ("timm/resnet50.a1_in1k", at a
    `revision`), torchvision's "torchvision/resnet50.IMAGENET1K_V2", or a local file or folder in any of these layouts
    or written by `save`. A bare file of upstream's also needs the `name` of its model, or a model `like` it; a model of
    your own, its `name` as `package.module:Class`, or a model `like` it. `entry` chooses among several state dicts of
    one torch file. Layers that were saved as int8 (`eqzoo.tree.quantize`) stay so.

    By default the model is the one that was published. `num_classes` gives it a new head of zeros (or none, with 0),
    `in_channels` and `image_size` adapt its first convolution and its positions as timm does. `dtype` is that of the
    parameters, and `sharding` where they go: a mesh, for the family's rules, or one sharding for all of them.
    """
    path = fetch(source, revision=revision)
    tensors, metadata = open_checkpoint(path, entry)
    changes = {"num_classes": num_classes, "in_channels": in_channels, "image_size": image_size}
    changes = {field: value for field, value in changes.items() if value is not None}
    if like is not None:
        if changes:
            raise ValueError(f"load: {', '.join(changes)} can't change the model given as `like`; pass its `name`")
        pair = like if isinstance(like, tuple) else (like, None)
        label, family, steps = f"the given {type(pair[0]).__name__}", None, []
        _check_size(tensors, pair)
        known = family_of(pair[0])
        match = _match(tensors, pair, {"own": OWN_FORMAT, **(known.rules if known else {})})
    elif name is not None and ":" in name:
        label, family, steps = name, None, []
        match = match_tensors(tensors, _skeleton(_maker(name, changes)), {"own": OWN_FORMAT})
    else:
        description = describe(source, path, metadata, name)
        label, family, _ = description
        match, steps = _match_zoo(tensors, description, changes)
    if match.plan.problems:
        raise CheckpointError(match.plan.report(os.fspath(source), label) + _advice(match, tensors, family))
    pair = read(tensors, match, steps, dtype, sharding)
    return pair if trainable else freeze(*pair)


class Match(NamedTuple):
    """A skeleton (of model and state) that a checkpoint was compared with, and how they fit."""

    pair: tuple[Any, eqx.nn.State | None]
    merged: PyTree
    naming: str
    plan: Plan
    config: Any = None


class Step(NamedTuple):
    """One config field changed: the adapter, the configs and the model's leaves before and after."""

    adapter: Callable[..., Any]
    old: Any
    new: Any
    pair: tuple[Any, eqx.nn.State | None]
    merged: PyTree
    changed: dict[str, jax.ShapeDtypeStruct]


def match_tensors(tensors: Mapping[str, Tensor], pair: tuple[Any, eqx.nn.State], namings: Mapping[str, Rules]) -> Match:
    """The first naming that fits a checkpoint, or else the one that fits best. Int8 layers become so in the model."""
    return _match(tensors, as_stored(pair, tensors), namings)


def match_described(
    tensors: Mapping[str, Tensor], pair: tuple[Any, eqx.nn.State], namings: Mapping[str, Rules]
) -> Match:
    """`match_tensors` for a model that the checkpoint describes itself: one of absurd size is refused at once."""
    _check_size(tensors, pair)
    return match_tensors(tensors, pair, namings)


def _check_size(tensors: Mapping[str, Tensor], pair: tuple[Any, eqx.nn.State | None]) -> None:
    leaves = _array_leaves(_merge(*pair))
    layers = sum(math.prod(leaf.shape[: path.count("[*]")]) for path, leaf in leaves)
    numbers = sum(math.prod(leaf.shape) for _, leaf in leaves)
    held = sum(math.prod(tensor.shape) for tensor in tensors.values())
    if layers > 1000 * (len(tensors) + 1) or numbers > 100 * held + 10**8:  # before names and shapes are worked out
        raise CheckpointError(
            f"a model of {numbers} numbers in {layers} weights was described, but the file holds {held} in "
            f"{len(tensors)} tensors; pass the `name` of the model the file was made for"
        )


def as_stored(pair: tuple[Any, eqx.nn.State], tensors: Mapping[str, Tensor]) -> tuple[Any, eqx.nn.State]:
    """The skeleton with those layers quantized whose weight is stored as int8."""
    stored = {_parse(name)[0] for name, tensor in tensors.items() if tensor.dtype == np.int8}
    if not stored:
        return pair
    model, state = pair
    return quantize_chosen(model, select(model, lambda path, _: _in_int8(path) in stored)), state


def _in_int8(path: str) -> str:
    """The path of a layer's weight once the layer is wrapped in `Int8`."""
    layer, dot, name = path.rpartition(".")
    return f"{layer}{dot}layer.{name}"


def _match(tensors: Mapping[str, Tensor], pair: tuple[Any, eqx.nn.State | None], namings: Mapping[str, Rules]) -> Match:
    merged = _merge(*pair)
    matches = []
    for naming, rules in namings.items():
        matches.append(Match(pair, merged, naming, plan(merged, tensors, rules)))
        if not matches[-1].plan.problems:
            break
    return min(matches, key=lambda match: match.plan.problems)


def _match_zoo(
    tensors: Mapping[str, Tensor], description: Description, changes: Mapping[str, Any]
) -> tuple[Match, list[Step]]:
    """How a checkpoint fits the model it is said to hold, and the steps from there to the model that is asked for.

    The file may be of the model as described, or have some of the changes already.
    """
    label, family, config = description
    _check_options(label, changes, [field.name for field in dataclasses.fields(config)])
    wanted = dataclasses.replace(config, **changes)
    if "num_classes" in changes:
        config = dataclasses.replace(config, num_classes=_classes(tensors, family))
    others = [field for field in changes if field != "num_classes"]
    matches = []
    for count in range(len(others) + 1):
        for made in itertools.combinations(others, count):
            stored = dataclasses.replace(config, **{field: changes[field] for field in made})
            match = match_described(tensors, _zoo_skeleton(description, stored), {"own": OWN_FORMAT, **family.rules})
            match = match._replace(config=stored)
            if not match.plan.problems:
                return match, _steps(description, match, wanted, tensors)
            matches.append(match)
    return min(matches, key=lambda match: match.plan.problems), []


def _steps(description: Description, match: Match, wanted: Any, tensors: Mapping[str, Tensor]) -> list[Step]:
    steps = []
    old, leaves = match.config, dict(_array_leaves(match.merged))
    for field in sorted(changed_fields(old, wanted)):
        adapter = description.family.adapters.get(field)
        if adapter is None:
            raise ValueError(
                f"load: {field} of {description.label} is {getattr(old, field)} and can't be changed on the way, for "
                f"{type(old).__name__} has no adapter for it; leave it out"
            )
        new = dataclasses.replace(old, **{field: getattr(wanted, field)})
        pair = as_stored(_zoo_skeleton(description, new), tensors)
        merged = _merge(*pair)
        after = dict(_array_leaves(merged))
        changed = {path: leaf for path, leaf in after.items() if path not in leaves or leaf.shape != leaves[path].shape}
        removed = [path for path in leaves if path not in after]
        for layer in stored_as_int8(match.pair[0]):
            if any(path.startswith(f"{layer}.") for path in (*changed, *removed)):
                raise ValueError(
                    f"load: {field} of {description.label} can't be changed on the way, for {layer} is stored as int8; "
                    f"leave it out"
                )
        _log.info(
            "%s: %s %s -> %s%s%s",
            description.label,
            field,
            getattr(old, field),
            getattr(new, field),
            f", adapts {', '.join(changed)}" if changed else "",
            f", removes {', '.join(removed)}" if removed else "",
        )
        steps.append(Step(adapter, old, new, pair, merged, changed))
        old, leaves = new, after
    return steps


def read(
    tensors: Mapping[str, Tensor],
    match: Match,
    steps: Sequence[Step],
    dtype: DTypeLike | None,
    sharding: Mesh | Sharding | None,
) -> tuple[Any, eqx.nn.State]:
    """The pair of model and state with a checkpoint's numbers, adapted step by step."""

    def typed(merged: PyTree, model: Any) -> PyTree:
        if dtype is not None:
            return _with_dtype(merged, model, dtype)
        return _with_stored_dtypes(merged, tensors, match.plan) if match.naming == "own" else merged

    merged = typed(match.merged, match.pair[0])
    if not steps:
        return _split(fill(merged, tensors, match.plan, _placer(merged, sharding)), *match.pair)

    pair, wanted = steps[-1].pair, typed(steps[-1].merged, steps[-1].pair[0])
    place = _placer(wanted, sharding)
    adapted = {path for step in steps for path in step.changed}
    kept = {path for path, _ in _array_leaves(wanted)} - adapted
    keep = lambda path, leaf, array: place(path, leaf, array) if path in kept else array
    values = dict(leaves_with_paths(fill(merged, tensors, match.plan, keep)))
    for step in steps:
        for path, leaf in step.changed.items():
            values[path] = step.adapter(values.get(path), leaf, step.old, step.new)
    finish = lambda path, leaf: place(path, leaf, values[path].astype(leaf.dtype)) if path in adapted else values[path]
    return _split(map_with_path(lambda path, leaf: finish(path, leaf) if _is_array(leaf) else leaf, wanted), *pair)


def _placer(tree: PyTree, sharding: Mesh | Sharding | None) -> Callable[[str, Any, np.ndarray], Array]:
    """What puts a leaf's numbers on the devices they belong to; of several hosts, each its own part."""
    if sharding is None:
        return place_on_default_device
    where = dict(leaves_with_paths(shardings(tree, sharding))) if isinstance(sharding, Mesh) else {}
    return lambda path, leaf, array: jax.make_array_from_callback(
        array.shape, where.get(path, sharding), lambda index: array[index]
    )


def _zoo_skeleton(description: Description, config: Any) -> tuple[Any, eqx.nn.State]:
    try:
        return _skeleton(functools.partial(description.family.model, config))
    except Exception as error:  # whatever a constructor trips over in a config that came out of a file
        raise CheckpointError(f"{description.label}: no model can be made of {config}: {error}"[:1000]) from error


def _classes(tensors: Mapping[str, Tensor], family: Family) -> int:
    """For how many classes the head in a checkpoint is; 0 if it has none."""
    for rules in (OWN_FORMAT, *family.rules.values()):
        for name, tensor in tensors.items():
            for rule in rules:
                leaves = rule.leaves_of(name) if isinstance(rule, Rule) else None
                if tensor.shape and {"head.weight", _in_int8("head.weight")} & {*(leaves or ())}:
                    return tensor.shape[0]
    return 0


def _advice(match: Match, tensors: Mapping[str, Tensor], family: Family | None) -> str:
    classes = 0 if family is None else _classes(tensors, family)
    if classes and classes != getattr(match.config, "num_classes", classes):
        return f"\n  its head is for {classes} classes: pass `num_classes={classes}` to keep it, or the number you want"
    return "\n  pass the `name` of the model the file was made for"


def _with_dtype(merged: PyTree, model: Any, dtype: DTypeLike) -> PyTree:
    """The skeleton with parameters of another dtype; statistics keep theirs."""
    if not jnp.issubdtype(dtype, jnp.floating) or jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
        raise ValueError(
            f"load: dtype={dtype!r} is no floating dtype that JAX has enabled; pass one such as jnp.bfloat16"
        )
    parameters = {path for path, leaf in _array_leaves(model) if jnp.issubdtype(leaf.dtype, jnp.inexact)}
    return map_with_path(
        lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, dtype) if path in parameters else leaf, merged
    )


def _with_stored_dtypes(skeleton: PyTree, tensors: Mapping[str, Tensor], fit: Plan) -> PyTree:
    """The skeleton with each leaf of the dtype it was saved with."""
    dtypes = {path: tensors[name].dtype for name, _, slots in fit.moves for path, _ in slots}
    return map_with_path(
        lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, dtypes[path]) if path in dtypes else leaf, skeleton
    )
