"""`python -m eqzoo runs`: what runs did, as a table, as JSON, as a picture."""

import json
import math
import re

import numpy as np
import pytest

from eqzoo import __main__ as cli
from eqzoo.train.run import Run, RunOptions


def make(folder, name, config, scores):
    run = Run(RunOptions(folder=folder, name=name), config)
    for index, test in enumerate(scores, start=1):
        run.log(100 * index, train={"loss": 1 / index}, test=test)
    return run


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A finished, a stopped and a running one; the last is kept for as long as it should run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    folder = tmp_path / "runs"
    scores = [{"loss": 0.5, "accuracy": 0.91}, {"loss": 0.25, "accuracy": 0.97}, {"loss": 0.3, "accuracy": 0.955}]
    finished = make(folder, "mlp-2", {"model": "mlp", "data": "digits"}, scores)
    finished.finish()
    log = finished.folder / "metrics.jsonl"
    *before, last = log.read_text().splitlines(keepends=True)
    log.write_text("".join(before) + json.dumps(json.loads(last) | {"seconds": 3723.4}) + "\n")
    make(folder, "mlp-10", {"model": "mlp", "data": "digits"}, [{"loss": math.nan, "accuracy": 0.5}])
    running = make(folder, "gpt2-1", {"model": "gpt2"}, [{"bits_per_byte": 2.5}, {"bits_per_byte": 2.25}])
    (folder / "no run").mkdir()
    (folder / "notes.txt").touch()
    return running


def output(capsys, *argv):
    assert cli.main(["runs", *argv]) == 0
    return capsys.readouterr().out


def cells(line):
    return re.split(r" {2,}", line.strip())


def test_a_row_a_run_in_natural_order(runs, capsys):
    lines = output(capsys).splitlines()
    scores = ["test bits_per_byte", "best", "test loss", "best", "test accuracy", "best"]
    assert cells(lines[0]) == ["name", "model", "data", "state", "steps", "time", *scores]
    assert [cells(line) for line in lines[1:]] == [
        ["gpt2-1", "gpt2", "running", "200", "0:00:00", "2.250", "2.250"],
        ["mlp-2", "mlp", "digits", "finished", "300", "1:02:03", "0.300", "0.250", "95.5%", "97.0%"],
        ["mlp-10", "mlp", "digits", "stopped", "100", "0:00:00", "nan", "nan", "50.0%", "50.0%"],
    ]


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit):
        cli.main(["runs", "--help"])
    assert "example: python -m eqzoo runs --plot curves.png" in capsys.readouterr().out


def test_json_is_what_the_table_says(runs, capsys):
    refuse = lambda constant: pytest.fail(f"{constant} is no JSON")
    documents = {run["name"]: run for run in json.loads(output(capsys, "--json"), parse_constant=refuse)}
    assert list(documents) == ["gpt2-1", "mlp-2", "mlp-10"]
    assert documents["mlp-2"] == {
        "name": "mlp-2",
        "folder": "runs/mlp-2",
        "model": "mlp",
        "data": "digits",
        "steps": 300,
        "seconds": 3723.4,
        "state": "finished",
        "scores": {"loss": {"last": 0.3, "best": 0.25}, "accuracy": {"last": 0.955, "best": 0.97}},
    }
    assert documents["mlp-10"]["scores"]["loss"] == {"last": None, "best": None}
    assert documents["gpt2-1"]["data"] is None


def test_looking_changes_nothing(runs, capsys, tmp_path):
    files = lambda: {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    before = files()
    output(capsys)
    assert files() == before


def test_runs_can_be_named_one_by_one_and_once(runs, capsys):
    lines = output(capsys, "runs/mlp-10", "runs/mlp-2", "runs/mlp-10").splitlines()
    assert [cells(line)[0] for line in lines[1:]] == ["mlp-2", "mlp-10"]


def test_a_run_that_has_logged_nothing_yet_has_no_scores(runs, capsys, tmp_path):
    make(tmp_path, "new", {"model": "mlp"}, [])
    assert [cells(line) for line in output(capsys, "new").splitlines()] == [
        ["name", "model", "data", "state", "steps", "time"],
        ["new", "mlp", "stopped", "0", "0:00:00"],
    ]


def test_a_plot_has_all_of_them(runs, capsys, tmp_path, monkeypatch):
    from eqzoo.train import plots

    drawn = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: drawn.append((figure, path)))
    output(capsys, "runs/mlp-2", "runs/gpt2-1", "--plot", "curves.svg")
    ((figure, path),) = drawn
    assert path == "curves.svg"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["gpt2-1", "mlp-2"]
    assert [axis.get_title("left") for axis in figure.axes[:3]] == ["loss", "bits_per_byte", "accuracy"]
    accuracy = figure.axes[2].get_lines()[0]
    np.testing.assert_allclose(accuracy.get_ydata(), [0.91, 0.97, 0.955])


def test_runs_of_one_name_are_told_apart_in_a_plot(runs, capsys, tmp_path, monkeypatch):
    from eqzoo.train import plots

    make(tmp_path / "others", "mlp-2", {}, [{"loss": 1.0}])
    drawn = []
    monkeypatch.setattr(plots, "curves", lambda runs, path: drawn.append(list(runs)))
    output(capsys, "runs/mlp-2", "others", "--plot", "curves.png")
    assert drawn == [["others/mlp-2", "runs/mlp-2"]]


def test_a_plot_is_a_file(runs, capsys, tmp_path):
    output(capsys, "--plot", "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere"], "nowhere is neither the folder of a run nor holds any: give one with a config.json"),
        (["runs/no run"], "runs/no run is neither the folder of a run nor holds any"),
        (["--plot", "curves.txt"], "a picture can't be written as curves.txt: let its name end in one of "),
    ],
)
def test_what_it_cannot_do_it_says_in_a_sentence(runs, capsys, argv, message):
    assert cli.main(["runs", *argv]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"eqzoo: {message}")
    assert error.count("\n") == 1


def test_a_damaged_config_is_named(runs, capsys, tmp_path):
    (tmp_path / "runs" / "mlp-2" / "config.json").write_text("{")
    assert cli.main(["runs"]) == 1
    assert capsys.readouterr().err.startswith("eqzoo: runs/mlp-2/config.json is damaged: it should be a JSON object")
