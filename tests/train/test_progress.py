"""Progress: adds up what the steps measured without holding up the device, stops a diverged run, shows it on a
terminal."""

import math
import os
import pty
import re
import subprocess
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqzoo.train.progress as progress_module
from eqzoo.train.metrics import Mean
from eqzoo.train.progress import Progress, number_text
from eqzoo.train.state import Skipped


def skipped(in_a_row, total=None, leaf=1):
    return Skipped(*map(jnp.int32, (in_a_row if total is None else total, in_a_row, leaf)))


def test_means_are_weighted_by_examples():
    progress = Progress(3)
    progress.update(1, {"loss": Mean.of(jnp.array([1.0, 2.0, 3.0])), "norm": jnp.array(5.0)})
    progress.update(2, {"loss": Mean.of(jnp.array([8.0, 9.0]), jnp.array([1.0, 0.0])), "norm": jnp.array(7.0)})
    assert progress.means() == {"loss": 14 / 4, "norm": 6.0}


def test_means_start_anew():
    progress = Progress(3)
    progress.update(1, {"loss": jnp.array(1.0)})
    assert progress.means() == {"loss": 1.0}
    progress.update(2, {"loss": jnp.array(2.0)})
    progress.update(3, {"loss": jnp.array(4.0)})
    assert progress.means() == {"loss": 3.0}
    assert progress.means() == {}


def test_long_sums_stay_exact():
    """In float32, a sum stops growing at 2**24."""
    progress = Progress(3)
    for step, value in enumerate((2.0**24, 1.0, 1.0), start=1):
        progress.update(step, {"loss": Mean(jnp.array(value), jnp.array(1.0))})
    assert progress.means() == {"loss": (2**24 + 2) / 3}


def test_a_step_that_was_skipped_does_not_count():
    progress = Progress(3)
    for step, (loss, in_a_row) in enumerate([(1.0, 0), (math.nan, 1), (3.0, 0)], start=1):
        progress.update(step, {"loss": Mean.of(jnp.array([loss])), "skipped": skipped(in_a_row, total=5)})
    assert progress.means() == {"loss": 2.0}


def test_if_all_were_skipped_there_is_no_number():
    progress = Progress(1)
    progress.update(1, {"loss": Mean.of(jnp.array([1.0])), "skipped": skipped(1)})
    assert math.isnan(progress.means()["loss"])


def test_too_many_skips_in_a_row_end_the_run(monkeypatch):
    monkeypatch.setattr(progress_module, "_PER_SECOND", math.inf)
    progress = Progress(10, max_skips=2, paths=["first", "second"])
    for step in (1, 2):
        progress.update(step, {"loss": jnp.array(0.0), "skipped": skipped(step)})
    progress.update(3, {"loss": jnp.array(0.0), "skipped": skipped(3)})
    with pytest.raises(FloatingPointError, match="not finite in 3 steps in a row, the last of them step 3.* in second"):
        progress.update(4, {"loss": jnp.array(0.0), "skipped": skipped(4)})


def test_steps_that_are_read_together_are_looked_at_one_by_one():
    progress = Progress(10, max_skips=2, paths=["first", "second"])
    for step, in_a_row in enumerate([0, 1, 2, 3, 0], start=1):
        progress.update(step, {"loss": jnp.array(0.0), "skipped": skipped(in_a_row)})
    with pytest.raises(FloatingPointError, match="the last of them step 4"):
        progress.means()


def test_the_last_step_is_looked_at_too():
    progress = Progress(1, max_skips=0, paths=["first", "second"])
    with pytest.raises(FloatingPointError), progress:
        progress.update(1, {"skipped": skipped(1)})


def test_an_error_in_the_loop_is_the_one_that_is_seen():
    progress = Progress(1, max_skips=0, paths=["first", "second"])
    progress.update(1, {"skipped": skipped(1)})
    with pytest.raises(KeyError), progress:
        raise KeyError


def test_a_step_is_waited_for_once_the_next_is_under_way(monkeypatch):
    """And read with others, four times a second."""
    waited, read, now = [], [], 100.0
    monkeypatch.setattr(jax, "block_until_ready", lambda step: waited.append(step[0]))
    monkeypatch.setattr(jax, "device_get", lambda steps: read.append([step for step, _ in steps]) or steps)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = Progress(10)
    for step in range(1, 8):
        progress.update(step, {"loss": float(step)})
        now += 0.1
    assert waited == [1, 2, 3, 4, 5, 6]
    assert read == [[1], [2, 3, 4]]
    assert progress.means() == {"loss": 4.0}
    assert read == [[1], [2, 3, 4], [5, 6, 7]]


@eqx.filter_jit(donate="all")
def donating_step(weights, skips, failing):
    grads = jnp.where(failing, jnp.nan, weights)
    skips = skips.next(grads)
    return weights + 1, skips, {"loss": Mean.of(weights), "skipped": skips}


def test_what_the_next_step_takes_over_can_still_be_read():
    """The counts go into the next step, which donates them, before they are read here."""
    weights, skips = jnp.zeros(3), Skipped.none()
    progress = Progress(4)
    for step in range(1, 5):
        weights, skips, metrics = donating_step(weights, skips, jnp.array(step == 2))
        progress.update(step, metrics)
    assert progress.means() == {"loss": (0 + 2 + 3) / 3}


def test_compilations_are_counted():
    progress = Progress(3)
    step = jax.jit(progress.count(lambda x: x + 1))
    assert progress.compiled == 0
    step(jnp.zeros(3))
    step(jnp.ones(3))
    assert progress.compiled == 1
    step(jnp.zeros(4))
    assert progress.compiled == 2


def test_a_counted_function_is_what_it_was():
    def function(x, *, scale=2):
        """Scales."""
        return x * scale

    counted = Progress(1).count(function)
    assert (counted.__name__, counted.__doc__, counted(3, scale=5)) == ("function", "Scales.", 15)


def test_in_a_pipe_it_is_silent(capsys):
    with Progress(2) as progress:
        progress.update(1, {"loss": jnp.array(1.0)})
        progress.say("[bold]saved[/bold]")
        progress.update(2, {"loss": jnp.array(1.0)})
    assert capsys.readouterr() == ("[bold]saved[/bold]\n", "")


def test_only_the_first_process_speaks(capsys, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with Progress(2) as progress:
        progress.update(1, {"loss": jnp.array(1.0)})
        progress.say("saved")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("loss", 0.12345, "0.123"),
        ("loss", 0.0, "0.000"),
        ("loss", 1.5e-4, "1.50e-04"),
        ("loss", 12345678.0, "1.23e+07"),
        ("loss", math.nan, "nan"),
        ("accuracy", 0.98765, "98.8%"),
        ("top5_accuracy", 1.0, "100.0%"),
    ],
)
def test_numbers_are_written_for_the_eye(name, value, text):
    assert number_text(name, value) == text


def on_a_terminal(code, columns):
    """What a program writes to a terminal of that width."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"COLUMNS": str(columns), "TERM": "xterm-256color"},
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # Linux's way to say that the other side is closed
            break
        if not chunk:
            break
        written += chunk
    os.close(ours)
    assert process.wait() == 0, written.decode()
    return written.decode()


LIVE = """
import time
import jax, jax.numpy as jnp
from eqzoo.train.metrics import Mean
from eqzoo.train.progress import Progress
from eqzoo.train.state import Skipped

with Progress(60, start=20, unit="images", per_step=64) as progress:
    step_fn = jax.jit(progress.count(lambda x: Mean.of(x)))
    for step in range(21, 61):
        x = jnp.full(step % 2 + 1, 0.25)
        skips = Skipped(jnp.int32(3), jnp.int32(0), jnp.int32(0))
        progress.update(step, {"loss": step_fn(x), "accuracy": step_fn(x), "skipped": skips})
        time.sleep(0.01)
        if step == 40:
            progress.say("[bold]saved[/bold] [1/2]")
"""


@pytest.mark.parametrize("columns", [80, 120])
def test_on_a_terminal_there_is_a_line(columns):
    text = on_a_terminal(LIVE, columns)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    lines = [line for line in re.split(r"[\r\n]+", plain) if line.strip()]
    assert "[bold]saved[/bold] [1/2]" in [line.strip() for line in lines]
    assert "20/60" in lines[0]
    assert "compiling" in lines[0]
    last = lines[-1]
    assert "60/60" in last
    assert all(len(line) <= columns for line in lines)
    if columns == 80:
        assert "loss 0.250  accuracy 25.0%  skipped 3 steps" in last
        return
    assert "loss 0.250  accuracy 25.0%  skipped 3 steps  compiled 2 x  " in last
    rate = float(re.search(r"([\d,]+) images/s", last)[1].replace(",", ""))
    assert 64 * 5 < rate < 64 * 100  # at most the hundred steps a second that the sleep allows


def test_on_a_terminal_without_rich_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    message = "^the progress bar needs rich.console: pip install 'eqzoo\\[train\\]'$"
    with pytest.raises(ModuleNotFoundError, match=message), Progress(1):
        pass
