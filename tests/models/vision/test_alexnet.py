"""AlexNet is torchvision's: names, shapes, maps; outputs and gradients on images of any size."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torchvision
from torch import nn

from eqzoo._model import _skeleton, freeze
from eqzoo.checkpoint import CheckpointError, unfill
from eqzoo.models.vision.alexnet import FAMILY, TORCHVISION, VARIANTS, AlexNet, AlexNetConfig
from tests.parity import (
    assert_close,
    assert_names_and_shapes,
    assert_same_results,
    from_torch,
    number_of_parameters,
    randomise,
)

KNOWN = {"AlexNet", "Sequential", "Conv2d", "ReLU", "MaxPool2d", "AdaptiveAvgPool2d", "Dropout", "Linear"}
CONFIG = AlexNetConfig(widths=(8, 12, 16, 12, 8), hidden=24, dropout=0.0, num_classes=5)


def test_the_variant_has_the_same_names_shapes_and_parameters():
    with torch.device("meta"):
        upstream = torchvision.models.alexnet()
    config = VARIANTS["alexnet"]
    assert {type(module).__name__ for module in upstream.modules()} == KNOWN
    assert {module.p for module in upstream.modules() if isinstance(module, nn.Dropout)} == {config.dropout}
    assert_names_and_shapes((FAMILY, config), upstream.state_dict())
    (weights,) = torchvision.models.get_model_weights("alexnet")
    assert weights.meta["num_params"] == number_of_parameters(FAMILY, config)


def tiny(config: AlexNetConfig = CONFIG) -> nn.Module:
    """torchvision's model with the config's widths, which can't be set there, in every layer."""
    with torch.device("meta"):
        upstream = torchvision.models.AlexNet()
        ins = config.in_channels
        numbers = [number for number, layer in enumerate(upstream.features) if isinstance(layer, nn.Conv2d)]
        for number, outs in zip(numbers, config.widths, strict=True):
            old = upstream.features[number]
            options = {"stride": old.stride, "padding": old.padding}
            upstream.features[number], ins = nn.Conv2d(ins, outs, old.kernel_size, **options), outs
        widths = (36 * ins, config.hidden), (config.hidden, config.hidden), (config.hidden, config.num_classes)
        for number, layer_widths in zip((1, 4, 6), widths, strict=True):
            upstream.classifier[number] = nn.Linear(*layer_widths)
    for number in (0, 3):
        upstream.classifier[number].p = config.dropout
    return randomise(upstream.to_empty(device="cpu"), 0)


def images(height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(4, height, width, channels)).astype(np.float32)


@pytest.mark.parametrize("size", [(63, 90), (224, 224), (251, 230)], ids=str)
def test_outputs_and_gradients(size):
    """Maps of one position, of the classifier's grid, and a little larger: they are averaged to the grid."""
    assert_same_results((FAMILY, CONFIG), tiny(), images(*size), TORCHVISION)


def test_maps_are_what_the_pools_get_and_give():
    upstream = tiny()
    maps = freeze(*from_torch((FAMILY, CONFIG), upstream)).features(jnp.asarray(x := images(71, 90)[0]))
    theirs = [torch.tensor(x).permute(2, 0, 1)]
    for layer in upstream.features:
        theirs.append(layer(theirs[-1].clone()))
    assert [layer for layer, each in enumerate(upstream.features) if isinstance(each, nn.MaxPool2d)] == [2, 5, 12]
    for ours, number in zip(maps, (2, 5, 12, 13), strict=True):
        assert_close(ours, theirs[number].permute(1, 2, 0), 1e-5)


@pytest.mark.parametrize(
    "changes", [{"widths": (8, 12, 16, 12, 12)}, {"hidden": 16}, {"in_channels": 1}, {"num_classes": 0}], ids=str
)
def test_every_option_changes_what_fits(changes):
    with pytest.raises(CheckpointError, match="does not fit"):
        from_torch((FAMILY, replace(CONFIG, **changes)), tiny())


def test_one_channel():
    config = replace(CONFIG, in_channels=1)
    assert_same_results((FAMILY, config), tiny(config), images(70, 70, 1), TORCHVISION)


def test_dropout_is_where_torchvision_has_it():
    """With a mask of its own before each of the first two linear layers: the mean over many is nearly the same."""
    config = replace(CONFIG, dropout=0.5)
    upstream = tiny(config).train()
    model, _ = from_torch((FAMILY, config), upstream)
    x = images(63, 63)[0]
    keys = jax.random.split(jax.random.key(0), 4000)
    ours = np.asarray(eqx.filter_jit(jax.vmap(lambda key: model(jnp.asarray(x), key=key)))(keys))
    with torch.no_grad():
        last_map = upstream.avgpool(upstream.features(torch.tensor(x).permute(2, 0, 1)[None]))
        theirs = upstream.classifier(last_map.flatten(1).expand(4000, -1)).numpy()
    assert np.abs(ours.mean(axis=0) - theirs.mean(axis=0)).max() <= 5 * theirs.std() * np.sqrt(2 / 4000)
    assert np.abs(ours.std(axis=0) / theirs.std(axis=0) - 1).max() <= 0.1


def test_initial_weights_are_spread_as_in_torchvision():
    config = replace(CONFIG, widths=(16, 32, 32, 32, 32), hidden=64, num_classes=100)
    upstream = tiny(config)
    for module in upstream.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    ours = unfill(eqx.filter_jit(AlexNet)(config, key=jax.random.key(0)), TORCHVISION)
    for name, theirs in upstream.state_dict().items():
        assert abs(ours[name].std() / theirs.std() - 1) < 5 / np.sqrt(theirs.numel()), name


def test_five_widths_are_needed():
    with pytest.raises(ValueError, match="has 2 widths for 5 convolutions; give each one"):
        AlexNetConfig(widths=(8, 8))


def test_a_small_image_is_refused():
    model, _ = _skeleton(lambda key: AlexNet(CONFIG, key=key))
    with pytest.raises(ValueError, match="doesn't fit into an image of .*; enlarge the image"):
        eqx.filter_eval_shape(model, jax.ShapeDtypeStruct((62, 62, 3), np.float32))
