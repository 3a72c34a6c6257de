"""What a tree holds, as a table for people to read."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from eqzoo.tree._level import LAYERS, children, join, label
from eqzoo.tree.measure import dtype_name, has_values
from eqzoo.tree.select import is_number

if TYPE_CHECKING:
    from rich.table import Table

TITLES = ("path", "shape", "dtype", "count", "share", "mean ± std")
ON_THE_LEFT = ("path", "dtype")
CHUNK = 2**16  # numbers whose copies in float64 stay in the cache


@dataclass(frozen=True)
class Row:
    """A leaf, or all the leaves that are alike and in the same place of repeated parts.

    `shape` is that of one leaf; `count`, `nbytes`, `mean` and `std` are about the numbers of all of them. The last two
    are None where there are only shapes.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    nbytes: int
    mean: float | None
    std: float | None


@dataclass(frozen=True)
class Summary:
    """The table that `summary` makes: to print, to show in a notebook or a rich console, or to read by its `rows`."""

    title: str
    rows: tuple[Row, ...]

    @property
    def count(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    @property
    def totals(self) -> str:
        """How many numbers and bytes, in one line; also by dtype if there are several."""
        counts, sizes = Counter(), Counter()
        for row in self.rows:
            counts[row.dtype] += row.count
            sizes[row.dtype] += row.nbytes
        line = f"{self.count:,} numbers, {_memory(self.nbytes)}"
        if len(counts) < 2:
            return " ".join((line, *counts))
        return f"{line}: {', '.join(f'{counts[dtype]:,} {dtype} ({_memory(sizes[dtype])})' for dtype in counts)}"

    def markdown(self) -> str:
        """The table as GitHub shows it."""
        rules = ["---" if title in ON_THE_LEFT else "---:" for title in TITLES]
        rows = [("`" + path.replace("|", "\\|") + "`", *cells) for path, *cells in self._cells()]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in (TITLES, rules, *rows))
        return f"**{self.title}**: {self.totals}\n\n{table}\n"

    def _repr_markdown_(self) -> str:
        return self.markdown()

    def __repr__(self) -> str:
        table = [TITLES, *self._cells()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["   ".join(map(_aligned, TITLES, cells, widths)).rstrip() for cells in table]
        rule = "─" * max(map(len, lines))
        return "\n".join([self.title, rule, lines[0], rule, *lines[1:], rule, self.totals])

    def __rich__(self) -> "Table":
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self.title, caption=self.totals, box=box.SIMPLE_HEAD, pad_edge=False)
        for title in TITLES:
            justify = "left" if title in ON_THE_LEFT else "right"
            table.add_column(title, justify=justify, overflow="fold", no_wrap=title not in ("path", "mean ± std"))
        for cells in self._cells():
            table.add_row(*map(Text, cells))  # as they are: a bracket in a path is no markup
        return table

    def _cells(self) -> Iterator[tuple[str, ...]]:
        total = self.count
        for row in self.rows:
            shape = " x ".join(map(str, row.shape)) or "scalar"
            share = f"{row.count / total:.1%}" if total else ""
            yield row.path, shape, row.dtype, f"{row.count:,}", share, _mean_and_std(row)


def summary(tree: PyTree) -> Summary:
    """A table of the numbers in `tree`: path, shape, dtype, count and mean ± standard deviation of every leaf.

    All layers of a stack are one row, and so are like parts of a list or dict: `layers.{0..11}.weight`. Shapes without
    values do. `print` it, or let `rich.print` do that in colour; a notebook shows it as it is.

    ```python
    print(summary([{"W": jnp.ones((3, 3)), "b": jnp.zeros(3)} for _ in range(4)]))
    ```
    """
    title = type(tree).__name__ if children(tree) else "leaf"
    return Summary(title, tuple(_row(path, leaves) for path, leaves in _places(tree)))


_Places = list[tuple[str, list[Any]]]  # paths, each with the leaves that are alike there


def _places(node: PyTree) -> _Places:
    if is_number(node):
        return [("", [node])]
    parts = [(*_split(key), places) for key, child in children(node) if (places := _places(child))]
    if type(node) is dict:  # JAX puts layer10 before layer2
        parts.sort(key=lambda part: part[:2])
    found = []
    for (stem, _), run in itertools.groupby(parts, lambda part: (part[0], _alike(part[2]))):
        _, numbers, repeats = zip(*run, strict=True)
        part = stem + _span(numbers)
        for places in zip(*repeats, strict=True):
            found.append((join(part, places[0][0]), [leaf for _, leaves in places for leaf in leaves]))
    return found


def _split(key: Any) -> tuple[str, int]:
    """A name without the number at its end, and that number; -1 if it has none, or is an attribute's."""
    text = label(key)
    found = None if key is LAYERS or isinstance(key, jax.tree_util.GetAttrKey) else re.search(r"(0|[1-9]\d*)$", text)
    return (text[: found.start()], int(found[0])) if found else (text, -1)


def _alike(places: _Places) -> list[tuple[str, int, tuple[int, ...], str]]:
    return [(path, len(leaves), np.shape(leaves[0]), dtype_name(leaves[0])) for path, leaves in places]


def _span(numbers: tuple[int, ...]) -> str:
    if len(numbers) == 1:
        return "" if numbers == (-1,) else str(numbers[0])
    runs = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        first, *rest = (number for _, number in run)
        runs.append(f"{first}..{rest[-1]}" if rest else str(first))
    return "{" + ",".join(runs if len(runs) <= 4 else [*runs[:2], "…", runs[-1]]) + "}"


def _row(path: str, leaves: list[Any]) -> Row:
    shape, itemsize = np.shape(leaves[0]), jnp.result_type(leaves[0]).itemsize
    count = len(leaves) * math.prod(shape)
    mean, std = (
        _moments(leaves)
        if count and all(has_values(leaf) and not np.iscomplexobj(leaf) for leaf in leaves)
        else (None, None)
    )
    return Row(path, shape, dtype_name(leaves[0]), count, count * itemsize, mean, std)


def _moments(leaves: list[Any]) -> tuple[float, float]:
    """Mean and standard deviation of all numbers, on the host and in float64."""
    parts = []
    with np.errstate(invalid="ignore"):  # infinities
        for leaf in leaves:
            flat = np.asarray(leaf).reshape(-1)
            for start in range(0, flat.size, CHUNK):
                x = flat[start : start + CHUNK].astype(np.float64)
                mean = x.sum() / x.size
                x -= mean
                x *= x
                parts.append((x.size, mean, x.sum()))
        sizes, means, squares = np.array(parts).T
        mean = np.sum(sizes * means) / np.sum(sizes)
        variance = np.sum(squares + sizes * (means - mean) ** 2) / np.sum(sizes)
    return float(mean), math.sqrt(variance)


def _mean_and_std(row: Row) -> str:
    if row.mean is None:
        return ""
    return f"{row.mean:.6g}" if row.count == 1 else f"{row.mean:.3g} ± {row.std:.3g}"


def _memory(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"


def _aligned(title: str, cell: str, width: int) -> str:
    return cell.ljust(width) if title in ON_THE_LEFT else cell.rjust(width)
