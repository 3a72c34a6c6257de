"""The MLP equals torchvision's `ops.MLP`, outputs and gradients, for every option."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torchvision.ops import MLP as TorchMLP

from eqzoo.checkpoint import Rule
from eqzoo.checkpoint.apply import unfill
from eqzoo.models._family import Family, Upstream
from eqzoo.models.vision.mlp import MLP, SHARDING, VARIANTS, MLPConfig
from tests.parity import assert_close, assert_same_gradients, from_torch, randomise


def rules(config: MLPConfig) -> tuple[Rule, ...]:
    """Upstream is a flat sequence: linear, norm if there is one, activation, dropout; at last the head."""
    stride = 4 if config.norm else 3
    layers = []
    for index in range(len(config.hidden)):
        layers.append(Rule(rf"{index * stride}\.(weight|bias)", f"layers.{index}.linear.{{0}}"))
        layers.append(Rule(rf"{index * stride + 1}\.(weight|bias)", f"layers.{index}.norm.{{0}}"))
    return (*layers, Rule(rf"{len(config.hidden) * stride}\.(weight|bias)", "head.{0}"))


CASES = {
    "plain": ({}, {}),
    "norm": ({"norm": True}, {"norm_layer": partial(torch.nn.LayerNorm, eps=1e-5)}),
    "gelu": ({"activation": "gelu"}, {"activation_layer": torch.nn.GELU}),
    "silu": ({"activation": "silu"}, {"activation_layer": torch.nn.SiLU}),
    "tanh": ({"activation": "tanh"}, {"activation_layer": torch.nn.Tanh}),
    "tanh of gelu": ({"activation": "gelu_tanh"}, {"activation_layer": partial(torch.nn.GELU, approximate="tanh")}),
}


def tiny(**options) -> MLPConfig:
    return MLPConfig(**{"hidden": (11, 7), "image_size": 4, "in_channels": 2, "num_classes": 3, **options})


def family(config: MLPConfig) -> Family:
    return Family(MLP, MLPConfig, VARIANTS, {"torchvision": Upstream(rules(config))}, SHARDING, {})


def outputs(config, upstream):
    model, _ = from_torch((family(config), config), upstream)
    images = np.random.default_rng(0).normal(size=(5, 4, 4, 2)).astype(np.float32)
    return model, jnp.asarray(images), torch.tensor(images.reshape(5, -1))


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_equal_torchvisions(case):
    ours, theirs = CASES[case]
    options = {} if "activation_layer" in theirs else {"inplace": None}
    config, upstream = tiny(**ours), randomise(TorchMLP(32, [11, 7, 3], **theirs, **options), 0)
    model, images, flat = outputs(config, upstream)
    loss = lambda model: jnp.mean(jax.vmap(model)(images) ** 2)
    expected = upstream(flat)
    expected.square().mean().backward()
    assert_close(jax.vmap(model)(images), expected, 1e-5)
    assert_same_gradients(eqx.filter_grad(loss)(model), upstream, rules(config))


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("plain", "norm")])
def test_the_activation_matters(case):
    _, theirs = CASES[case]
    upstream = randomise(TorchMLP(32, [11, 7, 3], **theirs), 0)
    model, images, flat = outputs(tiny(), upstream)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(jax.vmap(model)(images), upstream(flat), 1e-5)


def test_every_variant_has_upstreams_names_shapes_and_number_of_parameters():
    for config in VARIANTS.values():
        size = config.image_size**2 * config.in_channels
        upstream = TorchMLP(size, [*config.hidden, config.num_classes])
        model = eqx.filter_eval_shape(MLP, config, key=jax.random.key(0))
        ours = unfill(
            jax.tree.map(lambda leaf: np.zeros(leaf.shape), eqx.filter(model, lambda x: hasattr(x, "shape"))),
            rules(config),
        )
        assert {name: a.shape for name, a in ours.items()} == {
            name: tuple(a.shape) for name, a in upstream.state_dict().items()
        }


def test_features_are_the_hidden_layers_and_no_head_gives_the_last():
    model = MLP(tiny(num_classes=0), key=jax.random.key(0))
    x = jnp.ones((4, 4, 2))
    first, last = model.features(x)
    assert first.shape == (11,)
    np.testing.assert_array_equal(model(x), last)


def test_dropout_thins_out_the_hidden_layers_in_training_only():
    model = MLP(tiny(hidden=(1000,), dropout=0.25), key=jax.random.key(0))
    x = jnp.ones((4, 4, 2))
    kept = eqx.nn.inference_mode(model).features(x)[-1]
    (dropped,) = model.features(x, key=jax.random.key(1))
    gone = (dropped == 0) & (kept != 0)
    assert 0.2 < jnp.sum(gone) / jnp.sum(kept != 0) < 0.3
    np.testing.assert_allclose(dropped[dropped != 0], kept[dropped != 0] / 0.75, rtol=1e-6)
