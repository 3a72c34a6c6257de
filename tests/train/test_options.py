"""Options: from the command line as flat flags, to JSON and back, from the config of a run with changes."""

import dataclasses
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from eqzoo.train.options import NOT_SAVED, from_json, parse, read_options, to_json


@dataclass(frozen=True)
class Optimizer:
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Which one."""
    learning_rate: float = 1e-3
    """How far a step goes."""
    betas: tuple[float, float] = (0.9, 0.99)


@dataclass(frozen=True)
class Place:
    resume: Path | None = field(default=None, metadata=NOT_SAVED)
    keep: int = 3
    tensorboard: bool = False


@dataclass(frozen=True)
class Options:
    data: Path
    """Where the images are."""
    options: dict[str, str] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    clip: float | None = 1.0
    layers: list[int] = field(default_factory=list)
    optimizer: Optimizer = field(default_factory=Optimizer)
    run: Place = field(default_factory=Place)


OPTIONS = Options(
    data=Path("some/where"),
    options={"depth": "3", "act": "gelu"},
    sizes=(1, 2, 3),
    clip=None,
    layers=[4, 5],
    optimizer=Optimizer("sgd", 0.1, (0.5, 0.25)),
    run=Place(tensorboard=True),
)


@pytest.fixture
def run_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"options": to_json(OPTIONS)}))
    return tmp_path


def document(**changes):
    return json.loads(json.dumps(to_json(OPTIONS))) | changes


def test_flags_are_flat_and_dataclasses_nest():
    options = parse(Options, argv=["--data", "x", "--learning-rate", "0.5", "--betas", "0.1", "0.2", "--tensorboard"])
    expected = Options(Path("x"), optimizer=Optimizer(learning_rate=0.5, betas=(0.1, 0.2)), run=Place(tensorboard=True))
    assert options == expected


def test_help_has_a_section_a_dataclass_and_the_docstrings(capsys):
    with pytest.raises(SystemExit):
        parse(Options, "Trains something.", ["--help"])
    text = capsys.readouterr().out
    for part in ("Trains something.", "optimizer options", "run options", "How far a step goes.", "{adamw,sgd}"):
        assert part in text
    assert "--optimizer.learning-rate" not in text


def test_without_argv_it_is_the_programs_own(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--data", "x", "--sizes", "7", "8"])
    assert parse(Options).sizes == (7, 8)


def test_options_survive_json():
    assert from_json(Options, document()) == OPTIONS
    types = [type(value) for value in vars(from_json(Options, document())).values()]
    assert types == [type(value) for value in vars(OPTIONS).values()]


def test_where_a_run_is_stays_out_of_its_config():
    options = dataclasses.replace(OPTIONS, run=Place(resume=Path("runs/a"), keep=5))
    assert to_json(options)["run"] == {"keep": 5, "tensorboard": False}
    assert from_json(Options, to_json(options)).run == Place(keep=5)


def test_options_that_came_later_have_their_defaults():
    assert from_json(Options, {"data": "x"}) == Options(Path("x"))


def test_a_whole_number_will_do_for_a_float():
    clip = from_json(Options, document(clip=2)).clip
    assert (clip, type(clip)) == (2.0, float)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip": "high"}, "options.clip is 'high', but should be float or None"),
        ({"clip": True}, "options.clip is True, but should be float or None"),
        ({"data": 3}, "options.data is 3, but should be Path"),
        ({"data": None}, "options.data is None, but should be Path"),
        ({"sizes": [1, 2.5]}, "options.sizes[1] is 2.5, but should be int"),
        ({"sizes": [True]}, "options.sizes[0] is True, but should be int"),
        ({"sizes": 3}, "options.sizes is 3, but should be tuple[int, ...]"),
        ({"layers": ["a"]}, "options.layers[0] is 'a', but should be int"),
        ({"options": {"depth": 3}}, "options.options['depth'] is 3, but should be str"),
        ({"optimizer": "sgd"}, "options.optimizer is 'sgd', but should be an object"),
        (
            {"optimizer": {"optimizer": "adam"}},
            "options.optimizer.optimizer is 'adam', but should be 'adamw' or 'sgd'",
        ),
        (
            {"optimizer": {"betas": [0.1]}},
            "options.optimizer.betas is [0.1], but should be tuple[float, float]",
        ),
        (
            {"optimizer": {"learning_rte": 0.1}},
            "options.optimizer.learning_rte is not an option: correct it (learning_rate?) or remove it",
        ),
        ({"run": {"tensorboard": 1}}, "options.run.tensorboard is 1, but should be bool"),
        ({"zzz": 1}, "options.zzz is not an option: correct it (data, options, sizes"),
    ],
)
def test_a_wrong_entry_is_named_with_what_it_should_be(change, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        from_json(Options, document(**change))


def test_a_literal_is_of_its_own_type():
    assert from_json(Literal[1, 2], 1) == 1
    with pytest.raises(ValueError, match="^options is True, but should be 1 or 2$"):
        from_json(Literal[1, 2], True)


def test_only_resume_itself_resumes():
    """`--res` would be a flag of the script's own."""
    with pytest.raises(SystemExit):
        parse(Options, argv=["--data", "x", "--res", "nowhere"])


def test_a_missing_entry_without_a_default_is_named():
    with pytest.raises(ValueError, match="^options.data is missing and has no default: add it$"):
        from_json(Options, {})


@pytest.mark.parametrize("value", [{1, 2}, {3: "a"}, b"bytes"])
def test_what_json_cannot_hold_is_named(value):
    with pytest.raises(TypeError, match="^options.options is .*, which config.json can't hold; options are made of"):
        to_json(dataclasses.replace(OPTIONS, options=value))


def test_resume_takes_the_options_of_the_run(run_folder):
    expected = dataclasses.replace(OPTIONS, run=dataclasses.replace(OPTIONS.run, resume=run_folder))
    assert parse(Options, argv=["--resume", str(run_folder)]) == expected
    assert parse(Options, argv=[f"--resume={run_folder}"]) == expected


def test_resume_changes_what_is_given_and_nothing_else(run_folder):
    flags = ["--learning-rate", "0.7", "--sizes", "9", "--no-tensorboard", "--clip", "2", "--options", "depth", "4"]
    options = parse(Options, argv=["--resume", str(run_folder), *flags])
    assert options == Options(
        data=OPTIONS.data,
        options={"depth": "4", "act": "gelu"},
        sizes=(9,),
        clip=2.0,
        layers=OPTIONS.layers,
        optimizer=Optimizer("sgd", 0.7, (0.5, 0.25)),
        run=Place(resume=run_folder),
    )


def test_what_is_given_may_equal_the_default(run_folder):
    options = parse(Options, argv=["--resume", str(run_folder), "--learning-rate", "1e-3", "--optimizer", "adamw"])
    assert (options.optimizer.learning_rate, options.optimizer.optimizer) == (1e-3, "adamw")


def test_a_folder_that_is_no_run_is_said_to_be_none(tmp_path):
    with pytest.raises(ValueError, match="is not the folder of a run, for it has no config.json"):
        parse(Options, argv=["--resume", str(tmp_path / "nowhere")])


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_damaged_config_is_said_to_be_damaged(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json is damaged: it should be a JSON object with the run's options"):
        read_options(Options, tmp_path)


def test_a_wrong_entry_of_a_config_is_named_with_its_file(run_folder):
    file = run_folder / "config.json"
    file.write_text(json.dumps({"options": document(clip="high")}))
    with pytest.raises(ValueError, match=re.escape(f"{file}: options.clip is 'high', but should be float or None")):
        read_options(Options, run_folder)


def test_without_tyro_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tyro", None)
    with pytest.raises(ModuleNotFoundError, match="^the command line needs tyro: pip install 'eqzoo\\[train\\]'$"):
        parse(Options, argv=[])


def test_importing_costs_nothing():
    """Neither the optional packages nor a backend: `jax.distributed.initialize` must work afterwards."""
    code = """
import sys
import eqzoo.train.options, eqzoo.train.run, eqzoo.train.progress, eqzoo.train.plots
from jax._src import xla_bridge
optional = ("tyro", "rich", "matplotlib", "tensorboardX", "PIL")
print([name for name in optional if name in sys.modules], xla_bridge._backends)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] {}\n"
