"""What people do with whole models through `eqzoo.tree` works on every family, its stacked layers included."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array

import eqzoo
from eqzoo import nn, tree
from tests.contract.conftest import Subject
from tests.contract.table import assert_close, error, matches


def predict(subject: Subject, model) -> Array:
    return eqx.filter_jit(eqx.filter_vmap(eqzoo.freeze(model, subject.state)))(subject.xs)


def check_decay_mask(subject: Subject, predictions: Array) -> None:
    """One step of AdamW without gradients shrinks the weights of the layers that multiply, and moves nothing else."""
    params = eqx.filter(subject.model, eqx.is_inexact_array)
    optimizer = optax.adamw(0.5, weight_decay=0.5, mask=tree.decay_mask)
    updates = jax.jit(lambda params: optimizer.update(tree.zeros_like(params), optimizer.init(params), params)[0])(
        params
    )
    is_bias = lambda node: isinstance(node, nn.ContinuousBias)  # the layers of which compute one
    biases = [path for path, node in tree.leaves_with_paths(subject.model, is_leaf=is_bias) if is_bias(node)]
    layers = weights_of_layers(subject, nn.CausalConv1d)
    multiplying = {path for path in layers if not path.startswith(tuple(biases))}
    assert multiplying
    for (path, update), leaf in zip(tree.leaves_with_paths(updates), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(update, -0.25 * leaf if path in multiplying else 0 * leaf, rtol=1e-6, err_msg=path)


def weights_of_layers(subject: Subject, *more: type) -> set[str]:
    is_layer = lambda node: isinstance(node, (nn.Linear, nn.Conv2d, nn.Embedding, *more))
    layers = tree.leaves_with_paths(subject.model, is_leaf=is_layer)
    return {f"{path}.weight" for path, node in layers if is_layer(node)}


def grouped_convolutions(subject: Subject) -> set[str]:
    is_layer = lambda node: isinstance(node, nn.Conv2d)
    layers = tree.leaves_with_paths(subject.model, is_leaf=is_layer)
    return {f"{path}.weight" for path, node in layers if is_layer(node) and node.groups > 1}


def check_layer_scales(subject: Subject, predictions: Array) -> None:
    """One at the head, and a power of the decay elsewhere, that rises by one from layer to layer of a stack."""
    params = eqx.filter(subject.model, eqx.is_inexact_array)
    scales = tree.layer_scales(subject.model, 0.5)
    assert max(np.max(scale) for scale in jax.tree.leaves(scales)) == 1
    for path, scale, leaf in zip(tree.paths(params), *map(jax.tree.leaves, (scales, params)), strict=True):
        assert np.broadcast_shapes(np.shape(scale), leaf.shape) == leaf.shape
        powers = -np.log2(np.ravel(scale))
        assert np.array_equal(powers, np.round(powers)), path
        assert np.array_equal(powers, powers[0] - np.arange(len(leaf) if "[*]" in path else 1)), path


def check_add_noise(subject: Subject, predictions: Array) -> None:
    """Of the asked size in every leaf and layer, no two alike."""
    noisy = eqx.filter_jit(tree.add_noise)(subject.model, jax.random.key(0), 0.1)
    params = (jax.device_get(eqx.filter(model, eqx.is_inexact_array)) for model in (noisy, subject.model))
    noise = jax.tree.map(lambda a, b: a - b, *params)
    rows = []
    for path, leaf in tree.leaves_with_paths(noise):
        layers = leaf.reshape(-1, *leaf.shape[1:]) if "[*]" in path else leaf[None]
        rows += [np.asarray(layer).ravel() for layer in layers]
    every = np.concatenate(rows)
    assert abs(every.std() / 0.1 - 1) < 4 / np.sqrt(2 * every.size)
    assert len({row[:2].tobytes() for row in rows}) == len(rows)


def check_summary(subject: Subject, predictions: Array) -> None:
    """Says how many numbers there are, and names the first leaf and the last."""
    text = str(tree.summary(subject.model))
    assert f"{tree.count(subject.model):,}" in text
    arrays = tree.paths(eqx.filter(subject.model, eqx.is_array))
    assert arrays[0] in text
    assert arrays[-1] in text


def check_lora(subject: Subject, predictions: Array) -> None:
    """At first nothing changes; the gradient reaches every adapter; merged is unmerged."""
    grouped = grouped_convolutions(subject)  # which can't have one
    where = lambda path, leaf: path not in grouped and not matches(subject.row.vanishing, path)
    adapted = tree.lora(subject.model, where, rank=2, key=jax.random.key(0))
    assert_close(predict(subject, adapted), predictions, 1e-6)
    adapters, frozen = tree.lora_only(adapted)
    assert tree.count(adapters) < tree.count(subject.model)
    adapters = tree.add_noise(adapters, jax.random.key(1), 0.1)

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(adapters, frozen, state, xs):
        return error(eqx.filter_vmap(eqzoo.freeze(eqx.combine(adapters, frozen), state))(xs))

    gradients = gradient(adapters, frozen, subject.state, subject.xs)
    assert jax.tree.structure(gradients) == jax.tree.structure(adapters)
    for path, leaf in tree.leaves_with_paths(jax.device_get(gradients)):
        assert np.abs(leaf).max() > 0, path
    adapted = eqx.combine(adapters, frozen)
    merged = tree.merge_lora(adapted)
    assert jax.tree.structure(merged) == jax.tree.structure(subject.model)
    outputs = predict(subject, adapted)
    assert jnp.abs(outputs - predictions).max() > 1e-3 * jnp.abs(predictions).max()
    assert_close(predict(subject, merged), outputs, 1e-5)


def check_int8(subject: Subject, predictions: Array) -> None:
    """Every weight within half a step of its channel, a fraction of the bytes, nearly the outputs."""
    layers = weights_of_layers(subject)
    small = tree.quantize(subject.model, lambda path, leaf: path in layers)
    assert tree.nbytes(small) < 0.5 * tree.nbytes(subject.model)  # these are tiny: a scale serves few weights
    rounded = tree.dequantize(small)
    assert jax.tree.structure(rounded) == jax.tree.structure(subject.model)
    for difference in tree.diff(rounded, subject.model):
        assert difference.path in layers
        assert difference.kind == "value"
    before_and_after = map(jax.tree.leaves, jax.device_get((subject.model, rounded)))
    for path, before, after in zip(tree.paths(rounded), *before_and_after, strict=True):
        if path in layers:
            assert np.abs(before - after).max() <= 0.501 * np.abs(before).max() / 127, path
    outputs = predict(subject, small)
    assert_close(outputs, predict(subject, rounded), 1e-5)
    assert_close(outputs, predictions, 0.1)


def check_bfloat16(subject: Subject, predictions: Array) -> None:
    """Half the bytes, computed with in float32."""
    half = tree.cast(subject.model, jnp.bfloat16)
    assert 2 * tree.nbytes(eqx.filter(half, eqx.is_array)) == tree.nbytes(eqx.filter(subject.model, eqx.is_array))
    assert_close(predict(subject, half), predictions, 0.1)


CHECKS = {
    "decay_mask": check_decay_mask,
    "layer_scales": check_layer_scales,
    "add_noise": check_add_noise,
    "summary": check_summary,
    "lora": check_lora,
    "int8": check_int8,
    "bfloat16": check_bfloat16,
}


@pytest.mark.parametrize("tool", CHECKS)
def test_the_toolkit_works_on_every_family(subject, predictions, tool):
    """What each check asserts stands in the function of its name."""
    CHECKS[tool](subject, predictions)
