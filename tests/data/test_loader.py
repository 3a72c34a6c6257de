"""Batches: their order is the seed's and nothing else's; bad examples, workers and leaving early do no harm."""

import os
import signal
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, islice
from multiprocessing import active_children

import jax
import numpy as np
import pytest

from eqzoo import sharding
from eqzoo.data import Source, batches, on_device


@dataclass(frozen=True)
class Squares:
    """Example i holds i squared. What `bad` names can't be read."""

    length: int
    bad: frozenset[int] = frozenset()

    def __len__(self):
        return self.length

    def read(self, indices):
        readable = np.asarray([index not in self.bad for index in indices.tolist()], bool)
        square = np.stack([indices**2, indices], axis=-1).astype(np.int32) * readable[:, None]
        return {"square": square, "weight": readable.astype(np.float32)}

    def name(self, index):
        return f"square-{index}"


@dataclass(frozen=True)
class Remembering(Squares):
    """Keeps which examples were said to be unreadable."""

    unreadable: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Plain:
    """Without weights or names; raises or kills its process at an example."""

    length: int
    fatal: int = -1
    kill: bool = False

    def __len__(self):
        return self.length

    def read(self, indices):
        if self.fatal in indices:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("the disk is on fire")
        return {"number": indices.astype(np.int32)}


def indices(*args, steps, **options) -> list[list[int]]:
    return [batch["index"].tolist() for batch in batches(*args, steps=steps, **options)]


def settle() -> None:
    """Wait until threads that were told to end have ended."""
    for thread in threading.enumerate():
        if thread.name.startswith("grain"):
            thread.join(timeout=10)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("grain")]


def test_a_batch_is_what_the_source_reads_and_which_examples_it_is():
    source = Squares(20)
    assert isinstance(source, Source)
    (batch,) = batches(source, 8, seed=3, steps=1)
    assert {name: (array.shape, array.dtype.name) for name, array in batch.items()} == {
        "square": ((8, 2), "int32"),
        "weight": ((8,), "float32"),
        "index": ((8,), "int32"),
    }
    np.testing.assert_array_equal(batch["square"][:, 0], batch["index"] ** 2)
    assert batch["weight"].tolist() == [1] * 8


def test_an_epoch_holds_each_example_once_wherever_batches_begin_and_end():
    order = list(chain(*indices(Plain(10), 4, seed=0, steps=10)))
    epochs = [order[start : start + 10] for start in range(0, 40, 10)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 4
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_another_seed_gives_another_order_in_every_epoch():
    """No epoch of one seed is one of another either."""
    epochs = [tuple(epoch) for seed in range(3) for epoch in indices(Plain(12), 12, seed=seed, steps=4)]
    assert len(set(epochs)) == 12


@pytest.mark.parametrize("seed", [0, None])
def test_batches_from_any_start_are_those_of_an_uninterrupted_run(seed):
    whole = indices(Plain(11), 4, seed=seed, steps=9)
    assert len(whole) == (9 if seed == 0 else 3)
    for start in range(10):
        assert indices(Plain(11), 4, seed=seed, start=start, steps=9) == whole[start:]


def test_training_goes_on_without_end_unless_steps_are_given():
    assert len(list(islice(batches(Plain(3), 2, seed=0), 50))) == 50


def test_a_batch_can_be_larger_than_the_source():
    (index,) = indices(Plain(3), 8, seed=0, steps=1)
    assert sorted(Counter(index).values()) == [2, 3, 3]


def test_without_a_seed_the_order_is_the_sources_and_the_last_batch_is_filled_up():
    first, last = batches(Squares(6), 4, seed=None)
    assert first["index"].tolist() == [0, 1, 2, 3]
    assert last["index"].tolist() == [4, 5, -1, -1]
    assert last["weight"].tolist() == [1, 1, 0, 0]
    assert last["square"].tolist() == [[16, 4], [25, 5], [0, 0], [0, 0]]
    assert last["weight"].dtype == np.float32


@pytest.mark.parametrize("seed", [5, None])
def test_processes_share_a_batch(monkeypatch, seed):
    """Each reads a part that follows the one before; the last process's part may be all padding."""
    whole = list(batches(Squares(9), 4, seed=seed, steps=5))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    parts = []
    for process in range(2):
        monkeypatch.setattr(jax, "process_index", lambda: process)
        parts.append(list(batches(Squares(9), 4, seed=seed, steps=5)))
    for together, *apart in zip(whole, *parts, strict=True):
        for name, array in together.items():
            np.testing.assert_array_equal(array, np.concatenate([part[name] for part in apart]))


def test_examples_that_cannot_be_read_weigh_nothing_and_are_named_once(capsys):
    source = Squares(10, bad=frozenset({2, 7}))
    for batch in batches(source, 5, seed=0, steps=6):
        bad = np.isin(batch["index"], [2, 7])
        assert (batch["weight"] == ~bad).all()
        assert not batch["square"][bad].any()
    said = capsys.readouterr().err.splitlines()
    assert sorted(line.split()[-1] for line in said) == ["square-2", "square-7"]
    assert ["(1 so far)" in said[0], "(2 so far)" in said[1]] == [True, True]


def test_a_source_that_keeps_what_was_named_hears_it_once_however_often_it_is_read(capsys):
    source = Remembering(10, bad=frozenset({2, 7}))
    for _ in range(3):
        list(batches(source, 5, seed=None))
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert source.unreadable == {2, 7}


def test_padding_is_not_taken_for_an_unreadable_example(capsys):
    list(batches(Squares(5), 4, seed=None, bad_limit=0))
    assert capsys.readouterr().err == ""


def test_too_many_unreadable_examples_are_an_error(capsys):
    source = Squares(10, bad=frozenset(range(4, 8)))
    assert len(list(batches(source, 2, seed=None, bad_limit=4))) == 5
    with pytest.raises(ValueError, match=r"4 examples can't be read, the last of them square-7; .* \(now 3\)"):
        list(batches(source, 2, seed=None, bad_limit=3))
    settle()


@pytest.mark.parametrize(
    ("length", "batch_size", "message"),
    [
        (0, 4, "no examples"),
        (5, 0, "batch_size=0, expected a positive multiple"),
        (5, 3, "batch_size=3.* processes, 2"),
    ],
)
def test_what_cannot_work_is_said_before_the_first_batch(monkeypatch, length, batch_size, message):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=message):
        batches(Plain(length), batch_size, seed=0)


def test_missing_grain_is_said_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(ModuleNotFoundError, match=r"making batches needs grain: pip install 'eqzoo\[train\]'"):
        batches(Plain(3), 1, seed=0)


def test_an_error_of_the_source_ends_the_loop_with_it():
    with pytest.raises(RuntimeError, match="the disk is on fire"):
        list(batches(Plain(10, fatal=5), 2, seed=None))
    settle()


def test_leaving_early_leaves_no_thread_behind():
    for step, _ in enumerate(on_device(batches(Plain(10), 8, seed=0), sharding.make_mesh(data=8), ahead=1)):
        if step == 3:
            break
    settle()


def test_on_device_hands_over_every_batch_in_order_split_over_the_devices():
    mesh = sharding.make_mesh(data=4, fsdp=2)
    expected = list(batches(Squares(20), 8, seed=None))
    for ahead in (0, 2, 5):
        arrived = list(on_device(batches(Squares(20), 8, seed=None), mesh, ahead=ahead))
        assert len(arrived) == 3
        for batch, numbers in zip(arrived, expected, strict=True):
            assert batch.keys() == numbers.keys()
            for name, array in batch.items():
                assert len(array.addressable_shards) == 8
                assert array.addressable_shards[0].data.shape[0] == 1
                np.testing.assert_array_equal(array, numbers[name])


def test_on_device_has_batches_under_way_and_ends_them():
    taken, closed = [], []

    def counting():
        try:
            for number in range(10):
                taken.append(number)
                yield {"x": np.full(8, number)}
        finally:
            closed.append(True)

    counted = counting()
    stream = on_device(counted, sharding.make_mesh(data=8), ahead=2)
    assert [int(next(stream)["x"][0]) for _ in range(2)] == [0, 1]
    assert taken == [0, 1, 2, 3]
    assert int(next(stream)["x"][0]) == 2
    assert taken == [0, 1, 2, 3, 4, 5]
    stream.close()
    assert closed == [True]


def test_workers_read_the_same_batches_and_are_gone_afterwards(capfd):
    """Unreadable examples are reported from there too, and the arrays outlive the workers' memory on the device."""
    source = Squares(10, bad=frozenset({2}))
    expected = list(batches(source, 8, seed=1, start=1, steps=6))
    capfd.readouterr()
    reading = batches(source, 8, seed=1, start=1, steps=6, workers=2)
    arrived = list(on_device(reading, sharding.make_mesh(data=8)))
    for batch, numbers in zip(arrived, expected, strict=True):
        for name, array in batch.items():
            np.testing.assert_array_equal(array, numbers[name])
    assert capfd.readouterr().err.strip() == "can't be read and is left out (1 so far): square-2"

    for _ in batches(source, 8, seed=1, workers=1):
        assert len(active_children()) == 1
        break
    assert active_children() == []


@pytest.mark.parametrize(("kill", "message"), [(False, "the disk is on fire"), (True, "terminated unexpectedly.* -9")])
def test_a_worker_that_fails_or_dies_ends_the_loop(kill, message):
    with pytest.raises(RuntimeError, match=message):
        list(batches(Plain(10, fatal=5, kill=kill), 2, seed=None, workers=1))
    assert active_children() == []
