"""Batches of examples, in an order that a seed and a step decide, and their way to the devices."""

import functools
import itertools
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int, Int32

from eqzoo._optional import needed_for
from eqzoo.sharding import shard_batch

Batch = dict[str, np.ndarray]


@runtime_checkable
class Source(Protocol):
    """Examples that are read by their numbers.

    A source may also have `name(index) -> str`, for messages, and a set `unreadable`, in which is kept which examples
    were said to be so: they are then said once, and not once in each evaluation.
    """

    def __len__(self) -> int: ...

    def read(self, indices: Int[np.ndarray, " examples"]) -> Batch:
        """These examples (there may be none), each array with them along its first axis.

        An example that can't be read is zeros, in `weight` too; a source that has no `weight` can read them all.
        """
        ...


def batches(
    source: Source,
    batch_size: int,
    *,
    seed: int | None,
    start: int = 0,
    steps: int | None = None,
    workers: int = 0,
    bad_limit: int = 100,
) -> Iterator[Batch]:
    """The batches of steps `start` to `steps` (without end if that is None), which are the same for any `start`.

    Each epoch has an order of its own and goes through every example once; a batch may end one and begin the next. With
    `seed=None` the order is the source's own, for one epoch, and the last batch is filled up with zeros. To what the
    source reads come `index`, which example it is (-1: none), and `weight` (0: to be left out of everything).

    `batch_size` is that of all processes together; each reads its own part, in a thread or in `workers` processes.
    Examples that can't be read are named on stderr; it is an error if they are more than `bad_limit`.
    """
    with needed_for("making batches"):
        import grain
    processes = jax.process_count()
    if len(source) == 0:
        raise ValueError("batches: the source has no examples; give one that has some")
    if batch_size < 1 or batch_size % processes:
        raise ValueError(
            f"batches: batch_size={batch_size}, expected a positive multiple of the number of processes, {processes}"
        )
    end = sys.maxsize if steps is None else steps
    if seed is None:
        end = min(end, -(-len(source) // batch_size))
    read = _Reader(source, batch_size, seed, jax.process_index(), processes)
    # One thread: more of them wait for each other in what is Python, and a source can have its own for what is not.
    one_thread = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    reading = grain.MapDataset.range(start, max(start, end)).map(read).to_iter_dataset(one_thread)
    if workers:
        from absl import flags

        if not flags.FLAGS.is_parsed():  # outside absl's own programs nobody does it, and grain looks at some
            flags.FLAGS.mark_as_parsed()
        options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
        reading = reading.mp_prefetch(options)
    return _reporting(reading, source, bad_limit)


def on_device(batches: Iterator[Batch], mesh: Mesh, *, ahead: int = 2) -> Iterator[dict[str, jax.Array]]:
    """The batches split over the devices of `mesh`, `ahead` of them or one more on the way while one is in use.

    It ends `batches` when it ends, or when nobody wants more of it.
    """
    under_way = deque()
    try:
        while two := list(itertools.islice(batches, 2)):  # with half the calls, which cost more than the copies
            under_way.extend(shard_batch(two, mesh))
            while len(under_way) > ahead:
                yield under_way.popleft()
        while under_way:
            yield under_way.popleft()
    finally:
        if hasattr(batches, "close"):
            batches.close()  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True)
class _Reader:
    """Reads a process's part of the batch of a step."""

    source: Source
    batch_size: int
    seed: int | None
    process: int
    processes: int

    def __call__(self, step: int) -> Batch:
        size = self.batch_size // self.processes
        index = self._index(step * self.batch_size + self.process * size + np.arange(size))
        present = index[index >= 0]
        batch = {"weight": np.ones(len(present), np.float32)} | self.source.read(present)
        missing = size - len(present)
        if missing:
            batch = {name: np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) for name, array in batch.items()}
        return batch | {"index": index}

    def _index(self, position: Int[np.ndarray, " examples"]) -> Int32[np.ndarray, " examples"]:
        """Which examples are at these positions of all epochs one after the other."""
        length = len(self.source)
        if self.seed is None:
            return np.where(position < length, position, -1).astype(np.int32)
        epochs, places = np.divmod(position, length)
        index = np.empty(len(position), np.int32)
        for epoch in np.unique(epochs).tolist():
            index[epochs == epoch] = _shuffled(length, self.seed, epoch)[places[epochs == epoch]]
        return index


@functools.lru_cache(maxsize=2)
def _shuffled(length: int, seed: int, epoch: int) -> Int[np.ndarray, " length"]:
    return np.random.default_rng((seed, epoch)).permutation(length)


def _reporting(reading: Any, source: Source, bad_limit: int) -> Iterator[Batch]:
    iterator = iter(reading)
    unreadable = getattr(source, "unreadable", set())
    try:
        for batch in iterator:
            weightless = ~batch["weight"].reshape(len(batch["weight"]), -1).any(axis=1)
            for index in batch["index"][weightless & (batch["index"] >= 0)].tolist():
                if index in unreadable:
                    continue
                unreadable.add(index)
                name = source.name(index) if hasattr(source, "name") else f"example {index}"  # pyright: ignore
                if len(unreadable) > bad_limit:
                    raise ValueError(
                        f"{len(unreadable)} examples can't be read, the last of them {name}; "
                        f"repair or remove them, or allow more with bad_limit (now {bad_limit})"
                    )
                print(f"can't be read and is left out ({len(unreadable)} so far): {name}", file=sys.stderr)
            yield batch
    finally:
        iterator.close()
