"""How fast the models are, beside torch's and beside the same models written plainly in Equinox. For example:

python scripts/benchmark.py

python scripts/benchmark.py --models vit_small_patch16_224 resnet50 --torch-compile

python scripts/benchmark.py --json before.json --picture speed.png

python scripts/benchmark.py --against before.json

Each side of a comparison is a process of its own, with the same settings of its memory. They take turns, and the best
of all rounds counts. docs/speed.md says what the figures mean.
"""

import ctypes
import dataclasses
import gc
import importlib.util
import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich import box
from rich.console import Console
from rich.table import Table

import eqzoo
from eqzoo import generation, host, train, tree
from eqzoo._cost import cost
from eqzoo._registry import variant
from eqzoo.train import plots

MODELS = (
    *("vit_small_patch16_224", "convnext_tiny", "swin_tiny_patch4_window7_224", "gpt2", "mobilenetv2_100"),
    *("efficientnet_b0", "resnext50_32x4d", "regnety_008", "resnet50"),
)
QUICK = {"models": ("vit_tiny_patch16_224", "gpt2"), "batch_size": 2, "image_size": 32, "context": 16, "rounds": 1}
PLAIN = "plain Equinox"
PROMPT = 16
SQUARE = 2048
LEAST_NOISE, MORE_MEMORY = 0.05, 0.1

Tasks = dict[str, Callable[[], Any]]
Figures = dict[str, Any]


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = MODELS
    """Names that eqzoo and timm share, or GPT-2's."""
    batch_size: int = 8
    """Of images; of texts it is half as many."""
    image_size: int = 224
    context: int = 256
    """Tokens of a text."""
    decode: int = 128
    """Tokens that GPT-2 writes after a prompt of 16; 0: none."""
    rounds: int = 5
    torch_compile: bool = False
    """Have torch's models compiled, too."""
    quick: bool = False
    """Tiny models, to see that everything works; the figures mean nothing."""
    json: Path | None = None
    """Where to write all figures."""
    picture: Path | None = None
    """Where to draw the ratios, as .png or .svg."""
    against: Path | None = None
    """Figures of an earlier run; if a ratio is worse than it was there, by more than noise, the exit code is 1."""

    @property
    def sizes(self) -> dict[str, int]:
        """What figures have to have in common to be compared."""
        return {name: int(getattr(self, name)) for name in ("batch_size", "image_size", "context", "quick")}


def main(options: Options) -> int:
    if options.quick:
        options = dataclasses.replace(options, **QUICK, decode=min(options.decode, 4))
    try:
        before = check(options)
        no_torch = load_torch()
        if not no_torch:
            check_upstream(options.models)
    except ValueError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 2
    if no_torch:
        print(f"torch is left out: {no_torch}", file=sys.stderr)
    results = measure(options, with_torch=not no_torch)
    console = Console(width=120)
    console.print(speed_table(results))
    for name, group in results["groups"].items():
        if is_decoding(group):
            console.print(decode_table(name, group, results))
    console.print(machine_line(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    if options.picture:
        draw(results, options.picture)
    worse = regressions(results, before) if before else []
    for line in worse:
        console.print(f"[red]worse than before:[/] {line}")
    return 1 if worse else 0


# What can't work is said before anything is computed.


def check(options: Options) -> Figures | None:
    """The figures to compare with, if there are any."""
    for name, least in (("batch_size", 2), ("context", 1), ("rounds", 1), ("decode", 0)):
        if (value := getattr(options, name)) < least:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; give at least {least}")
    for name in options.models:
        config(name, options)
    for option, file in (("--json", options.json), ("--picture", options.picture)):
        if file and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
            raise ValueError(f"{option} {file} can't be written; give a file in a folder that exists and is yours")
    if options.picture and options.picture.suffix not in (".png", ".svg"):
        raise ValueError(f"--picture {options.picture} should end in .png or .svg")
    return read(options.against, options) if options.against else None


def read(file: Path, options: Options) -> Figures:
    try:
        before = json.loads(file.read_text())
        sizes, names = before["sizes"], before["groups"].keys()
    except OSError as error:
        raise ValueError(f"--against {file} can't be read: {error.strerror}; write such a file with --json") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"--against {file} has no figures of this script; write such a file with --json") from None
    differing = [f"{name}={sizes.get(name)}" for name, size in options.sizes.items() if sizes.get(name) != size]
    if differing:
        raise ValueError(f"--against {file} was measured with {', '.join(differing)}; this run has {options.sizes}")
    if names.isdisjoint(options.models):
        raise ValueError(f"--against {file} has figures of {', '.join(names)}; choose --models among them")
    return before


def load_torch() -> str | None:
    """Import what torch's sides need; if that can't be, why."""
    try:
        import torch

        package = importlib.util.find_spec("torchvision")
        for library in Path(package.origin).parent.glob("_C.*") if package and package.origin else ():
            try:
                torch.ops.load_library(library)
            except OSError:  # it was built for another torch; the rest needs no more than that these operators exist
                for name in ("nms", "qnms"):
                    torch.library.define(
                        f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    )
        import timm  # noqa: F401
        import transformers.models.gpt2.modeling_gpt2  # noqa: F401
    except Exception as error:
        return one_line(error)


def check_upstream(names: Sequence[str]) -> None:
    import timm

    for name in names:
        if not is_gpt2(name) and not timm.is_model(name):
            raise ValueError(f"--models {name}: torch's side is timm's models and GPT-2, which {name} is none of")


def one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


# The models of all sides, and what they do.


def is_gpt2(name: str) -> bool:
    return isinstance(variant(name)[1], eqzoo.GPT2Config)


def config(name: str, options: Options) -> Any:
    """All sides' models have these sizes, and no layer that drops anything."""
    return dataclasses.replace(variant(f"timm/{name}")[1], **fitting(name, options))


def fitting(name: str, options: Options) -> dict[str, Any]:
    dropped = ("dropout", "drop_path", "embedding_dropout", "attention_dropout", "residual_dropout")
    sizes: dict[str, Any] = {"image_size": options.image_size}
    if options.quick:
        sizes |= {"dim": 48, "depth": 2, "heads": 2, "vocab": 500} if is_gpt2(name) else {"depth": 2}
    return train.model_options(f"timm/{name}", {}, **dict.fromkeys(dropped, 0.0), **sizes)


def examples(name: str, options: Options) -> tuple[np.ndarray, np.ndarray]:
    """Images and their classes, or tokens and the next ones."""
    random = np.random.default_rng(0)
    if is_gpt2(name):
        tokens = random.integers(0, 500, (options.batch_size // 2, options.context + 1))
        return tokens[:, :-1], tokens[:, 1:]
    shape = (options.batch_size, options.image_size, options.image_size, 3)
    return random.standard_normal(shape, np.float32), random.integers(0, 1000, options.batch_size)


def eqzoo_tasks(name: str, options: Options) -> tuple[Tasks, Figures]:
    model, state = eqzoo.create(f"timm/{name}", key=jax.random.key(0), **fitting(name, options))
    return jax_tasks(model, state, *examples(name, options))


def plain_tasks(name: str, options: Options) -> tuple[Tasks, Figures]:
    inputs, labels = examples(name, options)
    model, state = eqx.nn.make_with_state(PLAIN_MODELS[name])(config(name, options), key=jax.random.key(0))
    return jax_tasks(model, state, inputs if is_gpt2(name) else inputs.transpose(0, 3, 1, 2), labels)


def jax_tasks(model: Any, state: eqx.nn.State, inputs: np.ndarray, labels: np.ndarray) -> tuple[Tasks, Figures]:
    optimizer = optax.adamw(1e-3)
    train_state = train.TrainState.create(model, state, optimizer, key=jax.random.key(0))
    batch = jnp.asarray(inputs), jnp.asarray(labels)

    def loss_fn(model, state, batch):
        inputs, labels = batch
        forward = jax.vmap(eqzoo.apply, axis_name="batch", in_axes=(None, None, 0), out_axes=(0, None))
        logits, state = forward(model, state, inputs)
        return train.cross_entropy(logits, labels).mean(), state

    @eqx.filter_jit(donate="all-except-first")
    def train_step(batch, train_state):
        gradient = eqx.filter_value_and_grad(loss_fn, has_aux=True)
        (_, state), grads = gradient(train_state.model, train_state.state, batch)
        parameters = eqx.filter(train_state.model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, train_state.opt_state, parameters)
        model = eqx.apply_updates(train_state.model, updates)
        return train_state.next(model, state, opt_state, grads)

    @eqx.filter_jit
    def predict(model, state, inputs):
        return jax.vmap(eqzoo.freeze(model, state))(inputs)

    def train_once():
        nonlocal train_state
        train_state = jax.block_until_ready(train_step(batch, train_state))

    def forward():
        jax.block_until_ready(predict(train_state.model, train_state.state, batch[0]))

    figures = {"flops": cost(predict, model, state, batch[0]).flops}
    figures |= {"parameters": tree.count(eqx.filter(model, eqx.is_inexact_array))}
    return {"train": train_once, "forward": forward}, figures


def torch_tasks(name: str, options: Options, *, channels_last: bool, compiled: bool) -> tuple[Tasks, Figures]:
    import torch

    inputs, labels = map(torch.from_numpy, examples(name, options))
    model = torch_gpt2(name, options) if is_gpt2(name) else torch_vision(name, options)
    if not is_gpt2(name):
        inputs = inputs.permute(0, 3, 1, 2).contiguous()
    if channels_last:
        model, inputs = model.to(memory_format=torch.channels_last), inputs.to(memory_format=torch.channels_last)
    call = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4, fused=True)

    def logits():
        return call(inputs).logits if is_gpt2(name) else call(inputs)

    def train_once():
        model.train()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits().flatten(0, -2), labels.flatten()).backward()
        optimizer.step()

    def forward():
        model.eval()
        with torch.inference_mode():
            logits()

    return {"train": train_once, "forward": forward}, {"parameters": sum(each.numel() for each in model.parameters())}


def torch_vision(name: str, options: Options) -> Any:
    import timm

    sizes = fitting(name, options)
    renamed = {"image_size": "img_size", "depth": "depth"}
    return timm.create_model(name, **{renamed[each]: sizes[each] for each in renamed if each in sizes})


def torch_gpt2(name: str, options: Options) -> Any:
    import transformers

    ours = config(name, options)
    sizes = {"n_embd": ours.dim, "n_layer": ours.depth, "n_head": ours.heads, "vocab_size": ours.vocab}
    dropped = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    tokens = {"bos_token_id": None, "eos_token_id": None}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, **sizes, **dropped, **tokens))


def eqzoo_decoding(options: Options) -> tuple[Tasks, Figures]:
    model = eqzoo.freeze(*eqzoo.create("gpt2", key=jax.random.key(0), **fitting("gpt2", options)))
    models = {"float32": model, "bfloat16": tree.cast(model, jnp.bfloat16), "int8": tree.quantize(model, "*")}
    write = lambda model: generation.generate(model, [list(range(PROMPT))], options.decode)
    tasks: Tasks = {dtype: partial(write, model) for dtype, model in models.items()}
    return tasks, {"bytes": {dtype: tree.nbytes(model) for dtype, model in models.items()}, "tokens": options.decode}


def torch_decoding(options: Options) -> tuple[Tasks, Figures]:
    import torch

    prompt = torch.arange(PROMPT)[None]
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}
    settings |= {"attention_mask": torch.ones_like(prompt), "max_new_tokens": options.decode}
    models = {name: torch_gpt2("gpt2", options).eval().to(getattr(torch, name)) for name in ("float32", "bfloat16")}
    return {dtype: partial(model.generate, prompt, **settings) for dtype, model in models.items()}, {}


def jax_machine(options: Options) -> tuple[Tasks, Figures]:
    """What the machine can do: read memory, and multiply matrices."""
    multiply = jax.jit(jnp.matmul)
    wide, square = jnp.ones(machine_shape(options)), jnp.ones((SQUARE, SQUARE))
    one_each = jnp.ones(wide.shape[1])
    block = jax.block_until_ready
    tasks = {"read": lambda: block(multiply(wide, one_each)), "multiply": lambda: block(multiply(square, square))}
    return tasks, {"bytes": wide.nbytes, "backend": jax.default_backend()}


def torch_machine(options: Options) -> tuple[Tasks, Figures]:
    import torch

    wide, square = torch.ones(machine_shape(options)), torch.ones(SQUARE, SQUARE)
    return {"read": wide.sum, "multiply": lambda: square @ square}, {}


def machine_shape(options: Options) -> tuple[int, int]:
    return (1024 if options.quick else 16384, 16384)  # 1 GiB, which no cache holds


# Processes that take turns.


@dataclass(frozen=True)
class Side:
    name: str
    make: Callable[[], tuple[Tasks, Figures]]
    """Its tasks, and what is known of it beforehand."""


@dataclass(frozen=True)
class Running:
    """A side's process, which answers questions."""

    pipe: Connection
    figures: Figures

    def ask(self, question: str) -> Any:
        self.pipe.send(question)
        return self.pipe.recv()

    def take_turn(self) -> None:
        for task in self.figures["first"]:
            wall, cpu = self.ask(task)
            self.figures["wall"].setdefault(task, []).append(wall)
            self.figures["cpu"].setdefault(task, []).append(cpu)


def sides(name: str, options: Options, *, with_torch: bool) -> list[Side]:
    found = [Side("eqzoo", partial(eqzoo_tasks, name, options))]
    layouts = {"torch": False} if is_gpt2(name) else {"torch": False, "torch channels_last": True}
    for compiled in (False, True)[: with_torch * (1 + options.torch_compile)]:
        for layout, channels_last in layouts.items():
            make = partial(torch_tasks, name, options, channels_last=channels_last, compiled=compiled)
            found.append(Side(layout + " compiled" * compiled, make))
    if name in PLAIN_MODELS:
        found.append(Side(PLAIN, partial(plain_tasks, name, options)))
    return found


def measure(options: Options, *, with_torch: bool) -> Figures:
    """All figures, by comparison and side; times are a list with a number for each round."""
    versions = {name: version(name) for name in ("jax", "equinox", *("torch", "timm", "transformers") * with_torch)}
    results = {"sizes": options.sizes, "versions": versions, "groups": {}}
    machine = [Side("XLA", partial(jax_machine, options)), Side("torch", partial(torch_machine, options))]
    with started(machine[: 1 + with_torch]) as machine:
        results["machine"] = {name: each.figures for name, each in machine.items()}
        # Where JAX has an accelerator, torch would still compute on the CPU.
        with_torch = with_torch and results["machine"]["XLA"]["backend"] == "cpu"
        groups = {name: sides(name, options, with_torch=with_torch) for name in options.models}
        if options.decode:
            both = [Side("eqzoo", partial(eqzoo_decoding, options)), Side("torch", partial(torch_decoding, options))]
            groups[f"GPT-2 writes {options.decode} tokens"] = both[: 1 + with_torch]
        for number, (group, members) in enumerate(groups.items(), start=1):
            print(f"{group} ({number} of {len(groups)})", file=sys.stderr, flush=True)
            with started(members) as running:
                for _ in range(options.rounds):
                    for each in (*machine.values(), *running.values()):
                        each.take_turn()
                results["groups"][group] = {
                    name: each.figures | {"peak": each.ask("peak")} for name, each in running.items()
                }
    return results


@contextmanager
def started(members: Sequence[Side]) -> Iterator[dict[str, Running]]:
    """A process for each side. One that fails says why and is left out, unless it is the first."""
    context = multiprocessing.get_context("fork")  # libraries are imported, but nothing has been computed yet
    running: dict[str, Running] = {}
    with ExitStack() as stack:
        for side in members:
            pipe, theirs = context.Pipe()
            process = context.Process(target=serve, args=(side, theirs, pipe), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.enter_context(pipe)
            try:
                figures = pipe.recv()
            except EOFError:
                figures = "its process died"
            first = next(iter(running.values()), None)
            if isinstance(figures, dict) and first and figures.get("parameters") != first.figures.get("parameters"):
                figures = f"it has {figures['parameters']:,} parameters instead of {first.figures['parameters']:,}"
            if isinstance(figures, dict):
                running[side.name] = Running(pipe, figures)
            elif first is None:
                raise RuntimeError(f"{side.name}: {figures}")
            else:
                print(f"{side.name} is left out: {figures}", file=sys.stderr, flush=True)
        yield running


def serve(side: Side, pipe: Connection, other_end: Connection) -> None:
    """Make the tasks, do each for the first time, then answer until nobody asks."""
    other_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks will end, and then this one
    try:
        libraries = memory("RssAnon")
        start = time.perf_counter()
        tasks, figures = side.make()
        made = time.perf_counter() - start
        first = {task: clocks(function)[0] for task, function in tasks.items()}
    except Exception as error:
        pipe.send(one_line(error))
        return
    pipe.send(figures | {"made": made, "first": first, "wall": {}, "cpu": {}})
    with suppress(EOFError):
        while question := pipe.recv():
            if question == "peak":
                pipe.send(peak_memory(tasks, libraries))
            else:
                function = tasks[question]
                function()
                pipe.send(tuple(map(min, zip(clocks(function), clocks(function), strict=True))))


def clocks(function: Callable[[], Any]) -> tuple[float, float]:
    """The seconds it takes, by the clock and of processors."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - cpu


def peak_memory(tasks: Tasks, libraries: int) -> int | None:
    """The most that the process has during a training step, beyond the libraries, in bytes; None where that can't be
    seen. What compilation took and gave back doesn't count."""
    if "train" not in tasks:
        return None
    try:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the most so far is what there is now
    except (OSError, AttributeError):
        return None
    tasks["train"]()
    return memory("VmHWM") - memory("RssFile") - libraries


def memory(field: str) -> int:
    """Of this process, in bytes: what it has of its own, `RssAnon`, of files, `RssFile`, or had at most, `VmHWM`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


# What the figures say. A ratio is the best of some sides over eqzoo: above 1, eqzoo is better.


def is_decoding(group: Figures) -> bool:
    return "train" not in group["eqzoo"]["wall"]


def best(group: Figures, task: str, names: Sequence[str]) -> str | None:
    """The fastest side of these."""
    known = [name for name in names if task in group[name]["wall"]]
    return min(known, key=lambda name: min(group[name]["wall"][task]), default=None)


def ratio(group: Figures, task: str, names: Sequence[str], clock: str = "wall") -> float | None:
    times = [min(group[name][clock][task]) for name in names if task in group[name][clock]]
    return min(times) / min(group["eqzoo"][clock][task]) if times else None


def memory_ratio(group: Figures, names: Sequence[str]) -> float | None:
    peaks = [group[name]["peak"] for name in names]
    return min(peaks) / group["eqzoo"]["peak"] if peaks and None not in (*peaks, group["eqzoo"]["peak"]) else None


def sides_like(group: Figures, prefix: str) -> list[str]:
    return [name for name in group if name.startswith(prefix)]


def noise(group: Figures, task: str, names: Sequence[str]) -> float:
    """How far the middle round is from the best one, added up over eqzoo and the fastest of the others."""
    rounds = [group[name]["wall"][task] for name in ("eqzoo", best(group, task, names))]
    return sum(statistics.median(seconds) / min(seconds) - 1 for seconds in rounds)
PLAIN_MODELS = {}
