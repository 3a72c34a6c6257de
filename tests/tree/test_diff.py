"""Every way in which two trees can differ is found, named by its path, and said in one line."""

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, replace
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqzoo import nn
from eqzoo.tree.diff import Difference, check_same_structure, diff
from tests.contract.table import KINDS, randomised

FAMILIES = pytest.mark.parametrize("row", KINDS, ids=lambda row: row.model.__name__)
VIT = next(row for row in KINDS if row.model.__name__ == "ViT")
Pair = namedtuple("Pair", ["x", "y"])


def lines(a, b, **options):
    return [str(each) for each in diff(a, b, **options)]


def first(x):
    return x


def second(x):
    return x


class Block(eqx.Module):
    weight: jax.Array | None
    activation: object
    size: int = eqx.field(static=True)
    table: object = eqx.field(static=True)


def block(weight=0.0, activation=first, size=1, table=None):
    return Block(jnp.full(2, weight), activation, size, table)


class OtherBlock(eqx.Module):
    weight: jax.Array


@FAMILIES
def test_equal_trees_have_no_differences(row):
    (model, state), (other, other_state) = randomised(row, seed=0), randomised(row, seed=0)
    assert model is not other
    assert diff((model, state), (other, other_state)) == []
    assert diff(model, model) == []


@FAMILIES
def test_each_changed_weight_is_named(row):
    (model, _), (other, _) = randomised(row, seed=0), randomised(row, seed=1)
    arrays = [leaf for leaf in jax.tree.leaves(model) if eqx.is_array(leaf)]
    found = diff(model, other)
    assert {each.kind for each in found} == {"value"}
    assert len(found) == len(arrays)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        pytest.param([np.zeros((3, 2))], [np.zeros((3, 4))], ["0: shape (3, 2) | (3, 4)"], id="shape"),
        pytest.param({"W": np.float32(1)}, {"W": np.float64(1)}, ["W: dtype float32 | float64"], id="dtype"),
        pytest.param(
            [np.zeros(3, np.int8)],
            [np.zeros(2)],
            ["0: shape (3,) | (2,)", "0: dtype int8 | float64"],
            id="shape and dtype",
        ),
        pytest.param([1.0], [jnp.ones(())], ["0: dtype float | float32"], id="number and array"),
        pytest.param([0.5], [0.25], ["0: 0.5 | 0.25"], id="numbers"),
        pytest.param(1, 2, ["the tree: 1 | 2"], id="bare leaves"),
        pytest.param([True], [False], ["0: True | False"], id="flags"),
        pytest.param([True], [1.0], ["0: type True | float 1.0"], id="flag and number"),
        pytest.param([first], [second], ["0: first | second"], id="functions"),
        pytest.param([first], [np.ones(2)], ["0: type first | float64 of shape (2,)"], id="function and array"),
        pytest.param([None], [np.ones(2)], ["0: type None | float64 of shape (2,)"], id="None and array"),
        pytest.param([None], [{"a": 1}], ["0: type None | dict"], id="None and node"),
        pytest.param([1, 2], (1, 2), ["the tree: type list | tuple"], id="node types of the same keys"),
        pytest.param([1, 2], (1, 3), ["the tree: type list | tuple", "1: 2 | 3"], id="below nodes of other types"),
        pytest.param([1], {"a": 1}, ["the tree: type list | dict"], id="node types of other keys"),
        pytest.param(Pair(1, 2), Pair(1, 3), ["y: 2 | 3"], id="named tuples"),
        pytest.param(
            {"a": 1, "c": [3, 4]},
            {"b": np.ones(2), "c": [3]},
            ["a: only in a: int 1", "c.1: only in a: int 4", "b: only in b: float64 of shape (2,)"],
            id="matched by key",
        ),
        pytest.param({"a": 1}, {"a": 1, "n": Pair(1, 2)}, ["n: only in b: Pair"], id="a part only in b"),
        pytest.param(
            OrderedDict(a=1, b=2), OrderedDict(b=2, a=1), ["the tree: ('a', 'b') | ('b', 'a')"], id="order of keys"
        ),
        pytest.param(
            [defaultdict(first, a=1)], [defaultdict(second, a=1)], ["0: (<function first"], id="auxiliary data"
        ),
        pytest.param(block(size=1), block(size=2), ["size: 1 | 2"], id="static field"),
        pytest.param(block(activation=first), block(activation=second), ["activation: first | second"], id="field"),
        pytest.param(block(), OtherBlock(jnp.zeros(2)), ["the tree: type Block | OtherBlock"], id="modules"),
        pytest.param(
            eqx.tree_at(lambda it: it.weight, block(), None),
            block(),
            ["weight: type None | float32 of shape (2,)"],
            id="absent weight",
        ),
        pytest.param(jax.random.key(0), jax.random.key(1), ["the tree: [0, 0] | [0, 1]"], id="random keys"),
        pytest.param(jax.random.key(0), 0.0, ["the tree: type key<fry> of shape () | float 0.0"], id="key and number"),
        pytest.param(
            [np.array([1.0, 2, 3])],
            [np.array([1.0, 2.5, 4])],
            ["0: 3.0 | 4.0 at [2]; 2 of 3 differ, by at most 1"],
            id="values",
        ),
        pytest.param(
            [np.array([[1.0, np.nan], [np.inf, -np.inf]])],
            [np.array([[1.0, np.nan], [np.inf, np.inf]])],
            ["0: -inf | inf at [1, 1]; 1 of 4 differ, by at most inf"],
            id="NaN equals NaN, infinity itself",
        ),
        pytest.param(
            [np.array([1.0, np.nan])],
            [np.array([9.0, 2.0])],
            ["0: nan | 2.0 at [1]; 2 of 2 differ, by at most inf"],
            id="NaN and number",
        ),
        pytest.param(
            [jnp.array([1, 2], jnp.bfloat16)],
            [jnp.array([1, 3], jnp.bfloat16)],
            ["0: 2 | 3 at [1]; 1 of 2 differ, by at most 1"],
            id="half",
        ),
    ],
)
def test_what_a_difference_is_called(a, b, expected):
    found = lines(a, b)
    assert len(found) == len(expected)
    for line, wanted in zip(found, expected, strict=True):
        assert line.startswith(wanted)
    assert diff(a, a) == diff(b, b) == []


def test_two_functions_of_one_name_are_told_apart():
    (line,) = lines([lambda x: x], [lambda x: x])
    a, b = line.removeprefix("0: ").split(" | ")
    assert a != b
    (line,) = lines(jax.tree_util.Partial(first), jax.tree_util.Partial(second))
    assert line == "the tree: first | second"
    assert diff([partial(first)], [partial(first)]), "JAX takes them for different, too"


def test_configs_are_compared_by_field_and_stacks_by_layer():
    changed = VIT.skeleton(replace(VIT.config, depth=2, heads=4, num_classes=3))[0]
    found = diff(VIT.skeleton()[0], changed)
    assert [str(each) for each in found[:5]] == [
        "config.depth: 3 | 2",
        "config.heads: 2 | 4",
        "config.num_classes: 8 | 3",
        "blocks.depth: 3 | 2",
        "blocks[*].norm1.weight: shape (3, 16) | (2, 16)",
    ]
    assert Difference("blocks[*].norm1.weight", "shape", "(3, 16)", "(2, 16)") in found
    assert str(found[-1]) == "head.bias: shape (8,) | (3,)"


def test_a_module_without_a_part():
    a, b = nn.LayerNorm(3), nn.LayerNorm(3, use_bias=False)
    assert "bias: type float32 of shape (3,) | None" in lines(a, b)


def test_shapes_are_compared_without_values():
    model, _ = randomised(VIT, seed=0)
    skeleton, _ = VIT.skeleton()
    assert diff(model, skeleton) == []
    assert lines(jnp.ones(3), jax.ShapeDtypeStruct((4,), jnp.float16)) == [
        "the tree: shape (3,) | (4,)",
        "the tree: dtype float32 | float16",
    ]


def test_under_jit_all_but_values_is_compared():
    found = []

    @jax.jit
    def compare(a, b, c):
        found.extend([lines(a, b), lines(a, c)])
        return a

    compare(jnp.zeros(2), jnp.ones(2), jnp.ones(3))
    assert found == [[], ["the tree: shape (2,) | (3,)"]]


def test_tolerances_are_absolute_and_relative_to_b():
    a, b = np.array([1.0, 100.0]), np.array([1.5, 101.0])
    assert diff(a, b, atol=1.0) == []
    assert "1 of 2" in lines(a, b, atol=0.6)[0]
    assert "1 of 2" in lines(a, b, rtol=0.01)[0]
    assert diff(a, b, rtol=0.4) == []
    assert diff(2.0, 1.0, rtol=0.6)
    assert not diff(1.0, 2.0, rtol=0.6)


def test_the_largest_difference_is_shown_with_enough_digits():
    a = jnp.array([1.0, 1.0])
    (line,) = lines(a, jnp.array([1.0, 1.0000001]))
    assert line == "the tree: 1.0 | 1.0000001 at [1]; 1 of 2 differ, by at most 1.19e-07"


def test_what_cannot_be_compared_counts_as_different():
    @dataclass
    class Table:
        rows: tuple

    assert len(diff([Table((np.ones(2),))], [Table((np.ones(2),))])) == 1


def test_long_texts_are_cut():
    (line,) = lines([block(table="a" * 1000)], [block(table="b" * 1000)])
    assert len(line) < 250


def test_same_structure_passes():
    model, _ = randomised(VIT, seed=0)
    check_same_structure("lerp", model, randomised(VIT, seed=1)[0], VIT.skeleton()[0])
    check_same_structure("lerp", [1.0, True, first], [jnp.ones((), jnp.bfloat16), False, second])
    check_same_structure("lerp")


def test_other_structure_is_refused_in_at_most_ten_lines():
    model, other = VIT.skeleton()[0], VIT.skeleton(replace(VIT.config, depth=2))[0]
    with pytest.raises(ValueError, match=r"^mean: trees 0 and 2 differ") as caught:
        check_same_structure("mean", model, model, other)
    message = str(caught.value).splitlines()
    assert len(message) == 12
    assert message[1:4] == [
        "  config.depth: 3 | 2",
        "  blocks.depth: 3 | 2",
        "  blocks[*].norm1.weight: shape (3, 16) | (2, 16)",
    ]
    assert message[-1] == f"  and {len(diff(model, other)) - 10} more"


@pytest.mark.parametrize(
    ("a", "b", "line"),
    [
        ({"a": 1.0}, {"a": 1.0, "b": 2.0}, "b: only in b: float 2.0"),
        ([jnp.ones(2)], [jnp.ones(3)], "0: shape (2,) | (3,)"),
        ([jnp.ones(2)], [first], "0: type float32 of shape (2,) | first"),
        ([None], [1.0], "0: type None | float 1.0"),
        (block(size=1), block(size=2), "size: 1 | 2"),
    ],
)
def test_what_jax_could_not_map_over_is_refused(a, b, line):
    with pytest.raises(ValueError, match="^ema: ") as caught:
        check_same_structure("ema", a, b)
    assert str(caught.value).splitlines()[1:] == [f"  {line}"]


def test_values_and_dtypes_are_no_structure():
    with pytest.raises(ValueError, match="x: only in b") as caught:
        check_same_structure("lerp", {"W": jnp.zeros(2), "b": 1}, {"W": jnp.ones(2, jnp.bfloat16), "b": 2, "x": 1})
    assert len(str(caught.value).splitlines()) == 2


def test_the_shapes_of_masks_count():
    with pytest.raises(ValueError, match=r"mask: shape \(2,\) \| \(3,\)"):
        check_same_structure("stack", {"mask": jnp.ones(2, bool)}, {"mask": jnp.ones(3, bool)})
