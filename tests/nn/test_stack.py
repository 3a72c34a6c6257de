"""A stack equals its layers run one by one, in every mode, at a program size that doesn't grow with depth."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from eqzoo import nn

DIM, DEPTH = 6, 5
MODES = {
    "scan": {},
    "remat": {"remat": True},
    "unroll": {"unroll": 2},
    "unrolled": {"unroll": 100},
    "remat_unroll": {"remat": True, "unroll": 3},
}


class Block(eqx.Module):
    """A residual block with everything a layer can have: arrays, a function, dropout, and an optional shift."""

    norm: nn.LayerNorm
    linear: nn.Linear
    dropout: nn.Dropout

    def __init__(self, dim, *, dropout=0.0, key):
        self.norm = nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, dim, key=key)
        self.dropout = nn.Dropout(dropout)

    def __call__(self, x, shift=0.0, *, key=None):
        return x + self.dropout(jnp.tanh(self.linear(self.norm(x))), key=key) + shift


class Normalised(eqx.Module):
    linear: nn.Linear
    norm: nn.BatchNorm

    def __init__(self, dim, *, key):
        self.linear = nn.Linear(dim, dim, key=key)
        self.norm = nn.BatchNorm(dim)

    def __call__(self, x, state, *, key=None):
        y, state = self.norm(self.linear(x), state)
        return x + y, state


def make_stack(depth=DEPTH, dropout=0.0, seed=0):
    stack = nn.Stack(lambda key: Block(DIM, dropout=dropout, key=key), depth, key=jax.random.key(seed))
    noise = jax.random.normal(jax.random.key(9), (depth, DIM))
    return eqx.tree_at(lambda s: s.block.norm.weight, stack, 1 + 0.3 * noise)


def layer(stack, index):
    return jax.tree.map(lambda leaf: leaf[index] if eqx.is_array(leaf) else leaf, stack.block)


def layer_by_layer(stack, x, each=None, key=None):
    keys = nn.split_key(key, stack.depth)
    for index in range(stack.depth):
        shift = () if each is None else (each[index],)
        x = layer(stack, index)(x, *shift, key=keys[index])
    return x


def assert_trees_close(here, there, tolerance=1e-5):
    assert jax.tree.structure(here) == jax.tree.structure(there)
    for left, right in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        assert np.max(np.abs(left - right)) <= tolerance * np.max(np.abs(right))


def inputs():
    return jnp.linspace(-2, 2, 3 * DIM).reshape(3, DIM)


@pytest.mark.parametrize("mode", MODES)
def test_equals_its_layers_run_one_by_one_in_value_and_gradient(mode):
    stack = make_stack(dropout=0.3)
    each, key = np.linspace(-1, 1, DEPTH, dtype=np.float32), jax.random.key(5)

    def run(call, stack, x, each):
        y, pull = eqx.filter_vjp(call, stack, x, each, key)
        return y, pull(jnp.cos(y))[:3]

    def arrays(result):
        y, (stack, x, each) = result
        return y, jax.tree.leaves(eqx.filter(stack.block, eqx.is_array)), x, each

    expected = eqx.filter_jit(run)(layer_by_layer, stack, inputs(), each)
    changed = nn.scan_options(stack, **MODES[mode])
    ours = eqx.filter_jit(run)(lambda stack, x, each, key: stack(x, each=each, key=key), changed, inputs(), each)
    assert len(arrays(ours)[1]) == 4
    assert_trees_close(arrays(ours), arrays(expected))


def test_without_each_or_key():
    stack = make_stack()
    assert_trees_close(stack(inputs()), layer_by_layer(stack, inputs()))


def test_each_layer_starts_from_its_own_key_as_it_would_alone():
    stack = nn.Stack(lambda key: Block(DIM, key=key), DEPTH, key=jax.random.key(0))
    for index, key in enumerate(jax.random.split(jax.random.key(0), DEPTH)):
        assert eqx.tree_equal(layer(stack, index), Block(DIM, key=key))
    assert len(np.unique(stack.block.linear.weight)) == DEPTH * DIM * DIM


def test_layers_draw_different_dropout_masks():
    stack = make_stack(dropout=0.5)
    _, masks = stack.scan(
        lambda block, x, key: (x, block.dropout(jnp.ones(64), key=key)),
        inputs(),
        jax.random.split(jax.random.key(0), DEPTH),
    )
    assert len({tuple(mask) for mask in np.asarray(masks)}) == DEPTH
    # and through the call: five layers with one mask between them would leave some channels untouched
    ones = eqx.tree_at(
        lambda s: (s.block.linear.weight, s.block.linear.bias),
        stack,
        (jnp.zeros((DEPTH, DIM, DIM)), jnp.full((DEPTH, DIM), 10.0)),
    )
    kept = np.round(np.asarray(ones(jnp.zeros((50, DIM)), key=jax.random.key(1))) / 2)
    assert set(np.unique(kept)) == set(range(DEPTH + 1))


def test_scan_hands_every_layer_its_input_and_stacks_the_outputs():
    stack = make_stack()
    carry, outputs = stack.scan(
        lambda block, x, scale: (block(x), scale * jnp.mean(x)), inputs(), jnp.arange(DEPTH * 1.0)
    )
    assert outputs.shape == (DEPTH,)
    x = inputs()
    for index in range(DEPTH):
        np.testing.assert_allclose(outputs[index], index * np.mean(x), rtol=1e-5, atol=1e-6)
        x = layer(stack, index)(x)
    assert_trees_close(carry, x)


@pytest.mark.parametrize("mode", MODES)
def test_with_state_keeps_each_layers_running_statistics(mode):
    def make(key):
        return nn.Stack(lambda key: Normalised(DIM, key=key), 3, key=key)

    stack, state = eqx.nn.make_with_state(make)(jax.random.key(0))
    changed = nn.scan_options(stack, **MODES[mode])
    batch = jax.random.normal(jax.random.key(1), (8, DIM)) * 3 + 1
    mapped = {"axis_name": "batch", "in_axes": (0, None), "out_axes": (0, None)}

    @jax.jit
    def train(x, state):
        y, pull, state = jax.vjp(lambda x: jax.vmap(changed.with_state, **mapped)(x, state), x, has_aux=True)
        return y, pull(jnp.cos(y))[0], state

    y, dx, after = train(batch, state)
    running = after.get(stack.block.norm.running)
    assert running.count.tolist() == [1, 1, 1]

    def alone(x, index):
        block, old = eqx.nn.make_with_state(lambda: Normalised(DIM, key=jax.random.key(2)))()
        block = eqx.tree_at(lambda b: b.linear, block, layer(stack, index).linear)
        x, new = jax.vmap(block, **mapped)(x, old)
        return x, new.get(block.norm.running)

    x, statistics = batch, []
    for index in range(3):
        x, new = alone(x, index)
        statistics.append(new)
    assert_trees_close(y, x)
    assert_trees_close(running, jax.tree.map(lambda *leaves: jnp.stack(leaves), *statistics))
    gradient = jax.vjp(lambda x: alone(alone(alone(x, 0)[0], 1)[0], 2)[0], batch)[1](jnp.cos(y))[0]
    assert_trees_close(dx, gradient, 1e-4)

    _, twice = jax.vmap(changed.with_state, **mapped)(batch, after)
    assert twice.get(stack.block.norm.running).count.tolist() == [2, 2, 2]
    inference = eqx.nn.inference_mode(changed)
    y, same = inference.with_state(batch[0], twice)
    assert y.shape == (DIM,)
    assert same.get(stack.block.norm.running).count.tolist() == [2, 2, 2]


class TwoStacks(eqx.Module):
    """A model with stacks inside a stack, beside another, and leaves that aren't arrays."""

    first: nn.Stack
    rest: dict
    name: str
    function: object

    def __init__(self, key):
        self.first = nn.Stack(lambda key: Nested(key), 2, key=key)
        self.rest = {"second": [make_stack(4)], "nothing": None}
        self.name = "two"
        self.function = jnp.tanh

    def __call__(self, x):
        return self.rest["second"][0](self.function(self.first(x)))


class Nested(eqx.Module):
    inner: nn.Stack

    def __init__(self, key):
        self.inner = nn.Stack(lambda key: Block(DIM, key=key), 3, key=key)

    def __call__(self, x, *, key=None):
        return self.inner(x, key=key)


def test_scan_options_reach_every_stack_and_nothing_else():
    model = TwoStacks(jax.random.key(0))
    changed = nn.scan_options(model, remat=True, unroll=3)
    stacks = (changed.first, changed.first.block.inner, changed.rest["second"][0])
    assert [(type(s), s.depth, s.remat, s.unroll) for s in stacks] == [
        (nn.Stack, d, True, u) for d, u in ((2, 2), (3, 3), (4, 3))
    ]
    back = nn.scan_options(changed, remat=False, unroll=1)
    assert jax.tree.structure(back) == jax.tree.structure(model) != jax.tree.structure(changed)
    assert all(left is right for left, right in zip(jax.tree.leaves(back), jax.tree.leaves(model), strict=True))
    assert not model.first.remat, "the original is as it was"
    assert nn.scan_options(changed, unroll=1).first.remat, "an option not given stays"
    assert nn.scan_options(changed, remat=False).first.unroll == 2
    assert_trees_close(eqx.filter_jit(changed)(inputs()), eqx.filter_jit(model)(inputs()))


def test_nested_stacks_equal_their_layers():
    model = TwoStacks(jax.random.key(0))
    x = inputs()
    for index in range(2):
        x = layer_by_layer(layer(model.first, index).inner, x)
    np.testing.assert_allclose(model.first(inputs()), x, rtol=1e-5, atol=1e-6)


def test_options_are_not_leaves():
    stack = make_stack()
    leaves = jax.tree.leaves(eqx.filter(stack, lambda leaf: not isinstance(leaf, bool)))
    assert all(eqx.is_inexact_array(leaf) and leaf.shape[0] == DEPTH for leaf in leaves)
    assert len(leaves) == 4
    zeros = jax.tree.map(jnp.zeros_like, eqx.filter(stack, eqx.is_inexact_array))
    assert eqx.apply_updates(stack, zeros).depth == DEPTH


def test_depth_one_and_depth_zero():
    stack = make_stack(1)
    assert_trees_close(stack(inputs()), layer(stack, 0)(inputs()))
    with pytest.raises(ValueError, match="Stack: depth=0 leaves no block to run; pass depth >= 1"):
        make_stack(0)


def test_an_ensemble_of_stacks_equals_its_members():
    keys = jax.random.split(jax.random.key(0), 3)

    def make(key):
        return nn.Stack(lambda key: Block(DIM, key=key), DEPTH, key=key)

    ensemble = eqx.filter_vmap(make)(keys)
    outputs = eqx.filter_vmap(lambda stack, x: stack(x), in_axes=(eqx.if_array(0), None))(ensemble, inputs())
    for key, output in zip(keys, outputs, strict=True):
        assert_trees_close(output, make(key)(inputs()))


@pytest.mark.parametrize("mode", MODES)
def test_traces_its_block_once_and_compiles_once(mode):
    traced = []

    class Counted(Block):
        def __call__(self, x, *, key=None):
            traced.append(x.shape)
            return super().__call__(x, key=key)

    stack = nn.Stack(lambda key: Counted(DIM, key=key), DEPTH, key=jax.random.key(0))
    run = eqx.filter_jit(lambda stack, x: stack(x))
    for _ in range(3):
        run(nn.scan_options(stack, **MODES[mode]), inputs())
    assert len(traced) == 1


@pytest.mark.parametrize("remat", [False, True])
def test_bfloat16(remat):
    stack = make_stack()
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf, stack)
    x = inputs().astype(jnp.bfloat16)
    y, gradient = eqx.filter_value_and_grad(lambda s: jnp.sum(s(x).astype(jnp.float32)))(
        nn.scan_options(half, remat=remat)
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.bfloat16)}
    assert half(x).dtype == jnp.bfloat16
    np.testing.assert_allclose(half(x).astype(jnp.float32), stack(inputs()), atol=0.1)
    assert jnp.isfinite(y)


def equations(jaxpr):
    """All equations, those of inner programs included."""
    inner = [sub for equation in jaxpr.eqns for sub in jaxprs_in_params(equation.params)]
    return len(jaxpr.eqns) + sum(equations(getattr(sub, "jaxpr", sub)) for sub in inner)


@pytest.mark.parametrize("remat", [False, True])
def test_the_gradients_program_does_not_grow_with_depth(remat):
    def count(depth):
        arrays, static = eqx.partition(nn.scan_options(make_stack(depth), remat=remat), eqx.is_array)
        return equations(jax.make_jaxpr(jax.grad(lambda a: jnp.sum(eqx.combine(a, static)(inputs()))))(arrays).jaxpr)

    assert count(48) == count(6)


@pytest.mark.parametrize(("remat", "kept"), [(False, 2), (True, 1)])
@pytest.mark.parametrize("block", ["matmul", "convolution"])
def test_the_backward_pass_keeps_a_layers_input_and_products_only(block, remat, kept):
    """Of several values of one size in each layer: its input, and unless `remat`, what its product gave."""

    class Squared(eqx.Module):
        layer: nn.Linear | nn.Conv2d

        def __call__(self, x, *, key=None):
            return jnp.sin(jnp.exp(self.layer(jnp.tanh(jnp.cos(x))))) ** 2

    make = {
        "matmul": lambda key: Squared(nn.Linear(DIM, DIM, key=key)),
        "convolution": lambda key: Squared(nn.Conv2d(DIM, DIM, 3, padding=1, key=key)),
    }[block]
    stack = nn.scan_options(nn.Stack(make, DEPTH, key=jax.random.key(0)), remat=remat)
    x = jnp.ones({"matmul": (97, DIM), "convolution": (11, 13, DIM)}[block])
    arrays, static = eqx.partition(stack, eqx.is_array)
    backward = jax.eval_shape(
        lambda arrays, x: jax.vjp(lambda a, x: eqx.combine(a, static)(x), arrays, x)[1], arrays, x
    )
    sizes = [leaf.size for leaf in jax.tree.leaves(backward)]
    assert sizes.count(DEPTH * x.size) == kept


@pytest.mark.parametrize(("remat", "drawn"), [(False, 1), (True, 2)])
def test_the_backward_pass_draws_no_branch_again(remat, drawn):
    class Dropping(eqx.Module):
        linear: nn.Linear
        drop_path: nn.DropPath

        def __call__(self, x, *, key):
            return x + self.drop_path(jnp.tanh(self.linear(x)), key=key)

    make = lambda key: Dropping(nn.Linear(DIM, DIM, key=key), nn.DropPath(0.5))
    stack = nn.scan_options(nn.Stack(make, DEPTH, key=jax.random.key(0)), remat=remat)
    gradient = jax.grad(lambda x, key: jnp.sum(stack(x, key=key)))
    program = str(jax.make_jaxpr(gradient)(jnp.ones(DIM), jax.random.key(1)))
    assert program.count("random_bits") == drawn


@pytest.mark.parametrize(("remat", "means"), [(False, 5), (True, 7)])
def test_the_backward_pass_takes_no_batch_statistics_again(remat, means):
    """Two sums over the batch forward, three backward."""

    class Normed(eqx.Module):
        linear: nn.Linear
        norm: nn.BatchNorm

        def __call__(self, x, state, *, key):
            return self.norm(self.linear(x), state)

    make = lambda key: Normed(nn.Linear(DIM, DIM, key=key), nn.BatchNorm(DIM))
    stack, state = eqx.nn.make_with_state(nn.Stack)(make, DEPTH, key=jax.random.key(0))
    run = jax.vmap(
        nn.scan_options(stack, remat=remat).with_state, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
    )
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(run(x, state)[0] ** 3)))
    program = gradient.lower(jnp.ones((3, DIM))).as_text()
    assert len(re.findall(r"stablehlo.reduce\(.*dimensions = \[0\] : \(tensor<3x", program)) == means


class Shifted(eqx.Module):
    """A block with running statistics that may change the width, and is told a number."""

    linear: nn.Linear
    norm: nn.BatchNorm

    def __init__(self, dim, out, *, key):
        self.linear = nn.Linear(dim, out, key=key)
        self.norm = nn.BatchNorm(out)

    def __call__(self, x, state, shift=0.0, *, key=None):
        y, state = self.norm(self.linear(x), state)
        return y + shift, state


class Widening(eqx.Module):
    linear: nn.Linear

    def __init__(self, dim, out, *, key):
        self.linear = nn.Linear(dim, out, key=key)

    def __call__(self, x, shift=0.0, *, key=None):
        return self.linear(x) + shift


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_stage_is_its_first_block_and_a_stack_of_the_rest(depth):
    stage = nn.Stage(
        lambda key: Widening(4, DIM, key=key), lambda key: Block(DIM, key=key), depth, key=jax.random.key(0)
    )
    x = jnp.linspace(-1, 1, 8).reshape(2, 4)
    y = stage(x)
    expected = stage.first(x)
    assert (stage.rest is None) == (depth == 1)
    assert_trees_close(y, expected if stage.rest is None else layer_by_layer(stage.rest, expected))


@pytest.mark.parametrize("depth", [1, 3])
def test_a_stage_with_state_tells_each_block_its_own(depth):
    make = lambda: nn.Stage(
        lambda key: Shifted(4, DIM, key=key), lambda key: Shifted(DIM, DIM, key=key), depth, key=jax.random.key(0)
    )
    stage, state = eqx.nn.make_with_state(make)()
    each = jnp.arange(depth, dtype=jnp.float32)
    batch = jax.random.normal(jax.random.key(1), (8, 4))
    mapped = {"axis_name": "batch", "in_axes": (0, None), "out_axes": (0, None)}
    y, after = jax.vmap(lambda x, state: stage.with_state(x, state, each=each), **mapped)(batch, state)

    blocks = [stage.first, *(layer(stage.rest, index) for index in range(depth - 1))]
    expected = [batch]
    for shift, block in enumerate(blocks):
        hidden = jax.vmap(block.linear)(expected[-1])
        expected.append((hidden - hidden.mean(0)) / jnp.sqrt(hidden.var(0) + 1e-5) + shift)
    assert_trees_close(y, expected[-1], 1e-4)
    ends, _ = jax.vmap(lambda x, state: stage.first_and_last(x, state, each=each), **mapped)(batch, state)
    assert_trees_close(ends, (expected[1], expected[-1]), 1e-4)
    assert after.get(stage.first.norm.running).count == 1
