"""scripts/benchmark.py on tiny models: all rows are there, and figures are written, read and compared."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import load_script

ROOT = Path(__file__).parents[1]
SCRIPT = load_script("benchmark")


def side(seconds: float, peak: int) -> dict:
    tasks = {"train": [seconds, 1.02 * seconds], "forward": [seconds, seconds]}
    return {"first": {"train": 1.0, "forward": 1.0}, "wall": tasks, "cpu": tasks, "peak": peak}


def figures(ours: float, peak: int = 100) -> dict:
    return {"sides": {"resnet50": {"eqzoo": side(ours, peak), "torch": side(2.0, 100), "torch b": side(1.0, 90)}}}


def test_a_ratio_is_of_torchs_best_layout():
    group = figures(0.5)["sides"]["resnet50"]
    assert SCRIPT.ratio(group, "train") == 2.0
    assert SCRIPT.memory_ratio(group) == 0.9
    assert SCRIPT.ratio(group, "train", SCRIPT.PLAIN) is None


@pytest.mark.parametrize(
    ("now", "peak", "tasks"),
    [(1.0, 100, []), (1.04, 105, []), (1.2, 100, ["train", "forward"]), (1.0, 120, ["memory"])],
)
def test_only_what_is_worse_beyond_noise_is_a_regression(now, peak, tasks):
    found = SCRIPT.regressions(figures(now, peak), figures(1.0))
    assert [line.split(": ")[0] for line in found] == [f"resnet50, {task}" for task in tasks]


def test_a_quick_run_has_all_rows_and_notices_that_it_was_faster_before(tmp_path):
    file = tmp_path / "figures.json"

    def run(*more: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "scripts/benchmark.py", "--quick", *more]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    faster = {"sides": {"gpt2": {"eqzoo": side(1e-9, 10**12), "torch": side(1.0, 1)}}}
    (tmp_path / "before.json").write_text(json.dumps(faster))
    done = run("--json", str(file), "--against", str(tmp_path / "before.json"))
    assert done.returncode == 1, done.stderr
    assert "slower than before: gpt2, train" in done.stdout
    assert "failed" not in done.stderr
    for row in ("vit_tiny_patch16_224", "gpt2", "torch channels_last", "plain Equinox", "bfloat16", "int8"):
        assert row in done.stdout
    results = json.loads(file.read_text())
    assert set(results["sides"]) == {"vit_tiny_patch16_224", "gpt2", "decode"}
    assert SCRIPT.regressions(results, results) == []
