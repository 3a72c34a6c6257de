"""Inception v3 is torchvision's and timm's, with and without auxiliary head: names, shapes and maps; outputs,
gradients and a training step."""

import copy
import importlib
from dataclasses import replace
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import timm
import torch
import torchvision
from torch import nn
from torchvision.models import inception

import eqzoo
from eqzoo import freeze
from eqzoo._model import _merge
from eqzoo.checkpoint import CheckpointError, unfill
from eqzoo.models.vision._inception_v3_upstream import TIMM
from eqzoo.models.vision.inception_v3 import FAMILY, VARIANTS, InceptionV3, InceptionV3Config
from tests.parity import (
    assert_close,
    assert_names_and_shapes,
    assert_same_gradients,
    assert_same_results,
    from_torch,
    in_double_precision,
    mean_square,
    narrowed,
    number_of_parameters,
    randomise,
)

BLOCKS = [inception.InceptionA, inception.InceptionB, inception.InceptionC, inception.InceptionD, inception.InceptionE]
KNOWN = {
    *("Inception3", "InceptionV3", "BasicConv2d", "ConvNormAct", "Conv2d", "BatchNorm2d", "BatchNormAct2d", "ReLU"),
    *("InceptionA", "InceptionB", "InceptionC", "InceptionD", "InceptionE", "InceptionAux", "MaxPool2d", "Identity"),
    *("AdaptiveAvgPool2d", "SelectAdaptivePool2d", "FastAdaptiveAvgPool", "Flatten", "Dropout", "Linear"),
}
CONFIG = InceptionV3Config(width=1 / 16, num_classes=5)


def assert_same_modules(config: InceptionV3Config, upstream: nn.Module) -> None:
    assert {type(module).__name__ for module in upstream.modules()} <= KNOWN
    assert {module.eps for module in upstream.modules() if isinstance(module, nn.BatchNorm2d)} == {1e-3}
    assert {module.p for module in upstream.modules() if isinstance(module, nn.Dropout)} <= {config.dropout}
    assert_names_and_shapes((FAMILY, config), upstream.state_dict())


@pytest.mark.parametrize("aux_heads", [False, True])
def test_timms_variant_has_the_same_names_shapes_and_maps(aux_heads):
    config = replace(VARIANTS["timm/inception_v3"], aux_heads=aux_heads)
    with torch.device("meta"):
        upstream = timm.create_model("inception_v3", aux_logits=aux_heads).eval()
    assert_same_modules(config, upstream)
    theirs = upstream.forward_intermediates(torch.empty(1, 3, 112, 155, device="meta"), intermediates_only=True)
    make = lambda: eqx.nn.make_with_state(InceptionV3)(config, key=jax.random.key(0))
    ours = eqx.filter_eval_shape(lambda: freeze(*make()).features(jnp.zeros((112, 155, 3))))
    assert [a.shape for a in ours] == [(*a.shape[2:], a.shape[1]) for a in theirs]


@pytest.mark.parametrize("aux_heads", [False, True])
def test_torchvisions_variant_has_the_same_names_shapes_and_parameters(aux_heads):
    full = VARIANTS["torchvision/inception_v3"]
    config = replace(full, aux_heads=aux_heads)
    with torch.device("meta"):
        upstream = torchvision.models.inception_v3(init_weights=False, aux_logits=aux_heads)
    assert_same_modules(config, upstream)
    (weights,) = torchvision.models.get_model_weights("inception_v3")
    assert (weights.meta["num_params"] == number_of_parameters(FAMILY, config)) == (config == full)
    assert weights.meta["min_size"] == (75, 75)


def tiny_torchvision(config: InceptionV3Config) -> nn.Module:
    """With a sixteenth of its widths; in training it returns what its head does."""
    conv = narrowed(inception.BasicConv2d, 16)
    blocks = [conv, *(partial(block, conv_block=conv) for block in (*BLOCKS, inception.InceptionAux))]
    with torch.device("meta"):
        upstream = inception.Inception3(
            config.num_classes, config.aux_heads, config.transform_input, blocks, init_weights=False, dropout=0.0
        )
        upstream.fc = nn.Linear(128, config.num_classes)
        if config.aux_heads:
            upstream.AuxLogits.fc = nn.Linear(48, config.num_classes)
    upstream.eager_outputs = lambda logits, auxiliary: logits
    return randomise(upstream.to_empty(device="cpu"), 0)


@pytest.fixture
def tiny_timm(monkeypatch) -> nn.Module:
    module = importlib.import_module("timm.models.inception_v3")  # of whose name timm.models has a function too
    monkeypatch.setattr(module, "ConvNormAct", narrowed(module.ConvNormAct, 16))
    with torch.device("meta"):
        upstream = module.InceptionV3(num_classes=5)
        upstream.fc = nn.Linear(128, 5)
    return randomise(upstream.to_empty(device="cpu"), 0)


def images(height: int = 83, width: int = 94) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(4, height, width, 3)).astype(np.float32)


def test_timms_outputs_and_gradients(tiny_timm):
    assert_same_results((FAMILY, CONFIG), tiny_timm, images(), TIMM)


def test_timms_training_step(tiny_timm):
    """In float64: through 94 batch norms and ReLUs, torch's own gradients in float32 are off by a tenth."""
    model, state = from_torch((FAMILY, CONFIG), tiny_timm)
    upstream, x = tiny_timm.double().train(), images(155, 171)
    theirs = upstream(torch.tensor(x).double().permute(0, 3, 1, 2))
    theirs.square().mean().backward()
    with jax.enable_x64(True):
        wide = lambda leaf: leaf.astype(jnp.float64) if eqx.is_inexact_array(leaf) else leaf
        model, state = jax.tree.map(wide, (model, state))
        (_, (outputs, state)), gradients = mean_square(model, state, jnp.asarray(x, jnp.float64))
        assert_close(outputs, theirs, 1e-9)
        assert_same_gradients(gradients, upstream, TIMM, 1e-9)
        after = unfill(_merge(model, state), TIMM)
    for name, buffer in upstream.named_buffers():
        assert_close(after[name], buffer, 1e-9)


def test_torchvisions_outputs_gradients_and_running_statistics():
    config = replace(CONFIG, transform_input=True)
    assert_same_results((FAMILY, config), tiny_torchvision(config), images(), TIMM)


@eqx.filter_jit
def all_logits(model, state, xs):
    call = lambda x: model.logits_with_auxiliary(x, jax.tree.map(lambda leaf: leaf, state))
    return jax.vmap(call, axis_name="batch", out_axes=(0, None))(xs)


def test_auxiliary_logits_and_running_statistics_are_torchvisions():
    """In training; in inference mode there is only the head, and any image size is taken again.

    In double precision: the last batch norm of the auxiliary head has few values a channel.
    """
    config = replace(CONFIG, aux_heads=True)
    upstream = tiny_torchvision(config).train()
    del upstream.eager_outputs
    x = images(347, 350)
    model, state = from_torch((FAMILY, config), upstream)
    with jax.enable_x64(True):
        logits, after = all_logits(*in_double_precision((model, state)), jnp.asarray(x, np.float64))
    exact = copy.deepcopy(upstream).double()
    theirs = exact(torch.tensor(x, dtype=torch.float64).permute(0, 3, 1, 2))
    for ours, there in zip(logits, (theirs.logits, theirs.aux_logits), strict=True):
        assert_close(ours, there, 1e-4)
    statistics = unfill(_merge(model, after), TIMM)
    for name, buffer in exact.named_buffers():
        assert_close(statistics[name], buffer, 1e-5)
    (only,), same = all_logits(eqx.nn.inference_mode(model), state, jnp.asarray(images()))
    assert_close(only, upstream.eval()(torch.tensor(images()).permute(0, 3, 1, 2)), 1e-4)
    assert eqx.tree_equal(state, same)


def test_a_file_with_auxiliary_head_fits_a_model_without():
    upstream = tiny_torchvision(replace(CONFIG, aux_heads=True))
    outputs = eqx.filter_jit(eqx.filter_vmap(freeze(*from_torch((FAMILY, CONFIG), upstream))))(jnp.asarray(images()))
    assert_close(outputs, upstream.eval()(torch.tensor(images()).permute(0, 3, 1, 2)), 1e-4)
    with pytest.raises(CheckpointError, match=r"AuxLogits\.fc\.weight"):
        from_torch((FAMILY, replace(CONFIG, aux_heads=True)), tiny_torchvision(CONFIG))


def test_timms_folders_load(tmp_path):
    """`inception_v3.tv_in1k` has the auxiliary head's weights although timm's model leaves them out."""
    pair = eqx.nn.make_with_state(InceptionV3)(VARIANTS["timm/inception_v3"], key=jax.random.key(0))
    eqzoo.export(tmp_path / "x", *pair, format="timm")
    upstream = timm.create_model(f"local-dir:{tmp_path / 'x'}", pretrained=True)
    tensors = {name: torch.tensor(tensor) for name, tensor in unfill(_merge(*pair), TIMM).items()}
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in upstream.state_dict().items())
    (tmp_path / "x" / "model.safetensors").unlink()
    with torch.device("meta"):
        aux = timm.create_model("inception_v3", aux_logits=True).AuxLogits.to_empty(device="cpu").state_dict()
    torch.save(tensors | {f"AuxLogits.{name}": tensor for name, tensor in aux.items()}, tmp_path / "x" / "model.pth")
    assert eqx.tree_equal(eqzoo.load(tmp_path / "x", trainable=True), pair)
    model, _ = eqzoo.load(tmp_path / "x", num_classes=7, in_channels=1, trainable=True)
    assert model.head.weight.shape == (7, 2048)


@pytest.mark.parametrize(
    "changes",
    [
        {"pool_widths": (32, 64, 32)},
        {"pool_widths": (32, 64)},
        {"widths_7x7": (128, 160, 192, 192)},
        {"wide_blocks": 1},
        {"width": 1 / 8},
        {"in_channels": 1},
        {"num_classes": 0},
    ],
    ids=str,
)
def test_every_option_changes_what_fits(changes):
    with pytest.raises(CheckpointError, match="does not fit"):
        from_torch((FAMILY, replace(CONFIG, **changes)), tiny_torchvision(CONFIG))


def test_transforming_the_input_is_noticed():
    upstream = tiny_torchvision(CONFIG)
    with pytest.raises(AssertionError, match="relative error"):
        assert_same_results((FAMILY, replace(CONFIG, transform_input=True)), upstream, images(), TIMM)


def test_the_smallest_images():
    """Without auxiliary head as torchvision states it; with it what it takes to have one whole window."""
    config = replace(CONFIG, aux_heads=True)

    def shapes(size: int, *, training: bool):
        def logits():
            model, state = eqx.nn.make_with_state(InceptionV3)(config, key=jax.random.key(0))
            return all_logits(eqx.nn.inference_mode(model, not training), state, jnp.zeros((2, size, size, 3)))[0]

        return eqx.filter_eval_shape(logits)

    assert [each.shape for each in shapes(75, training=False)] == [(2, 5)]
    with pytest.raises(ValueError, match="an image of 74 x 74 is smaller .*; enlarge it to 75 x 75 or more"):
        shapes(74, training=False)
    assert [each.shape for each in shapes(299, training=True)] == [(2, 5), (2, 5)]
    with pytest.raises(ValueError, match="on an image of 298 x 298; enlarge it to 299 x 299 or more, or set aux"):
        shapes(298, training=True)


def test_initial_weights_are_spread_as_upstream():
    pair = eqx.nn.make_with_state(InceptionV3)(VARIANTS["torchvision/inception_v3"], key=jax.random.key(0))
    for name, weight in unfill(_merge(*pair), TIMM).items():
        if name.endswith(("conv.weight", "fc.weight")):
            std = 0.001 if name == "AuxLogits.fc.weight" else 0.1
            assert abs(weight.std() / std - 1) < 5 / np.sqrt(weight.size), name


def test_no_width_is_refused():
    with pytest.raises(ValueError, match=r"width=0\.0 leaves no channels; pass a positive factor"):
        InceptionV3Config(width=0.0)
