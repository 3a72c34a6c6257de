"""The scripts run as a user runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

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


def test_train_classifier_learns_with_a_model_of_the_zoo():
    out = run(
        *("scripts/train_classifier.py", "--model", "mlp", "--epochs", "3"),
        *("--options", "image_size", "16", "in_channels", "3", "--image-size", "16"),
    )
    accuracies = [float(percent) for percent in re.findall(r"test accuracy ([\d.]+)%", out)]
    assert len(accuracies) == 3
    assert accuracies[-1] > 85


def test_train_classifier_takes_a_class_of_the_user(tmp_path):
    (tmp_path / "mynet.py").write_text(
        "import equinox as eqx\n"
        "class Net(eqx.Module):\n"
        "    linear: eqx.nn.Linear\n"
        "    def __init__(self, num_classes, *, key):\n"
        "        self.linear = eqx.nn.Linear(192, num_classes, key=key)\n"
        "    def __call__(self, x, *, key=None):\n"
        "        return self.linear(x.reshape(-1))\n"
    )
    out = run(
        *("scripts/train_classifier.py", "--model", "mynet:Net", "--epochs", "1", "--image-size", "8"),
        PYTHONPATH=str(tmp_path),
    )
    assert "mynet:Net: 1,930 parameters" in out


def test_help_explains_every_option():
    out = run("scripts/train_classifier.py", "--help")
    for option in ("--model", "--options", "--image-size", "--epochs", "--batch-size", "--learning-rate", "--seed"):
        assert option in out
