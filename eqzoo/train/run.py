"""A run's folder: its options, what it logs, its curves."""

import importlib.metadata
import json
import math
import platform
import re
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsFloat

import jax
import numpy as np
from filelock import FileLock, Timeout
from jax.experimental import multihost_utils

from eqzoo._optional import needed_for
from eqzoo.checkpoint._atomic import written_atomically
from eqzoo.train import plots
from eqzoo.train.options import NOT_SAVED, to_json
from eqzoo.train.progress import number_text


@dataclass(frozen=True)
class RunOptions:
    """Where a run is kept, and what of it."""

    folder: Path = field(default=Path("runs"), metadata=NOT_SAVED)
    """Holds a folder for each run."""
    name: str | None = field(default=None, metadata=NOT_SAVED)
    """Of the run's folder; if None, the model's name and a number."""
    resume: Path | None = field(default=None, metadata=NOT_SAVED)
    """The folder of a run to go on with, with its options except for those that are given."""
    keep: int = 3
    """How many of the newest checkpoints to keep, besides the best."""
    tensorboard: bool = False
    """Also log for TensorBoard, into the run's folder."""


class Run:
    """The folder `runs/NAME/` of a training run: `config.json` has all options and the versions of the libraries,
    `metrics.jsonl` a line for each `log`, and `pause` and `finish` draw `curves.png`. Of several processes, the first
    writes.

    A run that was stopped or killed goes on with `resume`; `truncate` then takes back what was logged after the
    checkpoint that it goes on from. Two processes can't work on one run.

    ```python
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        options = RunOptions(folder=Path(folder), name="first")
        run = Run(options, {"model": "mlp"})
        run.log(100, train={"loss": 0.5}, test={"loss": 0.7, "accuracy": 0.9})
        run.finish()
        assert (run.folder / "curves.png").exists()
    ```
    """

    folder: Path
    records: list[dict[str, Any]]

    def __init__(self, run_options: RunOptions, options: Any):
        with needed_for("curves.png"):
            import matplotlib  # noqa: F401  (better missing now than at the end)
        self._writes = jax.process_index() == 0
        self._events = None
        self._tensorboard = run_options.tensorboard and self._writes
        if self._tensorboard:
            with needed_for("--tensorboard", "tensorboard"):
                import tensorboardX  # noqa: F401
        self.folder = Path(_as_the_first_process(lambda: self._take_folder(run_options, options)))
        self.records = []
        if self._writes:
            self.records = [record for record in read_records(self.folder) if not record.get("finished")]
            self._write_records()
            config = {"options": to_json(options), "versions": _versions()}
            with written_atomically(self.folder / "config.json") as path:
                path.write_text(json.dumps(config, indent=2) + "\n")
        self._set_clock()

    @property
    def name(self) -> str:
        return self.folder.name

    def log(self, step: int, **groups: Mapping[str, SupportsFloat]) -> str:
        """Add a line: numbers by group and name, such as `train={"loss": 0.1}`. Returns it as one to be read."""
        numbers = {group: {name: float(value) for name, value in named.items()} for group, named in groups.items()}
        seconds = time.monotonic() - self._start
        if self._writes:
            if self._tensorboard:
                self._log_events(step, numbers)
            self._append({"step": int(step), "seconds": round(seconds, 3), **numbers})
        return _text(step, numbers, seconds)

    def truncate(self, step: int) -> None:
        """Forget what was logged after a step, to go on from there."""
        self.records = [record for record in self.records if record["step"] <= step]
        if self._writes:
            self._write_records()
        self._set_clock()

    def pause(self) -> None:
        """The training stopped before its end: draw what there is, and let others go on with it."""
        self._draw()
        self._close()

    def finish(self) -> None:
        """The training is complete: say so in the log, and draw it."""
        if not self._writes:
            return
        self._draw()
        step = self.records[-1]["step"] if self.records else 0
        self._append({"step": step, "seconds": round(time.monotonic() - self._start, 3), "finished": True})
        self._close()

    def _draw(self) -> None:
        if self.records:
            plots.curves(self.records, self.folder / "curves.png")

    def _close(self) -> None:
        if self._events is not None:
            self._events.close()
        if self._writes:
            self._held.close()

    def _take_folder(self, run_options: RunOptions, options: Any) -> str:
        folder = _new_folder(run_options, options) if run_options.resume is None else _old_folder(run_options)
        self._held = ExitStack()
        weakref.finalize(self, self._held.close)  # also when Python exits, where the lock alone would complain
        try:
            self._held.enter_context(FileLock(folder / ".lock", timeout=1))
        except Timeout:
            raise ValueError(f"{folder} is running already: wait for it, or start another run") from None
        return str(folder)

    def _append(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(_line(record))

    def _write_records(self) -> None:
        with written_atomically(self.folder / "metrics.jsonl") as path:
            path.write_text("".join(map(_line, self.records)))

    def _log_events(self, step: int, numbers: Mapping[str, Mapping[str, float]]) -> None:
        # Not through tensorboardX's SummaryWriter: that writes in a thread, of which a kill loses minutes.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # type: ignore[attr-defined]
        from tensorboardX.summary import scalar

        now = time.time()
        if self._events is None:
            self._events = EventsWriter(str(self.folder / "events"))
            # TensorBoard forgets what `truncate` took back.
            after = self.records[-1]["step"] + 1 if self.records else 0
            start = SessionLog(status=SessionLog.START)
            self._events.write_event(Event(wall_time=now, step=after, session_log=start))
        for group, named in numbers.items():
            for name, value in named.items():
                self._events.write_event(Event(wall_time=now, step=step, summary=scalar(f"{group}/{name}", value)))
        self._events.flush()

    def _set_clock(self) -> None:
        """A run's seconds are those that it was running."""
        self._start = time.monotonic() - (self.records[-1]["seconds"] if self.records else 0.0)


def read_records(folder: Path) -> list[dict[str, Any]]:
    """What a run has logged so far. The half line that a kill can leave at the end doesn't count."""
    file = folder / "metrics.jsonl"
    records = []
    for number, line in enumerate(file.read_bytes().split(b"\n")[:-1] if file.exists() else [], start=1):
        try:
            record = json.loads(line)
        except ValueError:
            raise ValueError(f"{file} is damaged: line {number} is not JSON; remove the line") from None
        for named in record.values():
            if isinstance(named, dict):
                named.update({name: math.nan for name, value in named.items() if value is None})
        records.append(record)
    return records


def is_running(folder: Path) -> bool:
    """Whether a process of this machine works on the run."""
    if not (folder / ".lock").exists():
        return False
    try:
        with FileLock(folder / ".lock", timeout=0):
            return False
    except Timeout:
        return True
    except PermissionError:  # somebody else's, of which one can't know
        return False


def _line(record: Mapping[str, Any]) -> str:
    """JSON knows no infinities and no NaN."""
    finite = lambda value: None if isinstance(value, float) and not math.isfinite(value) else value
    strict = {
        key: {name: finite(number) for name, number in value.items()} if isinstance(value, dict) else value
        for key, value in record.items()
    }
    return json.dumps(strict, allow_nan=False) + "\n"


def _text(step: int, numbers: Mapping[str, Mapping[str, float]], seconds: float) -> str:
    groups = [
        f"{group}: {', '.join(f'{name} {number_text(name, named[name])}' for name in sorted(named, key=_losses_first))}"
        for group, named in numbers.items()
        if named
    ]
    return f"step {step:6}   {'   '.join(groups)}   ({seconds:,.0f} s)"


def _losses_first(name: str) -> tuple[bool, str]:
    return "loss" not in name, name


def _new_folder(run_options: RunOptions, options: Any) -> Path:
    if run_options.name is not None:
        folder = run_options.folder / run_options.name
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise ValueError(
                f"{folder} exists already: go on with that run by --resume {folder}, or choose another --name"
            ) from None
        return folder
    model = getattr(options, "model", None) or Path(sys.argv[0]).stem
    title = re.sub(r"[^\w.-]+", "-", re.split(r"[/:]", model)[-1]) or "run"
    number = 1
    while True:
        folder = run_options.folder / f"{title}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder


def _old_folder(run_options: RunOptions) -> Path:
    folder = run_options.resume
    assert folder is not None
    if run_options.name not in (None, folder.name):
        raise ValueError(f"--resume {folder} goes on with that run under its name: drop --name {run_options.name}")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not the folder of a run, for it has no config.json: resume one that has")
    return folder


def _as_the_first_process(decide: Callable[[], str]) -> str:
    """What `decide` gives in the first process, its error included, in all of them."""
    if jax.process_count() == 1:
        return decide()
    decision, error = "", ""
    if jax.process_index() == 0:
        try:
            decision = decide()
        except (ValueError, OSError) as problem:
            error = str(problem)
    sent = np.zeros(4096, np.uint8)
    text = json.dumps([decision, error]).encode()
    sent[: len(text)] = np.frombuffer(text, np.uint8)
    decision, error = json.loads(bytes(multihost_utils.broadcast_one_to_all(sent)).rstrip(b"\0"))
    if error:
        raise ValueError(error)
    return decision


def _versions() -> dict[str, str]:
    libraries = ("eqzoo", "jax", "equinox", "optax")
    return {"python": platform.python_version(), **{name: _version(name) for name in libraries}}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"  # run from a checkout
