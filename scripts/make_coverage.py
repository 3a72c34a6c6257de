"""Compute what upstream computes, at real sizes, and write the table in docs/coverage.md.

python scripts/make_coverage.py                              # a model of each structure that has no row yet
python scripts/make_coverage.py --only 'timm/resnet1*'       # these names, with or without a row
python scripts/make_coverage.py --check                      # only say whether the table has what it should

Upstream's model gets random weights and is written in upstream's own layout. eqzoo loads that, and is compared in
outputs and in gradients of all parameters together, and with batch norm in training too; its export must load upstream
strictly and hold the same numbers. Two configs have one structure if they differ in numbers only: in widths, depths and
sizes, but not in whether something is there at all. The smallest of each structure is taken, and the largest of those
are made smaller, as the page says.
"""

import argparse
import fnmatch
import functools
import gc
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # before JAX starts: each program runs once

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from make_facts import timm, torchvision
from timm.models import save_for_hf
from torchvision.models.swin_transformer import ShiftedWindowAttentionV2

import eqzoo
from eqzoo._facts import torchvision_facts, transformers_facts
from eqzoo._model import _merge
from eqzoo._registry import families, variant
from eqzoo.checkpoint import open_checkpoint, unfill, write_safetensors
from tests.parity import number_of_parameters, randomise, structure

PAGE = Path(__file__).parents[1] / "docs" / "coverage.md"
COLUMNS = ("loads", "names and shapes", "outputs", "gradients", "training", "exports back")
INTRODUCTION = """# Coverage

Models of timm, torchvision and transformers, checked at their real size against the library itself on random weights
(`python scripts/make_coverage.py` writes this page). What differs between two models is structure, or only numbers such
as width and depth; the last line says how many structures have a row.
[Names](names.md) counts all models and checkpoints that match in names and shapes.

For memory's sake, models of more than a billion parameters are made with 8 layers. Of decoders from Llama to Mamba,
those of more than 300 million are made with a vocabulary of 8192 and as many layers as fit into that: 8, 4, 2, or at
least 1. Mixtral's experts are a fourteenth as wide there, and Qwen3's are 16. A text is 16 tokens: windows longer than
that count in the tests alone, which compare names and shapes at the full size too.

- **loads**: `eqzoo.load` takes upstream's own layout: a folder with config.json of timm or transformers, torchvision's
  `.pth`.
- **names and shapes**: every tensor is used exactly once, and every weight filled exactly once.
- **outputs**: the largest error, relative to the largest output; in double precision where it is above 1e-4 in single,
  for some networks of random weights enlarge whatever rounding leaves.
- **gradients**: the error of the gradient of all parameters, relative to its norm; in double precision (both) where it
  is above 1e-5 in single, as one ReLU that rounding puts on the other side of zero makes it.
- **training**: the largest error of outputs and running statistics after a step in training mode, for two images; in
  double precision where the gradients' is, or where it is itself above 1e-5.
- **exports back**: `eqzoo.export` writes what upstream loads strictly, with identical numbers; as another class where
  that one computes the same.
"""


# What upstream's builders do by themselves only if they also get the published weights.
WITH_WEIGHTS = {
    "torchvision/googlenet": {"aux_logits": False, "transform_input": True, "init_weights": False},
    "torchvision/inception_v3": {"transform_input": True, "init_weights": False},
    "timm/fbnetc_100": {"bn_eps": 1e-3},
}
LARGEST = 10**9
FEWER_LAYERS = {"depth": 8}
LARGEST_DECODER = 3 * 10**8
SMALLER_MIXTURES = {"mixtral": {"intermediate_size": 1024}, "qwen3_moe": {"num_experts": 16}}


def cases() -> dict[str, Callable[[], Any]]:
    """Each upstream name, and what makes its model there."""
    found = {}
    classifiers = {key.partition(".")[0] for key, facts in torchvision_facts().items() if "top1" in facts}
    for name in sorted(classifiers):
        found[f"torchvision/{name}"] = lambda name=name: torchvision.models.get_model(
            name, **WITH_WEIGHTS.get(f"torchvision/{name}", {})
        )
    for family in families():
        for upstream in (each for naming, each in family.upstreams.items() if naming.startswith("timm")):
            for name in filter(upstream.has, family.variants):
                name = name.removeprefix("timm/")
                found[f"timm/{name}"] = functools.partial(_make_timm, name)
    for name in sorted(transformers_facts()):
        found[name] = functools.partial(_make_transformers, name)
    return found


def _make_timm(name: str) -> Any:
    return timm.create_model(name, **WITH_WEIGHTS.get(f"timm/{name}", {}), **_model_args(f"timm/{name}"))


def _model_args(name: str) -> dict[str, Any]:
    """What a timm folder states about a model that isn't made as its name says."""
    return FEWER_LAYERS if _size(name) > LARGEST else {}


def _make_transformers(name: str) -> Any:
    options = transformers_facts()[name]["config"]
    architecture = options["architectures"][0]
    make = lambda more: getattr(transformers, architecture)(
        transformers.AutoConfig.for_model(**options | more, attn_implementation="eager")
    )
    if not architecture.endswith("ForCausalLM") or _size(name) <= LARGEST_DECODER:
        return make({})
    smaller = {"vocab_size": 8192, "pad_token_id": None, **SMALLER_MIXTURES.get(options["model_type"], {})}
    for depth in (8, 4, 2, 1):
        with torch.device("meta"):
            model = make(smaller | {"num_hidden_layers": depth})
        if sum(parameter.numel() for parameter in model.parameters()) <= LARGEST_DECODER:
            break
    return make(smaller | {"num_hidden_layers": depth})


def structures(every: Iterable[str]) -> list[list[str]]:
    """The names of each structure in each library."""
    groups = defaultdict(list)
    for name in every:
        groups[_library(name), _variant(name)[0].model, structure(_variant(name)[1])].append(name)
    return list(groups.values())


def uncovered(every: Iterable[str], rows: Iterable[str]) -> list[list[str]]:
    """Those without a row."""
    return [group for group in structures(every) if set(group).isdisjoint(rows)]


def _variant(name: str) -> Any:
    facts = transformers_facts().get(name)
    return variant(facts["variant"] if facts else name)


def _size(name: str) -> int:
    return number_of_parameters(*_variant(name))


def check(name: str, make: Callable[[], Any], folder: Path) -> dict[str, str]:
    """The row of one name. What isn't needed at once lies on disk: the largest models fill the memory as it is."""
    library = _library(name)
    upstream = _random(make)
    inputs = _inputs(name, upstream)
    _write_upstream(name, upstream, folder / "upstream")
    _write_results(upstream, inputs, folder / "single")
    del upstream
    source = folder / "upstream" / "model.pth" if library == "torchvision" else folder / "upstream"
    model, state = eqzoo.load(source, name=name if library == "torchvision" else None, trainable=True)
    back = folder / ("model.pth" if library == "torchvision" else "back")
    eqzoo.export(back, model, state, format=library)
    output_error, gradient_error = _errors(model, state, inputs, folder / "single")
    training_error = _training_error(model, state, inputs, folder / "single")
    if max(output_error, gradient_error, training_error) > 1e-5:  # as a ReLU makes it, put on zero's other side
        _write_results(_random(make).double(), inputs, folder / "double")
        with jax.enable_x64(True):
            widen = lambda leaf: leaf.astype(jnp.float64) if eqx.is_inexact_array(leaf) else leaf
            model, state = jax.tree.map(widen, (model, state))
            exact_error, gradient_error = _errors(model, state, inputs, folder / "double")
            training_error = _training_error(model, state, inputs, folder / "double")
        output_error = exact_error if output_error > 1e-4 else output_error
    del model, state
    exports_back = _exports_back(source, back)
    _load_strictly(library, make, back)
    return {
        "loads": "yes",
        "names and shapes": "yes",  # or `load` would have raised its report
        "outputs": _verdict(output_error, 1e-4),
        "gradients": _verdict(gradient_error, 1e-3),
        "training": _verdict(training_error, 1e-4) if (folder / "single" / "statistics.safetensors").exists() else "",
        "exports back": exports_back,
    }


def _library(name: str) -> Literal["timm", "torchvision", "transformers"]:
    owner = name.partition("/")[0]
    return owner if owner in ("timm", "torchvision") else "transformers"


def _random(make: Callable[[], Any]) -> Any:
    """Upstream's model with random weights, the same ones each time."""
    torch.manual_seed(0)
    model: Any = make().eval()
    config = getattr(model, "config", None)
    if getattr(config, "model_type", "") in ("t5", "mt5") and not getattr(config, "scale_decoder_outputs", False):
        # transformers 5 ties such a head too if it is new; the published ones aren't.
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    randomise(model, 0)
    for each, parameter in model.named_parameters():
        if each.endswith("mask_token"):  # for training only
            torch.nn.init.zeros_(parameter)
    for module in model.modules():
        if isinstance(module, ShiftedWindowAttentionV2):  # whose keys' biases are zero whatever is stored
            torch.nn.init.zeros_(module.qkv.bias.chunk(3)[1])
    return model


def _inputs(name: str, model: Any) -> np.ndarray:
    rng = np.random.default_rng(0)
    if hasattr(getattr(model, "config", None), "vocab_size"):
        return rng.integers(0, model.config.vocab_size, 16)
    size = _image_size(name, model)
    return rng.normal(size=(size, size, 3)).astype(np.float32)


def _write_upstream(name: str, model: Any, folder: Path) -> None:
    folder.mkdir(parents=True)
    if _library(name) == "torchvision":
        torch.save(model.state_dict(), folder / "model.pth")
    elif _library(name) == "timm":
        save_for_hf(model, str(folder), model_args=_model_args(name), safe_serialization=True)
    else:
        model.save_pretrained(folder)


def _exports_back(source: Path, back: Path) -> str:
    """Whether an export holds the numbers of what was loaded; with its class, if that is another."""
    original, exported = open_checkpoint(source)[0], open_checkpoint(back)[0]
    if exported.keys() <= original.keys():
        return (
            "yes" if all(np.array_equal(original[key].view(), each.view()) for key, each in exported.items()) else "NO"
        )
    architecture = json.loads((back / "config.json").read_text())["architectures"][0]
    return f"as {architecture}" if eqx.tree_equal(eqzoo.load(source), eqzoo.load(back)) else "NO"


def _write_training(model: Any, inputs: np.ndarray, folder: Path) -> None:
    """Upstream's outputs in training mode, with nothing dropped, and the statistics before they are put back.

    Without auxiliary heads: a call does without them, and what they compute is in the tests.
    """
    saved = {key: tensor.clone() for key, tensor in model.named_buffers()}
    model.train()
    for module in model.modules():
        if any(word in type(module).__name__ for word in ("Drop", "StochasticDepth")):
            module.eval()
    with torch.no_grad():
        output = model(torch.tensor(_two(inputs), dtype=next(model.parameters()).dtype).permute(0, 3, 1, 2))
    np.save(folder / "training.npy", _main_output(output).numpy())
    is_auxiliary = lambda key: key.lower().startswith("aux")
    statistics = {
        key: each.numpy() for key, each in model.named_buffers() if "running_" in key and not is_auxiliary(key)
    }
    write_safetensors(folder / "statistics.safetensors", statistics, {})
    for key, buffer in model.named_buffers():
        buffer.copy_(saved[key])
    model.eval()


def _main_output(output: Any) -> torch.Tensor:
    """Out of what transformers returns, and without torchvision's auxiliary heads."""
    if isinstance(output, dict):
        return next(output[key] for key in ("logits", "pooler_output", "out") if key in output)
    return output if isinstance(output, torch.Tensor) else output[0]


def _two(inputs: np.ndarray) -> np.ndarray:
    return np.stack([inputs, inputs[::-1, ::-1] ** 2 - 1])


def _training_error(model: Any, state: Any, inputs: np.ndarray, folder: Path) -> float:
    """Of outputs and running statistics after one step in training mode, relative to the largest of each tensor."""
    if not (folder / "training.npy").exists():
        return 0.0
    theirs = np.load(folder / "training.npy")
    is_drop = lambda node: isinstance(node, eqzoo.nn.Dropout | eqzoo.nn.DropPath)
    model = jax.tree.map(lambda node: eqx.nn.inference_mode(node) if is_drop(node) else node, model, is_leaf=is_drop)
    call = lambda model, state, x: eqzoo.apply(model, state, x)
    step = eqx.filter_vmap(call, in_axes=(None, None, 0), axis_name="batch", out_axes=(0, None))
    outputs, state = eqx.filter_jit(step)(model, state, jnp.asarray(_two(inputs), theirs.dtype))
    statistics = open_checkpoint(folder / "statistics.safetensors")[0]
    ours = unfill(_merge(model, state), _rules(_merge(model, state), statistics))
    errors = [np.abs(np.asarray(outputs) - theirs).max() / np.abs(theirs).max()]
    for key, tensor in statistics.items():
        errors.append(np.abs(ours[key] - tensor.view()).max() / np.abs(tensor.view()).max())
    return float(max(errors))


def _write_results(model: Any, inputs: np.ndarray, folder: Path) -> None:
    """Upstream's output for one input, and the gradients of its inner product with a ramp."""
    if np.issubdtype(inputs.dtype, np.integer):
        start = {"decoder_input_ids": torch.zeros((1, 1), dtype=torch.int64)}
        output = model(torch.tensor(inputs)[None], **(start if model.config.is_encoder_decoder else {}))
        output = output if "logits" in output else output.last_hidden_state
    else:
        dtype = next(model.parameters()).dtype
        output = model(torch.tensor(inputs, dtype=dtype).permute(2, 0, 1)[None])
    output = _main_output(output)[0]
    ramp = torch.linspace(-1.0, 1.0, output.numel(), dtype=output.dtype).reshape(output.shape)
    (output * ramp).sum().backward()
    folder.mkdir()
    np.save(folder / "output.npy", output.detach().numpy())
    gradients = {key: each.grad.numpy() for key, each in model.named_parameters() if each.grad is not None}
    write_safetensors(folder / "gradients.safetensors", gradients, {})
    for each in model.parameters():
        each.grad = None
    if any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules()):
        _write_training(model, inputs, folder)


def _errors(model: Any, state: Any, inputs: np.ndarray, folder: Path) -> tuple[float, float]:
    """Of the outputs, relative to the largest; and of the gradient of all parameters, relative to its norm."""
    theirs, (their_gradients, _) = np.load(folder / "output.npy"), open_checkpoint(folder / "gradients.safetensors")
    frozen = eqzoo.freeze(model, state)
    x = jnp.asarray(inputs, theirs.dtype if inputs.dtype == np.float32 else None)
    ours = np.asarray(eqx.filter_jit(frozen)(x))
    gradients = _gradients(frozen, x)
    rules = _rules(model, their_gradients)
    gradients = unfill(gradients.model if isinstance(gradients, eqzoo.Frozen) else gradients, rules)
    difference = norm = 0.0
    for key, tensor in their_gradients.items():
        difference += float(np.sum((gradients[key] - tensor.view()) ** 2, dtype=float))
        norm += float(np.sum(tensor.view() ** 2, dtype=float))
        tensor.release()
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max()), (difference / norm) ** 0.5


def _load_strictly(library: str, make: Callable[[], Any], path: Path) -> None:
    """An export into upstream's own model."""
    if library == "timm":
        timm.create_model(f"local-dir:{path}", pretrained=True)
    elif library == "torchvision":
        make().load_state_dict(torch.load(path, weights_only=True), strict=True)
    else:
        architecture = json.loads((path / "config.json").read_text())["architectures"][0]
        _, report = getattr(transformers, architecture).from_pretrained(path, output_loading_info=True)
        if any(report.values()):
            raise ValueError(f"the export is not what {architecture} expects: {report}")


@eqx.filter_jit
@eqx.filter_grad
def _gradients(frozen: Any, inputs: Any) -> Any:
    output = frozen(inputs)
    return jnp.sum(output * jnp.linspace(-1.0, 1.0, output.size, dtype=output.dtype).reshape(output.shape))


def _image_size(name: str, model: Any) -> int:
    """Its own: that of the checkpoint that the library takes by default, or of the model's positions."""
    if name.startswith("torchvision/"):
        weights = torchvision.models.get_model_weights(name.removeprefix("torchvision/"))
        return next(iter(weights)).transforms().crop_size[0]
    stated = getattr(model, "pretrained_cfg", None) or {}
    size = getattr(getattr(model, "config", None), "image_size", None)
    if size is None and hasattr(getattr(model, "patch_embed", None), "img_size"):
        size = model.patch_embed.img_size
    size = size or stated.get("input_size", (3, 224, 224))[-1]
    return size if isinstance(size, int) else size[0]


def _rules(model: Any, names: Iterable[str]) -> Any:
    """Those of the family's rules, first or last names first, under which its weights have upstream's names."""
    skeleton = jax.tree.map(lambda leaf: np.broadcast_to(np.int8(0), leaf.shape) if eqx.is_array(leaf) else leaf, model)
    family = next(family for family in families() if type(model) is family.model)
    both_ways = [rules for forward in family.rules.values() for rules in (forward, tuple(reversed(forward)))]
    return next(rules for rules in both_ways if _exported_names(skeleton, rules) >= set(names))


def _exported_names(skeleton: Any, rules: Any) -> set[str]:
    try:
        return set(unfill(skeleton, rules))
    except eqzoo.CheckpointError:
        return set()


def _verdict(error: float, tolerance: float) -> str:
    return f"{error:.0e}" if error <= tolerance else f"NO ({error:.0e})"


def read_rows() -> dict[str, dict[str, str]]:
    """The table as it stands."""
    if not PAGE.exists():
        return {}
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {name.strip("`"): dict(zip(COLUMNS, cells, strict=True)) for name, *cells in lines}


def write_rows(rows: dict[str, dict[str, str]], order: list[str]) -> None:
    """The page with a row for each name that has been checked."""
    lines = [f"| name | {' | '.join(COLUMNS)} |", "| --- |" + " --- |" * len(COLUMNS)]
    lines += [f"| `{name}` | {' | '.join(rows[name].values())} |" for name in order if name in rows]
    total, lacking = len(structures(order)), len(uncovered(order, rows))
    lines += ["", f"{total - lacking} of {total} structures have a row."]
    PAGE.write_text(INTRODUCTION + "\n" + "\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="a glob of names")
    parser.add_argument("--check", action="store_true", help="check nothing but that the table is complete")
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    every = cases()
    rows = read_rows()
    if options.check:
        stale = sorted(set(rows) - set(every))
        bad = sorted(name for name, row in rows.items() if any(cell.startswith("NO") for cell in row.values()))
        lacking = [group[0] for group in uncovered(every, rows)]
        print(f"{len(rows)} names; no longer upstream: {stale}; failing: {bad}; structures without a row: {lacking}")
        return int(bool(stale or bad))
    failed = False
    missing = [min(group, key=_size) for group in uncovered(every, rows)]
    for name in missing if options.only is None else fnmatch.filter(every, options.only):
        with tempfile.TemporaryDirectory() as folder:
            try:
                rows[name] = check(name, every[name], Path(folder))
            except Exception as error:
                rows[name] = dict.fromkeys(COLUMNS, "-") | {"loads": f"NO ({type(error).__name__})"}
                print(f"{name}: {error}", file=sys.stderr)
        failed |= any(cell.startswith("NO") for cell in rows[name].values())
        print(name, *(f"{column}: {cell}" for column, cell in rows[name].items()), sep=" | ", flush=True)
        write_rows({name: rows[name] for name in rows if name in every}, list(every))
        jax.clear_caches()
        gc.collect()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
