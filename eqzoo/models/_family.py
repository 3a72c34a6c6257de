"""What a family file tells the rest of eqzoo about itself."""

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Shaped

from eqzoo.checkpoint.rules import Alias, Drop, Rule


class Option(NamedTuple):
    """A config field that an option of upstream's sets, whose `values` (upstream's to ours) differ from ours."""

    field: str
    values: Mapping[Any, Any]


@dataclass(frozen=True)
class Options:
    """Upstream's description of a model, option by option, read into config fields and written from them.

    `fixed` options must have the value that every model of the family has, where they are stated at all. `ignored`
    options (regexes) change no number of a model in inference; any other is refused unless `lenient`. `implied` fields
    have a value that no option states. `prepare` puts a description into the form that `table` speaks of, and `restore`
    puts it back.
    """

    table: Mapping[str, str | Option]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    lenient: bool = False
    implied: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[dict[str, Any]], dict[str, Any]] = lambda options: options
    restore: Callable[[dict[str, Any]], dict[str, Any]] = lambda options: options

    def read(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The config fields that a description sets."""
        result = dict(self.implied)
        for name, value in self.prepare(dict(options)).items():
            if name in self.table:
                entry = self.table[name]
                if isinstance(entry, str):
                    result[entry] = _tuples(value)
                elif _is_among(value, entry.values):
                    result[entry.field] = entry.values[value]
                else:
                    choices = ", ".join(map(repr, entry.values))
                    raise ValueError(f"{name}={value!r} is not supported; eqzoo has {choices}")
            elif name in self.fixed:
                if value != self.fixed[name]:
                    raise ValueError(f"{name}={value!r} is not supported; eqzoo has {self.fixed[name]!r}")
            elif not self.lenient and not any(re.fullmatch(pattern, name) for pattern in self.ignored):
                raise ValueError(f"option {name!r} (of value {value!r}) is not known to eqzoo")
        return result

    def read_changes(self, options: Mapping[str, Any], config: Any) -> dict[str, Any]:
        """The config fields that a description of changes to a `config` sets.

        An option that says what the config has anyway brings nothing along that usually goes with it, such as a norm
        with a pool.
        """
        said = {name: field for name, value in options.items() if (field := self._said(name, value, config))}
        changes = self.read({name: value for name, value in options.items() if name not in said})
        return changes | {field: getattr(config, field) for field in said.values()}

    def _said(self, name: str, value: Any, config: Any) -> str | None:
        """The config's field that has the value of an option already."""
        entry = self.table.get(name)
        if isinstance(entry, Option):
            said = _is_among(value, entry.values) and entry.values[value] == getattr(config, entry.field)
            return entry.field if said else None
        return entry if entry is not None and _tuples(value) == getattr(config, entry) else None

    def write(self, config: Any) -> dict[str, Any]:
        """The options that say what a config's fields say."""
        for name, value in self.implied.items():
            if getattr(config, name) != value:
                raise ValueError(f"upstream has no {name}={getattr(config, name)!r}, only {value!r}; use `eqzoo.save`")
        result = {}
        for name, entry in self.table.items():
            if isinstance(entry, str):
                result[name] = getattr(config, entry)
            else:
                value = getattr(config, entry.field)
                if value not in entry.values.values():
                    raise ValueError(f"upstream has no {entry.field}={value!r}; use `eqzoo.save`")
                result[name] = next(theirs for theirs, ours in entry.values.items() if ours == value)
        return self.restore(result)

    @property
    def config_fields(self) -> set[str]:
        """The fields of the config that can be written."""
        return {entry if isinstance(entry, str) else entry.field for entry in self.table.values()} | {*self.implied}


class Upstream(NamedTuple):
    """How one library writes a family's models down: the names of tensors, and the options of a config.json.

    `names` are globs over the family's variants: those that the library has under the same name. transformers tells
    its models apart by `model_type`; `architecture` is the class that takes a whole model, and `base` the variant that
    its options describe where they say nothing. `zeros` are tensors that it insists on though they change nothing:
    their shapes by the config; `buffers`, tensors that it stores though they follow from the config. `version` is that
    of its module, which torch's files state.
    """

    rules: tuple[Rule | Drop | Alias, ...]
    options: Options = Options({})
    names: tuple[str, ...] = ()
    model_type: str = ""
    architecture: str = ""
    base: str = ""
    zeros: Mapping[str, Callable[[Any], tuple[int, ...]]] = {}
    buffers: Callable[[Any], Mapping[str, Shaped[np.ndarray, "..."]]] = lambda config: {}
    version: int = 1

    def has(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.names)


class Family(NamedTuple):
    """One architecture: its class, its named configs, and how upstream writes it down.

    `upstreams` has one entry per naming of tensors ("torchvision", "timm", "transformers"); a checkpoint's names decide
    which applies. `sharding` pairs a regex on leaf paths with a partition; the first that matches counts. `adapters`
    turn a weight into that of a config in which one field has another value; see `checkpoint.adapt`.
    """

    model: type[Any]
    config: type[Any]
    variants: Mapping[str, Any]
    upstreams: Mapping[str, Upstream]
    sharding: tuple[tuple[str, PartitionSpec], ...]
    adapters: Mapping[str, Callable[..., Any]]

    @property
    def rules(self) -> dict[str, tuple[Rule | Drop | Alias, ...]]:
        return {naming: upstream.rules for naming, upstream in self.upstreams.items()}

    def config_from(self, saved: Mapping[str, Any]) -> Any:
        """The config whose fields were saved as JSON."""
        return _rebuilt(self.config, saved)


def count_labels(options: dict[str, Any], *, classifier: str, body: str) -> dict[str, Any]:
    """transformers' options with `num_labels` as its class `classifier` counts them; a `body` has no labels."""
    (architecture, *_) = options.get("architectures") or [classifier]
    if architecture not in (classifier, body):
        raise ValueError(f"architectures={[architecture]} is not supported; eqzoo has {classifier!r} and {body!r}")
    labels = options.get("id2label")
    number = options.get("num_labels", 2 if labels is None else len(labels))
    return {**options, "num_labels": 0 if architecture == body else number}


def changed_fields(config: Any, other: Any) -> set[str]:
    """The fields in which two configs of one class differ."""
    return {f.name for f in fields(config) if getattr(config, f.name) != getattr(other, f.name)}


def _is_among(value: Any, values: Mapping[Any, Any]) -> bool:
    return isinstance(value, str | int | float | bool | None) and value in values


def _rebuilt(config: Any, saved: Mapping[str, Any]) -> Any:
    """A config of a class whose fields, which may be configs themselves, were saved as JSON."""
    hints = get_type_hints(config)

    def rebuild(name: str, value: Any) -> Any:
        parts = [part for part in (hints[name], *get_args(hints[name])) if is_dataclass(part)]
        return _rebuilt(parts[0], value) if parts and isinstance(value, Mapping) else _tuples(value)

    return config(**{name: rebuild(name, value) if name in hints else value for name, value in saved.items()})


def _tuples(value: Any) -> Any:
    """JSON's lists as tuples, for a config is hashable."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
