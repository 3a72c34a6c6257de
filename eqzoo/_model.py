"""Making and calling any model: the zoo's, or a user's own `package.module:Class`."""

import dataclasses
import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, PRNGKeyArray

from eqzoo._registry import variant


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
        return _WithoutState(self.model, self.state)(x, key=key)

    def __getattr__(self, name: str) -> Any:
        if name in ("model", "state") or name.startswith("__"):  # not set yet: the module is being rebuilt
            raise AttributeError(name)
        attribute = getattr(self.model, name)
        if callable(attribute) and "state" in inspect.signature(attribute).parameters:
            return _WithoutState(attribute, self.state)
        return attribute


class _WithoutState(eqx.Module):
    """A pytree as the method is, so that `eqx.filter_jit` takes its weights as arguments: no constants of a program."""

    function: Callable[..., Any]
    state: eqx.nn.State

    def __call__(self, x: Array, **options: Any) -> Any:
        return self.function(x, jax.lax.stop_gradient(_copy(self.state)), **options)[0]  # statistics are no parameters


def _copy(state: eqx.nn.State) -> eqx.nn.State:
    """The same values in a new object: Equinox voids a `State` once a layer has made a new one from it."""
    return jax.tree.map(lambda leaf: leaf, state)


def _maker(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """What makes the model, given a key."""
    _check_options(name, options, option_names(name))
    if ":" in name:
        return functools.partial(_import_class(name), **options)
    family, config = variant(name)
    return functools.partial(family.model, dataclasses.replace(config, **options))


def option_names(name: str) -> list[str]:
    """What `create` takes for this model: the fields of its config, or the arguments of a class of your own."""
    if ":" in name:
        return [argument for argument in inspect.signature(_import_class(name)).parameters if argument != "key"]
    return [field.name for field in dataclasses.fields(variant(name)[1])]


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
