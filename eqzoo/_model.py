"""Making, calling, saving and loading any model: the zoo's, or a user's own `package.module:Class`."""

import dataclasses
import difflib
import functools
import importlib
import inspect
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree

from eqzoo._registry import families, family_of, variant
from eqzoo.checkpoint.apply import Plan, Rules, fill, plan, unfill
from eqzoo.checkpoint.errors import CheckpointError
from eqzoo.checkpoint.formats import Tensor, open_checkpoint, write_safetensors
from eqzoo.checkpoint.rules import Rule
from eqzoo.tree import map_with_path

OWN_FORMAT = (Rule(r"(.*)", "{0}"),)


def create(name: str, *, key: PRNGKeyArray, **options: Any) -> tuple[Any, eqx.nn.State]:
    """A freshly initialised model and its state, which is empty for a model that has none.

    `name` is one of `list_models()`, or `package.module:Class` for a class of your own; `options` change fields of the
    model's config (`num_classes=10`), or are your class's own arguments.
    """
    return eqx.nn.make_with_state(_maker(name, options))(key=key)


def is_stateful(model: Any) -> bool:
    """Whether the model is called as `model(x, state)` and returns the new state beside its output."""
    return "state" in inspect.signature(type(model).__call__).parameters


def apply(model: Any, state: eqx.nn.State, x: Array, *, key: PRNGKeyArray | None = None) -> tuple[Any, eqx.nn.State]:
    """Call any model, stateful or not, in one form: `(y, state)`. The state passed in stays usable."""
    if is_stateful(model):
        return model(x, _copy(state), key=key)
    return model(x, key=key), state


def freeze(model: Any, state: eqx.nn.State) -> Any:
    """A pure function of one example, in inference mode: the model with its state built in."""
    model = eqx.nn.inference_mode(model)
    return Frozen(model, state) if is_stateful(model) else model


class Frozen(eqx.Module):
    """A stateful model in inference mode with its state built in; the model's methods take and return no state."""

    model: Any
    state: eqx.nn.State

    def __call__(self, x: Array, *, key: PRNGKeyArray | None = None) -> Any:
        return _without_state(self.model, self.state)(x, key=key)

    def __getattr__(self, name: str) -> Any:
        if name in ("model", "state") or name.startswith("__"):  # not set yet: the module is being rebuilt
            raise AttributeError(name)
        attribute = getattr(self.model, name)
        if callable(attribute) and "state" in inspect.signature(attribute).parameters:
            return _without_state(attribute, self.state)
        return attribute


def _without_state(function: Callable[..., Any], state: eqx.nn.State) -> Callable[..., Any]:
    def call(x, **options):
        return function(x, jax.lax.stop_gradient(_copy(state)), **options)[0]  # statistics are no parameters

    return call


def _copy(state: eqx.nn.State) -> eqx.nn.State:
    """The same values in a new object: Equinox voids a `State` once a layer has made a new one from it."""
    return jax.tree.map(lambda leaf: leaf, state)


def save(path: str | os.PathLike, model: Any, state: eqx.nn.State | None = None) -> None:
    """Write model and state to one `.safetensors` file: a tensor a leaf and layer, named by its path.

    The config of a zoo model goes into the file's metadata, so that `load(path)` needs nothing else.
    """
    if isinstance(model, Frozen):
        model, state = model.model, model.state
    if is_stateful(model) and state is None:
        raise ValueError(
            f"save: a {type(model).__name__} has running statistics; pass its state too: save(path, model, state)"
        )
    tensors = unfill(_merge(model, state), OWN_FORMAT)
    metadata = {}
    if family := family_of(model):
        skeleton = _skeleton(functools.partial(family.model, model.config))
        fit = plan(_merge(*skeleton), {name: _stored(array) for name, array in tensors.items()}, OWN_FORMAT)
        if fit.problems:
            raise CheckpointError(
                f"{fit.report(f'this {family.model.__name__}', 'its own config')}\n"
                f"  load could not rebuild it: give it the config it has become, or save it under a class of your own"
            )
        config = {"model": family.model.__name__, "config": dataclasses.asdict(model.config)}
        metadata["eqzoo"] = json.dumps(config)
    write_safetensors(path, tensors, metadata)


def load(source: str | os.PathLike, *, name: str | None = None, like: PyTree = None, trainable: bool = False) -> Any:
    """A model with the weights of a local file or folder.

    A file written by `save` says itself what it holds. For upstream's (`.safetensors`, `.pth`, a folder with either)
    pass the model's `name`; for a model of your own pass its `name` as `package.module:Class`, or a model `like` it.
    Returns the frozen model, a function of one example; with `trainable`, the pair of model and state.
    """
    tensors, metadata = open_checkpoint(source)
    if like is not None:
        pair = like if isinstance(like, tuple) else (like, None)
        label, namings = f"the given {type(pair[0]).__name__}", {"own": OWN_FORMAT}
    elif "eqzoo" in metadata and name is None:
        label, make = _described_maker(source, metadata["eqzoo"])
        pair, namings = _skeleton(make), {"own": OWN_FORMAT}
    elif name is not None:
        label, pair = name, _skeleton(_maker(name, {}))
        rules = {} if ":" in name else variant(name)[0].rules
        namings = {"own": OWN_FORMAT, **rules}
    else:
        raise CheckpointError(
            f"{os.fspath(source)} doesn't say which model it holds: pass `name=`, one of `eqzoo.list_models()`"
        )
    model, state = fill_from(tensors, pair, namings, os.fspath(source), label)
    return (model, state) if trainable else freeze(model, state)


def fill_from(
    tensors: Mapping[str, Tensor],
    pair: tuple[Any, eqx.nn.State | None],
    namings: Mapping[str, Rules],
    source: str,
    label: str,
) -> tuple[Any, eqx.nn.State]:
    """The pair of model and state with a checkpoint's numbers, by the naming that fits them best."""
    merged = _merge(*pair)
    fits = {naming: plan(merged, tensors, rules) for naming, rules in namings.items()}
    naming = min(fits, key=lambda naming: fits[naming].problems)
    if fits[naming].problems:
        raise CheckpointError(
            f"{fits[naming].report(source, label)}\n  pass the `name` of the model the file was made for"
        )
    if naming == "own":
        merged = _with_stored_dtypes(merged, tensors, fits[naming])
    return _split(fill(merged, tensors, fits[naming]), *pair)


def _maker(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """What makes the model, given a key."""
    if ":" in name:
        make = _import_class(name)
        known = [n for n in inspect.signature(make).parameters if n != "key"]
        _check_options(name, options, known)
        return functools.partial(make, **options)
    family, config = variant(name)
    _check_options(name, options, [field.name for field in dataclasses.fields(config)])
    return functools.partial(family.model, dataclasses.replace(config, **options))


def _check_options(name: str, options: Mapping[str, Any], known: list[str]) -> None:
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
            raise TypeError(f"{name} has no option {option!r}; {hint}")


def _import_class(name: str) -> Callable[..., Any]:
    module_name, _, class_name = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{name!r}: no module named {error.name!r}; give it as package.module:Class, importable from here"
        ) from error
    except AttributeError as error:
        raise ValueError(f"{name!r}: module {module_name!r} has no {class_name!r}") from error


def _described_maker(source: str | os.PathLike, description: str) -> tuple[str, Callable[..., Any]]:
    """The zoo class and config that a file's metadata names; nothing else can be named."""
    try:
        saved = json.loads(description)
        family = next(family for family in families() if family.model.__name__ == saved["model"])
        options = {name: _tuples(value) for name, value in saved["config"].items()}
        return saved["model"], functools.partial(family.model, family.config(**options))
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        raise CheckpointError(
            f"{os.fspath(source)} names a model that this version of eqzoo doesn't have ({description[:200]}): "
            f"upgrade eqzoo, or pass `name=`"
        ) from error


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _skeleton(make: Callable[..., Any]) -> tuple[Any, eqx.nn.State]:
    """Model and state as shapes only: no number is drawn."""
    return eqx.filter_eval_shape(lambda: eqx.nn.make_with_state(make)(key=jax.random.key(0)))


def _is_index(node: Any) -> bool:
    return isinstance(node, eqx.nn.StateIndex)


def _merge(model: Any, state: eqx.nn.State | None) -> Any:
    """The model with its state in place, so that one path leads to every number it has."""
    if state is None:
        return model
    return jax.tree.map(lambda node: state.get(node) if _is_index(node) else node, model, is_leaf=_is_index)


def _split(merged: Any, model: Any, state: eqx.nn.State | None) -> tuple[Any, eqx.nn.State]:
    """`_merge` undone, with the structure of `model` and `state`."""
    nodes, treedef = jax.tree.flatten(model, is_leaf=_is_index)
    pairs = list(zip(nodes, treedef.flatten_up_to(merged), strict=True))
    model = jax.tree.unflatten(treedef, [node if _is_index(node) else value for node, value in pairs])
    values = [value for node, value in pairs if _is_index(node)]  # a State lists its values in the model's order
    structure = jax.tree.structure(eqx.nn.State(None) if state is None else state)
    return model, jax.tree.unflatten(structure, jax.tree.leaves(values))


def _stored(array: np.ndarray) -> Tensor:
    return Tensor(array.shape, array.dtype, lambda: array)


def _with_stored_dtypes(skeleton: Any, tensors: Mapping[str, Tensor], fit: Plan) -> Any:
    """The skeleton with each leaf of the dtype it was saved with."""
    dtypes = {path: tensors[name].dtype for name, _, slots in fit.moves for path, _ in slots}
    return map_with_path(
        lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, dtypes[path]) if path in dtypes else leaf, skeleton
    )
