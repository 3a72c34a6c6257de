"""`docs/extending.md`, as its reader does it: models in a file of theirs, through the scripts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from eqzoo import train

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()
SMALL = ("--image-size", "16", "--batch-size", "32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the reader works: the page's Python is their `my_models.py`."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "my_models.py").write_text("\n\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)))
    return folder


def run(folder, script, *options):
    command = [sys.executable, ROOT / "scripts" / f"{script}.py", *options]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def last_accuracy(out):
    return float(re.findall(r"test accuracy ([\d.]+)%", out)[-1])


def test_a_network_of_the_readers_trains_resumes_and_is_evaluated(folder):
    out = run(folder, "train_classifier", "--model", "my_models:Net", "--epochs", "2", *SMALL)
    first = last_accuracy(out)
    assert "my_models:Net: 20,234 parameters" in out
    out = run(folder, "train_classifier", "--resume", "runs/Net-1", "--epochs", "4")
    assert out.count("test: ") == 2  # the third and the fourth epoch
    assert last_accuracy(out) > max(first, 80)
    kept = float(re.findall(r"at best ([\d.]+)%", out)[-1])
    out = run(folder, "evaluate", "--model", "runs/Net-1")
    assert f"accuracy  {kept:.2f}%" in out


def test_the_zoo_with_a_block_of_the_readers_trains_and_loads(folder, monkeypatch):
    options = ("--options", "depth", "2", "--name", "gated")
    out = run(folder, "train_classifier", "--model", "my_models:GatedViT", "--epochs", "4", *options, *SMALL)
    assert last_accuracy(out) > 50
    monkeypatch.syspath_prepend(folder)
    model = train.load_classifier(folder / "runs" / "gated").model
    assert model.vit.blocks.block.mlp.gate.weight.shape == (2, 128, 64)
    assert model(jnp.zeros((16, 16, 3))).shape == (10,)
