"""SqueezeNet is torchvision's: names, shapes and maps of both versions; outputs, gradients and export of each."""

from dataclasses import replace

import equinox as eqx
import jax
import numpy as np
import pytest
import torch
import torchvision
from torch import nn

import eqzoo
from eqzoo._model import _skeleton, freeze
from eqzoo.checkpoint import CheckpointError, unfill
from eqzoo.models.vision.squeezenet import FAMILY, TORCHVISION, VARIANTS, SqueezeNet, SqueezeNetConfig
from tests.parity import (
    assert_close,
    assert_names_and_shapes,
    assert_same_results,
    from_torch,
    number_of_parameters,
    randomise,
)

KNOWN = {"SqueezeNet", "Fire", "Sequential", "Conv2d", "ReLU", "MaxPool2d", "AdaptiveAvgPool2d", "Dropout"}
SMALLEST = {"squeezenet1_0": 21, "squeezenet1_1": 17}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_variant_has_the_same_names_shapes_and_parameters(name):
    with torch.device("meta"):
        upstream = torchvision.models.get_model(name)
    assert {type(module).__name__ for module in upstream.modules()} == KNOWN
    assert {module.p for module in upstream.modules() if isinstance(module, nn.Dropout)} == {VARIANTS[name].dropout}
    assert_names_and_shapes((FAMILY, VARIANTS[name]), upstream.state_dict())
    (weights,) = torchvision.models.get_model_weights(name)
    assert weights.meta["num_params"] == number_of_parameters(FAMILY, VARIANTS[name])
    assert weights.meta["min_size"] == (SMALLEST[name], SMALLEST[name])


def pair(name: str, classes: int = 5) -> tuple[SqueezeNetConfig, nn.Module]:
    upstream = randomise(torchvision.models.get_model(name, num_classes=classes, dropout=0.0), 0)
    return replace(VARIANTS[name], num_classes=classes, dropout=0.0), upstream


def images(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(4, height, width, 3)).astype(np.float32)


@pytest.mark.parametrize("name", VARIANTS)
def test_outputs_and_gradients(name):
    config, upstream = pair(name)
    assert_same_results((FAMILY, config), upstream, images(45, 38), TORCHVISION)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_smallest_image(name):
    """Torch lets a window reach beyond the image where pools round up."""
    config, upstream = pair(name)
    model = freeze(*from_torch((FAMILY, config), upstream))
    x = images(SMALLEST[name], SMALLEST[name] + 3)
    theirs = upstream.eval()(torch.tensor(x).permute(0, 3, 1, 2))
    assert_close(eqx.filter_jit(eqx.filter_vmap(model))(x), theirs, 1e-4)
    skeleton, _ = _skeleton(lambda key: SqueezeNet(config, key=key))
    with pytest.raises(ValueError, match="doesn't fit into an image"):
        eqx.filter_eval_shape(skeleton, jax.ShapeDtypeStruct((SMALLEST[name] - 6, 40, 3), np.float32))


@pytest.mark.parametrize("name", VARIANTS)
def test_maps_are_what_the_pools_get_and_the_last(name):
    config, upstream = pair(name)
    maps = eqx.filter_jit(freeze(*from_torch((FAMILY, config), upstream)).features)(x := images(50, 41)[0])
    theirs, y = [], torch.tensor(x).permute(2, 0, 1)[None]
    for layer in upstream.features:
        if isinstance(layer, nn.MaxPool2d):
            theirs.append(y)
        y = layer(y)
    for ours, there in zip(maps, [*theirs, y], strict=True):
        assert_close(ours, there[0].permute(1, 2, 0), 1e-5)


def test_without_classes_the_last_map_is_averaged():
    config, upstream = pair("squeezenet1_1")
    model, _ = from_torch((FAMILY, config), upstream)
    headless, state = _skeleton(lambda key: SqueezeNet(replace(config, num_classes=0), key=key))
    body = jax.tree.leaves(eqx.tree_at(lambda model: model.head, model, None))
    embed = freeze(jax.tree.unflatten(jax.tree.structure(headless), body), state)
    x = images(40, 40)[0]
    theirs = upstream.features(torch.tensor(x).permute(2, 0, 1)[None]).mean(dim=(2, 3))[0]
    assert_close(eqx.filter_jit(embed)(x), theirs, 1e-4)


def test_an_export_loads_strictly_in_torchvision(tmp_path):
    config, upstream = pair("squeezenet1_1")
    model, state = from_torch((FAMILY, config), upstream)
    eqzoo.export(tmp_path / "x.pth", model, state, format="torchvision")
    again = torchvision.models.squeezenet1_1(num_classes=5)
    again.load_state_dict(torch.load(tmp_path / "x.pth", weights_only=True), strict=True)
    assert all(torch.equal(tensor, upstream.state_dict()[name]) for name, tensor in again.state_dict().items())
    loaded = eqzoo.load(tmp_path / "x.pth", name="squeezenet1_1", num_classes=5)
    assert eqx.tree_equal(loaded.head, model.head)


@pytest.mark.parametrize(
    "changes",
    [
        {"stem_kernel": 7},
        {"stem_width": 96},
        {"squeeze": ((16, 16), (32, 32, 48), (48, 64, 64))},
        {"squeeze": ((16, 16), (32, 32), (48, 48, 64, 48))},
        {"in_channels": 1},
        {"num_classes": 0},
    ],
    ids=str,
)
def test_every_option_changes_what_fits(changes):
    config, upstream = pair("squeezenet1_1")
    with pytest.raises(CheckpointError, match="does not fit"):
        from_torch((FAMILY, replace(config, **changes)), upstream)


def test_initial_weights_are_spread_as_in_torchvision():
    config, _ = pair("squeezenet1_1", 100)
    upstream = torchvision.models.squeezenet1_1(num_classes=100)
    ours = unfill(eqx.filter_jit(SqueezeNet)(config, key=jax.random.key(0)), TORCHVISION)
    for name, theirs in upstream.state_dict().items():
        if theirs.std() == 0:
            np.testing.assert_array_equal(ours[name], theirs, err_msg=name)
        else:
            assert abs(ours[name].std() / theirs.std() - 1) < 5 / np.sqrt(theirs.numel()), name


def test_a_stage_without_fire_module_is_refused():
    with pytest.raises(ValueError, match="has a stage without fire module; give each at least one width"):
        replace(VARIANTS["squeezenet1_0"], squeeze=((16,), ()))
