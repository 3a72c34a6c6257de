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
from eqzoo.train import TrainState
from eqzoo.tree import leaves_with_paths
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


def parameters(model: eqx.Module) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))]


def test_donated_steps_train(trained):
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(trained.given) if eqx.is_array(leaf))
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
        *("model", *["state"] * trained.is_stateful, "opt_state", "step", "key")
    ]
    assert "model.head.weight" in named
    assert "opt_state.0.mu.head.weight" in named  # Adam's first moment
    assert all(eqx.is_array(leaf) or leaf is False for leaf in named.values())  # a flag is Equinox's `inference`


def test_norm_and_count_are_those_of_all_its_parts(trained):
    parts = [getattr(trained.third, field) for field in ("model", "state", "opt_state")]
    assert np.isclose(norm(trained.third), np.sqrt(sum(float(norm(part)) ** 2 for part in parts)))
    assert count(trained.third) == sum(map(count, parts)) + 1  # the step counts, the key doesn't


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
