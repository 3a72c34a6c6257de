"""How fast the models are, beside torch's and beside the same models written plainly in Equinox. For example:

python scripts/benchmark.py

python scripts/benchmark.py --models vit_small_patch16_224 resnet50 --torch-compile

python scripts/benchmark.py --json before.json

python scripts/benchmark.py --against before.json

Every side of a comparison is a process of its own, with the same settings of its memory. They take turns, one at work
at a time: in each round each does every task once to warm up and twice by the clock. The best of all rounds counts.
"""

import dataclasses
import importlib
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    "vit_small_patch16_224",
    "convnext_tiny",
    "swin_tiny_patch4_window7_224",
    "gpt2",
    "mobilenetv2_100",
    "efficientnet_b0",
    "resnext50_32x4d",
    "regnety_008",
    "resnet50",
)
TORCH = ("torch", "torch channels_last")
PLAIN = "plain Equinox"
DTYPES = ("float32", "bfloat16", "int8")
TINY_VIT = {"depth": 2}
TINY_GPT2 = {"dim": 48, "depth": 2, "heads": 2, "vocab": 500}
GPT2_MODULE = "transformers.models.gpt2.modeling_gpt2"
PROMPT = 16
LEAST_NOISE = 0.05


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
    """Tiny models and two rounds, to see that everything works; the figures mean nothing."""
    json: Path | None = None
    """Where to write all figures."""
    picture: Path | None = None
    """Where to draw the ratios, as .png or .svg."""
    against: Path | None = None
    """Figures of an earlier run; if a ratio is worse than it was there, by more than noise, the exit code is 1."""

    @property
    def sizes(self) -> "Options":
        if not self.quick:
            return self
        tiny = {"models": ("vit_tiny_patch16_224", "gpt2"), "batch_size": 2, "image_size": 32, "context": 16}
        return dataclasses.replace(self, **tiny, decode=min(self.decode, 4), rounds=2)


def main(options: Options) -> int:
    options = options.sizes
    before = json.loads(options.against.read_text()) if options.against else None
    results = measure(options)
    console = Console(width=max(Console().width, 150))
    console.print(speed_table(results), machine_line(results))
    if options.decode:
        console.print(decode_table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    if options.picture:
        draw(results, options.picture)
    worse = regressions(results, before) if before else []
    for line in worse:
        console.print(f"[red]slower than before:[/] {line}")
    return 1 if worse else 0


# What is measured: each side is a function that makes its tasks, in a process of its own.

Tasks = dict[str, Callable[[], Any]]
Facts = dict[str, Any]


def eqzoo_tasks(name: str, options: Options) -> tuple[Tasks, Facts]:
    model, state = eqzoo.create(f"timm/{name}", key=jax.random.key(0), **fitting(name, options))
    return jax_tasks(model, state, *map(jnp.asarray, examples(name, options)))


def plain_tasks(name: str, options: Options, *, make: Callable[..., Any]) -> tuple[Tasks, Facts]:
    config = dataclasses.replace(variant(f"timm/{name}")[1], **fitting(name, options))
    model, state = eqx.nn.make_with_state(make)(config, key=jax.random.key(0))
    inputs, labels = examples(name, options)
    return jax_tasks(model, state, jnp.asarray(inputs.transpose(0, 3, 1, 2)), jnp.asarray(labels))


def jax_tasks(model, state, inputs, labels) -> tuple[Tasks, Facts]:
    optimizer = optax.adamw(1e-3)
    train_state = train.TrainState.create(model, state, optimizer, key=jax.random.key(0))

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
        train_state = jax.block_until_ready(train_step((inputs, labels), train_state))

    parameters = eqx.filter(model, eqx.is_inexact_array)
    facts = {"parameters": tree.count(parameters), "flops": cost(predict, model, state, inputs).flops}
    del model, state, parameters  # the first step takes the place of what it was given
    forward = lambda: jax.block_until_ready(predict(train_state.model, train_state.state, inputs))
    return {"train": train_once, "forward": forward}, facts


def torch_tasks(name: str, options: Options, *, channels_last: bool, compiled: bool) -> tuple[Tasks, Facts]:
    import torch

    inputs, labels = map(torch.from_numpy, examples(name, options))
    model = torch_gpt2(name, options) if is_text(name) else torch_vision(name, options)
    if not is_text(name):
        inputs = inputs.permute(0, 3, 1, 2).contiguous()
    if channels_last:
        model, inputs = model.to(memory_format=torch.channels_last), inputs.to(memory_format=torch.channels_last)
    call = torch.compile(model) if compiled else model
    logits = lambda: call(inputs).logits if is_text(name) else call(inputs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4, fused=True)

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


def eqzoo_decoding(options: Options) -> tuple[Tasks, Facts]:
    model = eqzoo.freeze(*eqzoo.create("gpt2", key=jax.random.key(0), **fitting("gpt2", options)))
    models = {"float32": model, "bfloat16": tree.cast(model, jnp.bfloat16), "int8": tree.quantize(model, "*")}
    write = lambda model: generation.generate(model, [list(range(PROMPT))], options.decode)
    tasks: Tasks = {dtype: partial(write, model) for dtype, model in models.items()}
    return tasks, {"bytes": {dtype: tree.nbytes(model) for dtype, model in models.items()}}


def torch_decoding(options: Options) -> tuple[Tasks, Facts]:
    import torch

    prompt = torch.arange(PROMPT)[None]
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}
    settings |= {"attention_mask": torch.ones_like(prompt), "max_new_tokens": options.decode}
    models = {name: torch_gpt2("gpt2", options).eval().to(getattr(torch, name)) for name in ("float32", "bfloat16")}
    return {dtype: partial(model.generate, prompt, **settings) for dtype, model in models.items()}, {}


def jax_machine(options: Options) -> tuple[Tasks, Facts]:
    multiply = jax.jit(jnp.matmul)
    wide, tall = jnp.ones(machine_shape(options)), jnp.ones(machine_shape(options)[1])
    square = jnp.ones((2048, 2048))
    block = jax.block_until_ready
    tasks = {"read": lambda: block(multiply(wide, tall)), "multiply": lambda: block(multiply(square, square))}
    return tasks, {"bytes": wide.nbytes}


def torch_machine(options: Options) -> tuple[Tasks, Facts]:
    import torch

    wide, square = torch.ones(machine_shape(options)), torch.ones(2048, 2048)
    return {"read": wide.sum, "multiply": lambda: square @ square}, {}


def machine_shape(options: Options) -> tuple[int, int]:
    return (1024 if options.quick else 16384, 16384)  # 1 GiB


def is_text(name: str) -> bool:
    return hasattr(variant(name)[1], "vocab")


def fitting(name: str, options: Options) -> dict[str, Any]:
    """What both sides' models have alike: sizes, and no layer that drops anything."""
    dropped = ("dropout", "drop_path", "embedding_dropout", "attention_dropout", "residual_dropout")
    sizes: dict[str, Any] = {"image_size": options.image_size}
    if options.quick:
        sizes |= TINY_GPT2 if is_text(name) else TINY_VIT
    return train.model_options(f"timm/{name}", {}, **dict.fromkeys(dropped, 0.0), **sizes)


def examples(name: str, options: Options) -> tuple[np.ndarray, np.ndarray]:
    """Images and their classes, or tokens and the next ones."""
    random = np.random.default_rng(0)
    if is_text(name):
        tokens = random.integers(0, 500, (options.batch_size // 2, options.context + 1))
        return tokens[:, :-1], tokens[:, 1:]
    shape = (options.batch_size, options.image_size, options.image_size, 3)
    return random.standard_normal(shape, np.float32), random.integers(0, 1000, options.batch_size)


def load(library: str) -> Any:
    try:
        return importlib.import_module(library)
    except RuntimeError:
        # Where builds of torchvision and torch don't fit, its operators are missing; here they need only exist.
        import torch

        operators = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            operators.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return importlib.import_module(library)


def torch_vision(name: str, options: Options) -> Any:
    fitted = fitting(name, options)
    names = {"image_size": "img_size", "depth": "depth"}
    return load("timm").create_model(name, **{names[each]: fitted[each] for each in names if each in fitted})


def torch_gpt2(name: str, options: Options) -> Any:
    import transformers

    config = dataclasses.replace(variant(name)[1], **fitting(name, options))
    theirs = transformers.GPT2Config(
        n_embd=config.dim,
        n_layer=config.depth,
        n_head=config.heads,
        vocab_size=config.vocab,
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(theirs)


# Processes that take turns.


@dataclass(frozen=True)
class Side:
    """One process's part in a comparison: what makes its tasks, with which arguments."""

    name: str
    make: Callable[..., tuple[Tasks, Facts]]
    arguments: dict[str, Any]
    libraries: tuple[str, ...] = ()
    """Those to load beforehand, for they count for nothing."""


def sides(name: str, options: Options) -> list[Side]:
    shared = {"name": name, "options": options}
    layouts = TORCH[:1] if is_text(name) else TORCH
    found = [Side("eqzoo", eqzoo_tasks, shared)]
    for layout in layouts:
        for compiled in (False, True)[: 1 + options.torch_compile]:
            torch_options = {"channels_last": layout == TORCH[1], "compiled": compiled}
            libraries = ("torchvision", GPT2_MODULE if is_text(name) else "timm")
            found.append(Side(layout + " compiled" * compiled, torch_tasks, shared | torch_options, libraries))
    if make := plain_maker(name):
        found.append(Side(PLAIN, plain_tasks, shared | {"make": make}))
    return found


def measure(options: Options) -> dict[str, Any]:
    """All figures, by comparison and side: what `serve` says of the process, and lists with a number for each round."""
    groups = {name: sides(name, options) for name in options.models}
    shared = {"options": options}
    if options.decode:
        upstream = Side("torch", torch_decoding, shared, ("torchvision", GPT2_MODULE))
        groups["decode"] = [Side("eqzoo", eqzoo_decoding, shared), upstream]
    machine = [Side("XLA", jax_machine, shared), Side("torch", torch_machine, shared, ("torch",))]
    libraries = {name: version(name) for name in ("jax", "torch", "timm", "transformers")}
    results: dict[str, Any] = {"libraries": libraries, "decode": options.decode, "sides": {}}
    with processes(machine) as machine:
        results["machine"] = {name: facts for name, (_, facts) in machine.items()}
        for group, members in groups.items():
            print(f"{group} …", file=sys.stderr, flush=True)
            with processes(members) as members:
                for _ in range(options.rounds):
                    for pipe, facts in (*machine.values(), *members.values()):
                        take_turn(pipe, facts)
                for pipe, facts in members.values():
                    facts["peak"] = ask(pipe, "peak")
            results["sides"][group] = {name: facts for name, (_, facts) in members.items()}
            counts = {facts["parameters"] for _, facts in members.values() if "parameters" in facts}
            if len(counts) > 1:
                raise ValueError(f"{group}: the sides' models have {counts} parameters; they should be the same model")
    return results


@contextmanager
def processes(members: Sequence[Side]) -> Iterator[dict[str, tuple[Connection, dict[str, Any]]]]:
    """A process for each side, with its facts; one that fails says why, and has no figures."""
    context = multiprocessing.get_context("spawn")  # nothing of this process's memory
    started = {}
    running = []
    for side in members:
        pipe, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, side), daemon=True)
        process.start()
        theirs.close()
        running.append((process, pipe))
        try:
            started[side.name] = (pipe, pipe.recv())
        except EOFError:
            print(f"{side.name} failed, see above", file=sys.stderr)
    if members[0].name not in started:
        raise RuntimeError(f"{members[0].name} failed, see above: nothing to compare with")
    yield started
    for process, pipe in running:
        pipe.close()
        process.join()


def serve(pipe: Connection, side: Side) -> None:
    """Make the tasks, do each for the first time, then answer until nobody asks."""
    if side.libraries:
        for library in side.libraries:
            load(library)
    else:
        jax.config.update("jax_enable_compilation_cache", False)
        jax.devices()
    libraries = memory("VmRSS")
    start = time.perf_counter()
    tasks, facts = side.make(**side.arguments)
    made = time.perf_counter() - start
    first = {task: clocks(function)[0] for task, function in tasks.items()}
    pipe.send(facts | {"made": made, "first": first, "wall": {}, "cpu": {}})
    try:
        while question := pipe.recv():
            if question == "peak":
                pipe.send(memory("VmHWM") - libraries)
            else:
                function = tasks[question]
                function()
                pipe.send(tuple(map(min, zip(clocks(function), clocks(function), strict=True))))
    except EOFError:
        return


def ask(pipe: Connection, question: str) -> Any:
    pipe.send(question)
    return pipe.recv()


def take_turn(pipe: Connection, facts: dict[str, Any]) -> None:
    for task in facts["first"]:
        wall, cpu = ask(pipe, task)
        facts["wall"].setdefault(task, []).append(wall)
        facts["cpu"].setdefault(task, []).append(cpu)


def clocks(function: Callable[[], Any]) -> tuple[float, float]:
    """The seconds it takes, by the clock and of processors."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - cpu


def memory(field: str) -> int:
    """A field of this process's status in bytes: what it holds, `VmRSS`, or the most it ever held, `VmHWM`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


# What the figures say. A ratio is the best of torch's sides, or another side, over eqzoo: above 1, eqzoo is better.


def rivals(group: dict[str, Any], prefix: str, task: str) -> list[dict[str, Any]]:
    return [facts for name, facts in group.items() if name.startswith(prefix) and task in facts["first"]]


def ratio(group: dict[str, Any], task: str, prefix: str = "torch", clock: str = "wall") -> float | None:
    best = [min(facts[clock][task]) for facts in rivals(group, prefix, task)]
    return min(best) / min(group["eqzoo"][clock][task]) if best else None


def memory_ratio(group: dict[str, Any]) -> float | None:
    peaks = [facts["peak"] for facts in rivals(group, "torch", "train")]
    return min(peaks) / group["eqzoo"]["peak"] if peaks else None


def noise(group: dict[str, Any], task: str) -> float:
    """How far the middle round is from the best one, added up over eqzoo and the best of torch's sides."""
    best = min(rivals(group, "torch", task), key=lambda facts: min(facts["wall"][task]))
    spreads = [statistics.median(each["wall"][task]) / min(each["wall"][task]) - 1 for each in (group["eqzoo"], best)]
    return sum(spreads)


def regressions(results: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Ratios that are lower than they were by more than both runs' noise, and memory that is a tenth more."""
    found = []
    for name, group in results["sides"].items():
        old_group = before["sides"].get(name, {"eqzoo": {"first": {}}})
        for task in old_group["eqzoo"]["first"]:
            new, old = ratio(group, task), ratio(old_group, task)
            if new is None or old is None:
                continue
            tolerance = max(LEAST_NOISE, noise(group, task) + noise(old_group, task))
            if new < old / (1 + tolerance):
                found.append(f"{name}, {task}: {new:.2f} times torch, was {old:.2f} (noise {tolerance:.0%})")
        if "train" in old_group["eqzoo"]["first"] and group["eqzoo"]["peak"] > 1.1 * old_group["eqzoo"]["peak"]:
            peaks = [each["eqzoo"]["peak"] / 1e6 for each in (group, old_group)]
            found.append(f"{name}, memory: {peaks[0]:.0f} MB, was {peaks[1]:.0f}")
    return found


def machine_best(results: dict[str, Any], task: str) -> float:
    return min(min(facts["wall"][task]) for facts in results["machine"].values())


def machine_line(results: dict[str, Any]) -> str:
    speed = 2 * 2048**3 / machine_best(results, "multiply") / 1e9
    return f"The machine: {speed:.0f} GFLOP/s in a product of two matrices of 2048 x 2048, float32\n"


def models_of(results: dict[str, Any]) -> dict[str, Any]:
    return {name: group for name, group in results["sides"].items() if "train" in group["eqzoo"]["first"]}


def speed_table(results: dict[str, Any]) -> Table:
    columns = ("", "training", "CPU", "forward", "CPU", "memory")
    columns += ("training ms", "CPU", "forward ms", "CPU", "of peak", "compiling s", "first step s", "MB")
    table = Table(box=box.SIMPLE_HEAD, title="how many times as much as eqzoo takes; then the figures themselves")
    for column in columns:
        table.add_column(column, justify="right" if column else "left", no_wrap=not column)
    models = models_of(results)
    for name, group in models.items():
        ours = group["eqzoo"]
        for side, facts in group.items():
            pairs = [(task, clock) for task in ("train", "forward") for clock in ("wall", "cpu")]
            times = [(min(facts[clock][task]), min(ours[clock][task])) for task, clock in pairs]
            ratios = [f"{theirs / mine:.2f}" for theirs, mine in times] + [f"{facts['peak'] / ours['peak']:.2f}"]
            rate = 3 * ours["flops"] / times[0][0] * machine_best(results, "multiply") / (2 * 2048**3)
            table.add_row(
                *([name, *[""] * 5] if side == "eqzoo" else [f"  {side}", *ratios]),
                *(f"{1e3 * seconds:.0f}" for seconds, _ in times),
                *(f"{rate:.0%}", f"{facts['first']['train'] - times[0][0]:.1f}"),
                *(f"{facts['made'] + facts['first']['train']:.1f}", f"{facts['peak'] / 1e6:.0f}"),
                style="bold" if side == "eqzoo" else "",
            )
        table.add_section()
    for prefix in ("torch", PLAIN):
        pairs = [(task, clock) for task in ("train", "forward") for clock in ("wall", "cpu")]
        means = [mean([ratio(group, task, prefix, clock) for group in models.values()]) for task, clock in pairs]
        memories = [memory_ratio(group) for group in models.values()] if prefix == "torch" else []
        label = "torch's best" if prefix == "torch" else prefix
        table.add_row(f"{label}, geometric mean", *means, mean(memories), style="bold")
    return table


def mean(ratios: Sequence[float | None]) -> str:
    known = [each for each in ratios if each is not None]
    return number(statistics.geometric_mean(known) if known else None, ".2f")


def number(value: float | None, form: str) -> str:
    return "" if value is None or math.isnan(value) else format(value, form)


def decode_table(results: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=f"GPT-2 writes {results['decode']} tokens, one after the other")
    for column in ("weights", "times transformers", "CPU", "tokens/s", "transformers'", "GB/s", "of the memory's"):
        table.add_column(column, justify="left" if column == "weights" else "right")
    bandwidth = results["machine"]["XLA"]["bytes"] / machine_best(results, "read")
    group = results["sides"]["decode"]
    for dtype in DTYPES:
        ours, theirs = (tokens_per_second(results, name, dtype) for name in ("eqzoo", "torch"))
        read = ours * group["eqzoo"]["bytes"][dtype]
        table.add_row(
            *(dtype, *(number(ratio(group, dtype, clock=clock), ".2f") for clock in ("wall", "cpu"))),
            *(f"{ours:.1f}", number(theirs, ".1f"), f"{read / 1e9:.1f}"),
            f"{read / bandwidth:.0%} of {bandwidth / 1e9:.1f}",
        )
    return table


def tokens_per_second(results: dict[str, Any], side: str, dtype: str) -> float:
    facts = results["sides"]["decode"].get(side)
    return results["decode"] / min(facts["wall"][dtype]) if facts and dtype in facts["wall"] else math.nan


def draw(results: dict[str, Any], path: Path) -> None:
    """Bars of the ratios to torch's best, and dots of those to plain Equinox."""
    from matplotlib.figure import Figure

    models = dict(sorted(models_of(results).items(), key=lambda item: ratio(item[1], "train") or 0))
    figure = Figure((7.5, 1.1 + 0.55 * len(models)), layout="constrained", facecolor="white")
    axis = figure.subplots()
    for task, offset, color in (("train", 0.19, plots.BLUE), ("forward", -0.19, plots.LIGHT_BLUE)):
        label = "training step" if task == "train" else "forward"
        values = [ratio(group, task) or math.nan for group in models.values()]
        bars = axis.barh(np.arange(len(models)) + offset, values, 0.34, color=color, label=f"{label}, torch's best")
        axis.bar_label(bars, fmt="%.2f", padding=3, fontsize=8, color=plots.GREY)
        plain = [ratio(group, task, PLAIN) or math.nan for group in models.values()]
        if task == "train":
            axis.scatter(plain, np.arange(len(models)) + offset, 26, plots.ORANGE, zorder=3, label=f"{label}, {PLAIN}")
    axis.axvline(1, color=plots.INK, linewidth=1)
    axis.set_yticks(range(len(models)), list(models), fontsize=9, color=plots.INK)
    axis.set_xlabel("time over eqzoo's: right of 1, eqzoo is faster", fontsize=9, color=plots.GREY)
    axis.tick_params(length=0, labelcolor=plots.INK, labelsize=8)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="lower right", labelcolor=plots.INK)
    figure.savefig(path, dpi=plots.DPI)


# Models as Equinox's own layers make them: channels first, layer after layer.


def plain_maker(name: str) -> Callable[..., Any] | None:
    makers = {"vit": PlainViT, "resnet50": plain_resnet, "mobilenetv2": plain_mobilenet}
    return next((make for prefix, make in makers.items() if name.startswith(prefix)), None)


def conv_norm(ins: int, outs: int, size: int, *, stride=1, groups=1, activation=None, key) -> eqx.nn.Sequential:
    conv = eqx.nn.Conv2d(ins, outs, size, stride, size // 2, groups=groups, use_bias=False, key=key)
    activations = [] if activation is None else [eqx.nn.Lambda(activation)]
    return eqx.nn.Sequential([conv, eqx.nn.BatchNorm(outs, "batch", mode="batch"), *activations])


class Residual(eqx.nn.StatefulLayer):
    body: eqx.nn.Sequential
    shortcut: eqx.nn.Sequential
    activation: Callable

    def __init__(self, body: Sequence[Any], shortcut: Sequence[Any], activation: Callable):
        self.body, self.shortcut = eqx.nn.Sequential(body), eqx.nn.Sequential(shortcut)
        self.activation = activation

    def __call__(self, x, state, *, key=None):
        out, state = self.body(x, state)
        x, state = self.shortcut(x, state)
        return self.activation(out + x), state


def plain_resnet(config, *, key) -> eqx.nn.Sequential:
    keys = iter(jax.random.split(key, 100))
    relu = jax.nn.relu
    layers: list[Any] = [conv_norm(3, 64, 7, stride=2, activation=relu, key=next(keys)), eqx.nn.MaxPool2d(3, 2, 1)]
    ins = 64
    for stage, (depth, width) in enumerate(zip(config.depths, config.widths, strict=True)):
        for block in range(depth):
            stride = 2 if stage and not block else 1
            body = [
                conv_norm(ins, width, 1, activation=relu, key=next(keys)),
                conv_norm(width, width, 3, stride=stride, activation=relu, key=next(keys)),
                conv_norm(width, 4 * width, 1, key=next(keys)),
            ]
            shortcut = [] if block else [conv_norm(ins, 4 * width, 1, stride=stride, key=next(keys))]
            layers.append(Residual(body, shortcut, relu))
            ins = 4 * width
    return eqx.nn.Sequential([*layers, *plain_head(ins, config.num_classes, next(keys))])


def plain_mobilenet(config, *, key) -> eqx.nn.Sequential:
    keys = iter(jax.random.split(key, 100))
    relu6 = jax.nn.relu6
    layers: list[Any] = [conv_norm(3, 32, 3, stride=2, activation=relu6, key=next(keys))]
    ins = 32
    for run in (run for stage in config.stages for run in stage):
        for block in range(run.repeats):
            stride = 1 if block else run.stride
            hidden = round(ins * (run.expansion if run.kind == "inverted" else 1))
            expand = [conv_norm(ins, hidden, 1, activation=relu6, key=next(keys))] * (run.kind == "inverted")
            depthwise = conv_norm(hidden, hidden, 3, stride=stride, groups=hidden, activation=relu6, key=next(keys))
            body = [*expand, depthwise, conv_norm(hidden, run.channels, 1, key=next(keys))]
            is_residual = stride == 1 and ins == run.channels
            layers += [Residual(body, [], lambda x: x)] if is_residual else body
            ins = run.channels
    layers.append(conv_norm(ins, config.top_width, 1, activation=relu6, key=next(keys)))
    return eqx.nn.Sequential([*layers, *plain_head(config.top_width, config.num_classes, next(keys))])


def plain_head(ins: int, classes: int, key) -> list[Any]:
    return [eqx.nn.Lambda(lambda x: jnp.mean(x, (1, 2))), eqx.nn.Linear(ins, classes, key=key)]


class PlainBlock(eqx.Module):
    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, dim: int, heads: int, *, key):
        bias = dict.fromkeys(("use_query_bias", "use_key_bias", "use_value_bias", "use_output_bias"), True)
        self.norms = [eqx.nn.LayerNorm(dim), eqx.nn.LayerNorm(dim)]
        self.attention = eqx.nn.MultiheadAttention(heads, dim, key=key, **bias)
        self.mlp = eqx.nn.MLP(dim, dim, 4 * dim, 1, lambda x: jax.nn.gelu(x, approximate=False), key=key)

    def __call__(self, x):
        normed = jax.vmap(self.norms[0])(x)
        x = x + self.attention(normed, normed, normed)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class PlainViT(eqx.Module):
    stem: eqx.nn.Conv2d
    token: jax.Array
    positions: jax.Array
    blocks: list[PlainBlock]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, config, *, key):
        key_stem, key_blocks, key_head = jax.random.split(key, 3)
        patch, dim = config.patch_size, config.dim
        self.stem = eqx.nn.Conv2d(3, dim, patch, patch, key=key_stem)
        self.token = jnp.zeros((1, dim))
        self.positions = jnp.zeros((1 + (config.image_size // patch) ** 2, dim))
        self.blocks = [PlainBlock(dim, config.heads, key=key) for key in jax.random.split(key_blocks, config.depth)]
        self.norm = eqx.nn.LayerNorm(dim)
        self.head = eqx.nn.Linear(dim, config.num_classes, key=key_head)

    def __call__(self, x, *, key=None):
        patches = self.stem(x)
        tokens = jnp.concatenate([self.token, patches.reshape(patches.shape[0], -1).T]) + self.positions
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens[0]))


if __name__ == "__main__":
    options = train.parse(Options, __doc__)
    host.tune()
    sys.exit(main(options))
