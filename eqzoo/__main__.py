"""The command line: `python -m eqzoo list|show|fetch|check|convert|runs`."""

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Commands import JAX and rich where they need them: `--help` and usage errors should come at once.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from eqzoo._load import Match
    from eqzoo.checkpoint import Tensor
    from eqzoo.checkpoint.apply import Rules
    from eqzoo.models._family import Family

# What `show` counts operations for where a model takes any number of tokens, or images of any size.
TOKENS_IF_ANY = 1024
SIZE_IF_ANY = 224


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 fine, 1 failed, 130 interrupted; wrong usage exits with 2."""
    arguments = _parser().parse_args(argv)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has seen enough; Python must not try again on its way out
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError) as error:
        print(f"eqzoo: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m eqzoo", description="The model zoo of JAX and Equinox.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(run: Any, summary: str, example: str) -> argparse.ArgumentParser:
        name = run.__name__.removeprefix("_")
        added = commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=f"example: {example}"
        )
        added.add_argument("--json", action="store_true", help="print one JSON document")
        added.set_defaults(run=run)
        return added

    added = command(_list, "list the models", "python -m eqzoo list 'resnet*'")
    added.add_argument("glob", nargs="?", default="*", metavar="GLOB", help="names to list (default: all)")

    added = command(
        _show, "show a model's cost, shapes, config and pretrained weights", "python -m eqzoo show resnet50"
    )
    added.add_argument("name", metavar="NAME", help="a name that `list` shows")

    added = command(
        _fetch,
        "download pretrained weights and print where they are",
        "cp -rL $(python -m eqzoo fetch timm/resnet50.a1_in1k) weights",
    )
    added.add_argument("source", metavar="SOURCE", help="a source that `show` lists, or any repository on the hub")
    added.add_argument("--revision", metavar="R", help="a branch, tag or commit of the repository")

    added = command(_check, "name the models that a checkpoint fits", "python -m eqzoo check weights.pth")
    added.add_argument("file", metavar="FILE", help="a checkpoint, or a folder with one")
    added.add_argument("--name", help="the only model to check, or package.module:Class for your own")
    added.add_argument("--entry", metavar="E", help="which state dict, if the file holds several")

    added = command(
        _convert,
        "load weights and write them in another format",
        "python -m eqzoo convert weights.pth resnet50.safetensors --name resnet50",
    )
    added.add_argument("source", metavar="SRC", help="what `eqzoo.load` takes")
    added.add_argument("destination", metavar="DST", help="what to write")
    added.add_argument("--name", help="the model SRC holds, if it doesn't say so itself")
    added.add_argument("--format", default="own", choices=("own", "timm", "torchvision", "transformers"))
    added.add_argument("--entry", metavar="E", help="which state dict, if the file holds several")
    added.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights (default: as stored)"
    )

    added = command(_runs, "compare training runs", "python -m eqzoo runs --plot curves.png")
    added.add_argument(
        "folders", nargs="*", default=["runs"], metavar="FOLDER", help="runs, or folders of runs (default: runs)"
    )
    added.add_argument("--plot", metavar="FILE", help="draw the runs' curves together")
    return parser


# list


def _list(arguments: argparse.Namespace) -> int:
    from eqzoo._registry import list_models

    console = None if arguments.json else _console()
    models = [_overview(name) for name in list_models(arguments.glob) or [arguments.glob]]
    if console is None:
        return _print_json(models)
    rows = [(m["name"], f"{m['parameters']:,}", _input_text(m), len(m["sources"]) or "") for m in models]
    console.print(_table(("name", "parameters", "input", "pretrained"), rows, right=(1, 3)))
    return 0


def _overview(name: str) -> dict[str, Any]:
    from eqzoo._model import _maker, _skeleton
    from eqzoo._registry import variant

    _, config = variant(name)
    model, _ = _skeleton(_maker(name, {}))
    return {
        "name": name,
        "parameters": _parameters(model),
        "image_size": getattr(config, "image_size", None),
        "context": getattr(config, "context", None),
        "sources": [source["source"] for source in _sources(name)],
    }


def _parameters(model: Any) -> int:
    from eqzoo.checkpoint.apply import _array_leaves

    return sum(leaf.size for _, leaf in _array_leaves(model))


def _input_text(overview: Mapping[str, Any]) -> str:
    if overview["context"]:
        return f"{overview['context']:,} tokens"
    return f"{overview['image_size']} pixels" if overview["image_size"] else "any size"


def _sources(name: str) -> list[dict[str, Any]]:
    """The pretrained weights of a model, in the form that `load` takes, with what upstream says about each."""
    from eqzoo._facts import timm_facts, torchvision_facts, transformers_facts
    from eqzoo._registry import variant

    published = [
        *((f"torchvision/{key}", f"torchvision/{key.partition('.')[0]}", f) for key, f in torchvision_facts().items()),
        *((f"timm/{key}", f"timm/{key.partition('.')[0]}", f) for key, f in timm_facts().items()),
        *((key, f["variant"], f) for key, f in transformers_facts().items()),
    ]
    # `variant` returns the registry's own entry, which tells two models of one config apart.
    return [
        {"source": source, **{key: facts.get(key) for key in ("top1", "top5", "licence")}}
        for source, model, facts in sorted(published, key=lambda entry: entry[0])
        if variant(model) is variant(name)
    ]


# show


def _show(arguments: argparse.Namespace) -> int:
    console = None if arguments.json else _console()
    model = _details(arguments.name)
    if console is None:
        return _print_json(model)
    mebibytes = {dtype: f"{size / 2**20:,.1f} MiB" for dtype, size in model["memory"].items()}
    facts = {
        "parameters": f"{model['parameters']:,}",
        "memory": f"{mebibytes['float32']} in float32, {mebibytes['bfloat16']} in bfloat16",
        "input": _input_text(model) if model["context"] else _shape_text(model["input"]),
        "output": _shape_text(model["output"]),
        "MACs": _count_text(model["macs"]),
        "FLOPs": _count_text(model["flops"]),
        "activations": _count_text(model["activations"]),
    }
    console.print(model["name"], style="bold")
    console.print(model["paper"])
    console.print()
    console.print(_table(None, facts.items()))
    console.print(f"\n{model['method']}", style="bold")
    console.print(_table(None, [(index, _shape_text(shape)) for index, shape in enumerate(model["stages"])]))
    console.print("\nconfig", style="bold")
    console.print(_table(None, model["config"].items()))
    console.print("\npretrained", style="bold")
    if model["sources"]:
        titles = {"source": "source", "top1": "top-1", "top5": "top-5", "licence": "licence"}
        shown = [key for key in titles if any(source[key] is not None for source in model["sources"])]
        rows = [["" if source[key] is None else source[key] for key in shown] for source in model["sources"]]
        numbers = [index for index, key in enumerate(shown) if key.startswith("top")]
        console.print(_table([titles[key] for key in shown], rows, right=numbers))
    else:
        console.print("No weights are published for it.")
    return 0


def _details(name: str) -> dict[str, Any]:
    import dataclasses

    import equinox as eqx
    import jax
    import jax.numpy as jnp

    from eqzoo._cost import cost
    from eqzoo._model import _maker, _skeleton, freeze
    from eqzoo._registry import variant

    family, config = variant(name)
    model, state = _skeleton(_maker(name, {}))
    frozen = freeze(model, state)
    if hasattr(config, "vocab"):
        example = jax.ShapeDtypeStruct((getattr(config, "context", TOKENS_IF_ANY),), jnp.int32)
    else:
        size = getattr(config, "image_size", SIZE_IF_ANY)
        example = jax.ShapeDtypeStruct((size, size, config.in_channels), jnp.float32)
    method = "features" if hasattr(model, "features") else "hidden"
    stages = eqx.filter_eval_shape(lambda frozen, x: getattr(frozen, method)(x), frozen, example)
    output = eqx.filter_eval_shape(lambda frozen, x: frozen(x), frozen, example)
    spent, parameters = cost(frozen, example), _parameters(model)
    return {
        **_overview(name),
        "class": f"eqzoo.{family.model.__name__}",
        "paper": " ".join((sys.modules[family.model.__module__].__doc__ or "").split("\n\n")[0].split()),
        "memory": {"float32": 4 * parameters, "bfloat16": 2 * parameters},
        "input": example.shape,
        "output": output.shape,
        "macs": spent.macs,
        "flops": spent.flops,
        "activations": spent.activations,
        "method": method,
        "stages": [stage.shape for stage in jax.tree.leaves(stages)],
        "config": dataclasses.asdict(config),
        "sources": _sources(name),
    }


def _shape_text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _count_text(count: int) -> str:
    for factor, letter in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= factor:
            return f"{count / factor:.2f} {letter}"
    return str(count)


# fetch


def _fetch(arguments: argparse.Namespace) -> int:
    from eqzoo.checkpoint.hub import fetch

    path = str(fetch(arguments.source, revision=arguments.revision))
    if arguments.json:
        return _print_json({"source": arguments.source, "path": path})
    print(path)
    return 0


# check


def _check(arguments: argparse.Namespace) -> int:
    from eqzoo.checkpoint import open_checkpoint

    file = arguments.file
    tensors, metadata = open_checkpoint(file, arguments.entry)
    matches = dict(_matches(Path(file), arguments.name, tensors, metadata))
    if not matches:
        raise ValueError(
            f"{file}: no model has tensors named like {', '.join(list(tensors)[:3])}; "
            f"for a model of your own pass --name package.module:Class"
        )
    fits = [label for label, match in matches.items() if not match.plan.problems]
    nearest = min(matches, key=lambda label: matches[label].plan.problems)
    plan = matches[nearest].plan
    if arguments.json:
        sides = {"missing": plan.missing, "unexpected": plan.unexpected, "wrong": plan.wrong}
        _print_json({"file": file, "fits": fits, **({} if fits else {"nearest": nearest, **sides})})
    else:
        print("\n".join(fits) if fits else plan.report(file, nearest))
    if not fits:
        sys.stdout.flush()
        raise ValueError(f"{file} does not fit {nearest}" + ("" if arguments.name else ", which comes nearest"))
    return 0


def _matches(
    file: Path, name: str | None, tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str]
) -> "Iterator[tuple[str, Match]]":
    """How the checkpoint fits the model that is named, or that it names itself, or else those that are like it."""
    from eqzoo._describe import describe
    from eqzoo._load import OWN_FORMAT, _zoo_skeleton, match_described, match_tensors
    from eqzoo._model import _maker, _skeleton

    if name is not None and ":" in name:
        yield name, match_tensors(tensors, _skeleton(_maker(name, {})), {"own": OWN_FORMAT})
    elif name is not None or "eqzoo" in metadata or (file / "config.json").is_file():
        description = describe(file, file, metadata, name)
        _, family, config = description
        match = match_described(tensors, _zoo_skeleton(description, config), {"own": OWN_FORMAT, **family.rules})
        for label in [name] if name is not None else _labels(family, config):
            yield label, match
    else:
        yield from _matches_of_the_zoo(tensors)


def _matches_of_the_zoo(tensors: "Mapping[str, Tensor]") -> "Iterator[tuple[str, Match]]":
    """How the checkpoint fits the variants nearest in size of the families that know most of its tensors' names."""
    from eqzoo._load import _classes, match_tensors
    from eqzoo._model import _skeleton
    from eqzoo._registry import families

    most = max(_names_known(rules, tensors) for family in families() for rules in family.rules.values())
    held = sum(math.prod(tensor.shape) for tensor in tensors.values())
    candidates = []
    for family in families() if most else ():
        alike = {rules: naming for naming, rules in family.rules.items() if _names_known(rules, tensors) == most}
        namings = {naming: rules for rules, naming in alike.items()}  # several may be the same
        classes = _classes(tensors, family)
        labels: dict[Any, list[str]] = {}  # many variants have one config
        for label, config in family.variants.items() if namings else ():
            if classes and classes != getattr(config, "num_classes", classes):  # trained on, for other classes
                config = replace(config, num_classes=classes)
                label = f"{label} with num_classes={classes}"
            labels.setdefault(config, []).append(label)
        for config in labels:
            pair = _skeleton(partial(family.model, config))
            candidates.append((abs(_parameters(pair[0]) / max(held, 1) - 1), labels[config], pair, namings))

    candidates.sort(key=lambda candidate: candidate[0])
    for place, (apart, labels, pair, namings) in enumerate(candidates):
        if place < 10 or apart < 0.1:  # to compare each name and shape takes a while
            match = match_tensors(tensors, pair, namings)
            yield from ((label, match) for label in labels)


def _labels(family: "Family", config: Any) -> list[str]:
    """The variants with this config; if there is none, the nearest and the fields in which it differs."""
    from eqzoo.models._family import changed_fields

    changes = {name: sorted(changed_fields(config, other)) for name, other in family.variants.items()}
    equal = [name for name in changes if not changes[name]]
    nearest = min(changes, key=lambda name: len(changes[name]))
    texts = (f"{field}={getattr(config, field)!r}" for field in changes[nearest])
    return equal or [f"{nearest} with {', '.join(texts)}"]


def _names_known(rules: "Rules", names: Iterable[str]) -> int:
    pattern = re.compile("|".join(f"(?:{rule.source})" for rule in rules))
    return sum(pattern.fullmatch(name) is not None for name in names)


# convert


def _convert(arguments: argparse.Namespace) -> int:
    import jax.numpy as jnp

    import eqzoo

    dtype = None if arguments.dtype is None else jnp.dtype(arguments.dtype)
    model, state = eqzoo.load(arguments.source, name=arguments.name, entry=arguments.entry, dtype=dtype, trainable=True)
    if arguments.format == "own":
        eqzoo.save(arguments.destination, model, state)
    else:
        eqzoo.export(arguments.destination, model, state, format=arguments.format)
    written = {"path": arguments.destination, "format": arguments.format, "parameters": _parameters(model)}
    if arguments.json:
        return _print_json(written)
    print(f"wrote {written['parameters']:,} parameters to {arguments.destination}")
    return 0


# runs


def _runs(arguments: argparse.Namespace) -> int:
    from eqzoo._runs import describe, find_runs, table

    console = None if arguments.json else _console()
    folders = find_runs(map(Path, arguments.folders))
    runs = [describe(folder) for folder in folders]
    if console is None:
        _print_json(runs)
    else:
        titles, rows, numbers = table(runs)
        console.print(_table(titles, rows, right=numbers))
    if arguments.plot is not None:
        from eqzoo.train import plots
        from eqzoo.train.run import read_records

        names = [folder.name for folder in folders]
        labels = names if len(set(names)) == len(names) else map(str, folders)
        plots.curves(dict(zip(labels, map(read_records, folders), strict=True)), arguments.plot)
    return 0


# output


def _print_json(document: Any) -> int:
    print(json.dumps(document, indent=2))
    return 0


def _console() -> "Console":
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise ImportError("tables need rich: `pip install eqzoo[cli]`, or pass --json") from error
    # In a pipe, a row is a line however long it is.
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 10_000
    return Console(width=wide, markup=False, emoji=False, highlight=False)


def _table(titles: Sequence[str] | None, rows: Iterable[Sequence[Any]], right: Sequence[int] = ()) -> "Table":
    from rich.table import Table

    rows = list(rows)
    table = Table(box=None, show_header=titles is not None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, title in enumerate(titles or rows[0]):
        table.add_column(
            str(title),
            justify="right" if index in right else "left",
            overflow="fold",
            no_wrap=index in right or (titles is None and index == 0),
        )
    for row in rows:
        table.add_row(*map(str, row))
    return table


if __name__ == "__main__":
    sys.exit(main())
