"""A script's options: from the command line, and to and from the config of a run."""

import argparse
import dataclasses
import difflib
import json
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from eqzoo._optional import needed_for

T = TypeVar("T")
NOT_SAVED = {"saved": False}  # metadata of a field that stays out of a run's config


def parse(kind: type[T], description: str | None = None, argv: Sequence[str] | None = None) -> T:
    """A script's options from its command line: `kind` is a dataclass, whose fields' docstrings are what `--help` says
    and whose dataclass fields are its sections.

    `--resume runs/NAME` takes that run's options, and changes those that are given besides. Of a dict, it changes the
    entries that are given. Modules in the current folder can be imported from then on, as those of `python -m` can, for
    models of your own.

    ```python
    from dataclasses import dataclass


    @dataclass
    class Options:
        model: str = "resnet18"
        epochs: int = 10


    parse(Options, "Trains.", ["--epochs", "3"])  # Options(model='resnet18', epochs=3)
    ```
    """
    with needed_for("the command line"):
        import tyro

    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    argv = sys.argv[1:] if argv is None else argv
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--resume", nargs="?")
    resume = finder.parse_known_args(argv)[0].resume
    flat = (tyro.conf.OmitArgPrefixes,)
    if resume is None:
        return tyro.cli(kind, description=description, args=argv, config=flat)
    saved = read_options(kind, Path(resume))
    # tyro would take the entries of a filled dict for the only ones there can be.
    given = tyro.cli(kind, description=description, args=argv, config=flat, default=_without_entries(saved))
    return _with_entries(given, saved)


def read_options(kind: type[T], folder: Path) -> T:
    """The options of the run in a folder."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} is not the folder of a run, for it has no config.json: give one that has")
    try:
        document = json.loads(file.read_text())["options"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file} is damaged: it should be a JSON object with the run's options in it") from None
    return from_json(kind, document, f"{file}: options")


def to_json(value: Any, where: str = "options") -> Any:
    """Options as JSON can hold them: dataclasses and dicts as objects, tuples as lists, paths as text."""
    if dataclasses.is_dataclass(value):
        saved = [field.name for field in dataclasses.fields(value) if field.metadata.get("saved", True)]
        return {name: to_json(getattr(value, name), f"{where}.{name}") for name in saved}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: to_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"{where} is {value!r}, which config.json can't hold; options are made of numbers, text, paths, None, tuples, "
        f"dicts with text as keys, and dataclasses"
    )


def from_json(kind: Any, value: Any, where: str = "options") -> Any:
    """The way back, to what the annotations say."""
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _dataclass_from_json(kind, value, where)
    if origin in (Union, types.UnionType):
        for argument in arguments:
            try:
                return from_json(argument, value, where)
            except ValueError:
                continue
    elif origin is Literal:
        for argument in arguments:
            if value == argument and type(value) is type(argument):
                return argument
    elif origin is dict and isinstance(value, dict):
        return {key: from_json(arguments[1], item, f"{where}[{key!r}]") for key, item in value.items()}
    elif origin is tuple and isinstance(value, list):
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(kinds) == len(value):
            pairs = enumerate(zip(kinds, value, strict=True))
            return tuple(from_json(kind, item, f"{where}[{index}]") for index, (kind, item) in pairs)
    elif origin is list and isinstance(value, list):
        return [from_json(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value)]
    elif kind is Path and isinstance(value, str):
        return Path(value)
    elif kind is float and type(value) is int:
        return float(value)
    elif type(value) is kind or (kind is None and value is None):
        return value
    raise ValueError(f"{where} is {value!r}, but should be {_text(kind)}")


def _dataclass_from_json(kind: Any, document: dict[str, Any], where: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in document:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1) or [", ".join(fields)]
            raise ValueError(f"{where}.{name} is not an option: correct it ({near[0]}?) or remove it")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in document:
            raise ValueError(f"{where}.{name} is missing and has no default: add it")
    kinds = get_type_hints(kind)
    return kind(**{name: from_json(kinds[name], item, f"{where}.{name}") for name, item in document.items()})


def _text(kind: Any) -> str:
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(map(_text, get_args(kind)))
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if get_origin(kind) is not None or kind is type(None):
        return str(kind).replace("<class 'NoneType'>", "None")
    return "an object" if dataclasses.is_dataclass(kind) else kind.__name__


def _without_entries(options: Any) -> Any:
    return _map_fields(lambda value: {} if isinstance(value, dict) else value, options)


def _with_entries(given: Any, saved: Any) -> Any:
    return _map_fields(lambda new, old: old | new if isinstance(new, dict) else new, given, saved)


def _map_fields(function: Callable[..., Any], options: Any, *others: Any) -> Any:
    if not dataclasses.is_dataclass(options) or isinstance(options, type):
        return function(options, *others)
    names = [field.name for field in dataclasses.fields(options)]
    alike = {name: [getattr(each, name) for each in (options, *others)] for name in names}
    return dataclasses.replace(options, **{name: _map_fields(function, *values) for name, values in alike.items()})
