"""The applier fills each leaf exactly once from each tensor exactly once, or reports everything that doesn't fit."""

import gc
import subprocess
import sys
import tracemalloc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqzoo
from eqzoo import nn
from eqzoo.checkpoint import SPLIT, SPLIT_EACH, Alias, CheckpointError, Drop, Rule, apply, fill, plan, unfill
from eqzoo.checkpoint.formats import Tensor, write_safetensors
from eqzoo.nn import _init


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


KEY = jax.random.key(0)


class Nested(eqx.Module):
    """Stacks in a stack: three inner layers in each of two."""

    blocks: nn.Stack[nn.Stack[Block]]

    def __init__(self, *, key):
        inner = lambda key: nn.Stack(lambda key: Block(key=key), 3, key=key)
        self.blocks = nn.Stack(inner, 2, key=key)


ONE_BY_ONE = (Rule(r"h\.(\d+)\.(\d+)\.(query|key)\.(weight|bias)", "blocks[{0}][{1}].{2}.{3}"),)
AT_ONCE = (Rule(r"h\.(\d+)\.(weight|bias)", ("blocks[{0}][*].query.{1}", "blocks[{0}][*].key.{1}"), SPLIT_EACH),)


def test_all_layers_of_an_inner_stack_at_once_or_one_by_one():
    model = Nested(key=KEY)
    blank = eqx.filter_eval_shape(lambda: Nested(key=KEY))
    at_once, one_by_one = unfill(model, AT_ONCE), unfill(model, ONE_BY_ONE)
    assert {name: tensor.shape for name, tensor in at_once.items()} == {
        f"h.{layer}.{name}": (3, 6, *rest) for layer in range(2) for name, rest in (("weight", (3,)), ("bias", ()))
    }
    assert one_by_one["h.1.2.key.weight"].shape == (4, 3)
    np.testing.assert_array_equal(at_once["h.1.weight"][2, 2:], one_by_one["h.1.2.key.weight"])
    for rules, found in ((AT_ONCE, at_once), (ONE_BY_ONE, one_by_one)):
        fit = plan(blank, stored(found), rules)
        assert not fit.problems
        assert eqx.tree_equal(fill(blank, stored(found), fit), model)


def test_what_is_missing_or_doubled_in_an_inner_stack_is_named():
    blank = eqx.filter_eval_shape(lambda: Nested(key=KEY))
    tensors = unfill(Nested(key=KEY), AT_ONCE)
    del tensors["h.0.weight"]
    assert plan(blank, stored(tensors), AT_ONCE).missing == ["h.0.weight (3, 6, 3)"]
    tensors |= {"h.1.2.key.weight": np.zeros((4, 3), np.float32)}
    (problem,) = plan(blank, stored(tensors), (*AT_ONCE, *ONE_BY_ONE)).wrong
    assert problem == "h.1.2.key.weight: another tensor already fills blocks[1][2].key.weight"


def test_backwards_gives_the_tensors_it_came_from():
    named = arrays()
    model = fill(skeleton(), stored(named), plan(skeleton(), stored(named), RULES))
    back = unfill(model, RULES)
    assert set(back) == set(named)
    for name, array in named.items():
        np.testing.assert_array_equal(back[name], array)


def test_every_tensor_is_used_and_released_and_planning_reads_none():
    used, released = set(), set()

    def tensor(name, array):
        return Tensor(array.shape, array.dtype, lambda: (used.add(name), array)[1], lambda: released.add(name))

    tensors = {name: tensor(name, array) for name, array in arrays().items()}
    fit = plan(skeleton(), tensors, RULES)
    assert used == set()
    fill(skeleton(), tensors, fit)
    assert used == released == set(tensors)


def test_a_missing_tensor_is_named_as_upstream_names_it_once_and_with_its_neighbour():
    fit = plan(skeleton(), stored(arrays(wte=None, wtf=np.zeros((5, 3), np.float32), **{"h.1.qk.bias": None})), RULES)
    report = fit.report("a.pth", "model")
    assert "a.pth does not fit model: 2 missing, 1 unexpected, 0 of a wrong shape or kind" in report
    assert report.count("h.1.qk.bias (6,)") == 1
    assert len(fit.missing) == 2
    assert fit.unexpected == ["wtf"]


def test_near_names_are_shown_on_both_sides():
    fit = plan(skeleton(), stored(arrays(**{"h.1.qk.bias": None, "h.1.qk.biass": np.zeros(6, np.float32)})), RULES)
    assert fit.report("a.pth", "model").splitlines()[1:] == [
        "  missing from the file:",
        "    h.1.qk.bias (6,) (near h.1.qk.biass)",
        "  unexpected in the file:",
        "    h.1.qk.biass (near h.1.qk.bias)",
    ]


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


def test_an_optional_leaf_that_the_file_lacks_is_zero_in_each_layer_it_lacks():
    rules = (Rule(r"h\.(\d+)\.qk\.(weight|bias)", RULES[0].target, SPLIT, optional=True), *RULES[1:])
    named = arrays(**{"h.1.qk.bias": None})
    fit = plan(skeleton(), stored(named), rules)
    assert fit.problems == 0
    junk = [np.full(4096, 7, np.uint8) for _ in range(1000)]  # memory that is not zero for the leaves to take over
    del junk
    bias = fill(skeleton(), stored(named), fit).blocks.block.query.bias
    np.testing.assert_array_equal(bias[0], named["h.0.qk.bias"][:2])
    np.testing.assert_array_equal(bias[1], [0, 0])


def test_too_many_names_are_listed_without_their_neighbours_and_at_once():
    named = {f"{'x' * 50}.{i}": np.zeros(1, np.float32) for i in range(30_000)}
    report = plan(skeleton(), stored(named), RULES).report("a.pth", "model")
    assert f"{'x' * 50}.29999" in report
    assert "(near" not in report


# Memory


class Table(eqx.Module):
    """Leaves of several sizes and dtypes, some of them smaller than the alignment."""

    leaves: dict[str, jax.Array]


SHAPES = {"large": (512, 1024), "odd": (1021, 3), "one": (), "none": (0, 3)}


def table(dtype=jnp.float32):
    return eqx.filter_eval_shape(lambda: Table({name: jnp.zeros(shape, dtype) for name, shape in SHAPES.items()}))


def numbers(dtype=np.float32):
    rng = np.random.default_rng(0)
    return {f"leaves.{name}": rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


OWN = (Rule(r"(.*)", "{0}"),)


def filled(skeleton, named, **options):
    return fill(skeleton, stored(named), plan(skeleton, stored(named), OWN), **options)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_skeletons_dtype_is_what_the_numbers_become(dtype):
    named = numbers()
    for name, leaf in filled(table(dtype), named).leaves.items():
        assert leaf.dtype == dtype
        np.testing.assert_array_equal(leaf, named[f"leaves.{name}"].astype(dtype))


def test_on_a_cpu_the_numbers_are_copied_once_and_stay_where_they_are():
    places = {}

    def place(path, leaf, array):
        places[path] = array.ctypes.data
        return apply.place_on_default_device(path, leaf, array)

    result = filled(table(), numbers(), place=place)
    for name in ("large", "odd", "one"):
        assert result.leaves[name].unsafe_buffer_pointer() == places[f"leaves.{name}"]


def test_leaves_can_be_donated_without_harm_to_themselves_or_what_comes_after():
    """A compiled step that takes over its arguments' memory mustn't take over, or free, memory that numpy owns."""
    named, double = numbers(), eqx.filter_jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree), donate="all")
    hosts = []

    def place(path, leaf, array):
        hosts.append((path, array))
        return apply.place_on_default_device(path, leaf, array)

    result = double(double(filled(table(), named, place=place)))
    for path, host in hosts:
        np.testing.assert_array_equal(host, named[path])
    for turn in range(10):
        result = double(filled(table(), named))
        gc.collect()
        junk = [np.full(shape, turn, np.float32) for shape in SHAPES.values() for _ in range(4)]
        for name, leaf in double(result).leaves.items():
            np.testing.assert_array_equal(leaf, 4 * named[f"leaves.{name}"])
        del junk


def test_the_host_holds_one_leaf_at_a_time():
    shapes = {f"leaves.{i}": (256, 1024) for i in range(8)}  # a MB each
    tree = eqx.filter_eval_shape(lambda: Table({str(i): jnp.zeros((256, 1024)) for i in range(8)}))
    ones = np.broadcast_to(np.float32(1), (256, 1024))
    tensors = {name: Tensor(ones.shape, ones.dtype, lambda: ones) for name in shapes}
    fit = plan(tree, tensors, OWN)
    seen = []
    tracemalloc.start()
    fill(tree, tensors, fit, place=lambda path, leaf, array: seen.append((path, leaf.shape, array.sum())))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seen == [(name, shape, 256 * 1024) for name, shape in shapes.items()]
    assert peak < 1.5 * 2**20


def test_a_cast_needs_no_second_copy():
    wide = np.broadcast_to(np.float32(1), (2048, 1024))
    tree = eqx.filter_eval_shape(lambda: Table({"x": jnp.zeros((2048, 1024), jnp.bfloat16)}))
    tensors = {"leaves.x": Tensor(wide.shape, wide.dtype, lambda: wide)}
    fit = plan(tree, tensors, OWN)
    tracemalloc.start()
    fill(tree, tensors, fit)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.2 * 2 * wide.size


PEAK = """
import sys, jax, eqzoo
from eqzoo.checkpoint import apply, open_checkpoint, Rule
status = lambda name: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
tree = {"a": jax.ShapeDtypeStruct((8, 1024, 1024), "float32"), "b": jax.ShapeDtypeStruct((8, 1024, 1024), "float32")}
jax.numpy.zeros(1).block_until_ready()
before = status("VmRSS")
tensors, _ = open_checkpoint(sys.argv[1])
result = apply.fill(tree, tensors, apply.plan(tree, tensors, (Rule(r"(.*)", "{0}"),)))
print((status("VmHWM") - before) / 2**16)
"""


def test_reading_a_file_takes_little_more_memory_than_its_numbers(tmp_path):
    """The pages of the file must not stay beside the arrays they were copied to."""
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {name: np.ones((8, 1024, 1024), np.float32) for name in "ab"}, {})
    done = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 1 <= float(done.stdout) < 1.3


def test_loading_draws_no_random_number(tmp_path, monkeypatch):
    name = "vit_tiny_patch16_224"
    model, state = eqzoo.create(name, key=jax.random.key(0))
    eqzoo.save(tmp_path / "model.safetensors", model, state)
    draw = _init._scaled_draw

    def refuse(sampler, key, shape, scale):
        assert _init.is_traced(key), "a random number was drawn"
        return draw(sampler, key, shape, scale)

    monkeypatch.setattr(_init, "_scaled_draw", refuse)
    with pytest.raises(AssertionError, match="drawn"):
        eqzoo.create(name, key=jax.random.key(0))
    assert eqx.tree_equal(eqzoo.load(tmp_path / "model.safetensors"), eqx.nn.inference_mode(model))
