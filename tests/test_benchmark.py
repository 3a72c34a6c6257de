"""scripts/benchmark.py on tiny models and made-up figures: what a regression is, the plain models, and a whole run."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest

import eqzoo
from eqzoo import tree
from eqzoo._cost import cost
from eqzoo.models.vision._mobilenet_config import Run
from tests.scripts import load_script

ROOT = Path(__file__).parents[1]
SCRIPT = load_script("benchmark")
OPTIONS = SCRIPT.Options(models=("resnet50",))


def side(train: float, peak: int, *, forward: float = 1.0, noise: float = 0.02) -> dict:
    """A side with two rounds, whose middle is above the best by half of the noise."""
    seconds = {"train": [train, (1 + noise) * train], "forward": [forward, forward]}
    return {"wall": seconds, "cpu": seconds, "peak": {"train": [peak]}}


def figures(eqzoo: dict, *, machine_noise: float = 0.0, **more: dict) -> dict:
    torch = {"torch": side(2.0, 100), "torch channels_last": side(1.0, 90)}
    groups = {"resnet50": {"eqzoo": eqzoo, **torch, **more}}
    return {"sizes": OPTIONS.sizes, "noise": {"resnet50": machine_noise}, "groups": groups}


def test_a_ratio_is_of_torchs_best():
    group = figures(side(0.5, 100))["groups"]["resnet50"]
    torch = SCRIPT.named(group, "torch")
    assert SCRIPT.ratio(group, torch, "train") == 2.0
    assert SCRIPT.ratio(group, torch, "train", "peak") == 0.9
    assert SCRIPT.ratio(group, SCRIPT.named(group, SCRIPT.PLAIN), "train") is None
    assert SCRIPT.ratio(group, torch, "sleep") is None


def test_decoding_in_int8_is_compared_with_float32():
    theirs, ours = {"wall": {"float32": [3.0], "bfloat16": [2.0]}}, {"wall": {"int8": [1.0]}}
    assert SCRIPT.ratio({"eqzoo": ours, "torch": theirs}, ["torch"], "int8") == 3.0


@pytest.mark.parametrize(
    ("now", "worse"),
    [
        (side(1.0, 100), []),
        (side(1.04, 109), []),
        (side(0.5, 50), []),
        (side(1.2, 100), ["train"]),
        (side(1.2, 100, noise=0.4), []),
        (side(1.0, 100, forward=1.1), ["forward"]),
        (side(1.0, 120), ["memory"]),
    ],
)
def test_only_what_is_worse_by_more_than_noise_is_a_regression(now, worse):
    found = SCRIPT.regressions(figures(now), figures(side(1.0, 100)))
    assert [line.split(":")[0] for line in found] == [f"resnet50, {task}" for task in worse]


def test_a_slow_machine_is_noise():
    slow = figures(side(1.2, 100), machine_noise=0.3)
    assert SCRIPT.regressions(slow, figures(side(1.0, 100))) == []
    assert SCRIPT.regressions(figures(side(1.2, 100)), figures(side(1.0, 100))) != []


def test_a_side_that_only_one_run_has_does_not_count():
    compiled = {"torch.compile": side(0.1, 10, forward=0.1)}
    assert SCRIPT.regressions(figures(side(1.0, 100), **compiled), figures(side(1.0, 100))) == []


def test_decoding_other_numbers_of_tokens_is_not_compared():
    def decoding(seconds: float, tokens: int) -> dict:
        ours = {"wall": {"int8": [seconds]}, "peak": {}, "tokens": tokens}
        theirs = {"wall": {"float32": [1.0]}, "peak": {}}
        return {"noise": {"decoding": 0.0}, "groups": {"decoding": {"eqzoo": ours, "torch": theirs}}}

    assert SCRIPT.regressions(decoding(2.0, 4), decoding(1.0, 8)) == []
    assert SCRIPT.regressions(decoding(2.0, 8), decoding(1.0, 8)) == ["decoding, int8: ratio 0.50, was 1.00 (noise 0%)"]


def test_plain_equinox_counts_where_there_is_no_torch():
    def without_torch(seconds: float) -> dict:
        groups = {"resnet50": {"eqzoo": side(seconds, 100), SCRIPT.PLAIN: side(1.0, 100)}}
        return {"noise": {"resnet50": 0.0}, "groups": groups}

    plain, faster = ({SCRIPT.PLAIN: side(seconds, 100, forward=seconds)} for seconds in (0.5, 0.4))
    assert SCRIPT.regressions(figures(side(1.0, 100), **faster), figures(side(1.0, 100), **plain)) == []
    assert SCRIPT.regressions(without_torch(1.2), without_torch(1.0)) != []


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet50", {}),
        ("mobilenetv2_100", {}),
        ("convnext_tiny", {}),
        ("vit_small_patch16_224", {"image_size": 64}),
        ("gpt2", {"depth": 2}),
    ],
)
def test_a_plain_model_is_the_same_as_eqzoos(name, options):
    """As many parameters, and as many multiplications on the way to as many logits: so widths, strides, groups and
    depths are the same."""
    config = replace(SCRIPT.config(name, OPTIONS), **options)
    fitting = SCRIPT.fitting(name, OPTIONS) | options
    plain, ours = (
        eqx.filter_eval_shape(make)
        for make in (
            lambda: eqx.nn.make_with_state(SCRIPT.PLAIN_MODELS[name])(config, key=jax.random.key(0)),
            lambda: eqzoo.create(f"timm/{name}", key=jax.random.key(0), **fitting),
        )
    )
    is_array = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    assert tree.count(eqx.filter(plain[0], is_array)) == tree.count(eqx.filter(ours[0], is_array))
    predict = lambda model, state, x: eqzoo.freeze(model, state)(x)
    inputs = [jax.ShapeDtypeStruct((64,), "int32")] * 2
    if name != "gpt2":
        inputs = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((3, 64, 64), (64, 64, 3))]
    logits = [eqx.filter_eval_shape(predict, *each, x).shape for each, x in zip((plain, ours), inputs, strict=True)]
    assert logits[0] == logits[1]
    assert cost(predict, *plain, inputs[0]).macs == cost(predict, *ours, inputs[1]).macs


TINY = {
    "resnet50": {"depths": (1, 1), "widths": (4, 8)},
    "mobilenetv2_100": {"stages": ((Run("separable", 4),), (Run("inverted", 4, repeats=2, expansion=2.0),))},
    "convnext_tiny": {"depths": (1, 1), "widths": (4, 8), "kernel_sizes": (7, 7)},
    "vit_small_patch16_224": {"depth": 1, "dim": 8, "heads": 2, "image_size": 32},
    "gpt2": {"depth": 1, "dim": 8, "heads": 2, "vocab": 5, "context": 6},
}


@pytest.mark.parametrize("name", TINY)
def test_a_plain_models_tasks_run(name):
    is_gpt2 = name == "gpt2"
    config = replace(SCRIPT.config(name, OPTIONS), **{} if is_gpt2 else {"num_classes": 5}, **TINY[name])
    model, state = eqx.nn.make_with_state(SCRIPT.PLAIN_MODELS[name])(config, key=jax.random.key(0))
    before = jax.tree.map(np.array, eqx.filter(model, eqx.is_inexact_array))
    images = np.ones((2, 3, 32, 32), np.float32), np.array([0, 1])
    texts = np.array([[0, 1, 2], [2, 3, 4]]), np.array([[1, 2, 3], [3, 4, 0]])
    work = SCRIPT.jax_work(model, state, *(texts if is_gpt2 else images))
    for task in ("forward", "train", "train", "forward"):
        work.tasks[task]()
    assert work.figures["parameters"] == tree.count(before)
    assert work.held() > 3 * tree.nbytes(before)  # weights, and two moments of each


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"against": "missing.json"}, "--against .*missing.json can't be read: No such file or directory"),
        ({"against": "other.json"}, "--against .*other.json has no figures of this script"),
        ({"against": "before.json", "batch_size": 4}, "was measured with other sizes, .*'batch_size': 8"),
        ({"against": "before.json", "models": ("gpt2",)}, "has figures of resnet50; choose --models among them"),
        ({"json": "missing/figures.json"}, "--json .*missing/figures.json can't be written"),
        ({"picture": "."}, "--picture .* can't be written"),
        ({"picture": "ratios.txt"}, "--picture .*ratios.txt should end in .png or .svg"),
        ({"models": ("resnet5",)}, "there is no model named 'timm/resnet5'; did you mean resnet"),
        ({"image_size": 100, "models": ("vit_small_patch16_224",)}, "image_size=100"),
        ({"rounds": 0}, "--rounds is 0; give at least 1"),
    ],
)
def test_what_cannot_work_is_said_in_a_sentence(tmp_path, arguments, says):
    (tmp_path / "before.json").write_text(json.dumps(figures(side(1.0, 100))))
    (tmp_path / "other.json").write_text("[1]")
    files = {name: tmp_path / arguments[name] for name in ("against", "json", "picture") if name in arguments}
    with pytest.raises(ValueError, match=says):
        SCRIPT.check(replace(OPTIONS, **arguments | files))


def test_such_a_sentence_ends_the_run_with_another_code_than_a_regression(capsys):
    assert SCRIPT.main(replace(OPTIONS, rounds=0)) == 2
    assert capsys.readouterr().err == "benchmark: --rounds is 0; give at least 1\n"


def python(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


SIDES = """
import os
from tests.scripts import load_script

script = load_script("benchmark")

def work(parameters):
    return script.Work({"sleep": lambda: None}, {"parameters": parameters})

def fail():
    raise NotImplementedError("no compiler\\nand more")

sides = {"eqzoo": lambda: work(7), "a": fail, "b": lambda: os._exit(1), "c": lambda: work(8), "torch": lambda: work(7)}
with script.started(sides) as pipes:
    for _ in range(3):
        script.ask(pipes["torch"], "turn")
    print(list(pipes), len(script.ask(pipes["torch"], "end")["wall"]["sleep"]))
"""


def test_sides_that_fail_or_die_or_differ_are_left_out_with_a_line_each():
    done = python("-c", SIDES)
    assert done.stdout == "['eqzoo', 'torch'] 3\n"
    assert done.stderr.splitlines() == [
        "a is left out: NotImplementedError: no compiler",
        "b is left out: its process died; is there enough memory?",
        "c is left out: its model has 8 parameters, and eqzoo's 7",
    ]


def test_a_model_that_torchs_side_does_not_have_is_said():
    with pytest.raises(ValueError, match="--models mlp: torch's side has timm's models and GPT-2"):
        SCRIPT.load_torch(["resnet50", "gpt2", "mlp"])


def test_a_quick_run_has_all_rows_and_notices_that_it_was_faster_before(tmp_path):
    faster = {"eqzoo": side(1e-9, 10**12, forward=1e-9), "torch": side(1.0, 1)}
    sizes = replace(SCRIPT.Options(), **SCRIPT.QUICK, quick=True).sizes
    (tmp_path / "before.json").write_text(
        json.dumps({"sizes": sizes, "noise": {"gpt2": 0.0}, "groups": {"gpt2": faster}})
    )
    files = {name: str(tmp_path / name) for name in ("figures.json", "before.json", "ratios.png")}
    done = python(
        *("scripts/benchmark.py", "--quick", "--json", files["figures.json"], "--against", files["before.json"]),
        *("--picture", files["ratios.png"]),
    )
    assert done.returncode == 1, done.stderr
    assert "left out" not in done.stderr
    assert "worse than before: gpt2, train" in done.stdout
    for row in ("vit_tiny_patch16_224", "gpt2", "torch channels_last", "plain Equinox", "bfloat16", "int8"):
        assert row in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120
    results = json.loads((tmp_path / "figures.json").read_text())
    assert set(results["groups"]) == {"vit_tiny_patch16_224", "gpt2", "decoding"}
    assert SCRIPT.regressions(results, results) == []
    assert (tmp_path / "ratios.png").stat().st_size > 1000
