"""Pictures show the numbers they are given, and are readable: no text on another, none cut off."""

import inspect
import itertools
import math
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from eqzoo.train import metrics, plots

LONG = ("German short-haired pointer", "black-footed ferret, Mustela nigripes", "$cash$ and $more$ of it", "x")
EXAMPLES = [plots.curves, plots.mistakes, plots.confusion, plots.reliability, plots.predictions]


@pytest.fixture
def drawn(monkeypatch):
    """Collects the figures instead of writing them."""
    figures = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.append(figure))
    return figures


def records(scale=1.0, steps=30, names=("loss", "accuracy")):
    numbers = lambda step: dict.fromkeys(names, scale / step)
    return [
        {"step": step, "seconds": 1.0, "train": numbers(step), "test": numbers(2 * step)} for step in range(1, steps)
    ]


def lines(axis):
    return {line.get_label(): line for line in axis.get_lines()}


def check_readable(figure):
    in_sight = []
    draw = Text.draw

    def observed(text, renderer):
        if text.get_visible() and text.get_text().strip():
            assert "$" not in text.get_text() or not text.get_parse_math()  # a label is no formula
            in_sight.append((text.get_text(), text.get_window_extent(renderer)))
        draw(text, renderer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", observed)
        FigureCanvasAgg(figure).draw()
    width, height = figure.canvas.get_width_height()
    assert in_sight
    for text, box in in_sight:
        assert box.x0 >= -1, text
        assert box.x1 <= width + 1, text
        assert box.y0 >= -1, text
        assert box.y1 <= height + 1, text
    for (text, box), (other_text, other) in itertools.combinations(in_sight, 2):
        apart = box.x1 <= other.x0 or other.x1 <= box.x0 or box.y1 <= other.y0 or other.y1 <= box.y0
        assert apart, (text, other_text, box, other)


def test_curves_of_one_run_show_its_numbers(drawn):
    plots.curves([*records(), {"step": 29, "seconds": 2.0, "finished": True}], "curves.png")
    (figure,) = drawn
    assert [axis.get_title("left") for axis in figure.axes] == ["loss", "accuracy"]
    for axis in figure.axes:
        curves = lines(axis)
        assert list(curves) == ["train", "test"]
        np.testing.assert_array_equal(curves["train"].get_xdata(), range(1, 30))
        np.testing.assert_allclose(curves["train"].get_ydata(), 1 / np.arange(1, 30))
        np.testing.assert_allclose(curves["test"].get_ydata(), 0.5 / np.arange(1, 30))
        assert curves["train"].get_color() != curves["test"].get_color()
    assert [axis.get_title("right") for axis in figure.axes] == ["test 0.017", "test 1.7%"]
    check_readable(figure)


def test_curves_of_several_runs_have_a_colour_each(drawn):
    plots.curves({"a": records(), "b-$1$": records(2.0)}, "curves.png")
    (figure,) = drawn
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b-$1$"]
    a_train, a_test, b_train, b_test = figure.axes[0].get_lines()
    assert a_train.get_color() == a_test.get_color() != b_train.get_color() == b_test.get_color()
    assert (a_train.get_linestyle(), a_test.get_linestyle()) == ("--", "-")
    assert [line.get_linestyle() for line in figure.legends[0].get_lines()] == ["-", "-"]
    np.testing.assert_allclose(b_test.get_ydata(), 1 / np.arange(1, 30))
    check_readable(figure)


@pytest.mark.parametrize("number", [5, 8, 12])
def test_curves_of_many_runs_stay_distinct(drawn, number):
    plots.curves({f"rather-long-name-{index}": records(index + 1) for index in range(number)}, "curves.png")
    (figure,) = drawn
    curves = figure.axes[0].get_lines()
    assert [line.get_linestyle() for line in curves] == ["-"] * number
    assert len({tuple(np.atleast_1d(line.get_color())) for line in curves}) == number
    check_readable(figure)


def test_curves_of_metrics_that_only_training_has_are_kept(drawn):
    only_train = [{"step": 1, "train": {"norm": 2.0}}, {"step": 2, "train": {"norm": 3.0}}]
    plots.curves({str(index): only_train for index in range(6)}, "curves.png")
    assert len(drawn[0].axes[0].get_lines()) == 6


def test_curves_leave_no_empty_axes(drawn):
    plots.curves(records(names=("loss", "a", "b", "c")), "curves.png")
    (figure,) = drawn
    assert [axis.axison for axis in figure.axes] == [True] * 4 + [False] * 2
    check_readable(figure)


def test_curves_of_few_steps_count_whole_steps(drawn):
    plots.curves(records(steps=4), "curves.png")
    (figure,) = drawn
    FigureCanvasAgg(figure).draw()
    ticks = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert ticks
    assert all(re.fullmatch(r"\d+", tick) for tick in ticks)
    assert figure.axes[0].get_lines()[0].get_marker() == "o"


def test_curves_have_gaps_where_there_is_no_number(drawn):
    given = records()
    given[10]["test"]["loss"] = math.nan
    plots.curves(given, "curves.png")
    assert np.flatnonzero(np.isnan(lines(drawn[0].axes[0])["test"].get_ydata())).tolist() == [10]
    check_readable(drawn[0])


def test_curves_without_a_number_say_so():
    with pytest.raises(ValueError, match="nothing to draw in curves.png: none of the runs has logged a number yet"):
        plots.curves({"a": [], "b": [{"step": 1, "seconds": 0.0}]}, "curves.png")


def classified(number, wrong):
    """So many images, of which those at `wrong` are taken for the next class; image i is of brightness i."""
    images = np.broadcast_to(np.arange(number, dtype=np.uint8)[:, None, None, None], (number, 8, 8, 3))
    labels = np.arange(number) % 4
    predicted = labels.copy()
    predicted[wrong] = (labels[wrong] + 1) % 4
    confidence = np.random.default_rng(0).permutation(np.linspace(0.3, 0.99, number))
    return images, labels, predicted, confidence


def test_mistakes_are_the_most_confident_ones(drawn):
    wrong = np.arange(5, 90, 2)
    images, labels, predicted, confidence = classified(100, wrong)
    plots.mistakes(images, labels, predicted, confidence, "abcd", "samples.png")
    (figure,) = drawn
    expected = sorted(wrong, key=lambda index: -confidence[index])[:24]
    shown = [int(axis.get_images()[0].get_array()[0, 0, 0]) for axis in figure.axes]
    assert shown == expected
    for index, axis in zip(expected, figure.axes, strict=True):
        assert axis.get_title() == f"{'abcd'[predicted[index]]} ({confidence[index]:.0%})"
        assert [text.get_text() for text in axis.texts] == ["abcd"[labels[index]]]
    assert figure.get_suptitle() == "The 24 most confident of 43 mistakes among 100 images"
    check_readable(figure)


def test_few_mistakes_are_all_shown_with_long_names(drawn):
    plots.mistakes(*classified(100, np.arange(8)), LONG, "samples.png")
    (figure,) = drawn
    assert figure.get_suptitle() == "All 8 mistakes among 100 images, the most confident first"
    assert sum(bool(axis.get_images()) for axis in figure.axes) == 8
    check_readable(figure)


def test_no_mistake_is_said(drawn):
    plots.mistakes(*classified(100, np.arange(0)), LONG, "samples.png")
    assert drawn[0].get_suptitle() == "No mistakes among 100 images"
    check_readable(drawn[0])


def test_confusion_has_true_classes_as_rows(drawn):
    plots.confusion(np.array([[8, 2, 0], [0, 5, 5], [0, 0, 20]]), ("cat", "dog", "cow"), "confusion.png")
    (figure,) = drawn
    axis = figure.axes[0]
    np.testing.assert_allclose(axis.get_images()[0].get_array(), [[0.8, 0.2, 0], [0, 0.5, 0.5], [0, 0, 1]])
    counts = {text.get_position(): text.get_text() for text in axis.texts}
    assert counts == {(0, 0): "8", (1, 0): "2", (1, 1): "5", (2, 1): "5", (2, 2): "20"}
    assert (axis.get_ylabel(), axis.get_xlabel()) == ("true class", "taken for")
    assert axis.get_title("left") == "82.5% of 40 correct"
    check_readable(figure)


@pytest.mark.parametrize(
    ("number", "names", "counts"), [(4, True, True), (20, True, True), (30, True, False), (41, False, False)]
)
def test_confusion_stays_readable_with_many_classes(drawn, number, names, counts):
    classes = [LONG[index % 4] for index in range(number)]
    plots.confusion(np.full((number, number), 12345.0), classes, "confusion.png")
    (figure,) = drawn
    axis = figure.axes[0]
    assert bool(axis.texts) == counts
    assert any("pointer" in text.get_text() or "German" in text.get_text() for text in axis.get_xticklabels()) == names
    check_readable(figure)


def test_a_class_without_examples_has_an_empty_row(drawn):
    plots.confusion(np.array([[3.0, 0.0], [0.0, 0.0]]), ("cat", "dog"), "confusion.png")
    np.testing.assert_array_equal(drawn[0].axes[0].get_images()[0].get_array(), [[1, 0], [0, 0]])


def test_reliability_shows_the_bins(drawn):
    logits = jnp.log(jnp.array([[0.9, 0.1], [0.9, 0.1], [0.3, 0.7], [0.3, 0.7]]))
    plots.reliability(metrics.calibration(logits, jnp.array([0, 0, 0, 1]), bins=5), "reliability.png")
    (figure,) = drawn
    above, below = figure.axes
    bars = {round(bar.get_x(), 6): bar.get_height() for bar in above.patches}
    assert bars == {0.6: 0.5, 0.8: 1.0}
    (marks,) = (found for found in above.collections)
    np.testing.assert_allclose([mark[0, 1] for mark in marks.get_segments()], [0.7, 0.9], rtol=1e-6)
    np.testing.assert_allclose([bar.get_height() for bar in below.patches], [0, 0, 0, 0.5, 0.5])
    assert above.get_title("left") == "expected calibration error 15.0%"
    check_readable(figure)


def test_predictions_stand_beside_their_image(drawn):
    images = [np.full((20, 30, 3), 10, np.uint8), np.full((200, 100, 3), 20, np.uint8)]
    top = [list(zip(LONG, (0.75, 0.125, 0.1, 0.025), strict=True)), [("only", 1.0)]]
    plots.predictions(images, top, "predictions.png")
    (figure,) = drawn
    left, right, second_left, second_right = figure.axes
    assert [axis.get_images()[0].get_array()[0, 0, 0] for axis in (left, second_left)] == [10, 20]
    np.testing.assert_allclose([bar.get_width() for bar in right.patches], [0.75, 0.125, 0.1, 0.025])
    assert [text.get_text() for text in right.texts][::2] == list(LONG)
    assert [text.get_text() for text in right.texts][1::2] == ["75.0%", "12.5%", "10.0%", "2.5%"]
    assert [text.get_text() for text in second_right.texts] == ["only", "100.0%"]
    tops = [text.get_position()[1] for text in right.texts[::2]]
    assert tops == [0, 1, 2, 3]
    assert right.yaxis_inverted()
    check_readable(figure)


def test_a_picture_replaces_the_old_one_at_once(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    path = tmp_path / "curves.png"
    plots.curves(records(), path)
    before = path.read_bytes()
    assert before.startswith(b"\x89PNG")

    def broken(self, file, **options):
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", broken)
    with pytest.raises(OSError, match="disk full"):
        plots.curves(records(), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("name", "start"), [("a.svg", b"<?xml"), ("a.pdf", b"%PDF"), ("a.PNG", b"\x89PNG")])
def test_the_ending_says_the_format(tmp_path, name, start):
    plots.curves(records(), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize("name", ["curves", "curves.txt"])
def test_an_unknown_ending_lists_the_known(tmp_path, name):
    with pytest.raises(ValueError, match=f"can't be written as {name}: let its name end in one of .*.pdf.*.png.*.svg"):
        plots.curves(records(), tmp_path / name)


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match="^drawing needs matplotlib.*: pip install 'eqzoo.train.'$"):
        plots.curves(records(), "curves.png")


@pytest.mark.parametrize("function", EXAMPLES, ids=lambda function: function.__name__)
def test_the_example_of_the_docstring_draws(function, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", inspect.getdoc(function), re.DOTALL)
    exec(example, {"plots": plots, "jnp": jnp, "calibration": metrics.calibration})
    assert [file.suffix for file in tmp_path.iterdir()] == [".png"]
