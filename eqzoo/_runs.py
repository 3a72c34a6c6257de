"""What the folders of training runs say, for `python -m eqzoo runs`."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eqzoo.train.progress import number_text
from eqzoo.train.run import is_running, read_records

LOWER_IS_BETTER = ("loss", "error", "bits", "perplexity")


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The folders of runs among `paths` and right within them; `resnet18-2` comes before `resnet18-10`."""
    found = []
    for path in paths:
        folders = [path] if _is_run(path) else [folder for folder in path.glob("*/") if _is_run(folder)]
        if not folders:
            raise ValueError(f"{path} is neither the folder of a run nor holds any: give one with a config.json")
        found += folders
    return sorted(dict.fromkeys(found), key=lambda folder: [_natural(part) for part in folder.parts])


def describe(folder: Path) -> dict[str, Any]:
    """One run: what it trains, how far it is, its test scores."""
    file = folder / "config.json"
    try:
        options = json.loads(file.read_text())["options"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file} is damaged: it should be a JSON object with the run's options in it") from None
    records = read_records(folder)
    finished = bool(records) and records[-1].get("finished", False)
    return {
        "name": folder.name,
        "folder": str(folder),
        "model": options.get("model"),
        "data": options.get("data"),
        "steps": records[-1]["step"] if records else 0,
        "seconds": records[-1]["seconds"] if records else 0.0,
        "state": "running" if is_running(folder) else "finished" if finished else "stopped",
        "scores": _scores(records),
    }


def table(runs: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]], list[int]]:
    """Titles, rows, and which columns are numbers."""
    metrics = list(dict.fromkeys(name for run in runs for name in run["scores"]))
    titles = ["name", "model", "data", "state", "steps", "time"]
    titles += [title for name in metrics for title in (f"test {name}", "best")]
    rows = []
    for run in runs:
        words = [run["name"], *("" if run[key] is None else run[key] for key in ("model", "data", "state"))]
        numbers = [f"{run['steps']:,}", _duration(run["seconds"])]
        for name in metrics:
            scores = run["scores"].get(name)
            numbers += ["", ""] if scores is None else [_score(name, scores[key]) for key in ("last", "best")]
        rows.append([*words, *numbers])
    return titles, rows, list(range(4, len(titles)))


def _is_run(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def _scores(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """JSON knows no NaN: a score that is not a number is None."""
    values: dict[str, list[float]] = {}
    for record in records:
        for name, value in record.get("test", {}).items():
            values.setdefault(name, []).append(value)
    scores = {}
    for name, series in values.items():
        best = min if any(word in name for word in LOWER_IS_BETTER) else max
        numbers = [value for value in series if not math.isnan(value)]
        last = None if math.isnan(series[-1]) else series[-1]
        scores[name] = {"last": last, "best": best(numbers, default=None)}
    return scores


def _score(name: str, value: float | None) -> str:
    return number_text(name, math.nan if value is None else value)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
