"""The scripts run as a user runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_train_classifier_learns_with_a_model_of_the_zoo(tmp_path):
    out = run(
        *("scripts/train_classifier.py", "--model", "mlp", "--epochs", "3"),
        *("--image-size", "16", "--folder", str(tmp_path)),
    )
    accuracies = [float(percent) for percent in re.findall(r"test: .* accuracy ([\d.]+)%", out)]
    assert len(accuracies) == 3
    assert accuracies[-1] > 85
    folder = tmp_path / "mlp-1"
    assert {path.name for path in folder.iterdir()} >= {
        *("config.json", "metrics.jsonl", "curves.png", "samples.png", "model.safetensors", "classifier.json"),
        "checkpoints",
    }


def test_train_classifier_computes_in_half_precision_accumulates_averages_and_adds_noise(tmp_path):
    options = ("--compute", "bfloat16", "--accumulate", "2", "--ema", "0.9", "--gradient-noise", "1e-4", "--remat")
    augment = ("--flip", "--crop", "0.5", "--erase", "0.1", "--rand-augment", "3", "--mixup", "0.2", "--cutmix", "0.5")
    out = run(
        *("scripts/train_classifier.py", "--model", "vit_tiny_patch16_224", "--options", "patch_size", "4"),
        *("depth", "2", "dim", "48", "--image-size", "8", "--epochs", "6", "--optimizer", "muon"),
        *("--layer-decay", "0.9", "--folder", str(tmp_path), *options, *augment),
    )
    assert float(re.findall(r"test accuracy ([\d.]+)%", out)[0]) > 30


def test_the_same_seed_gives_the_same_run(tmp_path):
    command = ("scripts/train_classifier.py", "--model", "mlp", "--image-size", "8", "--epochs", "2", "--mixup", "0.2")
    command = (*command, "--folder", str(tmp_path))
    for seed in (0, 0, 1):
        run(*command, "--seed", str(seed))
    weights = [(tmp_path / f"mlp-{number}" / "model.safetensors").read_bytes() for number in (1, 2, 3)]
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.parametrize("script", ["train_classifier", "train_lm", "finetune", "evaluate", "predict", "generate"])
def test_help_explains_every_option(script):
    out = run(f"scripts/{script}.py", "--help", COLUMNS="200")
    assert "```" not in out
    unexplained = re.findall(r"^. (--\S+ \S+) +\(default", out, re.MULTILINE)
    assert set(unexplained) <= {"--epochs INT", "--seed INT", "--steps INT", "--batch-size INT", "--lora-rank INT"}
    assert "--model" in out


@pytest.mark.parametrize("script", ["train_classifier", "train_lm", "finetune"])
def test_the_loop_and_its_step_can_be_seen_at_a_glance(script):
    text = (ROOT / "scripts" / f"{script}.py").read_text()
    (step,) = re.findall(r"\n    @eqx\.filter_jit\(donate.*?\n\n", text, re.DOTALL)
    (loop,) = re.findall(r"\n        for step, batch in .*?break\n", text, re.DOTALL)
    assert len((step.strip() + "\n" + loop.strip()).splitlines()) < 40
