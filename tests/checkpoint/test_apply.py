"""The applier fills each leaf exactly once from each tensor exactly once, or reports everything that doesn't fit."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqzoo import nn
from eqzoo.checkpoint import SPLIT, Alias, CheckpointError, Drop, Rule, fill, plan, unfill
from eqzoo.checkpoint.formats import Tensor


class Block(eqx.Module):
    query: nn.Linear
    key: nn.Linear

    def __init__(self, *, key):
        self.query = nn.Linear(3, 2, key=key)
        self.key = nn.Linear(3, 4, key=key)


class Model(eqx.Module):
    blocks: nn.Stack[Block]
    table: jax.Array
    head: nn.Linear | None

    def __init__(self, *, head: bool = False, key):
        self.blocks = nn.Stack(lambda key: Block(key=key), 2, key=key)
        self.table = jnp.zeros((5, 3))
        self.head = nn.Linear(3, 5, use_bias=False, key=key) if head else None


RULES = (
    Rule(r"h\.(\d+)\.qk\.(weight|bias)", ("blocks[{0}].query.{1}", "blocks[{0}].key.{1}"), SPLIT),
    Rule(r"wte", "table"),
    Rule(r"lm_head", "head.weight"),
    Alias(r"lm_head", of="wte"),
    Drop(r"h\.\d+\.mask"),
)


def skeleton(**options):
    return eqx.filter_eval_shape(lambda: Model(**options, key=jax.random.key(0)))


def arrays(**changes):
    rng = np.random.default_rng(0)
    shapes = {"wte": (5, 3)} | {f"h.{i}.qk.{n}": s for i in range(2) for n, s in (("weight", (6, 3)), ("bias", (6,)))}
    made = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()} | changes
    return {name: array for name, array in made.items() if array is not None}


def stored(named):
    return {name: Tensor(array.shape, array.dtype, lambda array=array: array) for name, array in named.items()}


def test_layers_split_and_stacked():
    named = arrays()
    fit = plan(skeleton(), stored(named), RULES)
    assert fit.problems == 0
    model = fill(skeleton(), stored(named), fit)
    for layer in range(2):
        np.testing.assert_array_equal(model.blocks.block.query.weight[layer], named[f"h.{layer}.qk.weight"][:2])
        np.testing.assert_array_equal(model.blocks.block.key.bias[layer], named[f"h.{layer}.qk.bias"][2:])
    np.testing.assert_array_equal(model.table, named["wte"])
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(model))


def test_backwards_gives_the_tensors_it_came_from():
    named = arrays()
    model = fill(skeleton(), stored(named), plan(skeleton(), stored(named), RULES))
    back = unfill(model, RULES)
    assert set(back) == set(named)
    for name, array in named.items():
        np.testing.assert_array_equal(back[name], array)


def test_each_tensor_is_read_once():
    reads = []
    tensors = {
        name: Tensor(array.shape, array.dtype, lambda name=name, array=array: (reads.append(name), array)[1])
        for name, array in arrays().items()
    }
    fit = plan(skeleton(), tensors, RULES)
    assert reads == []
    fill(skeleton(), tensors, fit)
    assert sorted(reads) == sorted(tensors)


def test_a_missing_tensor_is_named_as_upstream_names_it_once_and_with_its_neighbour():
    fit = plan(skeleton(), stored(arrays(wte=None, wtf=np.zeros((5, 3), np.float32), **{"h.1.qk.bias": None})), RULES)
    report = fit.report("a.pth", "model")
    assert "a.pth does not fit model: 2 missing, 1 unexpected, 0 of a wrong shape or kind" in report
    assert report.count("h.1.qk.bias (6,)") == 1
    assert len(fit.missing) == 2
    assert fit.unexpected == ["wtf"]


def test_near_names_are_shown_on_both_sides():
    fit = plan(skeleton(), stored(arrays(**{"h.1.qk.bias": None, "h.1.qk.biass": np.zeros(6, np.float32)})), RULES)
    assert fit.missing == ["h.1.qk.bias (6,) (near h.1.qk.biass)"]
    assert fit.unexpected == ["h.1.qk.biass (near h.1.qk.bias)"]


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("wte", np.zeros((5, 4), np.float32), "wte: shape (5, 4) in the file, (5, 3) in the model"),
        ("wte", np.zeros((3, 5), np.float32), "wte: shape (3, 5) in the file, (5, 3) in the model"),
        ("wte", np.zeros((5, 3), np.int64), "wte: dtype int64 in the file, float32 in the model"),
        ("h.0.qk.bias", np.zeros(7, np.float32), "h.0.qk.bias: shape (7,) in the file, (6,) in the model"),
    ],
)
def test_a_wrong_shape_or_kind_is_reported_with_both_sides(name, array, message):
    assert plan(skeleton(), stored(arrays(**{name: array})), RULES).wrong == [message]


def test_two_tensors_for_one_leaf_are_reported():
    rules = (*RULES, Rule(r"embedding", "table"))
    fit = plan(skeleton(), stored(arrays(embedding=np.zeros((5, 3), np.float32))), rules)
    assert fit.wrong == ["embedding: another tensor already fills table"]


def test_a_layer_too_many_is_unexpected_and_a_layer_too_few_missing():
    more = arrays(**{"h.2.qk.weight": np.zeros((6, 3), np.float32)})
    (unexpected,) = plan(skeleton(), stored(more), RULES).unexpected
    assert unexpected.startswith("h.2.qk.weight")
    fewer = arrays(**{"h.1.qk.weight": None})
    assert len(plan(skeleton(), stored(fewer), RULES).missing) == 1


def test_known_buffers_are_dropped():
    fit = plan(skeleton(), stored(arrays(**{"h.0.mask": np.zeros(3, bool)})), RULES)
    assert fit.problems == 0


def test_a_tied_copy_is_accepted_when_equal_and_refused_when_not():
    named = arrays()
    named["lm_head"] = named["wte"].copy()
    fill(skeleton(), stored(named), plan(skeleton(), stored(named), RULES))
    named["lm_head"][0, 0] += 1
    with pytest.raises(CheckpointError, match="'lm_head' should repeat 'wte' but holds other numbers"):
        fill(skeleton(), stored(named), plan(skeleton(), stored(named), RULES))


def test_a_separate_head_takes_the_tensor_that_a_tied_model_takes_as_a_copy():
    named = arrays(lm_head=np.ones((5, 3), np.float32))
    model = fill(skeleton(head=True), stored(named), plan(skeleton(head=True), stored(named), RULES))
    np.testing.assert_array_equal(model.head.weight, named["lm_head"])
    assert set(unfill(model, RULES)) == set(named)


def test_half_precision_becomes_the_models_dtype():
    named = {name: array.astype(np.float16) for name, array in arrays().items()}
    model = fill(skeleton(), stored(named), plan(skeleton(), stored(named), RULES))
    assert model.table.dtype == jnp.float32
    np.testing.assert_array_equal(model.table, named["wte"].astype(np.float32))


def test_a_leaf_without_a_rule_is_an_error_of_the_family():
    with pytest.raises(CheckpointError, match="no rule names a place upstream for table"):
        unfill(Model(key=jax.random.key(0)), (RULES[0],))
