"""TrainState: made for any model and optimiser, carried through a donated step, looked at like any tree."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqzoo
from eqzoo.train.state import Skipped, TrainState
from eqzoo.tree import leaves_with_paths, paths, trainable
from eqzoo.tree.diff import diff
from eqzoo.tree.measure import count, norm
from eqzoo.tree.summary import summary

XS = jax.random.normal(jax.random.key(8), (4, 16, 16, 3))
LABELS = jnp.arange(4)
RESNET = {"depths": (1, 1), "widths": (4, 8), "num_classes": 4}
MLP = {"image_size": 16, "in_channels": 3, "hidden": (8,), "dropout": 0.5, "num_classes": 4}


def make(name: str, options: dict, optimizer: optax.GradientTransformation, seed: int = 0) -> TrainState:
    model, state = eqzoo.create(name, key=jax.random.key(0), **options)
    return TrainState.create(model, state, optimizer, key=jax.random.key(seed))


class Step(NamedTuple):
    run: Callable[..., tuple[TrainState, jax.Array]]
    traces: list


def make_step(optimizer: optax.GradientTransformation) -> Step:
    """A training step that donates everything, and a list that grows with each trace."""
    traces = []

    def loss_fn(model, state, xs, labels, key):
        call = lambda x, key: eqzoo.apply(model, state, x, key=key)
        logits, state = jax.vmap(call, axis_name="batch", out_axes=(0, None))(xs, jax.random.split(key, len(xs)))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), state

    @eqx.filter_jit(donate="all")
    def run(train_state, xs, labels):
        traces.append(None)
        model = train_state.model
        key = jax.random.fold_in(train_state.key, train_state.step)
        (loss, state), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(
            model, train_state.state, xs, labels, key
        )
        parameters = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, train_state.opt_state, parameters)
        model = eqx.apply_updates(model, updates)
        return TrainState(model, state, opt_state, train_state.step + 1, train_state.key), loss

    return Step(run, traces)


class Trained(NamedTuple):
    is_stateful: bool
    make: Callable[..., TrainState]
    step: Step
    given: TrainState  # to the first step
    before: list[np.ndarray]  # the model's parameters, before the first step
    first: TrainState  # after it
    third: TrainState
    loss: jax.Array


@pytest.fixture(scope="module", params=[("resnet18", RESNET), ("mlp", MLP)], ids=["resnet", "mlp"])
def trained(request):
    name, options = request.param
    optimizer = optax.adamw(optax.cosine_decay_schedule(1e-2, 10))
    step = make_step(optimizer)
    given = make(name, options, optimizer)
    before = parameters(given.model)
    train_state, _ = step.run(given, XS.copy(), LABELS.copy())
    first = jax.tree.map(lambda leaf: leaf.copy() if eqx.is_array(leaf) else leaf, train_state)
    for _ in range(2):
        train_state, loss = step.run(train_state, XS.copy(), LABELS.copy())
    return Trained(
        name == "resnet18", partial(make, name, options, optimizer), step, given, before, first, train_state, loss
    )


def parameters(model: eqx.Module | tuple) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))]


def test_donated_steps_train(trained):
    given = eqx.tree_at(lambda train_state: train_state.skipped, trained.given, None)  # this step doesn't count them
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given) if eqx.is_array(leaf))
    assert (int(trained.first.step), int(trained.third.step)) == (1, 3)
    assert trained.third.step.dtype == jnp.int32
    assert 0 < float(trained.loss) < np.log(4)
    pairs = zip(trained.before, parameters(trained.third.model), strict=True)
    assert all(np.any(before != after) for before, after in pairs)


def test_structure_shapes_and_dtypes_stay_so_a_second_step_does_not_retrace(trained):
    assert len(trained.step.traces) == 1
    fresh = trained.make()
    assert jax.tree.structure(fresh) == jax.tree.structure(trained.first) == jax.tree.structure(trained.third)
    shapes = lambda tree: [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]
    assert shapes(fresh) == shapes(trained.third)


def test_the_key_alone_decides_what_is_random(trained):
    again, _ = trained.step.run(trained.make(), XS.copy(), LABELS.copy())
    assert eqx.tree_equal(again, trained.first)
    other, _ = trained.step.run(trained.make(seed=1), XS.copy(), LABELS.copy())
    has_dropout = not trained.is_stateful
    assert eqx.tree_equal(other.model, trained.first.model) != has_dropout


def test_paths_and_leaves(trained):
    named = dict(leaves_with_paths(trained.third))
    assert list(dict.fromkeys(path.partition(".")[0] for path in named)) == [
        *("model", *["state"] * trained.is_stateful, "opt_state", "step", "key", "skipped")
    ]
    assert "model.head.weight" in named
    assert "opt_state.0.mu.head.weight" in named  # Adam's first moment
    assert all(eqx.is_array(leaf) or leaf is False for leaf in named.values())  # a flag is Equinox's `inference`


def test_norm_and_count_are_those_of_all_its_parts(trained):
    parts = [getattr(trained.third, field) for field in ("model", "state", "opt_state")]
    assert np.isclose(norm(trained.third), np.sqrt(sum(float(norm(part)) ** 2 for part in parts)))
    assert count(trained.third) == sum(map(count, parts)) + 1 + 3  # the step and what was skipped; the key is no number


def test_summary_and_diff_read_it(trained):
    rows = str(summary(trained.third))
    assert all(path in rows for path in ("model.head.weight", "opt_state.0.nu.head.weight", "step"))
    changed = {difference.path.partition(".")[0] for difference in diff(trained.first, trained.third)}
    assert changed == {"model", "opt_state", "step"} | ({"state"} if trained.is_stateful else set())


def test_an_optimiser_that_starts_with_one_array_in_two_places_can_be_donated():
    optimizer = optax.lbfgs(1e-2, linesearch=None)
    arrays = jax.tree.leaves(optimizer.init(jnp.zeros(3)))
    assert len({id(array) for array in arrays}) < len(arrays)
    train_state = make("mlp", MLP, optimizer)
    train_state, _ = make_step(optimizer).run(train_state, XS.copy(), LABELS.copy())
    assert int(train_state.step) == 1


def test_made_under_jit_and_as_shapes_only():
    make_it = lambda: make("mlp", MLP, optax.adam(1e-3))
    shapes = eqx.filter_eval_shape(make_it)
    assert jax.tree.structure(eqx.filter_jit(make_it)()) == jax.tree.structure(make_it()) == jax.tree.structure(shapes)
    assert isinstance(shapes.opt_state[0].mu.head.weight, jax.ShapeDtypeStruct)


def test_optimises_only_what_has_gradients():
    class Counter(eqx.Module):
        weight: jax.Array
        calls: jax.Array
        name: str

    model = Counter(jnp.ones(3), jnp.zeros((), jnp.int32), "a")
    train_state = TrainState.create(model, eqx.nn.State(None), optax.sgd(1.0, momentum=0.9), key=jax.random.key(0))
    assert [leaf.shape for leaf in jax.tree.leaves(train_state.opt_state)] == [(3,)]


def gradient_of(train_state: TrainState, poison: float) -> eqx.Module:
    """Gradients of ones, the head's weight times `poison`."""
    ones = jax.tree.map(jnp.ones_like, eqx.filter(train_state.model, eqx.is_inexact_array))
    return eqx.tree_at(lambda model: model.head.weight, ones, replace_fn=lambda leaf: leaf * poison)


def make_next(optimizer: optax.GradientTransformation, decay: float | None = None):
    """A donated step whose gradients are ones but for the head's weight, and that returns what it skipped as well."""

    @eqx.filter_jit(donate="all")
    def run(train_state, poison):
        grads = gradient_of(train_state, poison)
        parameters = eqx.filter(train_state.model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, train_state.opt_state, parameters)
        model = eqx.apply_updates(train_state.model, updates)
        state = jax.tree.map(lambda leaf: leaf + 1, train_state.state)
        train_state = train_state.next(model, state, opt_state, grads, ema_decay=decay)
        return train_state, train_state.skipped

    return run


def copied(tree):
    return jax.tree.map(lambda leaf: np.array(leaf) if eqx.is_array(leaf) else leaf, eqx.tree_at(KEY, tree, None))


KEY = lambda train_state: train_state.key


def test_the_average_is_that_of_the_closed_form_for_model_and_state():
    optimizer, decay, steps = optax.sgd(0.1), 0.75, 5
    model, state = eqzoo.create("resnet18", key=jax.random.key(0), **RESNET)
    train_state = TrainState.create(model, state, optimizer, key=jax.random.key(0), ema=True)
    run = make_next(optimizer, decay)
    floats = lambda pair: [
        np.array(leaf, np.float64) for leaf in jax.tree.leaves(eqx.filter(pair, eqx.is_inexact_array))
    ]
    seen = [floats((train_state.model, train_state.state))]
    for _ in range(steps):
        train_state, _ = run(train_state, jnp.ones(()))
        seen.append(parameters((train_state.model, train_state.state)))
    averages = parameters(train_state.averaged)
    assert len(averages) > 10
    for average, first, *rest in zip(averages, *seen, strict=True):
        weights = [(1 - decay) * decay ** (steps - step) for step in range(1, steps + 1)]
        expected = decay**steps * first + sum(weight * value for weight, value in zip(weights, rest, strict=True))
        np.testing.assert_allclose(average, expected, rtol=1e-5, atol=1e-6)
        assert np.any(average != rest[-1])


def test_the_average_evaluates_like_the_model_and_a_decay_of_zero_follows_it():
    train_state = TrainState.create(
        *eqzoo.create("mlp", key=jax.random.key(0), **MLP), optax.sgd(0.1), key=jax.random.key(0), ema=True
    )
    assert diff(train_state.averaged, (train_state.model, train_state.state)) == []
    train_state, _ = make_next(optax.sgd(0.1), 0.0)(train_state, jnp.ones(()))
    assert diff(train_state.averaged, (train_state.model, train_state.state)) == []
    without = make("mlp", MLP, optax.sgd(0.1))
    assert without.averaged == (without.model, without.state)


def test_settings_that_are_numbers_are_not_averaged():
    model = eqx.nn.Sequential([eqx.nn.Linear(2, 2, key=jax.random.key(0)), eqx.nn.Dropout(0.5)])
    train_state = TrainState.create(model, eqx.nn.State(model), optax.sgd(0.1), key=jax.random.key(0), ema=True)
    grads = jax.tree.map(jnp.ones_like, eqx.filter(model, eqx.is_inexact_array))
    train_state = train_state.next(model, train_state.state, train_state.opt_state, grads, ema_decay=0.9)
    assert train_state.averaged[0][1].p is model[1].p


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_step_whose_gradients_are_not_finite_changes_nothing_but_its_counts(bad):
    optimizer = optax.adam(0.1)
    model, state = eqzoo.create("resnet18", key=jax.random.key(0), **RESNET)
    train_state = TrainState.create(model, state, optimizer, key=jax.random.key(0), ema=True)
    names = paths(eqx.filter(model, eqx.is_inexact_array))
    run = make_next(optimizer, 0.5)
    train_state, _ = run(train_state, jnp.ones(()))
    before = copied(train_state)
    for in_a_row in (1, 2):
        train_state, skipped = run(train_state, jnp.array(bad))
        assert {each.path for each in diff(before, copied(train_state))} == {
            *("step", "skipped.total", "skipped.in_a_row"),
            *("skipped.leaf",),
        }
        assert (int(skipped.total), int(skipped.in_a_row)) == (in_a_row, in_a_row)
        assert names[int(skipped.leaf)] == "head.weight"
    assert int(train_state.step) == 3
    train_state, skipped = run(train_state, jnp.ones(()))
    assert (int(skipped.total), int(skipped.in_a_row), names[int(skipped.leaf)]) == (2, 0, "head.weight")
    changed = {each.path.partition(".")[0] for each in diff(before, copied(train_state))}
    assert changed == {"model", "state", "opt_state", "step", "ema", "skipped"}


def test_the_first_leaf_that_is_not_finite_is_named():
    nan, ones = jnp.array([1.0, jnp.nan]), jnp.ones(2)
    leaves = [Skipped.none().next(grads).leaf for grads in ([ones, nan, nan], [nan, ones, ones], [ones, ones, ones])]
    assert list(map(int, leaves)) == [1, 0, -1]


@pytest.mark.parametrize(("dtype", "large"), [("float32", 1e30), ("bfloat16", 1e30), ("float16", 6e4)])
def test_one_bad_number_among_many_is_found_and_large_ones_are_fine(dtype, large):
    grads = jnp.ones((300, 70), dtype)
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        assert all(int(Skipped.none().next(grads.at[row, 69].set(bad)).total) == 1 for row in (0, 171, 299))
    assert int(Skipped.none().next(-large * grads).total) == 0
    assert int(Skipped.none().next([grads, jnp.ones((0, 3))]).total) == 0


def test_what_was_skipped_can_be_read_after_a_step_that_donates_the_state():
    train_state = make("mlp", MLP, optax.sgd(0.1))
    run = make_next(optax.sgd(0.1))
    train_state, first = run(train_state, jnp.array(np.nan))
    run(train_state, jnp.ones(()))
    assert train_state.skipped.total.is_deleted()
    assert (int(first.total), int(first.in_a_row)) == (1, 1)


@pytest.mark.parametrize("average", [False, True])
def test_the_next_state_is_like_the_last_so_a_step_is_traced_once(average):
    optimizer, traces = optax.adam(1e-3), []
    make_it = lambda: TrainState.create(
        *eqzoo.create("mlp", key=jax.random.key(0), **MLP), optimizer, key=jax.random.key(0), ema=average
    )

    @eqx.filter_jit
    def run(train_state):
        traces.append(None)
        kept = (train_state.model, train_state.state, train_state.opt_state)
        return train_state.next(*kept, gradient_of(train_state, 1.0), ema_decay=0.9 if average else None)

    run(run(make_it()))
    assert len(traces) == 1


def test_a_trainable_part_is_carried_with_none_for_what_is_frozen():
    model, state = eqzoo.create("mlp", key=jax.random.key(0), **MLP)
    part, _ = trainable(model, "head")
    before = np.array(model.head.weight)
    optimizer = optax.adam(0.1)
    train_state = TrainState.create(part, state, optimizer, key=jax.random.key(0), ema=True)
    train_state, _ = make_next(optimizer, 0.5)(train_state, jnp.ones(()))
    assert paths(train_state.model) == paths(train_state.averaged[0]) == ["head.weight", "head.bias"]
    assert np.all(before != train_state.model.head.weight)


def test_an_average_without_a_decay_and_a_decay_without_an_average_are_errors():
    plain = make("mlp", MLP, optax.sgd(0.1))
    kept = (plain.model, plain.state, plain.opt_state, gradient_of(plain, 1.0))
    for decay in (0.9, jnp.array(0.9)):
        with pytest.raises(ValueError, match=r"ema_decay=0.\d+ of no average; make one by create\(..., ema=True\)"):
            plain.next(*kept, ema_decay=decay)
    assert plain.next(*kept, ema_decay=0.0).ema is None
    averaged = TrainState.create(plain.model, plain.state, optax.sgd(0.1), key=jax.random.key(0), ema=True)
    with pytest.raises(ValueError, match="an average but no ema_decay; pass ema_decay=0.999"):
        averaged.next(*kept)


def test_gradients_without_a_single_array_are_an_error():
    plain = make("mlp", MLP, optax.sgd(0.1))
    with pytest.raises(ValueError, match="no gradient at all; leave at least one array of the model trainable"):
        plain.next(plain.model, plain.state, plain.opt_state, eqx.filter(plain.model, lambda leaf: False))


def test_more_steps_in_a_row_than_allowed_are_an_error_that_says_where():
    skipped = Skipped.none()
    for _ in range(3):
        skipped = skipped.next({"head": jnp.ones(2), "stem": jnp.array(jnp.inf)})
    skipped.check(["head", "stem"], limit=3, step=12)
    message = "gradients were not finite in 3 steps in a row, the last of them step 12, first in stem; lower"
    with pytest.raises(FloatingPointError, match=message):
        skipped.check(["head", "stem"], limit=2, step=12)
    with pytest.raises(FloatingPointError, match="first in leaf 1"):
        skipped.check([], limit=2, step=12)
    skipped.next({"head": jnp.ones(2)}).check([], limit=0, step=13)
