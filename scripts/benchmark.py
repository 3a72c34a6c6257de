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
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from jaxtyping import Array, Float
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
TIMES = (("train", "wall"), ("train", "cpu"), ("forward", "wall"), ("forward", "cpu"))
LEAST_NOISE = {"wall": 0.05, "peak": 0.1}
INSTEAD = {"int8": "float32"}  # transformers' GPT-2 has no int8 weights
TITLE = "Ratios: above 1, eqzoo is better (beside a name: torch's best). Then each side's own figures"

Figures = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What a side does again and again, and what is known of it beforehand."""

    tasks: dict[str, Callable[[], Any]]
    figures: Figures
    held: Callable[[], int] | None = None
    """The bytes of all arrays there are between two training steps."""


Make = Callable[[], Work]


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
        no_torch = load_torch(options.models)
        if no_torch:
            print(f"torch is left out: {no_torch}", file=sys.stderr)
        results = measure(options, with_torch=not no_torch)
    except (ValueError, RuntimeError) as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 2
    console = Console(width=120, highlight=False)
    console.print(speed_table(results))
    if options.decode:
        console.print(decode_table(results))
    console.print(
        f"The machine: {os.cpu_count()} cores, reads {results['bandwidth'] / 1e9:.1f} GB/s, multiplies matrices of "
        f"{SQUARE} x {SQUARE} in float32 at {results['multiplying'] / 1e9:.0f} GFLOP/s.\n"
    )
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
        sizes, names = before["sizes"], before["groups"].keys() & before["noise"].keys()
    except OSError as error:
        raise ValueError(f"--against {file} can't be read: {error.strerror}; write such a file with --json") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"--against {file} has no figures of this script; write such a file with --json") from None
    if sizes != options.sizes:
        raise ValueError(f"--against {file} was measured with other sizes, {sizes}; this run has {options.sizes}")
    if names.isdisjoint(options.models):
        raise ValueError(f"--against {file} has figures of {', '.join(names)}; choose --models among them")
    return before


def load_torch(models: Sequence[str]) -> str | None:
    """Import what torch's sides need; if that can't be, why."""
    try:
        import torch

        package = importlib.util.find_spec("torchvision")
        for library in Path(package.origin).parent.glob("_C.*") if package and package.origin else ():
            try:
                torch.ops.load_library(library)
            except OSError:  # it was built for another torch; its import needs no more than that these exist
                for name in ("nms", "qnms"):
                    if not hasattr(torch.ops.torchvision, name):
                        torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")
        import timm
        import transformers.models.gpt2.modeling_gpt2  # noqa: F401
    except Exception as error:
        return one_line(error)
    for name in models:
        if not is_gpt2(name) and not timm.is_model(name):
            raise ValueError(f"--models {name}: torch's side has timm's models and GPT-2, and this is neither")
    return None


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:200]


# What each side does.


def is_gpt2(name: str) -> bool:
    return isinstance(variant(name)[1], eqzoo.GPT2Config)


def fitting(name: str, options: Options) -> dict[str, Any]:
    """The sizes that all sides' models have; nothing is dropped."""
    dropped = ("dropout", "drop_path", "embedding_dropout", "attention_dropout", "residual_dropout")
    sizes: dict[str, Any] = {"image_size": options.image_size}
    if options.quick:
        sizes |= {"dim": 48, "depth": 2, "heads": 2, "vocab": 500} if is_gpt2(name) else {"depth": 2}
    return train.model_options(f"timm/{name}", {}, **dict.fromkeys(dropped, 0.0), **sizes)


def config(name: str, options: Options) -> Any:
    return dataclasses.replace(variant(f"timm/{name}")[1], **fitting(name, options))


def examples(name: str, options: Options) -> tuple[np.ndarray, np.ndarray]:
    """Images and their classes, or tokens and the next ones."""
    random = np.random.default_rng(0)
    if is_gpt2(name):
        tokens = random.integers(0, 500, (options.batch_size // 2, options.context + 1))
        return tokens[:, :-1], tokens[:, 1:]
    shape = (options.batch_size, options.image_size, options.image_size, 3)
    return random.standard_normal(shape, np.float32), random.integers(0, 1000, options.batch_size)


def eqzoo_work(name: str, options: Options) -> Work:
    model, state = eqzoo.create(f"timm/{name}", key=jax.random.key(0), **fitting(name, options))
    return jax_work(model, state, *examples(name, options))


def plain_work(name: str, options: Options) -> Work:
    inputs, labels = examples(name, options)
    model, state = eqx.nn.make_with_state(PLAIN_MODELS[name])(config(name, options), key=jax.random.key(0))
    return jax_work(model, state, inputs if is_gpt2(name) else inputs.transpose(0, 3, 1, 2), labels)


def jax_work(model: Any, state: eqx.nn.State, inputs: np.ndarray, labels: np.ndarray) -> Work:
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

    def held():
        return sum(array.nbytes for array in jax.live_arrays())

    figures = {"parameters": tree.count(eqx.filter(model, eqx.is_inexact_array))}
    figures |= {"flops": cost(predict, model, state, batch[0]).flops}
    on_host = jax.default_backend() == "cpu"
    return Work({"train": train_once, "forward": forward}, figures, held if on_host else None)


def torch_work(name: str, options: Options, *, channels_last: bool, compiled: bool) -> Work:
    import torch

    inputs, labels = map(torch.from_numpy, examples(name, options))
    model = torch_gpt2(name, options) if is_gpt2(name) else torch_vision(name, options)
    if not is_gpt2(name):
        inputs = inputs.permute(0, 3, 1, 2).contiguous()
    if channels_last:
        model, inputs = model.to(memory_format=torch.channels_last), inputs.to(memory_format=torch.channels_last)
    call = torch.compile(model) if compiled else model
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=1e-4, fused=True)

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

    def held():
        grads = [each.grad for each in parameters if each.grad is not None]
        moments = [each for state in optimizer.state.values() for each in state.values()]
        return sum(each.nbytes for each in (inputs, labels, *parameters, *model.buffers(), *grads, *moments))

    return Work(
        {"train": train_once, "forward": forward}, {"parameters": sum(each.numel() for each in parameters)}, held
    )


def torch_vision(name: str, options: Options) -> Any:
    import timm

    sizes, renamed = fitting(name, options), {"image_size": "img_size", "depth": "depth"}
    return timm.create_model(name, **{renamed[each]: sizes[each] for each in renamed if each in sizes})


def torch_gpt2(name: str, options: Options) -> Any:
    import transformers

    ours = config(name, options)
    sizes = {"n_embd": ours.dim, "n_layer": ours.depth, "n_head": ours.heads, "vocab_size": ours.vocab}
    without = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config.from_dict({**sizes, **without, "use_cache": False}))


def eqzoo_decoding(options: Options) -> Work:
    model = eqzoo.freeze(*eqzoo.create("gpt2", key=jax.random.key(0), **fitting("gpt2", options)))
    models = {"float32": model, "bfloat16": tree.cast(model, jnp.bfloat16), "int8": tree.quantize(model, "*")}
    write = lambda model: generation.generate(model, [list(range(PROMPT))], options.decode)
    tasks = {dtype: partial(write, model) for dtype, model in models.items()}
    return Work(
        tasks, {"bytes": {dtype: tree.nbytes(model) for dtype, model in models.items()}, "tokens": options.decode}
    )


def torch_decoding(options: Options) -> Work:
    import torch

    prompt = torch.arange(PROMPT)[None]
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}
    settings |= {"attention_mask": torch.ones_like(prompt), "max_new_tokens": options.decode}
    models = {name: torch_gpt2("gpt2", options).eval().to(getattr(torch, name)) for name in ("float32", "bfloat16")}
    return Work({dtype: partial(model.generate, prompt, **settings) for dtype, model in models.items()}, {})


def machine_work(options: Options) -> Work:
    """What the machine can do: read memory, and multiply matrices."""
    multiply = jax.jit(lambda x, y: x @ y)
    wide, square = jnp.ones((1024 if options.quick else 16384, 16384)), jnp.ones((SQUARE, SQUARE))  # wide: 1 GiB
    read = partial(multiply, wide, jnp.ones(wide.shape[1]))
    tasks = {
        "read": lambda: read().block_until_ready(),
        "multiply": lambda: multiply(square, square).block_until_ready(),
    }
    return Work(tasks, {"bytes": wide.nbytes, "backend": jax.default_backend()})


# Processes that take turns.


def sides(name: str, options: Options, *, with_torch: bool) -> dict[str, Make]:
    found: dict[str, Make] = {"eqzoo": partial(eqzoo_work, name, options)}
    for compiled in (False, True)[: with_torch * (1 + options.torch_compile)]:
        for channels_last in (False, True)[: 1 if is_gpt2(name) else 2]:
            side = "torch" + ".compile" * compiled + " channels_last" * channels_last
            found[side] = partial(torch_work, name, options, channels_last=channels_last, compiled=compiled)
    if name in PLAIN_MODELS:
        found[PLAIN] = partial(plain_work, name, options)
    return found


def measure(options: Options, *, with_torch: bool) -> Figures:
    """All figures, by comparison and side; times are lists with a number for each round."""
    libraries = ("jax", "equinox", *("torch", "timm", "transformers")[: 3 * with_torch])
    results = {"sizes": options.sizes, "versions": {name: version(name) for name in libraries}, "groups": {}}
    jax.config.update("jax_enable_compilation_cache", False)  # compilation is measured
    jax.config.update("jax_disable_most_optimizations", options.quick)
    with started({"machine": partial(machine_work, options)}) as machine:
        # Where JAX has an accelerator, torch would still compute on the CPU.
        with_torch = with_torch and ask(machine["machine"], "figures")["backend"] == "cpu"
        groups = {name: sides(name, options, with_torch=with_torch) for name in options.models}
        if options.decode:
            both = {"eqzoo": eqzoo_decoding, "torch": torch_decoding}
            groups["decoding"] = {name: partial(both[name], options) for name in [*both][: 1 + with_torch]}
        for number, (group, members) in enumerate(groups.items(), start=1):
            print(f"{group} ({number} of {len(groups)})", file=sys.stderr, flush=True)
            with started(members) as pipes:
                for _ in range(options.rounds):
                    for pipe in (*machine.values(), *pipes.values()):
                        ask(pipe, "turn")
                results["groups"][group] = {name: ask(pipe, "end") for name, pipe in pipes.items()}
        figures = ask(machine["machine"], "end")
    read, multiply = figures["wall"]["read"], figures["wall"]["multiply"]
    results["bandwidth"] = figures["bytes"] / min(read)
    results["multiplying"] = 2 * SQUARE**3 / min(multiply)
    # How much slower the machine itself was while a group was measured.
    results["noise"] = {}
    for number, group in enumerate(groups):
        then = slice(number * options.rounds, (number + 1) * options.rounds)
        results["noise"][group] = max(statistics.median(each[then]) / min(each) - 1 for each in (read, multiply))
    return results


@contextmanager
def started(members: dict[str, Make]) -> Iterator[dict[str, Connection]]:
    """A process for each side. One that fails says why and is left out, unless it is the first."""
    context = multiprocessing.get_context("fork")  # all is imported, and nothing computed yet
    pipes: dict[str, Connection] = {}
    parameters = None
    with ExitStack() as stack:
        for name, make in members.items():
            pipe, theirs = context.Pipe()
            process = context.Process(target=serve, args=(make, theirs, pipe), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.enter_context(pipe)
            try:
                now = ask(pipe, "figures").get("parameters")
                if pipes and now != parameters:
                    raise RuntimeError(f"its model has {now:,} parameters, and eqzoo's {parameters:,}")
                parameters, pipes[name] = now, pipe
            except RuntimeError as error:
                if not pipes:
                    raise
                print(f"{name} is left out: {error}", file=sys.stderr, flush=True)
        yield pipes


def ask(pipe: Connection, question: str) -> Any:
    try:
        pipe.send(question)
        answer = pipe.recv()
    except (EOFError, ConnectionError):
        raise RuntimeError("its process died; is there enough memory?") from None
    if isinstance(answer, RuntimeError):
        raise answer
    return answer


def serve(make: Make, pipe: Connection, other_end: Connection) -> None:
    """Do everything for the first time, then answer until nobody asks."""
    other_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asks will end, and then this process
    try:
        start = time.perf_counter()
        work = make()
        made = time.perf_counter() - start
        first = {task: clocks(function)[0] for task, function in work.tasks.items()}
    except Exception as error:
        pipe.recv()
        pipe.send(RuntimeError(one_line(error)))
        return
    wall, cpu = {task: [] for task in work.tasks}, {task: [] for task in work.tasks}
    figures = work.figures | {"made": made, "first": first, "wall": wall, "cpu": cpu}
    with suppress(EOFError, ConnectionError):
        while question := pipe.recv():
            if question == "turn":
                for task, function in work.tasks.items():
                    function()  # the other processes had the caches
                    times = [clocks(function), clocks(function)]
                    wall[task].append(min(seconds for seconds, _ in times))
                    cpu[task].append(min(seconds for _, seconds in times))
            pipe.send(figures | {"peak": peak_memory(work)} if question == "end" else figures)


def clocks(function: Callable[[], Any]) -> tuple[float, float]:
    """The seconds it takes, by the clock and of processors."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - cpu


def peak_memory(work: Work) -> dict[str, list[int]]:
    """The bytes of all arrays, and how much more of memory the process takes in a training step. So neither libraries
    nor what a compiler left behind count. Nothing where Linux and glibc don't tell."""
    if work.held is None:
        return {}
    try:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM, the most so far, starts anew
    except (OSError, AttributeError):
        return {}
    held, before = work.held(), memory("VmRSS")
    work.tasks["train"]()
    return {"train": [held + memory("VmHWM") - before]}


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


# What the figures say. A ratio is the least of some sides' figures over eqzoo's: above 1, eqzoo is better.


def least(group: Figures, names: Sequence[str], task: str, kind: str) -> list[float]:
    """The figures of that kind, one for each round, of the best of these sides; none if none of them has any."""
    known = [group[name][kind].get(task) or group[name][kind].get(INSTEAD.get(task)) for name in names]
    return min(filter(None, known), key=min, default=[])


def ratio(group: Figures, names: Sequence[str], task: str, kind: str = "wall") -> float | None:
    ours, theirs = least(group, ["eqzoo"], task, kind), least(group, names, task, kind)
    return min(theirs) / min(ours) if ours and theirs else None


def named(group: Figures, prefix: str) -> list[str]:
    return [name for name in group if name.startswith(prefix)]


def models_of(results: Figures) -> Figures:
    return {name: group for name, group in results["groups"].items() if name != "decoding"}


def regressions(results: Figures, before: Figures) -> list[str]:
    """Ratios to torch's best of the sides that both runs have that are lower by more than noise: how far the middle
    round is from the best one, added up over both sides, the machine, and both runs."""
    found = []
    for name, group in results["groups"].items():
        old = before["groups"].get(name)
        if old is None or old["eqzoo"].get("tokens") != group["eqzoo"].get("tokens"):
            continue
        groups = [group, old]
        common = [side for side in groups[0] if side in groups[1] and side != "eqzoo"]
        others = [side for side in common if side != PLAIN] or common
        for kind, task in [(each, task) for each in LEAST_NOISE for task in groups[0]["eqzoo"][each]]:
            now, then = (ratio(group, others, task, kind) for group in groups)
            if now is None or then is None:
                continue
            rounds = [least(group, names, task, kind) for group in groups for names in (["eqzoo"], others)]
            noise = sum(statistics.median(each) / min(each) - 1 for each in rounds)
            noise += (results["noise"][name] + before["noise"][name]) * (kind == "wall")
            if now < then / (1 + max(LEAST_NOISE[kind], noise)):
                what = task if kind == "wall" else "memory"
                found.append(f"{name}, {what}: ratio {now:.2f}, was {then:.2f} (noise {noise:.0%})")
    return found


def speed_table(results: Figures) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, title=TITLE)
    columns = ("", "train", "CPU", "forward", "CPU", "memory", "train\nms", "CPU\nms", "forward\nms", "CPU\nms")
    for column in (*columns, "of\npeak", "compile\ns", "first\ns", "peak\nMB"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, group in models_of(results).items():
        for side, figures in group.items():
            is_ours = side == "eqzoo"
            first, step = figures["first"]["train"], min(figures["wall"]["train"])
            of_peak = 3 * group["eqzoo"]["flops"] / step / results["multiplying"]
            table.add_row(
                name if is_ours else f"  {side}",
                *ratios([group], lambda group: named(group, "torch") if is_ours else [side]),
                *(f"{1e3 * min(figures[kind][task]):.0f}" for task, kind in TIMES),
                *(f"{of_peak:.0%}", f"{first - step:.1f}", f"{figures['made'] + first:.1f}"),
                *(f"{peak / 1e6:.0f}" for peak in figures["peak"].get("train", ())),
                style="bold" if is_ours else "",
            )
        table.add_section()
    for label, prefix in (("torch's best, mean", "torch"), (f"{PLAIN}, mean", PLAIN)):
        groups = models_of(results).values()
        table.add_row(label, *ratios(groups, lambda group: named(group, prefix)), style="bold")
    return table


def ratios(groups: Iterable[Figures], names: Callable[[Figures], Sequence[str]]) -> list[str]:
    """Geometric means over these comparisons."""
    rows = [[ratio(group, names(group), *each) for each in (*TIMES, ("train", "peak"))] for group in groups]
    known = [[value for value in column if value] for column in zip(*rows, strict=True)]
    return [f"{statistics.geometric_mean(column):.2f}" if column else "" for column in known]


def decode_table(results: Figures) -> Table:
    group = results["groups"]["decoding"]
    ours, tokens = group["eqzoo"], group["eqzoo"]["tokens"]
    title = f"GPT-2 writes {tokens} tokens, one text alone; int8 beside transformers' float32"
    table = Table(box=box.SIMPLE_HEAD, title=title)
    for column in ("weights", "ratio", "CPU", "tokens/s", "transformers'", "GB/s", "of memory's", "compile s"):
        table.add_column(column, justify="left" if column == "weights" else "right")
    for dtype, rounds in ours["wall"].items():
        seconds, theirs = min(rounds), least(group, named(group, "torch"), dtype, "wall")
        read = tokens * ours["bytes"][dtype] / seconds
        both = [ratio(group, named(group, "torch"), dtype, kind) for kind in ("wall", "cpu")]
        table.add_row(
            *(dtype, *(f"{each:.2f}" if each else "" for each in both)),
            *(f"{tokens / seconds:.1f}", f"{tokens / min(theirs):.1f}" if theirs else "", f"{read / 1e9:.1f}"),
            *(f"{read / results['bandwidth']:.0%}", f"{ours['first'][dtype] - seconds:.1f}"),
        )
    return table


def draw(results: Figures, path: Path) -> None:
    """Bars of the ratios to torch's best side and to plain Equinox."""
    from matplotlib.figure import Figure

    models = models_of(results)
    names = sorted(models, key=lambda name: ratio(models[name], named(models[name], "torch"), "train") or 0)
    figure = Figure((9, 1.3 + 0.5 * len(names)), layout="constrained", facecolor="white")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, prefix in zip(axes, ("torch", PLAIN), strict=True):
        for task, offset, color in (("train", 0.19, plots.BLUE), ("forward", -0.19, plots.LIGHT_BLUE)):
            values = [ratio(models[name], named(models[name], prefix), task) or np.nan for name in names]
            bars = axis.barh(np.arange(len(names)) + offset, values, 0.34, color=color, label=task)
            axis.bar_label(bars, fmt="%.2f", padding=3, fontsize=8, color=plots.GREY)
        axis.axvline(1, color=plots.INK, linewidth=1)
        axis.margins(x=0.15)
        axis.set_yticks(range(len(names)), names)
        axis.set_title({"torch": "torch's best side", PLAIN: PLAIN}[prefix], fontsize=10, color=plots.INK)
        axis.tick_params(length=0, labelcolor=plots.INK, labelsize=9)
        axis.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, fontsize=9, loc="outside lower right", ncols=2)
    figure.supxlabel("time over eqzoo's: right of 1, eqzoo is faster", fontsize=9, color=plots.GREY)
    figure.savefig(path, dpi=plots.DPI)


# The same models as an Equinox user would write them: Equinox's own layers, channels first, one block after the other.


def conv_norm(ins: int, outs: int, size: int, *, stride=1, groups=1, activation=None, key) -> list[Any]:
    conv = eqx.nn.Conv2d(ins, outs, size, stride, size // 2, groups=groups, use_bias=False, key=key)
    norm = eqx.nn.BatchNorm(outs, "batch", mode="batch")
    return [conv, norm] if activation is None else [conv, norm, eqx.nn.Lambda(activation)]


def pool() -> eqx.nn.Lambda:
    return eqx.nn.Lambda(lambda x: jnp.mean(x, (1, 2)))


class Residual(eqx.nn.StatefulLayer):
    body: eqx.nn.Sequential
    shortcut: eqx.nn.Sequential
    activation: Callable

    def __init__(self, body: list[Any], shortcut: list[Any], activation: Callable):
        self.body, self.shortcut = eqx.nn.Sequential(body), eqx.nn.Sequential(shortcut)
        self.activation = activation

    def __call__(self, x, state, *, key=None):
        y, state = self.body(x, state)
        x, state = self.shortcut(x, state)
        return self.activation(x + y), state


def plain_resnet(config, *, key) -> eqx.nn.Sequential:
    keys = iter(jax.random.split(key, 100))
    relu = jax.nn.relu
    layers = [*conv_norm(3, 64, 7, stride=2, activation=relu, key=next(keys)), eqx.nn.MaxPool2d(3, 2, 1)]
    ins = 64
    for stage, (depth, width) in enumerate(zip(config.depths, config.widths, strict=True)):
        for block in range(depth):
            stride = 2 if stage and not block else 1
            body = conv_norm(ins, width, 1, activation=relu, key=next(keys))
            body += conv_norm(width, width, 3, stride=stride, activation=relu, key=next(keys))
            body += conv_norm(width, 4 * width, 1, key=next(keys))
            shortcut = [] if block else conv_norm(ins, 4 * width, 1, stride=stride, key=next(keys))
            layers.append(Residual(body, shortcut, relu))
            ins = 4 * width
    return eqx.nn.Sequential([*layers, pool(), eqx.nn.Linear(ins, config.num_classes, key=next(keys))])


def plain_mobilenet(config, *, key) -> eqx.nn.Sequential:
    keys = iter(jax.random.split(key, 100))
    relu6 = jax.nn.relu6
    layers = conv_norm(3, 32, 3, stride=2, activation=relu6, key=next(keys))
    ins = 32
    for run in (run for stage in config.stages for run in stage):
        for block in range(run.repeats):
            stride = 1 if block else run.stride
            hidden = ins if run.kind == "separable" else round(ins * run.expansion)
            body = [] if run.kind == "separable" else conv_norm(ins, hidden, 1, activation=relu6, key=next(keys))
            body += conv_norm(hidden, hidden, 3, stride=stride, groups=hidden, activation=relu6, key=next(keys))
            body += conv_norm(hidden, run.channels, 1, key=next(keys))
            is_residual = stride == 1 and ins == run.channels
            layers += [Residual(body, [], lambda x: x)] if is_residual else body
            ins = run.channels
    layers += conv_norm(ins, config.top_width, 1, activation=relu6, key=next(keys))
    return eqx.nn.Sequential([*layers, pool(), eqx.nn.Linear(config.top_width, config.num_classes, key=next(keys))])


class Pixels(eqx.Module):
    """Calls a layer for each pixel."""

    layer: Callable

    def __call__(self, x, *, key=None):
        return jax.vmap(jax.vmap(self.layer, 1, 1), 1, 1)(x)


class ConvNeXtBlock(eqx.Module):
    body: eqx.nn.Sequential
    scale: Float[Array, "dim 1 1"]

    def __init__(self, dim: int, *, key):
        key_conv, key_mlp = jax.random.split(key)
        conv = eqx.nn.Conv2d(dim, dim, 7, padding=3, groups=dim, key=key_conv)
        mlp = eqx.nn.MLP(dim, dim, 4 * dim, 1, exact_gelu, key=key_mlp)
        self.body = eqx.nn.Sequential([conv, Pixels(eqx.nn.LayerNorm(dim, eps=1e-6)), Pixels(mlp)])
        self.scale = jnp.full((dim, 1, 1), 1e-6)

    def __call__(self, x, *, key=None):
        return x + self.scale * self.body(x)


def plain_convnext(config, *, key) -> eqx.nn.Sequential:
    keys = iter(jax.random.split(key, 100))
    norm = lambda dim: Pixels(eqx.nn.LayerNorm(dim, eps=1e-6))
    ins = config.widths[0]
    layers: list[Any] = [eqx.nn.Conv2d(3, ins, 4, 4, key=next(keys)), norm(ins)]
    for stage, (depth, width) in enumerate(zip(config.depths, config.widths, strict=True)):
        layers += [norm(ins), eqx.nn.Conv2d(ins, width, 2, 2, key=next(keys))] if stage else []
        layers += [ConvNeXtBlock(width, key=next(keys)) for _ in range(depth)]
        ins = width
    head = [eqx.nn.LayerNorm(ins, eps=1e-6), eqx.nn.Linear(ins, config.num_classes, key=next(keys))]
    return eqx.nn.Sequential([*layers, pool(), *head])


class Block(eqx.Module):
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, dim: int, heads: int, *, eps: float, activation: Callable, key):
        key_attention, key_mlp = jax.random.split(key)
        bias = dict.fromkeys(("use_query_bias", "use_key_bias", "use_value_bias", "use_output_bias"), True)
        self.norms = eqx.nn.LayerNorm(dim, eps=eps), eqx.nn.LayerNorm(dim, eps=eps)
        self.attention = eqx.nn.MultiheadAttention(heads, dim, **bias, key=key_attention)
        self.mlp = eqx.nn.MLP(dim, dim, 4 * dim, 1, activation, key=key_mlp)

    def __call__(self, x, mask=None):
        normed = jax.vmap(self.norms[0])(x)
        x = x + self.attention(normed, normed, normed, mask)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class PlainViT(eqx.Module):
    stem: eqx.nn.Conv2d
    token: Float[Array, "1 dim"]
    positions: Float[Array, "tokens dim"]
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, config, *, key):
        key_stem, key_blocks, key_head = jax.random.split(key, 3)
        patch, dim = config.patch_size, config.dim
        self.stem = eqx.nn.Conv2d(3, dim, patch, patch, key=key_stem)
        self.token = jnp.zeros((1, dim))
        self.positions = jnp.zeros((1 + (config.image_size // patch) ** 2, dim))
        block = partial(Block, dim, config.heads, eps=1e-6, activation=exact_gelu)
        self.blocks = [block(key=key) for key in jax.random.split(key_blocks, config.depth)]
        self.norm = eqx.nn.LayerNorm(dim, eps=1e-6)
        self.head = eqx.nn.Linear(dim, config.num_classes, key=key_head)

    def __call__(self, x, *, key=None):
        patches = self.stem(x)
        tokens = jnp.concatenate([self.token, patches.reshape(patches.shape[0], -1).T]) + self.positions
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens[0]))


class PlainGPT2(eqx.Module):
    embedding: eqx.nn.Embedding
    positions: Float[Array, "context dim"]
    blocks: list[Block]
    norm: eqx.nn.LayerNorm

    def __init__(self, config, *, key):
        key_embedding, key_blocks = jax.random.split(key)
        self.embedding = eqx.nn.Embedding(config.vocab, config.dim, key=key_embedding)
        self.positions = jnp.zeros((config.context, config.dim))
        block = partial(Block, config.dim, config.heads, eps=1e-5, activation=jax.nn.gelu)
        self.blocks = [block(key=key) for key in jax.random.split(key_blocks, config.depth)]
        self.norm = eqx.nn.LayerNorm(config.dim)

    def __call__(self, ids, *, key=None):
        x = jax.vmap(self.embedding)(ids) + self.positions[: len(ids)]
        mask = jnp.tril(jnp.ones((len(ids), len(ids)), bool))
        for block in self.blocks:
            x = block(x, mask)
        return jax.vmap(self.norm)(x) @ self.embedding.weight.T


def exact_gelu(x):
    return jax.nn.gelu(x, approximate=False)


PLAIN_MODELS = {
    **dict.fromkeys(("vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224"), PlainViT),
    **dict.fromkeys(("convnext_tiny", "convnext_small", "convnext_base"), plain_convnext),
    **dict.fromkeys(("resnet50", "resnet101", "resnet152"), plain_resnet),
    "mobilenetv2_100": plain_mobilenet,
    "gpt2": PlainGPT2,
}


if __name__ == "__main__":
    options = train.parse(Options, __doc__)
    host.tune()
    sys.exit(main(options))
