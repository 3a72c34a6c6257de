"""What a run writes down as it goes, to continue from after it was stopped or killed."""

import importlib.metadata
import json
import math
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, PyTree, Shaped

from eqzoo._optional import needed_for
from eqzoo.tree import diff, leaves_with_paths, map_with_path
from eqzoo.tree.diff import MOST_LINES

Tree = TypeVar("Tree")

ABOUT = "about.json"  # in a checkpoint's folder, beside `ARRAYS`
ARRAYS = "arrays"
TEMPORARY = ".orbax-checkpoint-tmp"  # Orbax ends the names of incomplete checkpoints so
NONE, ALL_DAMAGED = -1, -2
LONGEST_REASON = 200


class Checkpoints:
    """The checkpoints of a run: in `folder`, one a step, the newest `keep` and the best by the score named `best`.

    A save is written in the background while the training goes on, and appears under its name when it is complete. All
    arrays of the tree are in it, by their paths; anything else, such as a function, is the same in the tree that is
    given to `restore`. `facts` are what a run must keep as it goes on, such as its data, seed and batch size.

    Create it, save and restore in all processes if there are several.

    ```python
    import tempfile

    model, state = eqzoo.create("mlp", hidden=(8,), image_size=4, key=jax.random.key(0))
    train_state = TrainState.create(model, state, optax.adam(1e-3), key=jax.random.key(1))
    with tempfile.TemporaryDirectory() as folder, Checkpoints(folder, best="accuracy") as checkpoints:
        train_state = checkpoints.restore(train_state)  # the same, for there is none yet
        checkpoints.save(train_state, {"accuracy": 0.1})
    ```
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        keep: int = 3,
        best: str | None = None,
        mode: Literal["max", "min"] = "max",
        facts: Mapping[str, Any] | None = None,
    ):
        with needed_for("saving"):
            import orbax.checkpoint as ocp
        if keep < 1:
            raise ValueError(f"keep={keep}: at least the newest checkpoint must be kept; give keep=1 or more")
        self.folder = Path(folder).absolute()
        _check_writable(self.folder)
        self._best = best
        self._facts = _as_json(facts or {})
        found = self._steps()
        self._retention = _Retention(keep, mode, {step: self._score(step) for step in found} if best else {})
        self._saving: dict[str, Any] = {}  # what `about.json` will have of the step that is being saved
        self._last: int | None = None  # the step that was saved or restored last
        # Later than the step that was restored: they give way to what comes now. None: not known before `restore`.
        self._abandoned: list[int] | None = None if found else []
        self._is_room_known = False
        self._has_failed = False
        self._args = ocp.args
        self._start = lambda: ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=self._retention,
                create=False,
                async_options=ocp.options.AsyncOptions(
                    post_finalization_callback=self._describe,
                    create_directories_asynchronously=False,  # a thread would wait 5 minutes for one that fails
                ),
            ),
        )
        self._manager = self._start()

    @property
    def latest(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return max(self._steps(), default=None)

    @property
    def best(self) -> int | None:
        """The step of the best checkpoint, once all are complete; of equally good ones, the newest."""
        self._wait()
        return self._retention.best(self._steps())

    def save(self, train_state: PyTree, scores: Mapping[str, Any] | None = None) -> None:
        """Start to write what `train_state` is now; nothing if its step is saved already.

        If the save before has failed, this is where it is said.
        """
        self._wait()
        step = int(train_state.step)
        scores = {name: float(score) for name, score in (scores or {}).items()}
        if step == self._last:
            return
        if self._abandoned is None:
            raise ValueError(
                f"{self.folder} has checkpoints of a run up to step {self.latest}; "
                f"restore one of them before you save, or give another folder"
            )
        if self._last is not None and step < self._last:
            raise ValueError(f"step {step} can't be saved after step {self._last}; restore an earlier step first")
        if scores and self._best not in (None, *scores):
            raise ValueError(f"scores have no {self._best!r}, by which the best is kept, but {sorted(scores)}")
        arrays = {path: _data(array) for path, array in _arrays(train_state).items() if array.size}
        self._check_room(arrays)
        self._saving = {
            "step": step,
            "versions": {name: importlib.metadata.version(name) for name in ("eqzoo", "jax")},
            "facts": self._facts,
            "scores": scores,
            "arrays": {path: _form(array) for path, array in _arrays(train_state).items()},
        }
        self._last = step
        if self._best in scores:
            self._retention.scores[step] = scores[self._best]
        try:
            if not self.folder.is_dir():  # Orbax would make another one, perhaps on another disk
                raise FileNotFoundError("the folder is gone")
            self._remove_incomplete()
            for abandoned in self._abandoned:
                self._manager.delete(abandoned)
            self._abandoned = []
            self._manager.save(step, args=self._args.Composite(**{ARRAYS: self._args.StandardSave(arrays)}), force=True)
        except Exception as error:
            raise self._failure(error) from error

    def restore(self, train_state: Tree, step: int | None = None) -> Tree:
        """The newest checkpoint that is in order, or that of a `step`, as a tree like `train_state`, which says where
        each array goes; `train_state` itself if there is none.

        The checkpoints after it are removed by the next save.
        """
        self._wait()
        steps = self._steps()
        if step is not None and step not in steps:
            raise ValueError(f"{self.folder} has no checkpoint of step {step}, but of {steps or 'none'}")
        chosen = self._newest_in_order(steps if step is None else [step])
        if chosen == NONE:
            self._abandoned = []
            return train_state
        if chosen == ALL_DAMAGED:
            which = "no checkpoint is in order" if step is None else f"the checkpoint of step {step} is damaged"
            raise OSError(f"{self.folder}: {which}; give another folder, or put them back from a copy")
        about = self._about(chosen)
        given = _arrays(train_state)
        self._check_facts(chosen, about["facts"])
        self._check_arrays(chosen, about["arrays"], given)
        targets = {path: _target(_data(array)) for path, array in given.items() if array.size}
        args = self._args.Composite(**{ARRAYS: self._args.StandardRestore(targets)})
        stored = self._manager.restore(chosen, args=args)[ARRAYS]
        self._last = chosen
        self._abandoned = [later for later in steps if later > chosen]
        return map_with_path(lambda path, leaf: _like(leaf, stored[path]) if path in stored else leaf, train_state)

    def close(self) -> None:
        """Wait until all is written."""
        try:
            self._wait()
        finally:
            self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _steps(self) -> list[int]:
        try:
            return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdecimal())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _wait(self) -> None:
        if self._has_failed:
            self._manager = self._start()
            self._has_failed = False
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> OSError:
        step, self._last = self._last, None
        with suppress(Exception):  # it would raise the same again, at each later save too
            self._manager.close()
        self._has_failed = True
        newest = "there is no complete one" if self.latest is None else f"the newest complete one is step {self.latest}"
        return OSError(
            f"the checkpoint of step {step} couldn't be written to {self.folder} ({_reason(error)}); {newest}; "
            f"make room or mend the folder, and go on from there"
        )

    def _remove_incomplete(self) -> None:
        """What a kill or a failed save left behind."""
        if jax.process_index() == 0:
            for path in self.folder.glob(f"*{TEMPORARY}*"):
                shutil.rmtree(path)

    def _describe(self) -> None:
        """Called in the background when all arrays are written, before the checkpoint gets its name."""
        if jax.process_index() != 0:
            return
        (folder,) = self.folder.glob(f"{self._saving['step']}{TEMPORARY}*")
        files = sorted(path for path in (folder / ARRAYS).rglob("*") if path.is_file())
        checksums = {str(path.relative_to(folder)): _checksum(path) for path in files}
        with open(folder / ABOUT, "w") as file:
            json.dump(self._saving | {"files": checksums}, file)
            file.flush()
            os.fsync(file.fileno())

    def _about(self, step: int) -> dict[str, Any]:
        return json.loads((self.folder / str(step) / ABOUT).read_text())

    def _score(self, step: int) -> float:
        try:
            return self._about(step)["scores"].get(self._best, math.nan)
        except (OSError, ValueError):
            return math.nan

    def _newest_in_order(self, steps: Sequence[int]) -> int:
        """What the first process finds; it holds for all."""
        chosen = NONE
        if jax.process_index() == 0:
            for step in reversed(steps):
                if (damage := self._damage(step)) is None:
                    chosen = step
                    break
                print(f"checkpoint {self.folder / str(step)} is damaged: {damage}", file=sys.stderr)
                chosen = ALL_DAMAGED
            if chosen >= 0 and chosen != steps[-1]:
                print(f"going on from step {chosen} instead", file=sys.stderr)
        return int(multihost_utils.broadcast_one_to_all(np.int32(chosen)))

    def _damage(self, step: int) -> str | None:
        folder = self.folder / str(step)
        try:
            for name, checksum in self._about(step)["files"].items():
                if _checksum(folder / name) != checksum:
                    return f"{name} is not as it was written"
        except FileNotFoundError as error:
            return f"{Path(error.filename).relative_to(folder)} is missing"
        except (OSError, ValueError, KeyError) as error:
            return f"{ABOUT} can't be read ({error})"
        return None

    def _check_facts(self, step: int, stored: dict[str, Any]) -> None:
        names = [name for name in {**stored, **self._facts} if stored.get(name) != self._facts.get(name)]
        if names:
            then, now = (", ".join(f"{name}={facts.get(name)}" for name in names) for facts in (stored, self._facts))
            raise ValueError(
                f"checkpoint {self.folder / str(step)} was made with {then}, and this run has {now}; "
                f"give what it was made with, or start a new run in another folder"
            )

    def _check_arrays(self, step: int, stored: dict[str, Any], given: dict[str, Array]) -> None:
        forms = [{path: _shape(form) for path, form in stored.items()}]
        forms.append({path: _shape(_form(array)) for path, array in given.items()})
        lines = [str(difference) for difference in diff(*forms)]
        if lines:
            more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
            raise ValueError(
                f"checkpoint {self.folder / str(step)} (a) is of another model or optimizer than the train state (b); "
                f"give the options it was made with, or another folder\n  " + "\n  ".join([*lines[:MOST_LINES], *more])
            )

    def _check_room(self, arrays: dict[str, Array]) -> None:
        """At the first save: for those to keep, the best, and the one that is written before an old one goes."""
        if self._is_room_known:
            return
        size = sum(array.nbytes for array in arrays.values())
        needed = size * (self._retention.keep + 2 - len(self._steps()))
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise OSError(
                f"{self.folder} needs {_megabytes(needed)} more for checkpoints of {_megabytes(size)} each "
                f"(keep={self._retention.keep}, the best, and one being written), and has {_megabytes(free)}; "
                f"make room, keep fewer, or give another folder"
            )
        self._is_room_known = True


@dataclass
class _Retention:
    """Orbax asks it which checkpoints to keep."""

    keep: int
    mode: Literal["max", "min"]
    scores: dict[int, float]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*steps[-self.keep :], self.best(steps)}
        return [step in kept for step in steps]

    def best(self, steps: Sequence[int]) -> int | None:
        sign = 1 if self.mode == "max" else -1
        scored = [(sign * self.scores[step], step) for step in steps if not math.isnan(self.scores.get(step, math.nan))]
        return max(scored)[1] if scored else None


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(
            f"can't write checkpoints to {folder} ({error.strerror}); give a folder that is writable"
        ) from error


def _as_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(dict(facts), default=str))


def _arrays(tree: PyTree) -> dict[str, Shaped[Array, "..."]]:
    leaves = [(path, leaf) for path, leaf in leaves_with_paths(tree) if eqx.is_array(leaf)]
    arrays = dict(leaves)
    if len(arrays) < len(leaves):
        paths = [path for path, _ in leaves]
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(f"two arrays of the tree have the path {twice}; name its parts differently")
    return arrays


def _is_key(array: Shaped[Array, "..."]) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _data(array: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    return jax.random.key_data(array) if _is_key(array) else array


def _target(array: Shaped[Array, "..."]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _like(given: Shaped[Array, "..."], stored: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    if not given.committed:  # free to move to where the others are
        stored = jnp.array(np.asarray(stored))
    return jax.random.wrap_key_data(stored, impl=jax.random.key_impl(given)) if _is_key(given) else stored


def _form(array: Shaped[Array, "..."]) -> dict[str, Any]:
    kind = {"key": str(jax.random.key_impl(array))} if _is_key(array) else {"dtype": str(array.dtype)}
    return {"shape": list(array.shape), **kind}


def _shape(form: dict[str, Any]) -> jax.ShapeDtypeStruct:
    if "key" in form:
        dtype = jax.eval_shape(lambda: jax.random.key(0, impl=form["key"])).dtype
    else:
        dtype = jnp.dtype(form["dtype"])
    return jax.ShapeDtypeStruct(tuple(form["shape"]), dtype)


def _checksum(file: Path) -> int:
    checksum = 0
    with open(file, "rb") as opened:
        while part := opened.read(2**24):
            checksum = zlib.crc32(part, checksum)
    return checksum


def _reason(error: Exception) -> str:
    if code := re.search(r"os_error_code='(\d+)'", str(error)):  # in what TensorStore says, somewhere
        return os.strerror(int(code[1]))
    text = " ".join(str(error).split())
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}…"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
