"""`replace` reaches every part of any tree by its path, and says so when it can't."""

import re
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqzoo
from eqzoo import nn
from eqzoo.tree.edit import replace
from eqzoo.tree.ensemble import unstack
from eqzoo.tree.paths import leaves_with_paths, paths
from tests.contract.table import KINDS, randomised

KEY = jax.random.key(0)
FAMILIES = pytest.mark.parametrize("row", KINDS, ids=lambda row: row.model.__name__)


class Pair(NamedTuple):
    first: object
    second: object


@jax.tree_util.register_pytree_with_keys_class
class Custom:
    def __init__(self, inside):
        self.inside = inside

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("inside"), self.inside)], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


class Block(eqx.Module):
    linear: eqx.nn.Linear
    act: object
    inner: nn.Stack | None = None


def stacked(depth=3, inner=0):
    def block(key):
        stack = nn.Stack(lambda key: eqx.nn.Linear(2, 2, key=key), inner, key=key) if inner else None
        return Block(eqx.nn.Linear(2, 4, key=key), jax.nn.relu, stack)

    return {"blocks": nn.Stack(block, depth, key=KEY), "head": None}


@pytest.mark.parametrize(
    ("tree", "path", "read"),
    [
        ([1.0, [2.0, 3.0]], "1.0", lambda tree: tree[1][0]),
        ({"a": {"b": 1.0}, "c": 2.0}, "a.b", lambda tree: tree["a"]["b"]),
        ({3: 1.0, 4: 2.0}, "3", lambda tree: tree[3]),
        ((1.0, (2.0,)), "1.0", lambda tree: tree[1][0]),
        (Pair(1.0, Pair(2.0, 3.0)), "second.first", lambda tree: tree.second.first),
        (Custom({"a": 1.0}), "inside.a", lambda tree: tree.inside["a"]),
        ({"a": None, "b": 1.0}, "a", lambda tree: tree["a"]),
        (eqx.nn.MLP(2, 2, 2, 1, key=KEY), "activation", lambda tree: tree.activation),
    ],
    ids=["list", "dict", "integer keys", "tuple", "named tuple", "custom node", "none", "module"],
)  # fmt: skip
def test_one_place_of_any_tree(tree, path, read):
    new = replace(tree, {path: 9.0})
    assert read(new) == 9.0
    assert type(new) is type(tree)
    assert read(tree) != 9.0
    others = lambda tree: [leaf for name, leaf in leaves_with_paths(tree) if name != path]
    assert all(a is b for a, b in zip(others(new), others(tree), strict=True))


@FAMILIES
def test_every_leaf_of_a_model_is_reached_by_the_path_that_paths_gives(row):
    model, state = randomised(row, seed=0)
    arrays = {path: leaf for path, leaf in leaves_with_paths((model, state)) if eqx.is_inexact_array(leaf)}
    new = replace((model, state), {path: leaf + 1 for path, leaf in arrays.items()})
    assert jax.tree.structure(new) == jax.tree.structure((model, state))
    for path, leaf in leaves_with_paths(new):
        if path in arrays:
            np.testing.assert_array_equal(leaf, arrays[path] + 1)


def test_a_new_head_of_another_structure_and_a_head_where_there_was_none():
    model, _ = eqzoo.create("mlp", num_classes=3, image_size=2, hidden=(4,), key=KEY)
    head = eqx.nn.MLP(4, 7, 5, 1, key=KEY)
    assert replace(model, {"head": head}).head is head
    beheaded = replace(model, {"head": None})
    assert beheaded.head is None
    assert replace(beheaded, {"head": head}).head is head
    assert beheaded.layers[0].linear.weight is model.layers[0].linear.weight


def test_one_layer_of_a_stack_or_all_of_it():
    tree = stacked()
    before = tree["blocks"].block.linear.weight
    one = replace(tree, {"blocks[1].linear.weight": jnp.full((4, 2), 7.0)})["blocks"].block.linear.weight
    np.testing.assert_array_equal(one[1], 7)
    np.testing.assert_array_equal(one[jnp.array([0, 2])], before[jnp.array([0, 2])])
    every = replace(tree, {"blocks[*].linear.weight": jnp.full((3, 4, 2), 7.0)})["blocks"].block.linear.weight
    np.testing.assert_array_equal(every, 7)
    assert isinstance(replace(tree, {"blocks[*].linear": jnp.ones(2)})["blocks"].block.linear, jax.Array)


def test_a_whole_layer_of_a_stack():
    tree = stacked()
    layers = unstack(tree["blocks"].block)
    swapped = replace(tree, {"blocks[0]": layers[2], "blocks[2]": layers[0]})
    for new, old in zip(unstack(swapped["blocks"].block), layers[::-1], strict=True):
        np.testing.assert_array_equal(new.linear.weight, old.linear.weight)
        np.testing.assert_array_equal(new.linear.bias, old.linear.bias)


def test_a_part_of_one_layer_and_a_leaf_of_another_at_once():
    tree = stacked()
    other = eqx.nn.Linear(2, 4, key=jax.random.key(1))
    new = replace(tree, {"blocks[0].linear": other, "blocks[1].linear.bias": jnp.full(4, 7.0)})["blocks"].block.linear
    np.testing.assert_array_equal(new.weight[0], other.weight)
    np.testing.assert_array_equal(new.bias, [other.bias, jnp.full(4, 7.0), tree["blocks"].block.linear.bias[2]])
    np.testing.assert_array_equal(new.weight[1:], tree["blocks"].block.linear.weight[1:])


@pytest.mark.parametrize(
    ("path", "index"),
    [
        ("blocks[1].inner[2].bias", (1, 2)),
        ("blocks[*].inner[2].bias", (slice(None), 2)),
        ("blocks[1].inner[*].bias", 1),
    ],
)
def test_layers_of_a_stack_in_a_stack(path, index):
    tree = stacked(3, inner=4)
    before = tree["blocks"].block.inner.block.bias
    value = before[index] + 5
    after = replace(tree, {path: value})["blocks"].block.inner.block.bias
    np.testing.assert_array_equal(after, before.at[index].set(value))
    assert (after != before).sum() == value.size


def test_a_stack_of_numpy_arrays():
    tree = jax.tree.map(lambda leaf: np.asarray(leaf) if eqx.is_array(leaf) else leaf, stacked())
    new = replace(tree, {"blocks[2].linear.bias": np.full(4, 7.0)})
    np.testing.assert_array_equal(new["blocks"].block.linear.bias[2], 7)
    assert not (tree["blocks"].block.linear.bias == 7).any()


def test_a_leaf_takes_the_new_dtype_and_a_layer_that_of_its_stack():
    tree = {"W": jnp.ones(4)} | stacked()
    new = replace(tree, {"W": jnp.ones(4, jnp.bfloat16), "blocks[1].linear.bias": jnp.ones(4, jnp.bfloat16)})
    assert new["W"].dtype == jnp.bfloat16
    assert new["blocks"].block.linear.bias.dtype == jnp.float32


def test_several_at_once_and_none():
    tree = [{"W": 1.0, "b": 2.0}, {"W": 3.0, "b": 4.0}]
    assert replace(tree, {"0.W": 5.0, "1.b": 6.0}) == [{"W": 5.0, "b": 2.0}, {"W": 3.0, "b": 6.0}]
    assert replace(tree, {}) == tree


def test_under_jit():
    tree = {"blocks": stacked()["blocks"], "W": jnp.ones(2)}
    new = eqx.filter_jit(lambda tree, x: replace(tree, {"W": x, "blocks[1].linear.bias": jnp.tile(x, 2)}))(
        tree, jnp.array([3.0, 4.0])
    )
    np.testing.assert_array_equal(new["W"], [3, 4])
    np.testing.assert_array_equal(new["blocks"].block.linear.bias[1], [3, 4, 3, 4])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"head.W": jnp.ones((4, 3))}, "head.W has the shape (2, 3), but its new value (4, 3)"),
        ({"head.W": 1.0}, "head.W has the shape (2, 3), but its new value ()"),
        ({"hed.W": 1.0}, "there is no hed.W; the tree has head"),
        ({"head.wieght": 1.0}, "there is no head.wieght; head has head.W"),
        ({"head.W.x": 1.0}, "there is no head.W.x; head.W is a leaf"),
        ({"tail.W": 1.0}, "there is no tail.W; tail is None"),
        ({"norm.use_bias": True}, "norm.use_bias is static"),
        ({"blocks.depth": 5}, "blocks.depth is static"),
        ({"blocks[3].linear.bias": jnp.ones(4)}, "the stack has 3 layers, from 0 to 2"),
        ({"blocks[1].linear.bias": jnp.ones(5)}, "shape (4,) | (5,)"),
        ({"blocks[1].linear": jnp.ones(5)}, "type Linear | float32 of shape (5,)"),
        ({"blocks[*].linear.bias": jnp.ones(4)}, "blocks[*].linear.bias has the shape (3, 4), but its new value (4,)"),
        ({"blocks[1].act": jax.nn.gelu}, "all layers of a stack share what is no array"),
        ({"blocks.linear.bias": jnp.ones(4)}, "there is no blocks.linear.bias; blocks has blocks[*]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_cannot_be_replaced_is_a_sentence(values, message):
    tree = {"head": {"W": jnp.ones((2, 3))}, "tail": None, "norm": eqx.nn.LayerNorm(3), "blocks": stacked()["blocks"]}
    with pytest.raises(ValueError, match=r"(?s)^replace: .*" + re.escape(message)) as caught:
        replace(tree, values)
    assert next(iter(values)) in str(caught.value)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("head", "head.W"),
        ("blocks[1]", "blocks[1].linear.bias"),
        ("blocks[*].linear.bias", "blocks[1].linear.bias"),
        ("blocks", "blocks[0].linear.bias"),
        ("blocks[1].linear", "blocks[*].linear.bias"),
    ],
)  # fmt: skip
def test_replacements_that_overlap_are_refused_in_either_order(first, second):
    tree = stacked() | {"head": {"W": 1.0}}
    for order in ((first, second), (second, first)):
        with pytest.raises(ValueError, match="overlap") as caught:
            replace(tree, dict.fromkeys(order, 0.0))
        assert repr(first) in str(caught.value)
        assert repr(second) in str(caught.value)


def test_names_that_begin_alike_do_not_overlap():
    assert replace({"W": 1.0, "W2": 2.0}, {"W": 3.0, "W2": 4.0}) == {"W": 3.0, "W2": 4.0}


def test_ten_thousand_replacements_take_no_quadratic_time():
    tree = [{"W": 0.0, "b": 0.0} for _ in range(5000)]
    new = replace(tree, dict.fromkeys(paths(tree), 1.0))
    assert all(leaf == 1.0 for leaf in jax.tree.leaves(new))


def test_a_layer_takes_the_dtype_of_its_stack():
    stack = nn.Stack(lambda key: nn.Linear(2, 2, key=key), 3, key=KEY)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), stack)
    bias = replace(half, {"[1].bias": jnp.ones(2)}).block.bias
    assert bias.dtype == jnp.bfloat16
    assert np.array_equal(bias[1], [1, 1])
