"""`scripts/train_lm.py` learns, measures what it says, goes on where it stopped, and takes any model and tokenizer."""

import json
import math
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqzoo
from eqzoo import train
from eqzoo.data.text import BPE, load_text
from tests.scripts import SCRIPTS, load_script

script = load_script("train_lm")
TINY = {"dim": "32", "depth": "1", "heads": "2"}


@pytest.fixture
def text(tmp_path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.py").write_text(f"def function_{number}(x):\n    return x + {number}\n\n\n" * 5)
    return folder


def options(text: Path, **changes) -> "script.Options":
    run = train.RunOptions(
        folder=text.parent / "runs", name=changes.pop("name", None), resume=changes.pop("resume", None)
    )
    tiny = {"options": TINY, "vocab": 280, "context": 32, "batch_size": 8, "steps": 8, "sample": 5}
    return script.Options(data=str(text), run=run, **(tiny | changes))


def scores(folder: Path) -> list[dict[str, float]]:
    """Of each evaluation."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["test"] for record in records if record.get("test")]


def test_it_learns_and_counts_bits_per_byte(text, capsys):
    script.main(options(text, steps=60, name="run", eval_every=30))
    folder = text.parent / "runs" / "run"
    first, last = scores(folder)
    assert last["bits_per_byte"] < first["bits_per_byte"]
    assert last["bits_per_byte"] < 1.5
    out = capsys.readouterr().out
    assert f"280 kinds; devices: {jax.device_count()}" in out
    assert f"test {last['bits_per_byte']:.3f} bits per byte" in out
    assert {"curves.png", "config.json", "tokenizer.json"} <= {file.name for file in folder.iterdir()}

    # The loss of a token is that of the model that was kept, and the bytes are those of the held-out files.
    nats, tokens, size = losses_of_the_kept_model(folder, text)
    assert last["loss"] == pytest.approx(nats / tokens, rel=1e-4)
    assert last["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-4)


def losses_of_the_kept_model(folder: Path, text: Path) -> tuple[float, int, int]:
    """Their sum over the held-out tokens; how many these are; and how many bytes."""
    model = eqzoo.load(folder / "model.safetensors")
    assert model.config.embedding_dropout == model.config.attention_dropout == model.config.residual_dropout == 0
    _, test = load_text(text, tokenizer=folder / "tokenizer.json", context=32)
    windows = test.read(np.arange(len(test)))
    logits = jax.vmap(model)(jnp.asarray(windows["tokens"][:, :-1]))
    losses = train.cross_entropy(logits, jnp.asarray(windows["tokens"][:, 1:]))[windows["weight"] > 0]
    assert len(losses) == len(test.stream) - 1
    return float(losses.sum()), len(losses), len(test.tokenizer.decode(test.stream))


def test_the_best_is_kept_and_a_run_that_stopped_goes_on_as_if_it_had_not(text, monkeypatch):
    runs = text.parent / "runs"
    with monkeypatch.context() as patch:
        patch.setattr(train.Checkpoints, "best", property(lambda self: 4))
        script.main(options(text, name="whole", eval_every=4))
    nats, tokens, _ = losses_of_the_kept_model(runs / "whole", text)
    assert scores(runs / "whole")[0]["loss"] == pytest.approx(nats / tokens, rel=1e-4)

    with monkeypatch.context() as patch:
        patch.setattr(train.Stop, "requested", lambda self, step: step == 5)
        script.main(options(text, name="parts", eval_every=4))
    assert scores(runs / "parts") == scores(runs / "whole")[:1]
    with monkeypatch.context() as patch:
        patch.setattr(BPE, "train", None)  # the tokenizer is that of the run
        script.main(options(text, resume=runs / "parts", eval_every=4))
    assert scores(runs / "parts") == scores(runs / "whole")


class Alphabet(eqx.Module):
    """Knows that a document is abcde, and learns nothing."""

    weight: jax.Array

    def __init__(self, *, key):
        self.weight = jnp.zeros(())

    def __call__(self, tokens, *, key=None):
        following = jnp.where(tokens == 256, ord("a"), jnp.where(tokens == ord("e"), 256, tokens + 1))
        return 100.0 * jax.nn.one_hot(following, 257) + self.weight


@pytest.mark.parametrize(("length", "expected"), [(100, "abcde"), (5, "abcde"), (3, "abc")])
def test_a_sample_is_a_document_of_the_models_own(length, expected, text, capsys):
    """With a class of the user, which gets none of the options that it doesn't have."""
    changes = {"model": f"{__name__}:Alphabet", "options": {}, "tokenizer": "bytes", "steps": 1, "sample": length}
    script.main(options(text, **changes))
    assert f"\n    {expected}\n" in capsys.readouterr().out


def test_the_small_gpt2_is_the_default_and_every_size_can_be_changed(text, capsys):
    def parameters(**changes):
        script.main(options(text, **({"steps": 1, "sample": 0, "tokenizer": "bytes"} | changes)))
        out = capsys.readouterr().out
        assert "\n    " not in out  # no sample
        assert "\n\n" not in out
        return out.split(" parameters")[0]

    def size(dim, depth):
        return f"gpt2: {(257 + 32 + 2) * dim + depth * (12 * dim**2 + 13 * dim):,}"

    assert parameters(options={}) == size(256, 4)
    assert parameters(options=TINY | {"depth": "2"}) == size(32, 2)


def test_help_explains_every_option():
    help_text = subprocess.run(
        [sys.executable, SCRIPTS / "train_lm.py", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for option in ("--model", "--options", "--data", "--tokenizer", "--vocab", "--context", "--steps", "--batch-size"):
        assert option in help_text
    for option in ("--accumulate", "--compute", "--sample", "--optimizer", "--learning-rate", "--resume", "--mesh"):
        assert option in help_text
