"""VGG is torchvision's and timm's: every variant's names, shapes and maps; outputs, gradients and a training step
of each classifier, on maps that are smaller and larger than its window."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import timm
import torch
import torchvision
from timm.layers import ClassifierHead
from timm.models.vgg import VGG as TimmVGG
from timm.models.vgg import ConvMlp
from torch import nn
from torchvision.models.vgg import VGG as TorchvisionVGG
from torchvision.models.vgg import make_layers

from eqzoo import freeze
from eqzoo.checkpoint import CheckpointError, unfill
from eqzoo.models.vision.vgg import FAMILY, TIMM, TORCHVISION, VARIANTS, VGG, VGGConfig
from tests.parity import (
    assert_close,
    assert_names_and_shapes,
    assert_same_results,
    from_torch,
    number_of_parameters,
    randomise,
)

NAMES = ["vgg11", "vgg11_bn", "vgg13", "vgg13_bn", "vgg16", "vgg16_bn", "vgg19", "vgg19_bn"]
KNOWN = {
    *("VGG", "Sequential", "Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d", "AdaptiveAvgPool2d", "Linear", "Dropout"),
    *("ConvMlp", "ClassifierHead", "SelectAdaptivePool2d", "FastAdaptiveAvgPool", "Flatten", "Identity"),
}
RULES = {"torchvision": TORCHVISION, "timm": TIMM}
POOL = {"torchvision": "before", "timm": "after"}
CONFIG = VGGConfig(widths=((8,), (12, 8)), hidden=16, dropout=0.0, num_classes=5)


def test_the_variants_are_those_of_both_libraries():
    assert set(VARIANTS) == {f"{library}/{name}" for library in RULES for name in NAMES}


def assert_same_modules(config: VGGConfig, upstream: nn.Module) -> None:
    assert {type(module).__name__ for module in upstream.modules()} <= KNOWN
    norms = [module for module in upstream.modules() if isinstance(module, nn.BatchNorm2d)]
    assert {norm.eps for norm in norms} == ({1e-5} if config.norm else set())
    assert {module.p for module in upstream.modules() if isinstance(module, nn.Dropout)} == {config.dropout}
    assert_names_and_shapes((FAMILY, config), upstream.state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_timm_variant_has_the_same_names_shapes_and_maps(name):
    config = VARIANTS[f"timm/{name}"]
    with torch.device("meta"):
        upstream = timm.create_model(name).eval()
    assert_same_modules(config, upstream)
    theirs = upstream.forward_intermediates(torch.empty(1, 3, 75, 97, device="meta"), intermediates_only=True)
    make = lambda: eqx.nn.make_with_state(VGG)(config, key=jax.random.key(0))
    ours = eqx.filter_eval_shape(lambda: freeze(*make()).features(jnp.zeros((75, 97, 3))))
    assert [a.shape for a in ours] == [(*a.shape[2:], a.shape[1]) for a in theirs]


@pytest.mark.parametrize("name", NAMES)
def test_torchvision_variant_has_the_same_names_shapes_and_parameters(name):
    config = VARIANTS[f"torchvision/{name}"]
    with torch.device("meta"):
        upstream = torchvision.models.get_model(name)
    assert_same_modules(config, upstream)
    for weights in torchvision.models.get_model_weights(name):
        assert weights.meta["num_params"] == number_of_parameters(FAMILY, config)


def tiny(library: str, config: VGGConfig = CONFIG) -> nn.Module:
    """Upstream's model of a config, whose classifier is made anew: its widths can't be set."""
    layers = [layer for widths in config.widths for layer in (*widths, "M")]
    channels, hidden = config.widths[-1][-1], config.hidden
    with torch.device("meta"):
        if library == "timm":
            norm = nn.BatchNorm2d if config.norm else None
            upstream = TimmVGG(layers, config.num_classes, config.in_channels, norm_layer=norm)
            upstream.pre_logits = ConvMlp(channels, hidden, 7, drop_rate=0.0)
            upstream.head = ClassifierHead(hidden, config.num_classes)
        else:
            upstream = TorchvisionVGG(make_layers(layers, config.norm), init_weights=False)
            linear1, linear2 = nn.Linear(49 * channels, hidden), nn.Linear(hidden, hidden)
            relu, drop = nn.ReLU(), nn.Dropout(0.0)
            head = nn.Linear(hidden, config.num_classes)
            upstream.classifier = nn.Sequential(linear1, relu, drop, linear2, relu, drop, head)
    return randomise(upstream.to_empty(device="cpu"), 0)


def images(height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(4, height, width, channels)).astype(np.float32)


@pytest.mark.parametrize("library", RULES)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_outputs_gradients_and_running_statistics(library, norm, training):
    """On a map of 9 x 11: the window slides, or the map is averaged to it."""
    config = replace(CONFIG, norm=norm, pool=POOL[library])
    upstream = tiny(library, config)
    assert_same_results((FAMILY, config), upstream, images(37, 46), RULES[library], training=training)


@pytest.mark.parametrize("library", RULES)
@pytest.mark.parametrize("size", [(18, 35), (28, 28), (9, 7)], ids=str)
def test_maps_of_any_size(library, size):
    """Lower and wider than the window, as large, and smaller."""
    config = replace(CONFIG, pool=POOL[library])
    assert_same_results((FAMILY, config), tiny(library), images(*size), RULES[library])


def test_one_channel_and_no_head():
    config = replace(CONFIG, pool="after", in_channels=1, num_classes=0)
    assert_same_results((FAMILY, config), tiny("timm", config), images(30, 35, 1), TIMM)


@pytest.mark.parametrize(
    "changes",
    [
        {"norm": True},
        {"hidden": 12},
        {"widths": ((8,), (12,))},
        {"widths": ((8, 12), (8,))},
        {"in_channels": 1},
        {"num_classes": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("library", RULES)
def test_every_option_changes_what_fits(changes, library):
    with pytest.raises(CheckpointError, match="does not fit"):
        from_torch((FAMILY, replace(CONFIG, **changes)), tiny(library))


@pytest.mark.parametrize("library", RULES)
def test_pooling_in_the_other_place_is_noticed(library):
    config = replace(CONFIG, pool="before" if library == "timm" else "after")
    with pytest.raises(AssertionError, match="relative error"):
        assert_same_results((FAMILY, config), tiny(library), images(37, 46), RULES[library])


def test_a_file_of_either_library_fits_the_others_variant():
    """They hold the same numbers, and on maps of the window's size both compute the same."""
    upstream = tiny("torchvision")
    model, state = from_torch((FAMILY, replace(CONFIG, pool="after")), upstream)
    theirs = tiny("timm")
    theirs.load_state_dict({name: torch.tensor(tensor) for name, tensor in unfill(model, TIMM).items()}, strict=True)
    x = images(28, 28)
    torch_x = torch.tensor(x).permute(0, 3, 1, 2)
    outputs = jax.vmap(freeze(model, state))(jnp.asarray(x))
    assert_close(outputs, upstream.eval()(torch_x), 1e-4)
    assert_close(outputs, theirs.eval()(torch_x), 1e-4)


def test_initial_weights_are_spread_as_upstream():
    """timm's classifier is made of convolutions; torchvision's always starts from one deviation."""
    config = replace(CONFIG, widths=((64,), (64,)), hidden=64, num_classes=100)
    upstream = tiny("timm", config)
    upstream._initialize_weights()
    expected = {name: (tensor.numel(), tensor.std()) for name, tensor in upstream.state_dict().items()}
    ours = unfill(eqx.filter_jit(VGG)(replace(config, pool="after"), key=jax.random.key(0)), TIMM)
    assert_spread(ours, expected)
    expected |= {f"classifier.{number}.weight": (6400, torch.tensor(0.01)) for number in (0, 3, 6)}
    ours = unfill(eqx.filter_jit(VGG)(config, key=jax.random.key(0)), TORCHVISION)
    assert_spread({name: tensor for name, tensor in ours.items() if name.endswith("weight")}, expected)


def assert_spread(ours: dict[str, np.ndarray], expected: dict[str, tuple[int, torch.Tensor]]) -> None:
    for name, tensor in ours.items():
        number, std = expected[name]
        # Five deviations of what two samples of this size differ by.
        assert abs(tensor.std() - std) <= 5 / np.sqrt(min(number, tensor.size)) * std, name


def test_a_stage_without_convolution_is_refused():
    with pytest.raises(ValueError, match="has a stage without convolution; give each at least one width"):
        replace(CONFIG, widths=((8,), ()))
