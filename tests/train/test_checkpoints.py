"""Checkpoints: what is restored is what was saved, whatever happened to folder, disk and process meanwhile."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import eqzoo
from eqzoo import sharding
from eqzoo.train import TrainState, checkpoints
from eqzoo.train.checkpoints import Checkpoints
from eqzoo.tree import diff

RESNET = {"depths": (1,), "widths": (8,), "stem_width": 4, "num_classes": 4}


class Small(eqx.Module):
    weight: jax.Array
    step: jax.Array


class Parts(eqx.Module):
    parts: dict
    step: jax.Array


def small(step: int, size: int = 2) -> Small:
    """A training after so many steps: its weights are their number."""
    return Small(jnp.full(size, step, jnp.float32), jnp.array(step, jnp.int32))


def save(folder: Path, *steps: int, **options) -> None:
    with Checkpoints(folder, **options) as written:
        written.restore(small(0))
        for step in steps:
            written.save(small(step))


def restored_step(folder: Path, **options) -> int:
    with Checkpoints(folder, **options) as written:
        restored = written.restore(small(0))
    assert diff(restored, small(int(restored.step))) == []
    return int(restored.step)


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def make(seed: int, **changes) -> TrainState:
    model, state = eqzoo.create("resnet18", key=jax.random.key(seed), **RESNET | changes)
    optimizer = optax.adamw(1e-2)
    return TrainState.create(model, state, optimizer, key=jax.random.key(seed + 1), ema=True)


def test_a_training_goes_on_bit_for_bit_as_if_it_had_not_been_interrupted(tmp_path):
    optimizer = optax.adamw(1e-2)
    images = np.random.default_rng(0).normal(size=(6, 4, 8, 8, 3)).astype(np.float32)

    def loss_fn(model, state, images, key):
        forward = lambda image, key: eqzoo.apply(model, state, image, key=key)
        keys = jax.random.split(key, len(images))
        logits, state = jax.vmap(forward, axis_name="batch", out_axes=(0, None))(images, keys)
        return jnp.mean(logits**2), state

    @eqx.filter_jit(donate="all")
    def train_step(it, images):
        model, key = it.model, jax.random.fold_in(it.key, it.step)
        grads, state = eqx.filter_grad(loss_fn, has_aux=True)(model, it.state, images, key)
        updates, opt_state = optimizer.update(grads, it.opt_state, eqx.filter(model, eqx.is_inexact_array))
        return it.next(eqx.apply_updates(model, updates), state, opt_state, grads, ema_decay=0.9)

    def train(it, written=None, stop=6):
        for step in range(int(it.step), stop):
            it = train_step(it, jnp.array(images[step]))
            if written is not None:
                written.save(it)
        return it

    whole = train(make(0))
    with Checkpoints(tmp_path) as written:
        train(written.restore(make(0)), written, stop=3)
    with Checkpoints(tmp_path) as written:
        restored = written.restore(make(5))
        assert restored.step == 3
        resumed = train(restored, written)
    assert diff(resumed, whole) == []
    assert len([difference for difference in diff(make(0), whole) if difference.kind == "value"]) > 20


def test_every_kind_of_array_comes_back_and_the_rest_is_as_given(tmp_path):
    def tree(number, name, activation):
        numbers = np.random.default_rng(number)
        dtypes = (jnp.bfloat16, jnp.float16, jnp.int8, jnp.uint32, jnp.bool_, jnp.complex64)
        parts = {
            "dtypes": [jnp.array(numbers.normal(size=(3, 2)) > 0).astype(dtype) for dtype in dtypes],
            "a.b[*]/c d": jnp.array(numbers.normal(size=5)),
            "scalar": jnp.array(numbers.normal()),
            "empty": jnp.zeros((0, 4)),
            "keys": jax.random.split(jax.random.key(number), 2),
            "other key": jax.random.key(number, impl="rbg"),
            "name": name,
            "activation": activation,
            "flag": True,
            "none": None,
        }
        return Parts(parts, jnp.array(3))

    saved = tree(0, "saved", jax.nn.relu)
    given = tree(1, "given", jax.nn.gelu)
    with Checkpoints(tmp_path) as written:
        written.save(saved)
        restored = written.restore(given)
    assert {difference.path for difference in diff(saved, restored)} == {"parts.name", "parts.activation"}
    assert restored.parts["name"] == "given"
    assert restored.parts["activation"] is jax.nn.gelu
    assert diff(saved, given)


def test_without_a_checkpoint_nothing_changes(tmp_path):
    given = small(7)
    with Checkpoints(tmp_path / "new" / "run") as written:
        assert written.latest is None
        assert written.restore(given) is given
        with pytest.raises(ValueError, match="no checkpoint of step 3, but of none"):
            written.restore(given, 3)


def test_the_next_steps_do_not_reach_a_save_under_way(tmp_path):
    numbers = np.random.default_rng(0).integers(0, 2**30, size=(6, 1024, 1024), dtype=np.int32)
    train_step = jax.jit(lambda it: jax.tree.map(lambda x: x + 1, it), donate_argnums=0)
    it = Parts({"numbers": [jnp.array(part) for part in numbers]}, jnp.array(0))
    were_under_way = []
    with Checkpoints(tmp_path, keep=4) as written:
        for step in (1, 2, 3, 4):
            it = train_step(it)
            written.save(it)
            after = train_step(it)
            jax.block_until_ready(after)
            were_under_way.append(not (tmp_path / str(step)).exists())
            it = eqx.tree_at(lambda it: it.step, after, jnp.array(step))
        assert any(were_under_way)
        for step in (1, 2, 3, 4):
            restored = written.restore(it, step)
            np.testing.assert_array_equal(restored.parts["numbers"], numbers + 2 * step - 1)


def test_arrays_go_where_those_given_are(tmp_path):
    weight = jnp.arange(64.0).reshape(8, 8)

    def place(mesh, *axes):
        key = jax.device_put(jax.random.key(3), NamedSharding(mesh, PartitionSpec()))
        parts = {"key": key, "weight": jax.device_put(weight, NamedSharding(mesh, PartitionSpec(*axes)))}
        return Parts(parts, jnp.array(1))

    saved = place(sharding.make_mesh(fsdp=8), "fsdp")
    with Checkpoints(tmp_path) as written:
        written.save(saved)
        for given in (
            place(sharding.make_mesh(data=2, fsdp=2, model=2), "fsdp", "model"),
            place(sharding.make_mesh(data=8)),
            jax.tree.map(lambda x: jax.device_put(x, jax.devices()[5]), saved),
        ):
            restored = written.restore(given)
            assert diff(restored, saved) == []
            for name, array in given.parts.items():
                assert restored.parts[name].sharding.is_equivalent_to(array.sharding, array.ndim)
                assert restored.parts[name].committed
    assert isinstance(restored.parts["weight"].sharding, SingleDeviceSharding)


def test_what_may_move_may_move_again(tmp_path):
    save(tmp_path, 1)
    with Checkpoints(tmp_path) as written:
        restored = written.restore(small(0))
    assert not restored.weight.committed
    on_another = jax.device_put(jnp.ones(2), jax.devices()[3])
    assert (restored.weight + on_another).devices() == {jax.devices()[3]}


@pytest.mark.parametrize(
    ("mode", "kept"), [pytest.param("max", [2, 5, 6], id="max"), pytest.param("min", [3, 5, 6], id="min")]
)
def test_the_newest_and_the_best_are_kept(tmp_path, mode, kept):
    scores = {1: float("nan"), 2: 0.9, 3: 0.1, 4: 0.5, 5: 0.4}
    with Checkpoints(tmp_path, keep=2, best="accuracy", mode=mode) as written:
        for step, score in scores.items():
            written.save(small(step), {"loss": 1.0, "accuracy": jnp.array(score)})
        written.save(small(6))
    assert steps_in(tmp_path) == kept
    with Checkpoints(tmp_path, keep=1, best="accuracy", mode=mode) as written:  # the scores are known after a restart
        assert written.best == kept[0]
        written.restore(small(0))
        written.save(small(7))
    assert steps_in(tmp_path) == [kept[0], 7]
    assert written.restore(small(0), written.best).step == kept[0]  # in order after the end, too


def test_without_a_score_to_go_by_the_newest_are_kept(tmp_path):
    save(tmp_path, 1, 2, 3, 4, keep=2)
    assert steps_in(tmp_path) == [3, 4]
    with Checkpoints(tmp_path, best="accuracy") as written:
        assert written.best is None


def test_of_equally_good_ones_the_newest_is_the_best(tmp_path):
    with Checkpoints(tmp_path, keep=1, best="accuracy") as written:
        for step, score in ((1, 0.9), (2, 0.9), (3, 0.1)):
            written.save(small(step), {"accuracy": score})
    assert steps_in(tmp_path) == [2, 3]


def test_a_step_may_be_saved_twice(tmp_path):
    with Checkpoints(tmp_path, best="accuracy") as written:
        written.save(small(1), {"accuracy": 0.5})
        written.save(small(1))
    with Checkpoints(tmp_path) as written:
        written.save(written.restore(small(0)))
        assert written.latest == 1
    assert restored_step(tmp_path) == 1


def test_normal_use_says_nothing(tmp_path, capfd, caplog):
    save(tmp_path, 1, 2, 3, 4, 5)
    assert restored_step(tmp_path) == 5
    assert capfd.readouterr() == ("", "")
    assert [record.message for record in caplog.records if record.levelname != "INFO"] == []


def test_another_model_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    with Checkpoints(tmp_path) as written:
        written.save(make(0))
    with Checkpoints(tmp_path) as written:
        monkeypatch.setattr(written._manager, "restore", None)
        with pytest.raises(ValueError, match=r"0 \(a\) is of another model or optimizer than the train") as caught:
            written.restore(make(0, num_classes=3, depths=(2,)))
    lines = str(caught.value).splitlines()
    assert "  model.head.weight: shape (4, 8) | (3, 8)" in lines
    assert any("only in b" in line for line in lines)
    assert lines[-1].startswith("  and ")
    assert len(lines) == 12


def test_another_dtype_or_kind_of_key_is_refused(tmp_path):
    trees = [
        Parts({"weight": jnp.ones(2, dtype), "key": jax.random.key(0, impl=impl)}, jnp.array(1))
        for dtype, impl in ((jnp.float32, "rbg"), (jnp.bfloat16, "unsafe_rbg"))
    ]
    with Checkpoints(tmp_path) as written:
        written.save(trees[0])
        with pytest.raises(ValueError, match="another model") as caught:
            written.restore(trees[1])
    assert str(caught.value).splitlines()[1:] == [
        "  parts.key: dtype key<rbg> | key<urbg>",
        "  parts.weight: dtype float32 | bfloat16",
    ]


def test_two_arrays_of_one_path_are_refused(tmp_path):
    with (
        Checkpoints(tmp_path) as written,
        pytest.raises(ValueError, match=r"two arrays of the tree have the path parts\.a\.b"),
    ):
        written.save(Parts({"a.b": jnp.ones(1), "a": {"b": jnp.zeros(1)}}, jnp.array(1)))


def test_a_run_goes_on_with_the_same_facts_only(tmp_path):
    facts = {"data": Path("digits"), "seed": 0, "size": (2, 3), "batch_size": 64}
    save(tmp_path, 1, facts=facts)
    assert restored_step(tmp_path, facts=facts) == 1
    changed = {key: fact for key, fact in facts.items() if key != "data"} | {"seed": 1, "workers": 2}
    with pytest.raises(
        ValueError,
        match="1 was made with data=digits, seed=0, workers=None, and this run has data=None, seed=1, workers=2",
    ):
        restored_step(tmp_path, facts=changed)


@pytest.mark.parametrize("harm", ["removed", "empty", "cut", "changed"])
def test_if_a_file_of_the_newest_checkpoint_is_damaged_the_one_before_is_taken(tmp_path, harm, capfd):
    save(tmp_path / "sound", 1, 2)
    newest = tmp_path / "sound" / "2"
    files = [newest / "about.json", *(path for path in (newest / "arrays").rglob("*") if path.is_file())]
    names = [file.relative_to(newest) for file in files]
    assert len(names) > 5
    with Checkpoints(tmp_path / "run") as written:
        for name in names:
            shutil.rmtree(tmp_path / "run")
            shutil.copytree(tmp_path / "sound", tmp_path / "run")
            file = tmp_path / "run" / "2" / name
            content = file.read_bytes()
            half = len(content) // 2
            if harm == "removed":
                file.unlink()
            else:
                changed = content[:half] + bytes([content[half] ^ 255]) + content[half + 1 :]
                file.write_bytes({"empty": b"", "cut": content[:half], "changed": changed}[harm])
            assert written.restore(small(0)).step == 1, name
            said = capfd.readouterr().err
            assert f"{tmp_path / 'run' / '2'} is damaged: {name}" in said
            assert "going on from step 1" in said
    save(tmp_path / "run", 2)
    assert capfd.readouterr().err.count("damaged") == 1
    assert restored_step(tmp_path / "run") == 2
    assert capfd.readouterr().err == ""


def test_if_all_are_damaged_it_is_an_error(tmp_path, capfd):
    save(tmp_path, 1, 2)
    for step in (1, 2):
        shutil.rmtree(tmp_path / str(step) / "arrays" / "d")
    with Checkpoints(tmp_path) as written:
        with pytest.raises(OSError, match="no checkpoint is in order"):
            written.restore(small(0))
        with pytest.raises(OSError, match="the checkpoint of step 1 is damaged"):
            written.restore(small(0), 1)
        with pytest.raises(ValueError, match="restore one of them before you save"):
            written.save(small(3))
    assert capfd.readouterr().err.count("is missing") == 3
    assert steps_in(tmp_path) == [1, 2]


def test_a_run_may_go_back(tmp_path):
    save(tmp_path, 1, 2, 3)
    with Checkpoints(tmp_path) as written:
        restored = written.restore(small(0), 1)
        assert restored.step == 1
        assert steps_in(tmp_path) == [1, 2, 3]
        with pytest.raises(ValueError, match="step 0 can't be saved after step 1"):
            written.save(small(0))
        written.save(eqx.tree_at(lambda it: it.weight, small(2), jnp.array([5.0, 6.0])))
    assert steps_in(tmp_path) == [1, 2]
    with Checkpoints(tmp_path) as written:
        np.testing.assert_array_equal(written.restore(small(0)).weight, [5, 6])


def test_another_run_s_folder_is_not_written_to(tmp_path):
    save(tmp_path, 5)
    with Checkpoints(tmp_path) as written, pytest.raises(ValueError, match="a run up to step 5; restore one of them"):
        written.save(small(1))
    assert steps_in(tmp_path) == [5]


def test_what_cannot_work_is_said_at_once(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="keep=0: at least the newest"):
        Checkpoints(tmp_path, keep=0)
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match="can't write checkpoints to .*file.* give a folder that is writable"):
            Checkpoints(folder)
    no_accuracy = pytest.raises(ValueError, match=r"no 'accuracy', by which the best is kept, but \['loss'\]")
    with Checkpoints(tmp_path / "run", best="accuracy") as written, no_accuracy:
        written.save(small(1), {"loss": 1.0})
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ModuleNotFoundError, match=r"saving needs orbax.checkpoint: pip install 'eqzoo\[train\]'"):
        Checkpoints(tmp_path / "run")


@pytest.mark.parametrize(("existing", "needed"), [(0, 5), (2, 3)])
def test_room_for_all_of_them_is_asked_for_before_the_first(tmp_path, monkeypatch, existing, needed):
    size = 250_000
    with Checkpoints(tmp_path) as written:
        for step in range(1, existing + 1):
            written.save(small(step, size))
    usage = shutil.disk_usage(tmp_path)
    with Checkpoints(tmp_path) as written:
        written.restore(small(0, size))
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=needed * (4 * size + 4) - 1))
        with pytest.raises(
            OSError, match=rf"needs {needed}\.0 MB more for checkpoints of 1\.0 MB each .* has {needed}\.0 MB"
        ):
            written.save(small(9, size))
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=needed * (4 * size + 4)))
        written.save(small(9, size))
    assert steps_in(tmp_path)[-1] == 9


def test_a_failed_write_is_said_at_the_next_save_and_the_others_stay(tmp_path, monkeypatch):
    def fails(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    with Checkpoints(tmp_path, keep=1) as written:
        written.save(small(1))
        written.save(small(2))
        written.restore(small(0))  # waits
        monkeypatch.setattr(checkpoints, "_checksum", fails)
        written.save(small(3))
        with pytest.raises(OSError, match="step 3 couldn't be written .*No space left.* newest complete one is step 2"):
            written.save(small(4))
        monkeypatch.undo()
        assert written.latest == 2
        assert written.restore(small(0)).step == 2
        written.save(small(3))
        written.save(small(4))
    assert restored_step(tmp_path) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["4"]


def test_a_folder_that_is_gone_is_an_error(tmp_path):
    folder = tmp_path / "run"
    with Checkpoints(folder) as written:
        written.save(small(1))
        written.restore(small(0))  # waits
        shutil.rmtree(folder)
        with pytest.raises(OSError, match="step 2 couldn't be written .*folder is gone.* there is no complete one"):
            written.save(small(2))
        assert not folder.exists()


def test_where_no_folder_can_be_made_nothing_waits_for_one(tmp_path, monkeypatch):
    def fails(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    save(tmp_path, 1)
    with Checkpoints(tmp_path) as written:
        written.restore(small(0))
        threads = set(threading.enumerate())
        monkeypatch.setattr(os, "mkdir", fails)
        with pytest.raises(OSError, match="step 2 couldn't be written .*No space left"):
            written.save(small(2))
        monkeypatch.undo()
        started = [thread for thread in threading.enumerate() if thread not in threads and not thread.daemon]
        for thread in started:
            thread.join(timeout=10)
        assert not any(thread.is_alive() for thread in started)
        written.save(small(2))
    assert restored_step(tmp_path) == 2


LIMITED = """
import resource
import sys

import jax
import jax.numpy as jnp

from eqzoo.train.checkpoints import Checkpoints

from typing import NamedTuple


class Parts(NamedTuple):
    numbers: jax.Array
    step: jax.Array


numbers = jax.random.bits(jax.random.key(0), (100_000,))
written = Checkpoints(sys.argv[1])
written.save(Parts(numbers, jnp.array(1)))
written.restore(Parts(numbers, jnp.array(0)))
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
written.save(Parts(numbers, jnp.array(2)))
try:
    written.close()
except OSError as error:
    print(error)
"""


def run(program: str, *arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_file_too_large_is_said_when_closing_and_the_one_before_is_in_order(tmp_path):
    with run(LIMITED, tmp_path) as process:
        said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "step 2 couldn't be written" in said
    assert "the newest complete one is step 1" in said
    assert "File too large" in said
    with Checkpoints(tmp_path) as written:
        restored = written.restore({"step": jnp.array(0), "numbers": jnp.zeros(100_000, jnp.uint32)})
    assert restored["step"] == 1
    np.testing.assert_array_equal(restored["numbers"], jax.random.bits(jax.random.key(0), (100_000,)))


ENDLESS = """
import itertools
import sys

import jax
import jax.numpy as jnp

from eqzoo.train.checkpoints import Checkpoints

from typing import NamedTuple


class Parts(NamedTuple):
    numbers: jax.Array
    step: jax.Array


written = Checkpoints(sys.argv[1])
it = written.restore(Parts(jnp.zeros(100_000), jnp.array(0)))
for step in itertools.count(int(it.step) + 1):
    written.save(Parts(jnp.full(100_000, float(step)), jnp.array(step)))
    print(step, flush=True)
"""


def test_a_kill_loses_at_most_what_was_being_written(tmp_path):
    begun = 0
    for wait in (0.0, 0.07):
        with run(ENDLESS, tmp_path) as process:
            for line in process.stdout:
                begun = int(line)
                if begun % 5 == 0:
                    break
            time.sleep(wait)
            process.kill()
            begun, errors = max([begun, *map(int, process.stdout)]), process.stderr.read()
        assert begun, errors
        with Checkpoints(tmp_path) as written:
            assert written.latest >= begun - 1
            restored = written.restore({"step": jnp.array(0), "numbers": jnp.zeros(100_000)})
        assert restored["step"] == written.latest
        np.testing.assert_array_equal(restored["numbers"], np.full(100_000, written.latest))


def test_what_a_kill_left_behind_goes_with_the_next_save(tmp_path):
    left_over = tmp_path / "2.orbax-checkpoint-tmp" / "arrays"
    left_over.mkdir(parents=True)
    (left_over / "part").write_text("…")
    save(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1"]


def test_what_is_known_about_a_checkpoint_can_be_read(tmp_path):
    with Checkpoints(tmp_path, facts={"seed": 3}) as written:
        written.save(small(4), {"accuracy": 0.5})
    about = json.loads((tmp_path / "4" / "about.json").read_text())
    assert about["step"] == 4
    assert about["versions"] == {"eqzoo": "0.1.0", "jax": jax.__version__}
    assert (about["facts"], about["scores"]) == ({"seed": 3}, {"accuracy": 0.5})
    assert about["arrays"] == {
        "weight": {"shape": [2], "dtype": "float32"},
        "step": {"shape": [], "dtype": "int32"},
    }
    assert os.path.commonpath(about["files"]) == "arrays"
