"""A batch in parts: the loss, gradient and metrics of the whole, in the memory of a part."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqzoo
from eqzoo.sharding import make_mesh, shard, shard_batch
from eqzoo.train.accumulate import accumulate

MLP = {"image_size": 4, "hidden": (16,), "dropout": 0.5, "num_classes": 4}


def loss_fn(model, state, batch):
    forward = lambda image, key: eqzoo.apply(model, state, image, key=key)
    logits, state = jax.vmap(forward, axis_name="batch", out_axes=(0, None))(batch["image"], batch["key"])
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), batch["label"][:, None], axis=1)[:, 0]
    weight = jnp.sum(batch["weight"])
    total = jnp.sum(losses * batch["weight"])
    loss = total / jnp.where(weight == 0, 1, weight)
    return loss, (state, {"loss": (total, weight), "examples": jnp.array(len(losses))})


WHOLE = eqx.filter_value_and_grad(loss_fn, has_aux=True)
COMPILED = {parts: eqx.filter_jit(accumulate(WHOLE, parts)) for parts in (1, 2, 3, 12)}


def make_batch(size: int, weight=None) -> dict:
    keys = jax.random.split(jax.random.key(7), 3)
    return {
        "image": jax.random.normal(keys[0], (size, 4, 4, 1)),
        "label": jax.random.randint(keys[1], (size,), 0, 4),
        "weight": jnp.ones(size) if weight is None else jnp.asarray(weight, jnp.float32),
        "key": jax.random.split(keys[2], size),
    }


def assert_same(ours, theirs, tolerance=1e-6):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    arrays = [jax.tree.leaves(eqx.filter(tree, eqx.is_array)) for tree in (ours, theirs)]
    for a, b in zip(*arrays, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= tolerance * max(1, np.abs(b).max())


@pytest.mark.parametrize(
    "weight",
    [None, [1, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0], [0.5, 2, 0, 3, 0, 0, 1, 1, 0, 4, 0, 0], [0] * 12],
    ids=["ones", "padded", "weighted", "nothing"],
)
@pytest.mark.parametrize("parts", [2, 3, 12])
def test_it_equals_the_whole_batch(parts, weight):
    model, state = eqzoo.create("mlp", key=jax.random.key(0), **MLP)
    batch = make_batch(12, weight)
    whole = COMPILED[1](model, state, batch)
    in_parts = COMPILED[parts](model, state, batch)
    ((_, (_, ours)), _), ((_, (_, theirs)), grads) = in_parts, whole
    assert int(ours.pop("examples")) == int(theirs.pop("examples")) == 12
    assert weight == [0] * 12 or all(np.any(leaf != 0) for leaf in jax.tree.leaves(grads))
    assert_same(in_parts, whole)


def test_one_part_is_the_function_itself():
    assert accumulate(WHOLE, 1) is WHOLE


def test_the_state_goes_from_part_to_part():
    def loss_fn(model, state, batch):
        return jnp.sum(model * batch["x"]), (0.5 * state + jnp.mean(batch["x"]), {})

    gradient = accumulate(eqx.filter_value_and_grad(loss_fn, has_aux=True), 3)
    batch = {"x": jnp.array([1.0, 2.0, 3.0, 5.0, 6.0, 7.0]), "weight": jnp.ones(6)}  # parts of means 3, 4 and 5
    (_, (state, _)), _ = gradient(jnp.array(1.0), jnp.array(8.0), batch)
    assert float(state) == 0.5 * (0.5 * (0.5 * 8 + 3) + 4) + 5


def test_gradients_in_half_precision_are_summed_in_single():
    """Of 512 equal parts, a sum in bfloat16 would stop at 256 of them."""

    def loss_fn(model, state, batch):
        return jnp.sum(model * batch["x"] * batch["weight"]) / jnp.sum(batch["weight"]), (state, {})

    gradient = accumulate(eqx.filter_value_and_grad(loss_fn, has_aux=True), 512)
    batch = {"x": jnp.ones(512, jnp.bfloat16), "weight": jnp.ones(512)}
    _, grads = gradient(jnp.array(1.0, jnp.bfloat16), None, batch)
    assert grads.dtype == jnp.bfloat16
    assert float(grads) == 1


def test_what_is_frozen_has_no_gradient():
    model, state = eqzoo.create("mlp", key=jax.random.key(0), **MLP)
    part, frozen = eqzoo.tree.trainable(model, "head")
    gradient = eqx.filter_value_and_grad(lambda part, *rest: loss_fn(eqx.combine(part, frozen), *rest), has_aux=True)
    whole, in_parts = (eqx.filter_jit(f)(part, state, make_batch(4))[1] for f in (gradient, accumulate(gradient, 2)))
    assert len(jax.tree.leaves(in_parts)) == 2
    assert_same(in_parts, whole)


def test_each_part_of_a_sharded_batch_is_spread_over_all_devices():
    mesh = make_mesh(data=8)
    model, state = eqzoo.create("mlp", key=jax.random.key(0), **MLP)
    batch = make_batch(32)
    whole = COMPILED[1](model, state, batch)
    keys = batch.pop("key")
    sharded = shard_batch(batch, mesh)
    sharded["key"] = jax.device_put(keys, sharded["weight"].sharding)
    step = eqx.filter_jit(accumulate(WHOLE, 4))
    arguments = (shard(model, mesh), shard(state, mesh), sharded)
    ((loss, (_, metrics)), grads), ((loss_whole, (_, metrics_whole)), grads_whole) = step(*arguments), whole
    assert_same((loss, grads, metrics["loss"]), (loss_whole, grads_whole, metrics_whole["loss"]))
    program = step.lower(*arguments).compile().compiled.as_text()
    assert "all-reduce" in program
    assert not re.findall("all-gather|all-to-all|collective-permute", program)  # no example leaves its device


def test_a_part_takes_a_part_of_the_memory():
    def loss_fn(model, state, batch):
        y = jnp.tanh(jnp.tanh(batch["x"] @ model) @ model.T)
        return jnp.mean(y), (state, {})

    gradient = eqx.filter_value_and_grad(loss_fn, has_aux=True)
    batch = {"x": jnp.ones((1024, 64)), "weight": jnp.ones(1024)}
    model = jnp.ones((64, 256))
    memory = [
        eqx.filter_jit(f).lower(model, None, batch).compile().compiled.memory_analysis().temp_size_in_bytes
        for f in (gradient, accumulate(gradient, 8))
    ]
    assert memory[1] < memory[0] / 2


def test_a_batch_that_does_not_divide_is_an_error():
    model, state = eqzoo.create("mlp", key=jax.random.key(0), **MLP)
    with pytest.raises(ValueError, match="a batch of 10 examples has no 4 parts of one size; choose a batch size"):
        accumulate(WHOLE, 4)(model, state, make_batch(10))
    with pytest.raises(ValueError, match="parts=0 leaves no part to take; pass parts >= 1"):
        accumulate(WHOLE, 0)
