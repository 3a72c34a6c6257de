"""Low-rank adapters start as PEFT's do and compute what they do."""

from math import sqrt

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch

from eqzoo import nn
from eqzoo.tree import LoRA, lora
from tests.parity import array, assert_close


def _linear(*, bias):
    return torch.nn.Linear(6, 5, bias=bias), nn.Linear(6, 5, use_bias=bias, key=jax.random.key(0)), (7, 6)


def _conv(kernel, **options):
    ours = nn.Conv2d(3, 5, kernel, **options, key=jax.random.key(0))
    return torch.nn.Conv2d(3, 5, kernel, **options), ours, (9, 8, 3)


def _embedding():
    return torch.nn.Embedding(9, 5), nn.Embedding(9, 5, key=jax.random.key(0)), None


CASES = {
    "linear": lambda: _linear(bias=True),
    "linear without bias": lambda: _linear(bias=False),
    "conv": lambda: _conv((3, 2), stride=(2, 1), padding=1),
    "1x1 conv": lambda: _conv(1, stride=2),
    "embedding": _embedding,
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_gradients_and_merged_weights_are_pefts(case):
    theirs, layer, shape = CASES[case]()
    options = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["layer"])
    theirs = peft.inject_adapter_in_model(options, torch.nn.ModuleDict({"layer": theirs}))["layer"]
    names = ("lora_embedding_A", "lora_embedding_B") if case == "embedding" else ("lora_A", "lora_B")
    down, up = (getattr(theirs, name)["default"] for name in names)
    down, up = (factor if case == "embedding" else factor.weight for factor in (down, up))
    for parameter in theirs.parameters():
        parameter.data = torch.randn(parameter.shape)

    matrix = lambda factor: factor[:, :, 0, 0] if factor.ndim == 4 else factor
    layer = eqx.tree_at(lambda layer: layer.weight, layer, array(theirs.base_layer.weight))
    if getattr(layer, "bias", None) is not None:
        layer = eqx.tree_at(lambda layer: layer.bias, layer, array(theirs.base_layer.bias))
    layer = LoRA(layer, rank=3, alpha=5.0, key=jax.random.key(1))
    layer = eqx.tree_at(lambda layer: (layer.down, layer.up), layer, (array(down), matrix(array(up))))

    x = torch.randint(9, (4, 2)) if shape is None else torch.randn(shape)
    channels_first = lambda tensor: tensor.permute(2, 0, 1)[None] if "conv" in case else tensor
    output = theirs(channels_first(x))
    (output**2).sum().backward()
    ours = layer(array(x))
    gradients = eqx.filter_grad(lambda layer: jnp.sum(layer(array(x)) ** 2))(layer)
    assert_close(ours, output[0].permute(1, 2, 0) if "conv" in case else output)
    assert_close(gradients.down, down.grad)
    assert_close(gradients.up, matrix(up.grad))
    theirs.merge()
    assert_close(layer.weight, theirs.base_layer.weight)


def test_adapters_start_where_pefts_do():
    theirs = torch.nn.ModuleDict(
        {"linear": torch.nn.Linear(400, 40), "conv": torch.nn.Conv2d(50, 6, 3), "embedding": torch.nn.Embedding(9, 500)}
    )
    theirs = peft.inject_adapter_in_model(peft.LoraConfig(r=40, target_modules=list(theirs)), theirs)
    keys = jax.random.split(jax.random.key(0), 3)
    ours = {
        "linear": nn.Linear(400, 40, key=keys[0]),
        "conv": nn.Conv2d(50, 6, 3, key=keys[1]),
        "embedding": nn.Embedding(9, 500, key=keys[2]),
    }
    ours = lora(ours, lambda path, leaf: True, rank=40, key=jax.random.key(1))
    for name, layer in ours.items():
        is_table = name == "embedding"
        random, zero = (layer.up, layer.down) if is_table else (layer.down, layer.up)
        upstream = theirs[name].lora_embedding_B["default"] if is_table else theirs[name].lora_A["default"].weight
        assert random.shape == tuple(upstream.shape)
        assert not np.any(zero)
        np.testing.assert_allclose(np.std(random), upstream.detach().numpy().std(), rtol=0.03)
        np.testing.assert_allclose(np.mean(random), 0, atol=0.03 * np.std(random))
    np.testing.assert_allclose(np.abs(ours["linear"].down).max(), 1 / sqrt(400), rtol=0.01)
