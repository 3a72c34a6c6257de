"""The axis vocabulary, and the check that turns a wrong argument of a public method into one sentence.

Axes: images are "height width channels", sequences "tokens dim", attention heads "heads tokens dim_head", token ids
"tokens". A model maps one example; no axis is a batch.
"""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from beartype import beartype
from jaxtyping import AbstractArray, TypeCheckError, jaxtyped

Method = TypeVar("Method", bound=Callable[..., Any])


def typed(method: Method) -> Method:
    """Check a model's public method on every call; under `jit` that happens while tracing and costs nothing."""
    signature = inspect.signature(method)

    @functools.cache
    def checked():  # made when it is first called: for every family's methods that takes a fifth of a second
        return jaxtyped(method, typechecker=beartype)

    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        try:
            return checked()(*args, **kwargs)
        except TypeCheckError as error:
            about = re.match(r"Type-check error whilst checking the parameters of (\S+)\.\n", str(error))
            culprit = re.search(r"typechecking parameter '(\w+)'", str(error))
            if about is None or culprit is None or not about[1].endswith(method.__qualname__):
                raise
            arguments = signature.bind(*args, **kwargs).arguments
            annotation = signature.parameters[culprit[1]].annotation
            message = _sentence(arguments["self"], culprit[1], arguments[culprit[1]], annotation)
        raise TypeError(message)

    return wrapper  # pyright: ignore[reportReturnType]


def check_choices(config: Any) -> None:
    """Refuse a config whose value for a `Literal` field is none of its choices."""
    for name, choices in _choices(type(config)).items():
        if getattr(config, name) not in choices:
            listed = ", ".join(map(repr, choices))
            raise ValueError(f"{type(config).__name__}: {name}={getattr(config, name)!r} is unknown; choose {listed}")


@functools.cache
def _choices(config_class: type) -> dict[str, tuple[Any, ...]]:
    hints = get_type_hints(config_class)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def _sentence(model: Any, name: str, value: Any, annotation: Any) -> str:
    owner = type(model).__name__
    choices = [each for each in get_args(annotation) if inspect.isclass(each) and issubclass(each, AbstractArray)]
    annotation = choices[0] if len(choices) == 1 else annotation  # an array or None
    if not (inspect.isclass(annotation) and issubclass(annotation, AbstractArray)):
        return f"{owner}: {name} is {_describe(value)}, expected {annotation}"
    kind = annotation.__name__.split("[")[0]
    axes = annotation.dim_str.format(self=model).split()
    expected = f"{'an' if kind == 'Int' else 'a'} {kind.lower()} array of shape ({', '.join(axes)})"
    return f"{owner}: {name} is {_describe(value)}, expected {expected}; {_remedy(name, value, kind, axes)}"


def _describe(value: Any) -> str:
    if isinstance(value, jax.Array | np.ndarray):
        kind = "a numpy array" if isinstance(value, np.ndarray) else "an array"
        return f"{kind} of shape {value.shape} and dtype {value.dtype}"
    return f"{value!r}" if value is None or isinstance(value, int | float | str) else f"a {type(value).__name__}"


def _remedy(name: str, value: Any, kind: str, axes: list[str]) -> str:
    if not isinstance(value, jax.Array):
        return f"pass a JAX array: `jnp.asarray({name})`"
    channels = int(axes[-1]) if axes[-1].isdigit() else None
    if value.ndim == len(axes) + 1:
        return "a model takes one example, so map it over the batch: `jax.vmap(model)`"
    if value.ndim != len(axes):
        return f"pass an array with {len(axes)} axes"
    if channels is not None and value.shape[-1] != channels:
        if value.shape[0] == channels:
            return f"images are channels-last: `jnp.moveaxis({name}, 0, -1)`"
        return f"pass {channels} channels, or create the model with `in_channels={value.shape[-1]}`"
    if kind == "Float" and not jnp.issubdtype(value.dtype, jnp.floating):
        return f"convert it as the model was trained, for example `{name}.astype(jnp.float32) / 255`"
    if kind == "Bool" and value.dtype != bool:
        return f"convert it: `{name}.astype(bool)`"
    if kind == "Int" and not jnp.issubdtype(value.dtype, jnp.integer):
        return f"token ids are integers: `{name}.astype(jnp.int32)`"
    return f"resize it, or create the model with `image_size={value.shape[0]}`"
