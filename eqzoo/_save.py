"""Saving: eqzoo's own format, and the files of timm, torchvision and transformers."""

import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Shaped

from eqzoo._load import OWN_FORMAT, as_stored
from eqzoo._model import Frozen, _merge, _skeleton, is_stateful
from eqzoo._registry import family_of
from eqzoo.checkpoint._atomic import written_atomically
from eqzoo.checkpoint._torch_write import write_state_dict
from eqzoo.checkpoint.apply import Rules, _array_leaves, plan, unfill
from eqzoo.checkpoint.errors import CheckpointError
from eqzoo.checkpoint.formats import Tensor, write_safetensors
from eqzoo.checkpoint.rules import Rule
from eqzoo.models._family import Family, Upstream, changed_fields
from eqzoo.tree.int8 import stored_as_int8


def save(path: str | os.PathLike, model: Any, state: eqx.nn.State | None = None) -> None:
    """Write model and state to one `.safetensors` file: a tensor a leaf and layer, named by its path.

    The config of a zoo model goes into the file's metadata, so that `load(path)` needs nothing else. Int8 layers
    (`eqzoo.tree.quantize`) are written as such.
    """
    merged, model = _with_state("save", model, state)
    tensors = unfill(merged, OWN_FORMAT)
    metadata = {}
    if family := family_of(model):
        remedy = "load could not rebuild it: give it the config it has become, or save it under a class of your own"
        _check_config(model, family, tensors, OWN_FORMAT, remedy)
        config = {"model": family.model.__name__, "config": dataclasses.asdict(model.config)}
        metadata["eqzoo"] = json.dumps(config)
    write_safetensors(path, tensors, metadata)


def export(
    path: str | os.PathLike,
    model: Any,
    state: eqx.nn.State | None = None,
    *,
    format: Literal["timm", "torchvision", "transformers", "smp", "torch"],
) -> None:
    """Write a zoo model as one of these libraries would, so that it loads there and computes the same.

    A `path` that ends in `.safetensors` or `.pth` becomes a file with the state dict; any other a folder with
    `config.json` too, for `timm.create_model("local-dir:PATH", pretrained=True)` or transformers' `from_pretrained`.
    torchvision, smp (segmentation_models_pytorch) and torch itself have files only. What isn't part of a model, such as
    its preprocessing or a tokenizer, isn't written.
    """
    merged, model = _with_state("export", model, state)
    path = Path(path)
    if format in ("torchvision", "smp", "torch") and path.suffix not in (".safetensors", ".pth"):
        raise ValueError(f"export: {format} has no folders; let {path} end in .pth or .safetensors")
    family = family_of(model)
    if family is None:
        raise ValueError(
            f"export: a {type(model).__name__} is none of the zoo's models, so its names upstream are not known; "
            f"write it with `eqzoo.save`"
        )
    if layers := stored_as_int8(model):
        raise ValueError(
            f"export: {format} doesn't know int8 as {layers[0]} has it; export `eqzoo.tree.dequantize(model)`"
        )
    upstream, base, options = _described_upstream(model, family, format)
    tensors = {name: _as_torch(array) for name, array in unfill(merged, upstream.rules).items()}
    tensors |= {name: np.zeros(shape(model.config), np.float32) for name, shape in upstream.zeros.items()}
    tensors |= upstream.buffers(model.config)
    remedy = f"{format} could not rebuild it: give it the config it has become, or use `eqzoo.save`"
    _check_config(model, family, tensors, upstream.rules, remedy)
    if path.suffix == ".pth":
        with written_atomically(path) as temporary:
            write_state_dict(temporary, tensors, upstream.version)
    elif path.suffix == ".safetensors":
        write_safetensors(path, tensors, {"format": "pt"})
    else:
        describe = {"timm": _timm_config, "transformers": _transformers_config}[format]
        _write_folder(path, tensors, describe(model, upstream, base, options))


def _check_config(
    model: Any, family: Family, tensors: Mapping[str, Shaped[np.ndarray, "..."]], rules: Rules, remedy: str
) -> None:
    """A model that was changed after it was made may no longer be what its config says."""
    stored = {name: _stored(array) for name, array in tensors.items()}
    skeleton = _merge(*as_stored(_skeleton(functools.partial(family.model, model.config)), stored))
    fit = plan(skeleton, stored, rules)
    if fit.problems:
        raise CheckpointError(f"{fit.report(f'this {family.model.__name__}', 'its own config')}\n  {remedy}")


def _write_folder(path: Path, tensors: Mapping[str, Shaped[np.ndarray, "..."]], config: Mapping[str, Any]) -> None:
    """Weights and config.json; neither replaces a file of before until both are complete."""
    is_new = not path.exists()
    path.mkdir(exist_ok=True)
    try:
        with written_atomically(path / "config.json") as temporary:
            temporary.write_text(json.dumps(config, indent=2) + "\n")
            write_safetensors(path / "model.safetensors", tensors, {"format": "pt"})
    except BaseException:
        if is_new:
            path.rmdir()
        raise


def _described_upstream(model: Any, family: Family, format: str) -> tuple[Upstream, str, dict[str, Any]]:
    """Which of a library's models this one is: the naming, the name it is a variation of, and the options to give."""
    libraries = [(naming.partition("_")[0], each) for naming, each in family.upstreams.items() if each.names]
    upstreams = [each for library, each in libraries if library == format]
    if not upstreams:
        known = sorted({library for library, _ in libraries})
        remedy = f"use format={' or '.join(map(repr, known))}" if known else "use `eqzoo.save`"
        raise ValueError(f"export: {format} has no {family.model.__name__}; {remedy}")
    reasons, errors = [], []
    for upstream in upstreams:
        bases = [upstream.base] if upstream.base else [name for name in family.variants if upstream.has(name)]
        unsaid = {name: _unsaid(upstream, format, family.variants[name], model.config) for name in bases}
        changed = {name: changed_fields(family.variants[name], model.config) for name in bases}
        base = min(bases, key=lambda name: (len(unsaid[name]), len(changed[name])))
        if not unsaid[base]:
            try:
                return upstream, base, _options(upstream, family.variants[base], model.config)
            except ValueError as error:  # it has no option for that value
                if len(upstreams) == 1:
                    raise
                reasons.append(str(error))
                continue
        values = ", ".join(f"{field}={getattr(model.config, field)!r}" for field in sorted(unsaid[base]))
        reasons.append(f"{values} (the nearest, {base}, differs)")
    if errors:
        raise errors[-1]
    raise ValueError(f"export: {format} has no {family.model.__name__} with {' or '.join(reasons)}; use `eqzoo.save`")


def _unsaid(upstream: Upstream, format: str, base: Any, config: Any) -> set[str]:
    """The fields in which a config differs from upstream's, and that upstream has no option for."""
    fields = set()
    for field in changed_fields(base, config):
        value = getattr(config, field)
        said = field in upstream.options.config_fields
        if format in ("torchvision", "smp") and value == 0:  # their models always have a head
            said = False
        of_base = getattr(base, field)
        if format == "timm" and isinstance(value, tuple) and isinstance(of_base, tuple) and len(value) != len(of_base):
            said = False  # its models have a fixed number of stages
        if not said and not _is_for_training(field):
            fields.add(field)
    return fields


def _options(upstream: Upstream, base: Any, config: Any) -> dict[str, Any]:
    """The options that differ from upstream's default, or all of them where one implies others."""
    every = upstream.options.write(config)
    if upstream.model_type:
        return every
    default = upstream.options.write(base)
    different = {name: value for name, value in every.items() if value != default[name]}
    built = dataclasses.replace(base, **upstream.options.read(different))
    return every if any(not _is_for_training(field) for field in changed_fields(built, config)) else different


def _is_for_training(field: str) -> bool:
    return field.endswith("dropout") or field == "drop_path"


def _timm_config(model: Any, upstream: Upstream, base: str, options: dict[str, Any]) -> dict[str, Any]:
    config = model.config
    size = getattr(config, "image_size", 224)
    return {
        "architecture": base.removeprefix("timm/"),
        "num_classes": config.num_classes,
        **({"model_args": options} if options else {}),
        "pretrained_cfg": {
            "input_size": [config.in_channels, size, size],
            "fixed_input_size": hasattr(config, "image_size"),
            "num_classes": config.num_classes,
            "first_conv": _modules(model, upstream, "in_channels"),
            "classifier": _modules(model, upstream, "num_classes"),
        },
    }


def _modules(model: Any, upstream: Upstream, field: str) -> str | list[str]:
    """What upstream calls the modules whose weight depends on a field of the config."""
    more = dataclasses.replace(model.config, **{field: getattr(model.config, field) + 1})
    ours, other = (
        {path: leaf.shape for path, leaf in _array_leaves(_skeleton(functools.partial(type(model), config))[0])}
        for config in (model.config, more)
    )
    rules = [rule for rule in upstream.rules if isinstance(rule, Rule)]
    changed = [path for path, shape in other.items() if ours.get(path) != shape and path.endswith(".weight")]
    sources = [next(filter(None, (rule.source_of(path) for rule in rules))) for path in changed]
    names = [source.removesuffix(".weight") for source in sources]
    return names[0] if len(names) == 1 else names


def _transformers_config(model: Any, upstream: Upstream, base: str, options: dict[str, Any]) -> dict[str, Any]:
    weights = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    return {
        "architectures": [upstream.architecture],
        "model_type": upstream.model_type,
        **options,
        "dtype": str(weights[0].dtype),
    }


def _as_torch(array: np.ndarray) -> np.ndarray:
    """torch counts in 64 bits."""
    return array.astype(np.int64) if np.issubdtype(array.dtype, np.integer) else array


def _with_state(verb: str, model: Any, state: eqx.nn.State | None) -> tuple[Any, Any]:
    """Model and state merged into one tree, and the model itself."""
    if isinstance(model, Frozen):
        model, state = model.model, model.state
    if is_stateful(model) and state is None:
        raise ValueError(
            f"{verb}: a {type(model).__name__} has running statistics; pass its state too: {verb}(path, model, state)"
        )
    return _merge(model, state), model


def _stored(array: np.ndarray) -> Tensor:
    return Tensor(array.shape, array.dtype, lambda: array)
