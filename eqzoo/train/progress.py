"""How a training is getting on: the numbers so far, and a line that shows them."""

import functools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from eqzoo._optional import needed_for
from eqzoo.train.metrics import Mean

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_PER_SECOND = 4  # how often the line is drawn, and metrics are read

F = TypeVar("F", bound=Callable[..., Any])


class Progress:
    """Follows a training: adds up the metrics of its steps, stops it if too many in a row were skipped, and shows a
    line with all that on a terminal. Each step is waited for when the next one has been given to the device, which so
    never waits for Python; metrics are read as often as the line is drawn, those of several short steps together.

    ```python
    progress = Progress(2, unit="images", per_step=64)
    step = jax.jit(progress.count(lambda x: {"loss": jnp.mean(x), "accuracy": Mean.of(x > 1.5)}))
    with progress:
        for number, x in enumerate(jnp.array([[1.0, 2.0], [3.0, 4.0]]), start=1):
            progress.update(number, step(x))
    progress.means()  # {'loss': 2.5, 'accuracy': 0.75}
    progress.compiled  # 1
    ```
    """

    compiled: int

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        unit: str = "images",
        per_step: int = 1,
        max_skips: int = 10,
        paths: Sequence[str] = (),
    ):
        self.compiled = 0
        self._total, self._start = total, start
        self._unit, self._per_step = unit, per_step
        self._max_skips, self._paths = max_skips, paths
        self._unread: list[tuple[int, dict[str, Any]]] = []
        self._read_at = -math.inf
        self._sums: dict[str, tuple[float, float]] = {}
        self._first = jax.process_index() == 0
        self._bar: Bar | None = None

    def __enter__(self) -> "Progress":
        if self._first and sys.stdout.isatty():
            self._bar = _bar()
            self._bar.add_task("", total=self._total, completed=self._start, numbers="compiling")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._read()
        finally:
            if self._bar is not None:
                self._bar.stop()
                self._bar = None

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A step has been started, with metrics to come: `Mean`s or scalars by name, and under `skipped` what
        `TrainState` counts."""
        if self._unread:
            jax.block_until_ready(self._unread[-1])
            if time.monotonic() - self._read_at >= 1 / _PER_SECOND:
                self._read()
        self._unread.append((step, dict(metrics)))

    def means(self) -> dict[str, float]:
        """The metrics of all steps since this was last asked, each weighted by its examples. Steps that were skipped
        don't count."""
        self._read()
        means = {name: _ratio(total, weight) for name, (total, weight) in self._sums.items()}
        self._sums = {}
        return means

    def say(self, text: str) -> None:
        """Print a line, above the one that shows the progress."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif self._first:
            print(text, flush=True)

    def count(self, function: F) -> F:
        """Around a function to be jitted: counts how often that is compiled, which should be once."""

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.compiled += 1
            return function(*args, **kwargs)

        return counted  # type: ignore[return-value]

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        self._read_at = time.monotonic()
        steps = jax.device_get(unread)
        for step, numbers in steps:
            self._add(step, numbers)
        if steps and self._bar is not None:
            step, numbers = steps[-1]
            self._bar.update(self._bar.task_ids[0], completed=step, numbers=self._line(numbers.get("skipped")))

    def _add(self, step: int, numbers: dict[str, Any]) -> None:
        skipped = numbers.get("skipped")
        for name, number in numbers.items():
            if name == "skipped":
                continue
            total, weight = (number.total, number.weight) if isinstance(number, Mean) else (number, 1.0)
            if skipped is not None and skipped.in_a_row > 0:
                total, weight = 0.0, 0.0
            total_before, weight_before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (total_before + float(total), weight_before + float(weight))
        if skipped is not None:
            skipped.check(self._paths, self._max_skips, step)

    def _line(self, skipped: Any) -> str:
        assert self._bar is not None
        names = sorted(self._sums, key=lambda name: name != "loss")  # first what every training has
        parts = [f"{name} {number_text(name, _ratio(*self._sums[name]))}" for name in names]
        if skipped is not None and skipped.total > 0:
            parts.append(f"skipped {skipped.total} steps")
        if self.compiled > 1:
            parts.append(f"compiled {self.compiled} x")
        if speed := self._bar.tasks[0].speed:
            parts.append(f"{speed * self._per_step:,.0f} {self._unit}/s")
        return "  ".join(parts)


def number_text(name: str, value: float) -> str:
    """A metric for the eye; accuracies are percentages."""
    if "accuracy" in name:
        return f"{value:.1%}"
    return f"{value:.3f}" if value == 0 or 1e-2 <= abs(value) < 1e4 else f"{value:.2e}"


def _ratio(total: float, weight: float) -> float:
    return total / weight if weight else math.nan


def _bar() -> "Bar":
    with needed_for("the progress bar"):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

    # On a narrow terminal, the numbers are cut off at the end and the rest stays whole.
    rest_of_the_line = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    return Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[numbers]}", markup=False, table_column=rest_of_the_line),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(),
        expand=True,
        refresh_per_second=_PER_SECOND,
    )
