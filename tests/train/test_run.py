"""A run's folder: named once, logged line by line, gone on with after a kill, written by one process."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import jax.numpy as jnp
import pytest

from eqzoo.train.options import parse
from eqzoo.train.run import Run, RunOptions, is_running, read_records


@dataclass(frozen=True)
class Options:
    model: str = "resnet18"
    learning_rate: float = 0.1
    run: RunOptions = field(default_factory=RunOptions)


def start(folder, options=None, **run_options):
    return Run(RunOptions(folder=folder, **run_options), options or Options())


def lines(run):
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


def steps(run):
    return [line["step"] for line in lines(run)]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("resnet18", "resnet18-1"),
        ("timm/resnet50.a1_in1k", "resnet50.a1_in1k-1"),
        ("my.module:MyNet", "MyNet-1"),
        ("odd name!", "odd-name--1"),
    ],
)
def test_a_run_is_named_after_its_model(tmp_path, model, name):
    run = start(tmp_path / "runs", Options(model=model))
    assert (run.folder, run.name) == (tmp_path / "runs" / name, name)


def test_a_run_without_a_model_is_named_after_the_script(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["some/train_thing.py"])
    assert start(tmp_path, {"seed": 1}).name == "train_thing-1"


def test_no_run_gets_anothers_folder(tmp_path):
    """Also of runs that start at once."""
    runs = []
    threads = [threading.Thread(target=lambda: runs.append(start(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(run.name for run in runs) == [f"resnet18-{number}" for number in range(1, 9)]


def test_a_name_that_is_taken_says_what_to_do(tmp_path):
    run = start(tmp_path, name="mine")
    before = sorted(run.folder.iterdir())
    with pytest.raises(ValueError, match=f"{run.folder} exists already: go on with that run by --resume {run.folder}"):
        start(tmp_path, name="mine")
    assert sorted(run.folder.iterdir()) == before


def test_the_config_has_all_options_and_the_versions(tmp_path):
    config = json.loads((start(tmp_path, Options(learning_rate=0.5)).folder / "config.json").read_text())
    expected = {"model": "resnet18", "learning_rate": 0.5, "run": {"keep": 3, "tensorboard": False}}
    assert config["options"] == expected
    assert sorted(config["versions"]) == ["equinox", "eqzoo", "jax", "optax", "python"]


def test_a_line_is_on_disk_once_it_is_logged(tmp_path):
    run = start(tmp_path)
    run.log(10, train={"loss": jnp.array(0.5)}, test={"loss": 0.75, "accuracy": 1})
    (line,) = lines(run)
    seconds = line.pop("seconds")
    assert 0 <= seconds < 60
    assert line == {"step": 10, "train": {"loss": 0.5}, "test": {"loss": 0.75, "accuracy": 1.0}}


def test_log_returns_the_line_for_the_eye(tmp_path):
    text = start(tmp_path).log(10, train={"accuracy": 0.5, "loss": 0.25}, test={})
    assert text == "step     10   train: loss 0.250, accuracy 50.0%   (0 s)"


def test_numbers_that_are_none_stay_valid_json(tmp_path):
    run = start(tmp_path)
    run.log(1, train={"loss": math.nan, "norm": math.inf})
    assert lines(run)[0]["train"] == {"loss": None, "norm": None}
    assert all(math.isnan(value) for value in read_records(run.folder)[0]["train"].values())


def test_a_run_goes_on_where_it_was(tmp_path):
    first = start(tmp_path, name="mine")
    for step in (10, 20, 30):
        first.log(step, train={"loss": 1 / step})
    kept = lines(first)[:2]
    del first
    options = parse(Options, argv=["--resume", str(tmp_path / "mine"), "--learning-rate", "0.3"])
    run = Run(options.run, options)
    run.truncate(20)
    assert lines(run) == kept
    run.log(25, train={"loss": 0.0})
    assert steps(run) == [10, 20, 25]
    assert lines(run)[:2] == kept
    assert json.loads((run.folder / "config.json").read_text())["options"]["learning_rate"] == 0.3


def test_the_clock_stands_still_between(tmp_path):
    first = start(tmp_path, name="mine")
    first.log(10)
    first._append({"step": 20, "seconds": 5000.0})
    first._append({"step": 30, "seconds": 9000.0})
    del first
    run = start(tmp_path, resume=tmp_path / "mine")
    run.log(40)
    run.truncate(20)
    run.log(30)
    assert [round(line["seconds"] / 100) for line in lines(run)] == [0, 50, 50]


def test_a_half_line_is_forgotten(tmp_path):
    first = start(tmp_path, name="mine")
    first.log(10, train={"loss": 0.5})
    first.log(20, train={"loss": 0.25})
    del first
    file = tmp_path / "mine" / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-1])
    assert [record["step"] for record in read_records(tmp_path / "mine")] == [10]
    run = start(tmp_path, resume=tmp_path / "mine")
    run.log(15, train={"loss": 0.3})
    assert steps(run) == [10, 15]


def test_a_line_that_is_damaged_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="metrics.jsonl is damaged: line 2 is not JSON; remove the line"):
        read_records(tmp_path)


def test_a_kill_at_any_moment_leaves_a_run_to_go_on_with(tmp_path):
    """Real processes, killed while they log as fast as they can."""
    code = """
import itertools, sys
from pathlib import Path
from eqzoo.train.run import Run, RunOptions
folder = Path(sys.argv[1])
resume = folder / "mine" if (folder / "mine").exists() else None
run = Run(RunOptions(folder=folder, name="mine", resume=resume), {})
last = run.records[-1]["step"] if run.records else 0
print("ready", flush=True)
for step in itertools.count(last + 1):
    run.log(step, train={f"number {index}": float(step) for index in range(1000)})
"""
    last = 0
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(0.3)
        assert is_running(tmp_path / "mine")
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not is_running(tmp_path / "mine")
        records = read_records(tmp_path / "mine")
        assert [record["step"] for record in records] == list(range(1, len(records) + 1))
        assert len(records) > last
        last = len(records)


def test_one_run_belongs_to_one_process(tmp_path):
    run = start(tmp_path, name="mine")
    assert is_running(run.folder)
    with pytest.raises(ValueError, match=f"{run.folder} is running already: wait for it, or start another run"):
        start(tmp_path, resume=run.folder)
    run.finish()
    assert not is_running(run.folder)
    start(tmp_path, resume=run.folder)


def test_a_run_that_is_not_finished_ends_quietly(tmp_path):
    code = """
import sys
from pathlib import Path
from eqzoo.train.run import Run, RunOptions
run = Run(RunOptions(folder=Path(sys.argv[1]), name="mine"), {})
run.log(1)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert not is_running(tmp_path / "mine")


def test_a_folder_that_nobody_locked_is_not_running(tmp_path):
    assert not is_running(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_gone_on_with_says_why(tmp_path):
    with pytest.raises(ValueError, match="none is not the folder of a run, for it has no config.json: resume one"):
        start(tmp_path, resume=tmp_path / "none")
    run = start(tmp_path, name="mine")
    with pytest.raises(ValueError, match=f"--resume {run.folder} goes on with that run under its name: drop --name x"):
        start(tmp_path, resume=run.folder, name="x")


def test_a_finished_run_says_so_and_has_its_curves(tmp_path):
    run = start(tmp_path, name="mine")
    run.log(10, train={"loss": 0.5})
    run.finish()
    assert lines(run)[-1].items() >= {"step": 10, "finished": True}.items()
    assert (run.folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in run.folder.iterdir()) == [".lock", "config.json", "curves.png", "metrics.jsonl"]
    longer = start(tmp_path, resume=run.folder)
    assert steps(longer) == [10]
    assert not any("finished" in line for line in lines(longer))


def test_a_paused_run_has_its_curves_and_can_be_gone_on_with_at_once(tmp_path):
    run = start(tmp_path, name="mine")
    run.log(10, train={"loss": 0.5})
    run.pause()
    assert (run.folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not is_running(run.folder)
    assert not any("finished" in line for line in lines(run))
    assert steps(start(tmp_path, resume=run.folder)) == [10]


def test_a_run_that_logged_nothing_can_finish(tmp_path):
    run = start(tmp_path)
    run.finish()
    assert not (run.folder / "curves.png").exists()


def test_without_matplotlib_it_says_so_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="^curves.png needs matplotlib: pip install"):
        start(tmp_path)
    assert list(tmp_path.iterdir()) == []


def events(folder):
    """Values by tag and step; and the steps from which on TensorBoard forgets what came before."""
    from tensorboardX.proto.event_pb2 import Event

    values, forgotten = {}, []
    for file in sorted(folder.glob("events.out.tfevents.*"), key=lambda file: file.stat().st_mtime_ns):
        data = file.read_bytes()
        while data:  # each with its length before it, and checksums after both
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.session_log.status == event.session_log.START:
                forgotten.append(event.step)
            for value in event.summary.value:
                values[value.tag, event.step] = value.simple_value
    return values, forgotten


def test_tensorboard_gets_the_same_numbers(tmp_path):
    run = start(tmp_path, name="mine", tensorboard=True)
    run.log(10, train={"loss": 0.5}, test={"accuracy": 0.25})
    run.log(20, train={"loss": 0.125})
    expected = {("train/loss", 10): 0.5, ("test/accuracy", 10): 0.25, ("train/loss", 20): 0.125}
    assert events(run.folder)[0] == expected
    run.finish()
    longer = start(tmp_path, resume=run.folder, tensorboard=True)
    longer.truncate(10)
    time.sleep(1.1)  # its files are named by the second
    longer.log(30, train={"loss": 0.0625})
    longer.finish()
    values, forgotten = events(run.folder)
    assert values == expected | {("train/loss", 30): 0.0625}
    assert forgotten[-1] == 11


def test_without_being_asked_there_are_no_events(tmp_path):
    run = start(tmp_path)
    run.log(10, train={"loss": 0.5})
    assert not list(run.folder.glob("events*"))


def test_without_tensorboardx_it_says_so_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(
        ModuleNotFoundError, match="^--tensorboard needs tensorboardX: pip install 'eqzoo.tensorboard.'$"
    ):
        start(tmp_path, tensorboard=True)


WORKER = """
import sys
from pathlib import Path

import jax

coordinator, index, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
jax.distributed.initialize(coordinator, 2, index)

from eqzoo.train.run import Run, RunOptions

run = Run(RunOptions(folder=folder), {})
run.truncate(10)
run.log(10, train={"loss": index})
run.finish()
try:
    Run(RunOptions(folder=folder, name=run.name), {})
except ValueError as error:
    print(run.folder, "|", error)
"""


def test_two_processes_share_a_folder_and_the_first_writes(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-c", WORKER, coordinator]
    workers = [
        subprocess.Popen(
            [*command, str(index), str(tmp_path)],
            env=os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=100)[0].splitlines()[-1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    (folder,) = tmp_path.iterdir()
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith(f"{folder} | {folder} exists already: go on")
    assert [record.get("train") for record in read_records(Path(folder))] == [{"loss": 0.0}, None]
