"""The training scripts give the same numbers on one device, on eight, and on two processes of four each; and a run goes
on with the devices that there are then.

SGD, because Adam's first updates are as large as the learning rate however small a gradient is: where it is exactly
zero, they would be the sign of its rounding noise.
"""

import json
import os
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.scripts import SCRIPTS

TIMEOUT = 300
SGD = "--optimizer sgd --learning-rate 0.1 --batch-size 16"
MODELS = {
    "resnet": "--model resnet18 --options depths (1,1) widths (8,16) stem deep stem_width 4 --image-size 16",
    "vit": "--model vit_tiny_patch16_224 --options dim 16 depth 2 heads 2 patch_size 4 --flip --shift 0.2",
    "gpt2": "--model gpt2 --options dim 32 depth 2 heads 2 --tokenizer bytes --context 16 --sample 4",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Noise in MNIST's format, 80 images of 4 classes to train on and 24 to test on; and a folder of text."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    for name, count in {"train": 80, "t10k": 24}.items():
        write_idx(folder / f"{name}-images-idx3-ubyte", random.integers(0, 256, (count, 8, 8)))
        write_idx(folder / f"{name}-labels-idx1-ubyte", np.arange(count) % 4)
    (folder / "text").mkdir()
    for number in range(40):
        (folder / "text" / f"{number}.py").write_text(f"def function_{number}(x):\n    return x + {number}\n\n\n" * 3)
    return folder


def write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def training(model: str, data: Path, folder: Path, epochs: int = 1) -> list[str]:
    """The command line of a run of that name, of five steps an epoch."""
    if model == "gpt2":
        what = ["train_lm.py", "--data", str(data / "text"), "--steps", str(5 * epochs)]
    else:
        what = ["train_classifier.py", "--data", str(data), "--epochs", str(epochs)]
    how = f"{MODELS[model]} {SGD} --save-every 1 --eval-every {5 * epochs}"  # so that the last model is the one kept
    return [*what, *shlex.split(how), "--folder", str(folder.parent), "--name", folder.name]


def start(command: Sequence[str], output: Path, *, devices: int) -> subprocess.Popen:
    """Writes to `output`.out and `output`.err."""
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_LOG_COMPILES": "1"}
    with output.with_suffix(".out").open("w") as out, output.with_suffix(".err").open("w") as err:
        script = [sys.executable, str(SCRIPTS / command[0]), *command[1:]]
        return subprocess.Popen(script, env=os.environ | flags, stdout=out, stderr=err)


def start_two(command: Sequence[str], outputs: Sequence[Path]) -> list[subprocess.Popen]:
    """Two processes with four devices each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    job = [*command, "--distributed", "--coordinator", coordinator, "--processes", "2", "--process"]
    return [start([*job, str(process)], output, devices=4) for process, output in enumerate(outputs)]


def finish(processes: Sequence[subprocess.Popen], outputs: Sequence[Path]) -> None:
    deadline = time.monotonic() + TIMEOUT
    try:
        for process in processes:
            process.wait(deadline - time.monotonic())
    finally:
        kill(processes)
    errors = [output.with_suffix(".err").read_text()[-3000:] for output in outputs]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n\n".join(errors)


def kill(processes: Sequence[subprocess.Popen]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def printed(output: Path) -> str:
    """Without what Gloo says about its connections, piece by piece: its threads write into each other's lines."""
    said = r"\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of connected peer ranks is : "
    rest = re.sub(said, "", output.with_suffix(".out").read_text())
    return re.sub(r"^\d*(\n|$)", "", rest, flags=re.MULTILINE)


def compiled(output: Path) -> int:
    """How often the training step was."""
    return output.with_suffix(".err").read_text().count("Compiling jit(train_step)")


def check_the_same(run: Path, expected: Path) -> None:
    """Training and test losses of every step, parameters and statistics, to 1e-5; each is written once."""
    lines = lambda folder: (folder / "metrics.jsonl").read_text().splitlines()
    records, expected_records = (list(map(json.loads, lines(folder))) for folder in (run, expected))
    assert len(records) == len(expected_records)
    for record, alone in zip(records, expected_records, strict=True):
        assert record["step"] == alone["step"]
        for group in ("train", "test"):
            assert record.get(group, {}) == pytest.approx(alone.get(group, {}), rel=1e-5), record["step"]
    weights, expected_weights = load_file(run / "model.safetensors"), load_file(expected / "model.safetensors")
    assert weights.keys() == expected_weights.keys()
    for name, weight in weights.items():
        np.testing.assert_allclose(weight, expected_weights[name], rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("model", "mesh_of_eight", "mesh_of_two_times_four"),
    [
        ("resnet", "data=4,fsdp=2", "data=8"),
        ("vit", "data=2,fsdp=2,model=2", "data=4,fsdp=2"),
        ("gpt2", "data=4,fsdp=2", "model=8"),
    ],
)
def test_a_run_is_the_same_on_any_devices(model, mesh_of_eight, mesh_of_two_times_four, data, tmp_path):
    """ResNet with batch statistics, ViT with augmentation, GPT-2 with a sample. Only the first process prints."""
    names = ("alone", "eight", "first", "second")
    alone, eight, first, second = outputs = [tmp_path / name for name in names]
    two = tmp_path / "two"
    processes = [
        start(training(model, data, alone), alone, devices=1),
        start([*training(model, data, eight), "--mesh", mesh_of_eight], eight, devices=8),
        *start_two([*training(model, data, two), "--mesh", mesh_of_two_times_four], (first, second)),
    ]
    finish(processes, outputs)
    check_the_same(eight, alone)
    check_the_same(two, alone)
    assert [compiled(output) for output in outputs] == [1] * 4
    assert printed(first).count("\nstep ") == 5
    assert printed(second) == ""


def wait_for(text: str, output: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + TIMEOUT
    while text not in printed(output):
        assert process.poll() is None, output.with_suffix(".err").read_text()[-3000:]
        assert time.monotonic() < deadline, printed(output)
        time.sleep(0.01)


def test_a_stopped_run_goes_on_with_other_devices(data, tmp_path):
    """SIGTERM stops it, of two processes also the one that didn't get it."""
    names = ("whole", "eight", "first", "second")
    whole, eight, first, second = outputs = [tmp_path / name for name in names]
    two = tmp_path / "two"
    mesh = ["--mesh", "data=4,fsdp=2"]
    processes = [
        start(training("resnet", data, whole, epochs=4), whole, devices=1),
        start([*training("resnet", data, eight, epochs=4), *mesh], eight, devices=8),
    ]
    try:
        wait_for("step      1 ", eight, processes[1])
        processes[1].send_signal(signal.SIGTERM)
        processes += start_two([*training("resnet", data, two, epochs=4), *mesh], (first, second))
        wait_for("step      1 ", first, processes[2])
        processes[3].send_signal(signal.SIGTERM)
    except BaseException:
        kill(processes)
        raise
    finish(processes, outputs)
    for run, output in ((eight, eight), (two, first)):
        assert not (run / "model.safetensors").exists()
        assert (run / "curves.png").exists()
        (line,) = re.findall(r"stopped; to go on: python (.*)\n", printed(output))
        resume = [*shlex.split(line), "--mesh", "data=1"]
        resume[0] = Path(resume[0]).name
        again = tmp_path / f"{run.name}-again"
        finish([start(resume, again, devices=1)], [again])
        check_the_same(run, whole)
    assert "stopped" not in printed(second)
