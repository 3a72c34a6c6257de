"""Compare names and shapes of every classifier of torchvision and timm, and of each published checkpoint, with eqzoo's.

python scripts/check_names.py                                   # says how many there are, and lists what is missing
python scripts/check_names.py --only 'timm/convnext*'           # some of them
python scripts/check_names.py --write                           # and writes docs/names.md

Nothing is downloaded and nothing computed: upstream's models are made on torch's meta device, a checkpoint's with the
classes and the image size that its own `pretrained_cfg` states, and eqzoo's as shapes. What eqzoo has must match in
every name and every shape, what it says about a checkpoint's images must be what upstream does with them, and a
mismatch exits with 1.
"""

import argparse
import fnmatch
import functools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from math import floor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from make_facts import timm, torchvision
from timm.data.config import resolve_data_config
from timm.models._hub import save_config_for_hf
from timm.models._registry import _model_to_module
from torchvision.models.regnet import BlockParams

import eqzoo
from eqzoo._describe import Description, describe, from_config_json
from eqzoo._registry import variant
from tests.parity import assert_names_and_shapes

PAGE = Path(__file__).parents[1] / "docs" / "names.md"
INTRODUCTION = """# Names

Which of torchvision's and timm's models and published checkpoints eqzoo has. Each one's tensors were compared with
upstream's by name and shape, and what is done to a checkpoint's images with what upstream does
(`python scripts/check_names.py --write` writes this page). [Coverage](coverage.md) has the numbers they compute.

transformers keeps no list of checkpoints to count: a language model is known by its config.json. Those whose repository
eqzoo can name are in `python -m eqzoo list`, and each family's tests compare every name's tensors with transformers'.

| | eqzoo | upstream |
| --- | ---: | ---: |
"""


class Case(NamedTuple):
    """A model's name, or a checkpoint's, the upstream module it comes from, and what compares it with eqzoo's."""

    name: str
    module: str
    kind: str
    check: Callable[[], None]


def cases() -> list[Case]:
    names = torchvision.models.list_models(module=torchvision.models)
    weights = [(name, each) for name in names for each in torchvision.models.get_model_weights(name)]
    tags = timm.list_pretrained()
    return [
        *(_case("torchvision", name, "model", functools.partial(check_torchvision, name)) for name in names),
        *(
            _case("torchvision", f"{name}.{each.name}", "checkpoint", functools.partial(check_weights, name, each))
            for name, each in weights
        ),
        *(_case("timm", name, "model", functools.partial(check_timm, name)) for name in timm.list_models()),
        *(_case("timm", tag, "checkpoint", functools.partial(check_tag, tag)) for tag in tags),
    ]


def _case(library: str, name: str, kind: str, check: Callable[[], None]) -> Case:
    architecture = name.partition(".")[0]
    module = torchvision.models.get_model_builder(architecture).__module__ if library == "torchvision" else None
    return Case(f"{library}/{name}", (module or _model_to_module[architecture]).rpartition(".")[2], kind, check)


def check_torchvision(name: str) -> None:
    family, config = variant(f"torchvision/{name}")
    upstream = _on_meta(torchvision.models.get_model, name).state_dict()
    assert_names_and_shapes((family, config), upstream, unused=None)  # Swin v2 has biases of keys that it sets to zero


def check_weights(name: str, weights: Any) -> None:
    """A file of torchvision's holds what the builder makes with the options that come with it."""
    description = describe(f"torchvision/{name}.{weights.name}", Path(), {})
    (size,) = weights.transforms().crop_size
    upstream = _on_meta(torchvision.models.get_model, name, **({"image_size": size} if name.startswith("vit") else {}))
    assert_names_and_shapes(description[1:], upstream.state_dict(), unused=None)
    heads = ("aux1", "aux2") if name == "googlenet" else ()  # which its builder takes off when it has read the file
    numbers = [p.numel() for each, p in upstream.named_parameters() if not each.startswith(heads)]
    _compare(weights.meta["num_params"], sum(numbers), "parameters")


def check_timm(name: str) -> None:
    upstream = _on_meta(timm.create_model, name)
    assert_names_and_shapes(variant(f"timm/{name}"), upstream.state_dict())


def check_tag(tag: str) -> None:
    """With its own config.json, as timm publishes it."""
    upstream = _on_meta(timm.create_model, tag)
    with tempfile.TemporaryDirectory() as folder:
        save_config_for_hf(upstream, f"{folder}/config.json")
        description: Description = from_config_json(json.loads((Path(folder) / "config.json").read_text()))
        prepare = eqzoo.preprocessing(folder)
    assert_names_and_shapes(description[1:], upstream.state_dict())
    _compare(getattr(description.config, "num_classes", 0), upstream.num_classes, "classes")
    theirs = resolve_data_config({}, pretrained_cfg=upstream.pretrained_cfg)
    channels, height, width = theirs["input_size"]
    _compare(prepare.crop, (height, width), "crop")
    _compare(prepare.resize, (floor(height / theirs["crop_pct"]), floor(width / theirs["crop_pct"])), "resize")
    _compare((prepare.mean, prepare.std), (theirs["mean"], theirs["std"]), "mean and std")
    _compare(prepare.interpolation, theirs["interpolation"], "interpolation")
    _compare(len(prepare.mean), channels, "channels")


def _on_meta(make: Callable[..., Any], name: str, **options: Any) -> torch.nn.Module:
    with torch.device("meta"), mock.patch.object(BlockParams, "from_init_params", _regnet_widths):
        return make(name, **options)


def _regnet_widths(*arguments: Any, widths: Callable[..., Any] = BlockParams.from_init_params, **options: Any) -> Any:
    """Upstream computes them with tensors, which on the meta device have no values."""
    with torch.device("cpu"):
        return widths(*arguments, **options)


def _compare(ours: Any, theirs: Any, what: str) -> None:
    if ours != theirs:
        raise AssertionError(f"{what} {ours}, upstream {theirs}")


def is_known(case: Case) -> bool:
    library, _, name = case.name.partition("/")
    return not {f"{library}/{name.partition('.')[0]}", name.partition(".")[0]}.isdisjoint(eqzoo.list_models())


def table(of: list[Case], matched: set[str]) -> str:
    """A row a module: how many of its models and checkpoints eqzoo has."""
    total = Counter((case.name.partition("/")[0], case.module, case.kind) for case in of)
    ours = Counter((case.name.partition("/")[0], case.module, case.kind) for case in of if case.name in matched)
    rows = ["| library | module | models | of | checkpoints | of |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for library, module in sorted({key[:2] for key in total}, reverse=True):
        cells = [each[library, module, kind] for kind in ("model", "checkpoint") for each in (ours, total)]
        rows.append(f"| {library} | {module} | {' | '.join(map(str, cells))} |")
    return "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="a glob of names")
    parser.add_argument("--kind", choices=("model", "checkpoint"), help="models, or checkpoints, alone")
    parser.add_argument("--write", action="store_true", help="write docs/names.md")
    options = parser.parse_args()
    chosen = [case for case in cases() if fnmatch.fnmatchcase(case.name, options.only)]
    chosen = [case for case in chosen if options.kind in (None, case.kind)]
    matched, failed, missing = set(), [], []
    for case in chosen:
        if not is_known(case):
            missing.append(case)
            continue
        try:
            case.check()
            matched.add(case.name)
        except Exception as error:
            failed.append(case)
            print(f"{case.name} does not match: {error}", file=sys.stderr, flush=True)
    for module in sorted({case.module for case in missing}):
        names = [case.name for case in missing if case.module == module and case.kind == "model"]
        print(f"missing of {module}: {', '.join(names)}")
    lines = []
    for library in ("torchvision", "timm"):
        for kind in ("model", "checkpoint"):
            of = [case for case in chosen if case.name.startswith(f"{library}/") and case.kind == kind]
            count = sum(case.name in matched for case in of)
            lines.append(f"| {library}'s {kind}s | {count} | {len(of)} |")
    print("\n".join(lines))
    if options.write:
        PAGE.write_text(f"{INTRODUCTION}{chr(10).join(lines)}\n\n{table(chosen, matched)}", encoding="utf-8")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
