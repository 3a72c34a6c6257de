"""How long and how much memory loading a ViT-B/16 takes, beside the libraries that read the same files.

    python scripts/bench_load.py

Each load runs in a process of its own, which has imported everything and started its backend; the files are in the
page cache. Time is the best of several turns; memory is the peak above what the process held before. Needs Linux.
"""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import eqzoo
from eqzoo._registry import variant
from eqzoo.checkpoint import unfill, write_safetensors

MODEL = "vit_base_patch16_224"
MEGABYTE = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--measure", nargs=2, metavar=("READER", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(*measure(*arguments.measure))
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = write_files(Path(folder))
        results: dict[tuple[str, Path], list[tuple[float, float]]] = {row: [] for row in rows}
        for _ in range(arguments.turns):
            for reader, path in rows:  # interleaved, so that all see the same machine
                command = [sys.executable, __file__, "--measure", reader, str(path)]
                output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                seconds, peak = map(float, output.split())
                results[reader, path].append((seconds, peak))
        print(f"{'':44}{'ms':>8}{'peak MB':>10}{'of the file':>13}")
        for (reader, path), turns in results.items():
            seconds, peaks = zip(*turns, strict=True)
            size = path.stat().st_size
            label = f"{path.name}: {reader}"
            print(f"{label:44}{1000 * min(seconds):8.0f}{min(peaks) / MEGABYTE:10.0f}{min(peaks) / size:13.2f}")


def write_files(folder: Path) -> list[tuple[str, Path]]:
    """Random weights under timm's names, and which reader reads which file."""
    model, _ = eqzoo.create(MODEL, key=jax.random.key(0))
    tensors = {name: np.asarray(array) for name, array in unfill(model, variant(MODEL)[0].rules["timm"]).items()}
    write_safetensors(folder / "vit.safetensors", tensors, {})
    rows = [("safetensors.numpy", folder / "vit.safetensors"), ("eqzoo", folder / "vit.safetensors")]
    if importlib.util.find_spec("torch"):
        import torch

        torch.save({name: torch.tensor(array) for name, array in tensors.items()}, folder / "vit.pth")
        rows += [("torch", folder / "vit.pth"), ("eqzoo", folder / "vit.pth")]
    return rows


def measure(reader: str, path: str) -> tuple[float, float]:
    """The seconds and the bytes of memory that one load takes in this process."""
    load = loader(reader)
    before = resident("VmRSS")
    start = time.perf_counter()
    loaded = load(path)
    seconds = time.perf_counter() - start
    peak = resident("VmHWM") - before
    del loaded
    return seconds, peak


def loader(reader: str) -> Callable[[str], Any]:
    if reader == "torch":
        import torch

        return lambda path: torch.load(path, weights_only=True)
    if reader == "safetensors.numpy":
        from safetensors.numpy import load_file

        return load_file
    jax.numpy.zeros(1).block_until_ready()
    return lambda path: jax.block_until_ready(eqzoo.load(path, name=MODEL))


def resident(field: str) -> int:
    """A field of this process's status, such as "VmHWM": the most memory it ever held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


if __name__ == "__main__":
    main()
