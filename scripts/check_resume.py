"""Kills training runs at random moments, resumes them, and checks that they end as one that was never interrupted, bit
for bit: every array of the last checkpoint, and every number in the log. For example:

python scripts/check_resume.py

python scripts/check_resume.py --kills 100 --seed 1
"""

import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

from eqzoo import train
from eqzoo.train.checkpoints import ARRAYS

SCRIPT = Path(__file__).with_name("train_classifier.py")
TRAINING = (
    *("--model", "resnet18", "--options", "depths", "(1,1)", "widths", "(8,16)", "--image-size", "8"),
    *("--epochs", "5", "--ema", "0.9", "--flip", "--mixup", "0.2", "--save-every", "5"),
)


@dataclass(frozen=True)
class Options:
    kills: int = 30
    seed: int = 0
    """Of the moments; another one tries others."""


def main(options: Options) -> None:
    moments = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start(folder, "uninterrupted").communicate()
        began = time.monotonic()
        start(folder, "again").communicate()
        seconds = time.monotonic() - began
        assert_same(folder / "again", folder / "uninterrupted")
        print(f"a run takes {seconds:.1f} s, and a second one is the same")
        kills = 0
        while kills < options.kills:
            shutil.rmtree(folder / "killed", ignore_errors=True)
            here = 0
            while kills + here < options.kills and killed(folder, seconds * moments.random()):
                here += 1
            start(folder, "killed").communicate()
            assert_same(folder / "killed", folder / "uninterrupted")
            kills += here
            print(f"killed {here} times and resumed: the same ({kills} kills so far)", flush=True)


def start(folder: Path, name: str) -> subprocess.Popen:
    """The run of that name, from where it is."""
    if (folder / name / "config.json").exists():
        command = ("--resume", folder / name)
    else:  # killed before it began
        shutil.rmtree(folder / name, ignore_errors=True)
        command = (*TRAINING, "--folder", folder, "--name", name)
    return subprocess.Popen([sys.executable, SCRIPT, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def killed(folder: Path, after: float) -> bool:
    """Whether the run was still going when it was killed after so many seconds."""
    process = start(folder, "killed")
    try:
        out, _ = process.communicate(timeout=after)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return True
    if process.returncode != 0:
        raise RuntimeError(out.decode())
    return False


def assert_same(run: Path, other: Path) -> None:
    logs = [[json.loads(line) for line in (each / "metrics.jsonl").read_text().splitlines()] for each in (run, other)]
    for record in logs[0] + logs[1]:
        del record["seconds"]
    if logs[0] != logs[1]:
        raise AssertionError(f"{run.name} has logged other numbers than {other.name}")
    if last_checkpoint(run) != last_checkpoint(other):
        raise AssertionError(f"the last checkpoint of {run.name} has other numbers than that of {other.name}")
    if (run / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes():
        raise AssertionError(f"the model of {run.name} has other numbers than that of {other.name}")


def last_checkpoint(run: Path) -> dict[str, bytes]:
    """Its arrays, by path."""
    folder = max((run / "checkpoints").iterdir(), key=lambda folder: int(folder.name))
    arrays = ocp.StandardCheckpointer().restore(folder.absolute() / ARRAYS)
    return {path: np.asarray(array).tobytes() for path, array in arrays.items()}


if __name__ == "__main__":
    main(train.parse(Options, __doc__))
