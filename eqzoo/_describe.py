"""Which model a source holds: by its own metadata, its config.json, or the name it was published under."""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from eqzoo._facts import torchvision_facts
from eqzoo._registry import families, variant
from eqzoo.checkpoint.errors import CheckpointError
from eqzoo.models._family import Family


class Description(NamedTuple):
    """One of the zoo's models, and what to call it."""

    label: str
    family: Family
    config: Any


def describe(
    source: str | os.PathLike, path: Path, metadata: Mapping[str, str], name: str | None = None
) -> Description:
    """The model that a source, found at `path`, holds; `name` decides if it is given."""
    if name is not None:
        family, config = variant(name)
        return Description(name, family, config)
    if "eqzoo" in metadata:
        return _guarded(functools.partial(_from_metadata, metadata["eqzoo"]), f"{source} names")
    if _torchvision_name(source):
        return _from_torchvision(os.fspath(source))
    config_file = path / "config.json"
    if config_file.is_file():
        return _guarded(lambda: from_config_json(json.loads(config_file.read_bytes())), f"{config_file} describes")
    raise CheckpointError(
        f"{source} doesn't say which model it holds: pass `name=`, one of `eqzoo.list_models()`, "
        f"or the folder with its config.json"
    )


def from_config_json(saved: Mapping[str, Any]) -> Description:
    """The model that timm's or transformers' config.json describes."""
    if not isinstance(saved, dict):
        raise ValueError("it is not a JSON object")
    if "architecture" in saved:
        return _from_timm(saved)
    if "model_type" in saved:
        return _from_transformers(saved)
    raise ValueError("it has neither timm's `architecture` nor transformers' `model_type`")


def _from_timm(saved: Mapping[str, Any]) -> Description:
    name = str(saved["architecture"])
    family, config = variant(f"timm/{name}")
    # In old files everything lies at the top.
    published = saved.get("pretrained_cfg", saved)
    known = {field.name for field in dataclasses.fields(config)}
    fields = {}
    if "num_classes" in {**published, **saved}:
        fields["num_classes"] = {**published, **saved}["num_classes"]
    if "input_size" in published:
        channels, height, width = published["input_size"]
        fields["in_channels"] = channels
        if "image_size" in known and published.get("fixed_input_size", False):
            if height != width:
                raise ValueError(
                    f"its images are {height} x {width}; eqzoo's {family.model.__name__} takes square ones"
                )
            fields["image_size"] = width
    fields |= family.upstreams["timm"].options.read_changes(saved.get("model_args") or {}, config)
    return Description(name, family, dataclasses.replace(config, **fields))


def _from_transformers(saved: Mapping[str, Any]) -> Description:
    known = {
        upstream.model_type: (family, upstream)
        for family in families()
        for upstream in family.upstreams.values()
        if upstream.model_type
    }
    model_type = saved["model_type"]
    if model_type not in known:
        raise ValueError(f"eqzoo has no model of model_type {model_type!r}; it has {', '.join(sorted(known))}")
    family, upstream = known[model_type]
    base = family.variants[upstream.base]
    fields = {name: _number_like(getattr(base, name), value) for name, value in upstream.options.read(saved).items()}
    return Description(model_type, family, dataclasses.replace(base, **fields))


def _number_like(known: Any, value: Any) -> Any:
    """JSON writes a float that is whole as an integer."""
    return float(value) if type(known) is float and type(value) is int else value


def _from_metadata(text: str) -> Description:
    saved = json.loads(text)
    family = next((family for family in families() if family.model.__name__ == saved["model"]), None)
    if family is None:
        raise ValueError(f"there is no model class {saved['model']!r}; upgrade eqzoo, or pass `name=`")
    return Description(saved["model"], family, family.config_from(saved["config"]))


def _torchvision_name(source: str | os.PathLike) -> str | None:
    """The architecture of a source `torchvision/NAME.WEIGHTS`."""
    library, _, weights = os.fspath(source).partition("/")
    return weights.partition(".")[0] if library == "torchvision" and weights in torchvision_facts() else None


def _from_torchvision(source: str) -> Description:
    name = source.removeprefix("torchvision/")
    facts, architecture = torchvision_facts()[name], f"torchvision/{name.partition('.')[0]}"
    family, config = variant(architecture)
    fields = {}
    if "image_size" in {field.name for field in dataclasses.fields(config)}:
        fields["image_size"] = facts["min_size"][0]
    if options := facts.get("options"):
        known = (upstream for naming, upstream in family.upstreams.items() if naming.startswith("torchvision"))
        names = (architecture, architecture.removeprefix("torchvision/"))
        fields |= next(each for each in known if any(map(each.has, names))).options.read(options)
    return Description(source, family, dataclasses.replace(config, **fields))


def _guarded(read: Callable[[], Description], about: str) -> Description:
    """A description as it was read; whatever is wrong with it in one sentence."""
    try:
        description = read()
        if len(repr(description.config)) > 3000:  # a stage, a layer of each: making them would take hours
            raise ValueError("its options are longer than those of any model")
    except Exception as error:  # whatever the parsers and the config's own checks trip over
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)[:500]
        raise CheckpointError(f"{about} no model that eqzoo can make: {reason}") from error
    return description
