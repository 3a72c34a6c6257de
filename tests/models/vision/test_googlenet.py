"""GoogLeNet is torchvision's, with and without auxiliary heads: names, shapes and parameters; outputs, gradients and a
training step of all heads."""

from dataclasses import replace
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torchvision
from torch import nn
from torchvision.models.googlenet import BasicConv2d, GoogLeNet, Inception, InceptionAux

import eqzoo
from eqzoo import freeze
from eqzoo._load import match_tensors
from eqzoo._model import _merge, _skeleton
from eqzoo._save import _stored
from eqzoo.checkpoint import CheckpointError, unfill
from eqzoo.models.vision.googlenet import FAMILY, TORCHVISION, VARIANTS, GoogLeNetConfig
from eqzoo.models.vision.googlenet import GoogLeNet as Ours
from tests.parity import (
    assert_close,
    assert_names_and_shapes,
    assert_same_gradients,
    assert_same_results,
    from_torch,
    narrowed,
    number_of_parameters,
    randomise,
)

KNOWN = {
    *("GoogLeNet", "BasicConv2d", "Conv2d", "BatchNorm2d", "Inception", "InceptionAux", "Sequential", "MaxPool2d"),
    *("AdaptiveAvgPool2d", "Dropout", "Linear"),
}
FULL = VARIANTS["googlenet"]
CONFIG = GoogLeNetConfig(
    stem=tuple(width // 8 for width in FULL.stem),
    blocks=tuple(tuple(tuple(width // 8 for width in block) for block in stage) for stage in FULL.blocks),
    aux=(16, 24),
    aux_heads=True,
    transform_input=False,
    dropout=0.0,
    aux_dropout=0.0,
    num_classes=5,
)


@pytest.mark.parametrize("aux_heads", [False, True])
def test_the_variant_has_the_same_names_shapes_and_parameters(aux_heads):
    with torch.device("meta"):
        upstream = torchvision.models.googlenet(aux_logits=aux_heads, init_weights=False)
    config = replace(FULL, aux_heads=aux_heads)
    assert {type(module).__name__ for module in upstream.modules()} <= KNOWN
    rates = {module.p for module in upstream.modules() if isinstance(module, nn.Dropout)}
    assert rates == ({config.dropout, config.aux_dropout} if aux_heads else {config.dropout})
    assert {module.eps for module in upstream.modules() if isinstance(module, nn.BatchNorm2d)} == {1e-3}
    assert_names_and_shapes((FAMILY, config), upstream.state_dict())
    (weights,) = torchvision.models.get_model_weights("googlenet")
    assert (weights.meta["num_params"] == number_of_parameters(FAMILY, config)) == (config == FULL)


def tiny(config: GoogLeNetConfig = CONFIG) -> nn.Module:
    """torchvision's model with an eighth of its widths; in training it returns what its head does."""
    conv = narrowed(BasicConv2d, 8)
    blocks = [conv, partial(Inception, conv_block=conv), partial(InceptionAux, conv_block=conv)]
    with torch.device("meta"):
        upstream = GoogLeNet(
            config.num_classes, config.aux_heads, config.transform_input, False, blocks, dropout=0.0, dropout_aux=0.0
        )
        upstream.fc = nn.Linear(128, config.num_classes)
        for aux in (upstream.aux1, upstream.aux2) if config.aux_heads else ():
            aux.fc1, aux.fc2 = nn.Linear(256, 24), nn.Linear(24, config.num_classes)
    upstream.eager_outputs = lambda logits, *auxiliary: logits
    return randomise(upstream.to_empty(device="cpu"), 0)


def images(height: int = 66, width: int = 79) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(4, height, width, 3)).astype(np.float32)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("transform_input", [False, True], ids=["plain", "transformed"])
def test_outputs_gradients_and_running_statistics(training, transform_input):
    """Those of the auxiliary heads too, and in training only."""
    config = replace(CONFIG, transform_input=transform_input)
    assert_same_results((FAMILY, config), tiny(config), images(), TORCHVISION, training=training)


@eqx.filter_jit
def all_logits(model, state, xs):
    call = lambda x: model.logits_with_auxiliary(x, jax.tree.map(lambda leaf: leaf, state))
    return jax.vmap(call, axis_name="batch", out_axes=(0, None))(xs)


def test_auxiliary_logits_are_torchvisions():
    """Theirs come from the last head to the first."""
    upstream = tiny().train()
    del upstream.eager_outputs
    model, state = from_torch((FAMILY, CONFIG), upstream)
    logits, after = all_logits(model, state, jnp.asarray(images()))
    theirs = upstream(torch.tensor(images()).permute(0, 3, 1, 2))
    for ours, there in zip(logits, (theirs.logits, theirs.aux_logits1, theirs.aux_logits2), strict=True):
        assert_close(ours, there, 1e-4)
    statistics = unfill(_merge(model, after), TORCHVISION)
    for name, buffer in upstream.named_buffers():
        assert_close(statistics[name], buffer, 1e-5)
    (only,), same = all_logits(eqx.nn.inference_mode(model), state, jnp.asarray(images()))
    assert only.shape == (4, 5)
    assert eqx.tree_equal(state, same)


def test_gradients_of_a_loss_on_all_heads_are_torchvisions():
    upstream = tiny().train()
    del upstream.eager_outputs
    model, state = from_torch((FAMILY, CONFIG), upstream)
    xs = jnp.asarray(images())

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(model):
        (main, first, second), _ = all_logits(model, state, xs)
        return jnp.mean(main**2) + 0.3 * (jnp.mean(first**2) + jnp.mean(second**2))

    theirs = upstream(torch.tensor(images()).permute(0, 3, 1, 2))
    (theirs[0].square().mean() + 0.3 * (theirs[1].square().mean() + theirs[2].square().mean())).backward()
    assert_same_gradients(gradient(model), upstream, TORCHVISION)


def test_a_published_file_has_auxiliary_heads_and_fits_a_model_without():
    upstream = tiny()
    config = replace(CONFIG, aux_heads=False)
    outputs = eqx.filter_jit(eqx.filter_vmap(freeze(*from_torch((FAMILY, config), upstream))))(jnp.asarray(images()))
    assert_close(outputs, upstream.eval()(torch.tensor(images()).permute(0, 3, 1, 2)), 1e-4)


def test_the_published_names_load_under_the_variants_name(tmp_path):
    """As `eqzoo.load("torchvision/googlenet.IMAGENET1K_V1")` does, and with another number of classes."""
    with torch.device("meta"):
        upstream = torchvision.models.googlenet(init_weights=False, aux_logits=True)
    torch.save(randomise(upstream.to_empty(device="cpu"), 0).state_dict(), tmp_path / "x.pth")
    model, state = eqzoo.load(tmp_path / "x.pth", name="torchvision/googlenet", trainable=True)
    assert model.config == FULL
    assert np.array_equal(model.head.weight, upstream.fc.weight.detach())
    eqzoo.export(tmp_path / "y.pth", model, state, format="torchvision")
    again = torchvision.models.googlenet(init_weights=False, aux_logits=False)
    again.load_state_dict(torch.load(tmp_path / "y.pth", weights_only=True), strict=True)
    model, _ = eqzoo.load(tmp_path / "x.pth", name="googlenet", num_classes=7, in_channels=1, trainable=True)
    assert model.head.weight.shape == (7, 1024)


def test_an_export_with_auxiliary_heads_is_what_the_builder_makes_without_weights(tmp_path):
    config = replace(FULL, aux_heads=True)
    pair = eqx.nn.make_with_state(Ours)(config, key=jax.random.key(0))
    eqzoo.export(tmp_path / "x.safetensors", *pair, format="torchvision")
    tensors, _ = eqzoo.checkpoint.open_checkpoint(tmp_path / "x.safetensors")
    with torch.device("meta"):
        expected = torchvision.models.googlenet(init_weights=False).state_dict()
    assert {name: tensor.shape for name, tensor in tensors.items()} == {n: tuple(t.shape) for n, t in expected.items()}


def test_all_heads_get_the_new_classes():
    """`num_classes` changes them, and 0 leaves each with what its last layer would get."""
    skeleton, _ = _skeleton(partial(Ours, replace(CONFIG, num_classes=3)))
    assert [aux.fc2.weight.shape for aux in skeleton.aux_heads] == [(3, 24), (3, 24)]
    make = lambda: eqx.nn.make_with_state(Ours)(replace(CONFIG, num_classes=0), key=jax.random.key(0))
    logits, _ = eqx.filter_eval_shape(lambda: all_logits(*make(), jnp.zeros((4, 66, 79, 3))))
    assert [each.shape for each in logits] == [(4, 128), (4, 24), (4, 24)]


@pytest.mark.parametrize(
    "changes",
    [
        {"stem": (8, 8, 16)},
        {"blocks": (*CONFIG.blocks[:2], CONFIG.blocks[2][:1])},
        {"aux": (16, 16)},
        {"in_channels": 1},
        {"num_classes": 0},
    ],
    ids=str,
)
def test_every_option_changes_what_fits(changes):
    with pytest.raises(CheckpointError, match="does not fit"):
        from_torch((FAMILY, replace(CONFIG, **changes)), tiny())


def test_auxiliary_heads_that_a_file_lacks_are_missed():
    upstream = tiny(replace(CONFIG, aux_heads=False))
    tensors = {name: _stored(tensor.numpy()) for name, tensor in upstream.state_dict().items()}
    plan = match_tensors(tensors, _skeleton(partial(Ours, CONFIG)), FAMILY.rules).plan
    assert plan.missing
    assert all(name.startswith("aux") for name in plan.missing)


def test_transforming_the_input_is_noticed():
    with pytest.raises(AssertionError, match="relative error"):
        assert_same_results((FAMILY, replace(CONFIG, transform_input=True)), tiny(), images(), TORCHVISION)


def test_maps_are_the_last_at_their_size():
    make = lambda: eqx.nn.make_with_state(Ours)(CONFIG, key=jax.random.key(0))
    maps = eqx.filter_eval_shape(lambda: freeze(*make()).features(jnp.zeros((65, 96, 3))))
    assert [each.shape for each in maps] == [(33, 48, 8), (16, 24, 24), (8, 12, 60), (4, 6, 104), (2, 3, 128)]


def test_the_smallest_image():
    upstream = tiny().eval()
    model = freeze(*from_torch((FAMILY, CONFIG), upstream))
    (weights,) = torchvision.models.get_model_weights("googlenet")
    x = images(*weights.meta["min_size"])
    assert_close(
        eqx.filter_jit(eqx.filter_vmap(model))(jnp.asarray(x)), upstream(torch.tensor(x).permute(0, 3, 1, 2)), 1e-4
    )


def test_initial_weights_are_spread_as_in_torchvision():
    with torch.device("meta"):
        upstream = torchvision.models.googlenet(init_weights=False)
    ours = unfill(
        _merge(*eqx.nn.make_with_state(Ours)(replace(FULL, aux_heads=True), key=jax.random.key(0))), TORCHVISION
    )
    for name in upstream.state_dict():
        if name.endswith(("conv.weight", "fc.weight", "fc1.weight", "fc2.weight")):
            assert abs(ours[name].std() / 0.01 - 1) < 5 / np.sqrt(ours[name].size), name


@pytest.mark.parametrize("blocks", [CONFIG.blocks[:2], ((), *CONFIG.blocks[1:]), (CONFIG.blocks[0],) * 3], ids=len)
def test_stages_without_room_for_the_heads_are_refused(blocks):
    blocks = (blocks[0], blocks[1][:1], blocks[2]) if len(blocks) == 3 and blocks[0] else blocks
    with pytest.raises(ValueError, match="give three stages at least one block each, and the second two"):
        replace(CONFIG, blocks=blocks)
