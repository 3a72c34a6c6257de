"""Names: which model and config each stands for."""

import difflib
import fnmatch
import functools
import importlib
import pkgutil
from typing import Any

import eqzoo.models
from eqzoo.models._family import Family


@functools.cache
def families() -> tuple[Family, ...]:
    """Every family: each module below `eqzoo.models` that has a `FAMILY`."""
    modules = pkgutil.walk_packages(eqzoo.models.__path__, "eqzoo.models.")
    found = [getattr(importlib.import_module(info.name), "FAMILY", None) for info in modules]
    return tuple(family for family in found if family is not None)


@functools.cache
def public_classes() -> dict[str, type[Any]]:
    """Every family's model and config by the names of their classes."""
    return {each.__name__: each for family in families() for each in (family.model, family.config)}


@functools.cache
def _variants() -> dict[str, tuple[Family, Any]]:
    return {name: (family, config) for family in families() for name, config in family.variants.items()}


def list_models(pattern: str = "*") -> list[str]:
    """The names `create` and `load` know, sorted; `pattern` is a glob such as "resnet*"."""
    return sorted(fnmatch.filter(_variants(), pattern))


def variant(name: str) -> tuple[Family, Any]:
    """The family and config behind a name.

    A bare name means torchvision's model where torchvision and timm mean different mathematics by it; "timm/NAME" and
    "torchvision/NAME" name either one.
    """
    bare = name.removeprefix("torchvision/").removeprefix("timm/")
    for candidate in (name, bare, f"torchvision/{bare}"):
        if candidate in _variants():
            return _variants()[candidate]
    near = difflib.get_close_matches(bare, _variants(), n=4)
    hint = f"did you mean {' or '.join(near)}?" if near else "`eqzoo.list_models()` lists all names"
    raise ValueError(f"there is no model named {name!r}; {hint}")


def family_of(model: Any) -> Family | None:
    """The family a model belongs to, if it is one of the zoo's."""
    return next((family for family in families() if type(model) is family.model), None)
