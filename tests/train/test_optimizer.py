"""OptimizerOptions: torch's and timm's optimizers, optax's schedules, and Muon that knows what a stack is."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import timm.optim
import torch
from timm.optim.muon import zeropower_via_newtonschulz

import eqzoo
from eqzoo import nn
from eqzoo.train import parse
from eqzoo.train.optimizer import OptimizerOptions, _groups
from eqzoo.train.state import TrainState
from eqzoo.tree import leaves_with_paths, trainable
from tests.parity import assert_close

STEPS = 10
OPTIMIZERS = ("adamw", "sgd", "lion", "muon")


def parameters_of(model):
    return eqx.filter(model, eqx.is_inexact_array)


def draw(tree, seed: int):
    """Random numbers in the shapes of a tree."""
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(treedef, [jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)])


TORCH = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "lion": lambda groups: timm.optim.Lion(groups, lr=0.1, betas=(0.9, 0.99)),
}


@pytest.mark.parametrize("clip_norm", [0.0, 3.0])
@pytest.mark.parametrize("name", TORCH)
def test_steps_are_those_of_torch_with_decay_on_the_matrix_alone(name, clip_norm):
    params = {"W": jax.random.normal(jax.random.key(0), (4, 3)), "b": jnp.ones(4)}
    options = OptimizerOptions(name, learning_rate=0.1, weight_decay=0.3, warmup=0.2, clip_norm=clip_norm)
    optimizer = options.make(params, STEPS)
    opt_state = optimizer.init(params)
    theirs = {key: torch.nn.Parameter(torch.tensor(np.asarray(value))) for key, value in params.items()}
    groups = [{"params": [theirs["W"]], "weight_decay": 0.3}, {"params": [theirs["b"]], "weight_decay": 0.0}]
    upstream = TORCH[name](groups)
    for step in range(STEPS):
        grads = draw(params, step)
        for key, grad in grads.items():
            theirs[key].grad = torch.tensor(np.asarray(grad))
        if clip_norm:
            total = torch.nn.utils.clip_grad_norm_(list(theirs.values()), clip_norm)
            assert step > 0 or total > clip_norm
        for group in upstream.param_groups:
            group["lr"] = 0.1 * (step / 2 if step < 2 else (1 + np.cos(np.pi * (step - 2) / 8)) / 2)
        upstream.step()
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = eqx.apply_updates(params, updates)
    for key, value in params.items():
        assert_close(value, theirs[key])


GIVEN = {
    "adamw": ({"betas": (0.5, 0.7)}, optax.adam(1e-3, 0.5, 0.7)),
    "sgd": ({"momentum": 0.5}, optax.sgd(1e-3, 0.5, nesterov=True)),
    "lion": ({"betas": (0.5, 0.7)}, optax.lion(1e-3, 0.5, 0.7, weight_decay=0.0)),
    "muon": ({"momentum": 0.5}, optax.contrib.muon(1e-3, beta=0.5, consistent_rms=0.2)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_momentum_and_betas_are_those_given(name):
    given, upstream = GIVEN[name]
    params = {"W": jnp.ones((3, 2))}
    ours = OptimizerOptions(name, weight_decay=0.0, clip_norm=0.0, warmup=0.0, schedule="constant", **given)
    optimizers = [ours.make(params, STEPS), upstream]
    states = [each.init(params) for each in optimizers]
    for step in range(3):
        grads = draw(params, step)
        steps = [each.update(grads, state, params) for each, state in zip(optimizers, states, strict=True)]
        (mine, theirs), states = zip(*steps, strict=True)
        assert_close(mine["W"], np.asarray(theirs["W"]))


def test_schedules_rise_and_fall():
    def rates(**options):
        schedule = OptimizerOptions(learning_rate=2.0, **options).learning_rates(10)
        return [float(schedule(step)) for step in range(11)]

    upstream = optax.warmup_cosine_decay_schedule(0.0, 2.0, 3, 10, end_value=0.2)
    np.testing.assert_allclose(rates(warmup=0.3, final=0.1), [float(upstream(step)) for step in range(11)], rtol=1e-5)
    np.testing.assert_allclose(rates(schedule="linear", warmup=0.0), np.linspace(2, 0, 11), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rates(schedule="linear", warmup=0.0, final=0.5), np.linspace(2, 1, 11), rtol=1e-5)
    np.testing.assert_allclose(rates(schedule="constant", warmup=0.2), [0, 1, *[2] * 9], rtol=1e-5)


class Block(eqx.Module):
    linear: nn.Linear
    conv: nn.Conv2d
    norm: nn.LayerNorm

    def __init__(self, *, key):
        self.linear = nn.Linear(5, 7, key=key)
        self.conv = nn.Conv2d(3, 6, 3, key=key)
        self.norm = nn.LayerNorm(5)


STACK = lambda: nn.Stack(lambda key: Block(key=key), 3, key=jax.random.key(0))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_earlier_layers_learn_and_decay_at_a_share_of_the_rate(name):
    model = STACK()
    params = parameters_of(model)
    updates = []
    for layer_decay in (1.0, 0.5):
        optimizer = OptimizerOptions(name, warmup=0.0, layer_decay=layer_decay).make(model, STEPS)
        updates.append(eqx.filter_jit(optimizer.update)(draw(params, 0), optimizer.init(params), params)[0])
    for plain, scaled in zip(*map(jax.tree.leaves, updates), strict=True):
        assert np.all(plain != 0)
        shares = np.reshape([0.25, 0.5, 1.0], (3, *[1] * (plain.ndim - 1)))
        np.testing.assert_allclose(scaled, plain * shares, rtol=1e-5)


def test_muon_updates_each_layer_of_a_stack_as_it_would_alone():
    options = OptimizerOptions("muon", learning_rate=0.1, weight_decay=0.1, clip_norm=0.0, warmup=0.0)

    def trained(params, gradients):
        optimizer = options.make(params, STEPS)
        opt_state, update = optimizer.init(params), eqx.filter_jit(optimizer.update)
        for grads in gradients:
            updates, opt_state = update(grads, opt_state, params)
            params = eqx.apply_updates(params, updates)
        return params

    params = parameters_of(STACK())
    gradients = [draw(params, step) for step in range(3)]
    together = trained(params, gradients)
    for layer in range(3):
        take = lambda stack: jax.tree.map(lambda leaf: leaf[layer], stack.block)
        alone = trained(take(params), map(take, gradients))
        for ours, theirs in zip(jax.tree.leaves(take(together)), jax.tree.leaves(alone), strict=True):
            assert_close(ours, np.asarray(theirs))


def test_muon_makes_a_matrix_orthogonal_and_as_large_as_an_update_of_adam():
    params = {"wide": jnp.ones((4, 9)), "tall": jnp.ones((9, 4)), "conv": jnp.ones((6, 3, 2, 2)), "b": jnp.ones(4)}
    options = OptimizerOptions("muon", 1.0, weight_decay=0.0, clip_norm=0.0, warmup=0.0)
    optimizer = options.make(params, STEPS)
    grads = draw(params, 0)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    for name in ("wide", "tall", "conv"):
        flat = torch.tensor(np.asarray(grads[name])).flatten(1)
        orthogonal = zeropower_via_newtonschulz(flat, 5, [(3.4445, -4.7750, 2.0315)] * 5, dtype=torch.float32)
        expected = -0.2 * max(flat.shape) ** 0.5 * orthogonal
        assert_close(updates[name].reshape(expected.shape), expected)
        assert 0.1 < float(jnp.sqrt(jnp.mean(updates[name] ** 2))) < 0.3
    np.testing.assert_allclose(updates["b"], -jnp.sign(grads["b"]), rtol=1e-4)  # Adam's first step


MATRICES = {
    "vit_b_16": (
        {"image_size": 8, "patch_size": 4, "dim": 16, "depth": 2, "heads": 2, "num_classes": 4},
        {
            *(f"blocks[*].attention.{name}.weight" for name in ("query", "key", "value", "out")),
            *("blocks[*].mlp.fc1.weight", "blocks[*].mlp.fc2.weight"),
        },
    ),
    "resnet18": (
        {"depths": (1, 2), "widths": (4, 8), "num_classes": 4},
        {
            *("stem.conv.conv.weight", "stages.0.first.shortcut.conv.weight", "stages.1.first.shortcut.conv.weight"),
            *(f"stages.{stage}.first.convs.{conv}.conv.weight" for stage in (0, 1) for conv in (0, 1)),
            *(f"stages.1.rest[*].convs.{conv}.conv.weight" for conv in (0, 1)),
        },
    ),
    "gpt2": (
        {"dim": 8, "depth": 2, "heads": 2, "vocab": 11, "context": 8, "tied_head": False},
        {
            *(f"blocks[*].attention.{name}.weight" for name in ("query", "key", "value", "out")),
            *("blocks[*].mlp.fc1.weight", "blocks[*].mlp.fc2.weight"),
        },
    ),
}


@pytest.mark.parametrize("name", MATRICES)
def test_muon_is_for_the_matrices_within_a_model(name):
    options, matrices = MATRICES[name]
    model = eqx.filter_eval_shape(lambda: eqzoo.create(name, key=jax.random.key(0), **options)[0])
    groups = leaves_with_paths(_groups(model))
    assert {path for path, group in groups if group == "matrix"} == matrices


def test_muon_knows_embeddings_and_heads_of_other_trees_by_name():
    names = ("wte", "embedding", "token_embed.weight", "lm_head", "classifier.W", "W", "head_mixer", "b")
    groups = _groups({name: jnp.ones((2, 2)) for name in names})
    assert [name for name in names if groups[name] == "matrix"] == ["W", "head_mixer"]


@pytest.mark.parametrize("kind", [nn.Embedding, eqx.nn.Embedding])
def test_muon_knows_embeddings_by_type(kind):
    assert jax.tree.leaves(_groups({"words": kind(3, 4, key=jax.random.key(0))})) == ["other"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_donated_step_of_a_part_of_a_model_trains_it(name):
    model, state = eqzoo.create("mlp", key=jax.random.key(0), image_size=4, hidden=(8, 8), num_classes=4)
    part, frozen = trainable(model, ("layers.1", "head"))
    learning_rate = 0.3 if name == "sgd" else 0.03
    optimizer = OptimizerOptions(name, learning_rate).make(part, 30)
    train_state = TrainState.create(part, state, optimizer, key=jax.random.key(0), ema=True)
    xs, labels, traces = jax.random.normal(jax.random.key(1), (8, 4, 4, 1)), jnp.arange(8) % 4, []

    @eqx.filter_jit(donate="all-except-first")
    def step(data, train_state):
        traces.append(None)
        frozen, xs, labels = data

        def loss_fn(part):
            logits = jax.vmap(eqx.combine(part, frozen))(xs)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = eqx.filter_value_and_grad(loss_fn)(train_state.model)
        updates, opt_state = optimizer.update(grads, train_state.opt_state, train_state.model)
        model = eqx.apply_updates(train_state.model, updates)
        return train_state.next(model, train_state.state, opt_state, grads, ema_decay=0.5), loss

    losses = []
    for _ in range(30):
        train_state, loss = step((frozen, xs, labels), train_state)
        losses.append(float(loss))
    assert len(traces) == 1
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    "given",
    [
        *({"learning_rate": 0.0}, {"weight_decay": -0.1}, {"layer_decay": 0.0}, {"layer_decay": 1.5}, {"warmup": 1.0}),
        *({"final": 1.5}, {"clip_norm": -1.0}, {"momentum": 1.0}, {"betas": (0.9, 1.0)}, {"warmup": -0.1}),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_an_error_that_names_it(given):
    ((name, value),) = given.items()
    with pytest.raises(ValueError, match=f"^{name}={re.escape(str(value))}: expected .*(0|1)"):
        OptimizerOptions(**given)


def test_a_training_of_no_steps_is_an_error():
    with pytest.raises(ValueError, match="steps=0: a training takes at least one; give it more data or more epochs"):
        OptimizerOptions().make({"W": jnp.ones((2, 2))}, 0)


def test_the_command_line_gives_all_of_them():
    argv = "--optimizer muon --learning-rate 0.02 --betas 0.8 0.95 --momentum 0.9 --schedule linear --layer-decay 0.75"
    expected = OptimizerOptions("muon", 0.02, layer_decay=0.75, schedule="linear", momentum=0.9, betas=(0.8, 0.95))
    assert parse(OptimizerOptions, "Trains.", argv.split()) == expected
