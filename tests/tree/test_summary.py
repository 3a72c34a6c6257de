"""A summary's rows tell shape, dtype, count, mean and deviation of every number of a tree; like parts are one row."""

import time
from collections import OrderedDict
from io import StringIO

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

import eqzoo
from eqzoo import nn
from eqzoo.tree.measure import count, nbytes
from eqzoo.tree.summary import CHUNK, summary
from tests.contract.table import KINDS, randomised

FAMILIES = pytest.mark.parametrize("row", KINDS, ids=lambda row: row.model.__name__)
LAYERS = [{"W": np.full((2, 3), i, np.float32), "b": np.zeros(3, np.float32)} for i in (1, 3)]


def paths(tree):
    return [row.path for row in summary(tree).rows]


def test_a_printed_table_reads_like_this():
    tree = {"layers": LAYERS, "head": jnp.array([-1.0, 2.0], jnp.bfloat16), "steps": 120_001, "activation": jax.nn.relu}
    assert str(summary(tree)).splitlines() == [
        "dict",
        "────────────────────────────────────────────────────────────────",
        "path               shape   dtype      count   share   mean ± std",
        "────────────────────────────────────────────────────────────────",
        "head                   2   bfloat16       2    9.5%    0.5 ± 1.5",
        "layers.{0..1}.W    2 x 3   float32       12   57.1%        2 ± 1",
        "layers.{0..1}.b        3   float32        6   28.6%        0 ± 0",
        "steps             scalar   int            1    4.8%       120001",
        "────────────────────────────────────────────────────────────────",
        "21 numbers, 80 B: 2 bfloat16 (4 B), 18 float32 (72 B), 1 int (4 B)",
    ]


def test_markdown_is_a_github_table():
    table = summary({"layers": LAYERS, "a|b": 0.5})
    assert table.markdown().splitlines() == [
        "**dict**: 19 numbers, 76 B: 1 float (4 B), 18 float32 (72 B)",
        "",
        "| path | shape | dtype | count | share | mean ± std |",
        "| --- | ---: | --- | ---: | ---: | ---: |",
        "| `a\\|b` | scalar | float | 1 | 5.3% | 0.5 |",
        "| `layers.{0..1}.W` | 2 x 3 | float32 | 12 | 63.2% | 2 ± 1 |",
        "| `layers.{0..1}.b` | 3 | float32 | 6 | 31.6% | 0 ± 0 |",
    ]
    assert table._repr_markdown_() == table.markdown()


def test_rich_shows_the_same_cells():
    console = Console(width=120, record=True, file=StringIO())
    table = summary({"[red]": nn.Stack(lambda key: nn.Linear(2, 3, key=key), 4, key=jax.random.key(0))})
    console.print(table)
    text = console.export_text()
    for cells in table._cells():
        assert all(cell in text for cell in cells)
    assert "[red][*].weight" in text
    assert table.totals in text


@FAMILIES
def test_rows_add_up_and_a_stack_is_one_row(row):
    model, state = randomised(row, seed=0)
    table = summary((model, state))
    assert (table.count, table.nbytes) == (count((model, state)), nbytes((model, state)))
    assert sum(row.count for row in table.rows) == table.count
    shapes = {path: leaf.shape for path, leaf in eqzoo.tree.leaves_with_paths(model) if eqx.is_array(leaf)}
    for each in summary(model).rows:
        if "{" not in each.path:
            assert each.shape == shapes[each.path]


def test_a_stack_is_not_counted_layer_by_layer():
    model, _ = next(row for row in KINDS if row.model.__name__ == "GPT2").skeleton()
    table = summary(model)
    (found,) = (row for row in table.rows if row.path == "blocks[*].norm1.weight")
    assert (found.shape, found.count, found.dtype, found.nbytes) == ((3, 16), 48, "float32", 192)
    assert "  3 x 16  " in str(table)


def test_shapes_without_values():
    model, state = eqx.filter_eval_shape(lambda: eqzoo.create("resnet18", key=jax.random.key(0)))
    table = summary(model)
    assert table.totals == "11,689,512 numbers, 46.8 MB float32"
    assert table.title == "ResNet"
    assert all(row.mean is None and row.std is None for row in table.rows)
    assert "±" not in str(table).split("mean ± std")[1]
    assert summary(state).count == 9620


def test_traced_values_are_left_out():
    tables = []

    @jax.jit
    def look(tree):
        tables.append(summary(tree))
        return tree

    look(LAYERS)
    assert [row.mean for row in tables[0].rows] == [None, None]


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ([1.0, 2.0, 3.0], ["{0..2}"]),
        ([1.0, 2], ["0", "1"]),
        ([np.ones(3), np.ones(2), np.ones(2)], ["0", "{1..2}"]),
        ([np.ones(2), np.ones(2, np.int8)], ["0", "1"]),
        ([np.ones(2), jax.nn.relu, np.ones(2), None, np.ones(2), np.ones(2)], ["{0,2,4..5}"]),
        ([1.0 if i % 2 else None for i in range(20)], ["{1,3,…,19}"]),
        ([[1.0, 2.0], [3.0, 4.0]], ["{0..1}.{0..1}"]),
        ([[1.0, 2.0], [3.0]], ["0.{0..1}", "1.0"]),
        ([{"W": 1.0, "b": 2.0}, {"W": 3.0}], ["0.W", "0.b", "1.W"]),
        ([{"x": {"W": 1.0}}, {"x": {"W": 2.0}}], ["{0..1}.x.W"]),
        ({f"layer_{i}": {"W": 1.0} for i in range(12)}, ["layer_{0..11}.W"]),
        ({f"layer_{i}": np.ones(2 if i == 2 else 3) for i in range(12)}, ["layer_{0..1}", "layer_2", "layer_{3..11}"]),
        ({"linear": 1.0, "linear_1": 2.0, "linear_2": 3.0}, ["linear", "linear_{1..2}"]),
        ({"x01": 1.0, "x1": 1.0, "x2": 1.0}, ["x{1..2}", "x01"]),
        ({7: 1.0, 10: 2.0}, ["{7,10}"]),
        (OrderedDict(b2=1.0, b1=2.0, a=3.0), ["b{2,1}", "a"]),
        ({"k": 1.0, "q": 2.0}, ["k", "q"]),
        (np.ones(3), [""]),
        ((), []),
    ],
)
def test_like_parts_are_one_row(tree, expected):
    assert paths(tree) == expected


def test_attributes_are_never_joined():
    class Two(eqx.Module):
        fc1: jax.Array
        fc2: jax.Array

    assert paths(Two(jnp.ones(2), jnp.ones(2))) == ["fc1", "fc2"]


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16, np.int8])
def test_mean_and_deviation_are_of_all_the_numbers_of_a_row(dtype):
    generator = np.random.default_rng(0)
    leaves = [(5 + 9 * i + 3 * generator.standard_normal((2, CHUNK // 2 + 7))).astype(dtype) for i in range(3)]
    (row,) = summary([leaves[0], jnp.asarray(leaves[1]), leaves[2]]).rows
    numbers = np.concatenate(leaves).astype(np.float64)
    assert row.count == numbers.size
    assert row.mean == pytest.approx(numbers.mean(), rel=1e-12)
    assert row.std == pytest.approx(numbers.std(), rel=1e-9)


def test_a_small_deviation_beside_a_large_mean():
    (row,) = summary(1e6 + np.arange(2 * CHUNK) % 2).rows
    assert (row.mean, row.std) == (1e6 + 0.5, 0.5)


def test_what_is_not_finite_shows():
    text = str(summary({"nan": jnp.array([1.0, jnp.nan]), "inf": jnp.array([1.0, jnp.inf])}))
    assert "nan ± nan" in text
    assert "inf ± nan" in text


def test_what_is_no_number_has_no_row():
    tree = {"key": jax.random.key(0), "flag": True, "function": jax.nn.relu, "none": None, "text": "a", "x": 1.0}
    assert paths(tree) == ["x"]
    assert str(summary(None)).endswith("0 numbers, 0 B")
    assert str(summary({"x": jnp.zeros((0, 3))})).count("0 x 3") == 1


def test_an_optimiser_s_state_a_frozen_model_and_a_complex_leaf():
    row = next(row for row in KINDS if row.model.__name__ == "ResNet")
    model, state = randomised(row, seed=0)
    opt_state = optax.adam(1e-3).init(eqx.filter(model, eqx.is_inexact_array))
    assert "0.mu.stages.1.rest[*].convs.1.conv.weight" in paths(opt_state)
    frozen = eqzoo.freeze(model, state)
    assert summary(frozen).title == "Frozen"
    assert summary(frozen).count == count(model) + count(state)
    assert summary(np.ones(3, np.complex64)).rows[0].mean is None


def test_ten_thousand_leaves_take_no_compilation():
    alike = [{name: np.ones(3, np.float32) for name in "abcd"} for _ in range(2_500)]
    differing = [np.ones((1 + i % 100, 1 + i // 100), np.float32) for i in range(10_000)]
    for tree, rows in ((alike, 4), (differing, 10_000)):
        start = time.process_time()
        text = str(summary(tree))
        assert time.process_time() - start < 5.0  # seconds; most of them check types, which only tests do
        assert len(text.splitlines()) == rows + 6
