"""Pictures of a training and of what came of it. Each function writes one file, whose ending says the format."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int, Shaped, UInt8

from eqzoo._optional import needed_for
from eqzoo.checkpoint._atomic import written_atomically
from eqzoo.train.metrics import Calibration
from eqzoo.train.progress import number_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GREY, PALE = "#1f2937", "#6b7280", "#e5e7eb"
BLUE, LIGHT_BLUE, ORANGE = "#2563eb", "#bfd4fb", "#d9622b"
RUNS = (BLUE, ORANGE, "#0f9d75", "#9333ea", "#c026a3", "#b08900", "#0891b2", "#475569")  # one run after the other
DPI = 120
MOST_RUNS_WITH_TRAIN = 4  # beyond, the test is enough to look at
MOST_MISTAKES, MISTAKES_A_ROW = 24, 6
MOST_NAMED_CLASSES, MOST_COUNTED_CLASSES = 40, 20

Record = Mapping[str, Any]


@runtime_checkable
class Images(Protocol):
    """An array of images, or anything else that has them by their number."""

    def __getitem__(self, number: int, /) -> UInt8[np.ndarray, "height width 3"]: ...


def curves(runs: Mapping[str, Sequence[Record]] | Sequence[Record], path: str | os.PathLike) -> None:
    """The metrics of a run over its steps, or of several runs by name; a run is its `records`, or `read_records` of its
    folder.

    ```python
    records = [{"step": step, "train": {"loss": 1 / step}, "test": {"loss": 2 / step}} for step in range(1, 10)]
    plots.curves(records, "curves.png")
    ```
    """
    several = isinstance(runs, Mapping)
    named = runs if isinstance(runs, Mapping) else {"": runs}
    lines = {
        (metric, group, run): points
        for run, records in named.items()
        for (metric, group), points in _points(records).items()
    }
    if len(named) > MOST_RUNS_WITH_TRAIN:
        tested = {metric for metric, group, _ in lines if group != "train"}
        lines = {key: points for key, points in lines.items() if key[1] != "train" or key[0] not in tested}
    colors = dict(zip(named, _run_colors(len(named)), strict=True))
    metrics = sorted(dict.fromkeys(metric for metric, _, _ in lines), key=lambda metric: metric != "loss")
    if not metrics:
        raise ValueError(f"there is nothing to draw in {os.fspath(path)}: none of the runs has logged a number yet")
    columns = min(len(metrics), 3)
    rows = -(-len(metrics) // columns)
    figure = _figure(4.6 * columns, 3.1 * rows + 0.3)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for metric, axis in zip(metrics, axes, strict=False):
        _plain(axis)
        _title(axis, metric)
        for (name, group, run), (steps, values) in lines.items():
            if name == metric:
                main = group != "train"
                color = colors[run] if several else (BLUE if main else ORANGE)
                axis.plot(
                    steps,
                    values,
                    color=color,
                    linewidth=1.8 if main else 1.2,
                    linestyle="-" if main else (0, (3, 1.5)),
                    marker="o" if len(steps) <= 20 else "",
                    markersize=3,
                    label=run if several else group,
                )
                if main and not several:
                    axis.set_title(f"{group} {number_text(metric, values[-1])}", loc="right", fontsize=9, color=GREY)
        axis.set_xlabel("step")
        _count_steps(axis)
        if "accuracy" in metric:
            axis.yaxis.set_major_formatter(_percent())
    for axis in axes[len(metrics) :]:
        axis.set_axis_off()
    _legend(figure, "dashed: train" if several and any(group == "train" for _, group, _ in lines) else "")
    _save(figure, path)


def mistakes(
    images: Images,
    labels: Int[np.ndarray, " images"],
    predicted: Int[np.ndarray, " images"],
    confidence: Float[np.ndarray, " images"],
    classes: Sequence[str],
    path: str | os.PathLike,
) -> None:
    """The images that a classifier got wrong and was most sure of: below each what it is, above what it was taken for.

    ```python
    import numpy as np

    images = np.zeros((2, 8, 8, 3), np.uint8)
    confidence = np.array([0.9, 0.8])
    plots.mistakes(images, np.array([0, 1]), np.array([1, 1]), confidence, ("cat", "dog"), "mistakes.png")
    ```
    """
    wrong = np.flatnonzero(labels != predicted)
    shown = wrong[np.argsort(-confidence[wrong], kind="stable")][:MOST_MISTAKES].tolist()
    rows = -(-len(shown) // MISTAKES_A_ROW)
    figure = _figure(1.55 * MISTAKES_A_ROW, 2.0 * rows + 0.6)
    if not shown:
        headline = f"No mistakes among {len(labels):,} images"
    elif len(shown) == len(wrong):
        headline = f"All {len(wrong):,} mistakes among {len(labels):,} images, the most confident first"
    else:
        headline = f"The {len(shown)} most confident of {len(wrong):,} mistakes among {len(labels):,} images"
    figure.suptitle(headline, fontsize=11, color=INK, x=0.01, ha="left")
    axes = list(figure.subplots(rows, MISTAKES_A_ROW, squeeze=False).flat) if shown else []
    for axis in axes:
        axis.set_axis_off()
    for index, axis in zip(shown, axes, strict=False):
        _picture(axis, images[index])
        taken_for = f"{_short(classes[int(predicted[index])], 15)} ({confidence[index]:.0%})"
        axis.set_title(taken_for, fontsize=8, color=ORANGE, pad=3, parse_math=False)
        is_class = _short(classes[int(labels[index])], 21)
        style = {"fontsize": 8, "color": INK, "ha": "center", "va": "top", "parse_math": False}
        axis.text(0.5, -0.04, is_class, transform=axis.transAxes, **style)
    if shown:
        note = "above each: what it was taken for, and how confidently; below: what it is"
        figure.supxlabel(note, fontsize=8, color=GREY, x=0.01, ha="left")
    _save(figure, path)


def confusion(matrix: Shaped[np.ndarray, "classes classes"], classes: Sequence[str], path: str | os.PathLike) -> None:
    """How often each true class (row) was taken for each class (column), as `metrics.confusion` counts it.

    ```python
    import numpy as np

    plots.confusion(np.array([[8, 2], [1, 9]]), ("cat", "dog"), "confusion.png")
    ```
    """
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    matrix = np.asarray(matrix)
    number = len(matrix)
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    size = float(np.clip(0.42 * number + 2.2, 4.5, 11))
    figure = _figure(size + 0.6, size)
    axis = figure.subplots()
    # The square root lets rare confusions be seen.
    blues = LinearSegmentedColormap.from_list("blues", ("#ffffff", LIGHT_BLUE, BLUE, "#172f6b"))
    drawn = axis.imshow(shares, cmap=blues, norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
    axis.set(xlabel="taken for", ylabel="true class")
    axis.xaxis.label.set_color(GREY)
    axis.yaxis.label.set_color(GREY)
    axis.tick_params(length=0, colors=INK, labelsize=9)
    axis.spines[:].set_visible(False)
    if number <= MOST_NAMED_CLASSES:
        names = [_short(name) for name in classes]
        fits = 0.08 * max(map(len, names)) < (size - 2) / number
        axis.set_xticks(range(number), names, rotation=0 if fits else 90, parse_math=False)
        axis.set_yticks(range(number), names, parse_math=False)
    if number <= MOST_COUNTED_CLASSES:
        for (row, column), count in np.ndenumerate(matrix):
            if count:
                color = "white" if shares[row, column] > 0.3 else INK
                axis.text(column, row, f"{count:.0f}", ha="center", va="center", color=color, fontsize=8)
    bar = figure.colorbar(drawn, ax=axis, shrink=0.5, aspect=25, ticks=(0, 0.01, 0.1, 0.25, 0.5, 1), format=_percent())
    bar.outline.set_visible(False)  # type: ignore[attr-defined]
    bar.set_label("of the true class", fontsize=9, color=GREY)
    bar.ax.tick_params(length=0, labelsize=8, colors=GREY)
    correct = np.trace(matrix) / max(matrix.sum(), 1)
    axis.set_title(f"{correct:.1%} of {matrix.sum():,.0f} correct", loc="left", fontsize=11, color=INK)
    _save(figure, path)


def reliability(calibration: Calibration, path: str | os.PathLike) -> None:
    """Whether a classifier is right as often as it is sure: accuracy by confidence, and how many are that sure.

    ```python
    logits = jnp.array([[2.0, 0.0], [0.0, 1.0], [0.5, 0.0]])
    plots.reliability(calibration(logits, jnp.array([0, 1, 1])), "reliability.png")
    ```
    """
    confidence, accuracy, share = (np.asarray(values) for values in calibration.bins)
    width = 1 / len(share)
    left = np.arange(len(share)) * width
    some = share > 0
    figure = _figure(4.6, 5.0)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.bar(left[some], accuracy[some], 0.9 * width, align="edge", color=LIGHT_BLUE, label="accuracy")
    right = left[some] + 0.9 * width
    above.hlines(confidence[some], left[some], right, color=ORANGE, linewidth=2.5, label="confidence")
    above.plot((0, 1), (0, 1), color=GREY, linewidth=1, linestyle="--")
    below.bar(left, share, 0.9 * width, align="edge", color=GREY)
    for axis in (above, below):
        _plain(axis)
        axis.yaxis.set_major_formatter(_percent())
        axis.xaxis.set_major_formatter(_percent())
    above.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    below.set(xlabel="confidence", ylabel="examples")
    _title(above, f"expected calibration error {float(calibration.error):.1%}")
    above.legend(loc="upper left", frameon=False, fontsize=8, labelcolor=INK)
    _save(figure, path)


def predictions(
    images: Sequence[UInt8[np.ndarray, "_ _ 3"]],
    top: Sequence[Sequence[tuple[str, float]]],
    path: str | os.PathLike,
) -> None:
    """Photographs, beside each its likeliest labels with their probabilities.

    ```python
    import numpy as np

    plots.predictions([np.zeros((8, 8, 3), np.uint8)], [[("cat", 0.9), ("dog", 0.1)]], "predictions.png")
    ```
    """
    figure = _figure(7.0, 2.5 * len(images))
    axes = figure.subplots(len(images), 2, squeeze=False, width_ratios=(2.5, 4.5))
    for image, labels, (left, right) in zip(images, top, axes, strict=True):
        _picture(left, image)
        rows = np.arange(len(labels))
        right.barh(rows, [probability for _, probability in labels], 0.78, color=LIGHT_BLUE)
        for row, (label, probability) in zip(rows, labels, strict=True):
            weight = "bold" if row == 0 else "normal"
            text = {"va": "center", "color": INK, "fontsize": 10, "fontweight": weight}
            right.text(0.015, row, _short(label, 40), parse_math=False, **text)
            right.text(1.0, row, f"{probability:.1%}", ha="right", **text)
        right.set(xlim=(0, 1), ylim=(max(len(labels), 5) - 0.5, -0.5))
        right.set_axis_off()
    _save(figure, path)


def _points(records: Sequence[Record]) -> dict[tuple[str, str], tuple[list[int], list[float]]]:
    """Steps and values by metric and group."""
    points = {}
    for record in records:
        for group, named in record.items():
            for metric, value in named.items() if isinstance(named, Mapping) else ():
                steps, values = points.setdefault((metric, group), ([], []))
                steps.append(record["step"])
                values.append(value)
    return points


def _run_colors(number: int) -> Sequence[Any]:
    from matplotlib import colormaps

    return RUNS[:number] if number <= len(RUNS) else list(colormaps["turbo"](np.linspace(0.05, 0.95, number)))


def _figure(width: float, height: float) -> "Figure":
    with needed_for("drawing"):
        from matplotlib.figure import Figure

    return Figure((width, height), layout="constrained", facecolor="white")


def _plain(axis: "Axes") -> None:
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(GREY)
    axis.grid(axis="y", color=PALE, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(length=0, pad=6, colors=GREY, labelsize=8)
    axis.xaxis.label.set(color=GREY, fontsize=9)
    axis.yaxis.label.set(color=GREY, fontsize=9)


def _title(axis: "Axes", text: str) -> None:
    axis.set_title(text, loc="left", fontsize=11, color=INK, parse_math=False)


def _picture(axis: "Axes", image: UInt8[np.ndarray, "height width 3"]) -> None:
    axis.imshow(image, interpolation="nearest" if max(image.shape) <= 64 else "antialiased")
    axis.set_axis_off()


def _legend(figure: "Figure", note: str) -> None:
    """One for all, below; a name that stands for several lines once, as its solid line."""
    handles = {}
    for axis in figure.axes:
        for line in axis.get_lines():
            if line.get_label() not in handles or line.get_linestyle() == "-":
                handles[line.get_label()] = line
    legend = figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(len(handles), 4),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        title=note or None,
        title_fontsize=8,
    )
    legend.get_title().set_color(GREY)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _percent() -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: f"{round(100 * value, 6):g}%")


def _count_steps(axis: "Axes") -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))


def _short(text: str, most: int = 17) -> str:
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def _save(figure: "Figure", path: str | os.PathLike) -> None:
    path = Path(path)
    kind, kinds = path.suffix.removeprefix(".").lower(), figure.canvas.get_supported_filetypes()
    if kind not in kinds:
        raise ValueError(f"a picture can't be written as {path.name}: let its name end in one of .{', .'.join(kinds)}")
    with written_atomically(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=DPI)
