"""DenseNet is torchvision's and timm's: every variant's names and shapes; outputs, gradients and a training step of
every option, running statistics included."""

from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import timm
import torch
import torchvision
from timm.layers import BlurPool2d
from timm.models.densenet import DenseNet as TimmDenseNet
from torchvision.models.densenet import DenseNet as TorchvisionDenseNet

import eqzoo
from eqzoo import nn, tree
from eqzoo._model import _skeleton
from eqzoo._save import _stored
from eqzoo.checkpoint import CheckpointError
from eqzoo.models.vision import densenet
from eqzoo.models.vision.densenet import FAMILY, LONGEST_RUN, TIMM, VARIANTS, DenseNet, DenseNetConfig
from tests.parity import (
    assert_close,
    assert_names_and_shapes,
    assert_same_results,
    filled,
    from_torch,
    mean_square,
    randomise,
)

TORCHVISION_VARIANTS = [name for name in VARIANTS if name in torchvision.models.list_models()]
KNOWN = {
    *("DenseNet", "DenseBlock", "DenseLayer", "DenseTransition", "Sequential", "Conv2d", "BatchNormAct2d", "ReLU"),
    *("BlurPool2d", "MaxPool2d", "AvgPool2d", "SelectAdaptivePool2d", "FastAdaptiveAvgPool", "Dropout", "Linear"),
    *("Identity", "Flatten", "AdaptiveAvgPool2d", "_DenseBlock", "_DenseLayer", "_Transition", "BatchNorm2d"),
}


def assert_same_parts(config: DenseNetConfig, upstream: torch.nn.Module) -> None:
    """What names and shapes don't show."""
    kinds = {type(module).__name__ for module in upstream.modules()}
    assert kinds <= KNOWN
    blurs = [name for name, module in upstream.named_modules() if isinstance(module, BlurPool2d)]
    assert blurs == (["features.pool0.1"] if config.blur else [])
    assert {module.eps for module in upstream.modules() if isinstance(module, torch.nn.BatchNorm2d)} == {1e-5}


@pytest.mark.parametrize("name", VARIANTS)
def test_timm_variant_has_the_same_names_and_shapes(name):
    with torch.device("meta"):
        upstream = timm.create_model(name)
    assert_same_parts(VARIANTS[name], upstream)
    assert_names_and_shapes((FAMILY, VARIANTS[name]), upstream.state_dict())


@pytest.mark.parametrize("name", ["densenet121", "densenetblur121d"])
def test_feature_maps_have_timms_shapes(name):
    with torch.device("meta"):
        upstream = timm.create_model(name).eval()
    theirs = upstream.forward_intermediates(torch.empty(1, 3, 75, 97, device="meta"), intermediates_only=True)
    ours = eqx.filter_eval_shape(lambda: _features(VARIANTS[name]))
    assert [a.shape for a in ours] == [(*a.shape[2:], a.shape[1]) for a in theirs[1:]]


def _features(config: DenseNetConfig) -> Any:
    model, state = eqx.nn.make_with_state(DenseNet)(config, key=jax.random.key(0))
    return eqzoo.freeze(model, state).features(jnp.zeros((75, 97, 3)))


@pytest.mark.parametrize("name", TORCHVISION_VARIANTS)
def test_torchvision_variant_has_the_same_names_shapes_and_parameters(name):
    with torch.device("meta"):
        upstream = torchvision.models.get_model(name)
    assert_same_parts(VARIANTS[name], upstream)
    assert_names_and_shapes((FAMILY, VARIANTS[name]), upstream.state_dict())
    model, _ = _skeleton(partial(DenseNet, VARIANTS[name]))
    number = sum(leaf.size for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.ShapeDtypeStruct))
    for weights in torchvision.models.get_model_weights(name):
        assert weights.meta["num_params"] == number


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain, one channel": ({"in_channels": 1}, {"in_chans": 1}),
    "several runs of layers": ({"layers": (LONGEST_RUN + 1, 1)}, {"block_config": (LONGEST_RUN + 1, 1)}),
    "deep stem, blur, no head": (
        {"stem": "deep", "blur": True, "bottleneck": 3, "num_classes": 0},
        {"stem_type": "deep", "aa_layer": BlurPool2d, "bn_size": 3, "num_classes": 0},
    ),
}


def tiny(**options: Any) -> DenseNetConfig:
    return DenseNetConfig(**{"growth_rate": 6, "layers": (2, 3, 1), "num_classes": 5, **options})


def pair(option: str) -> tuple[DenseNetConfig, torch.nn.Module]:
    ours, theirs = OPTIONS[option]
    upstream = TimmDenseNet(**{"growth_rate": 6, "block_config": (2, 3, 1), "num_classes": 5, **theirs})
    return tiny(**ours), randomise(upstream, 0)


def torchvisions() -> torch.nn.Module:
    upstream = TorchvisionDenseNet(growth_rate=6, block_config=(2, 3, 1), num_init_features=12, num_classes=5)  # pyright: ignore[reportArgumentType]
    return randomise(upstream, 0)


def batch(channels: int = 3) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(4, 71, 62, channels)).astype(np.float32)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_outputs_gradients_and_running_statistics(option, training):
    config, upstream = pair(option)
    assert_same_results((FAMILY, config), upstream, batch(config.in_channels), TIMM, training=training)


def test_torchvisions_own_layers_in_training():
    assert_same_results((FAMILY, tiny()), torchvisions(), batch(), TIMM, training=True)


def test_files_from_before_torchvision_renamed_the_layers_load():
    """They say `norm.1` and `conv.1` where torchvision now says `norm1` and `conv1`, and count no batches."""
    upstream = torchvisions()
    old = {}
    for name, tensor in upstream.state_dict().items():
        if "denselayer" in name:
            for part in ("norm1", "norm2", "conv1", "conv2"):
                name = name.replace(part, f"{part[:-1]}.{part[-1]}")
        if not name.endswith("num_batches_tracked"):
            old[name] = _stored(tensor.numpy())
    assert "features.denseblock2.denselayer3.conv.2.weight" in old
    pair = filled(old, _skeleton(partial(DenseNet, tiny())), FAMILY.rules)
    new, _ = from_torch((FAMILY, tiny()), upstream)
    assert eqx.tree_equal(pair[0], new)


@pytest.mark.parametrize(
    "changes",
    [
        {"growth_rate": 8},
        {"layers": (2, 3, 2)},
        {"bottleneck": 3},
        {"stem": "deep"},
        {"in_channels": 1},
        {"num_classes": 0},
    ],
    ids=str,
)
def test_every_option_changes_what_fits(changes):
    with pytest.raises(CheckpointError, match="does not fit"):
        from_torch((FAMILY, replace(tiny(), **changes)), torchvisions())


def test_blur_changes_the_numbers():
    with pytest.raises(AssertionError, match="relative error above"):
        assert_same_results((FAMILY, tiny(blur=True)), torchvisions(), batch(), TIMM)


def test_rates_are_off_in_inference():
    config = tiny(dropout=0.5, layer_dropout=0.5)
    assert_same_results((FAMILY, config), torchvisions(), batch(), TIMM)


@pytest.mark.parametrize("rate", ["dropout", "layer_dropout"])
def test_training_needs_a_key(rate):
    model, state = _skeleton(partial(DenseNet, tiny(**{rate: 0.5})))
    call = lambda model, state, xs: jax.vmap(lambda x: eqzoo.apply(model, state, x)[0], axis_name="batch")(xs)
    with pytest.raises(ValueError, match="got no key in training mode"):
        eqx.filter_eval_shape(call, model, state, jnp.zeros((2, 32, 32, 3)))


@pytest.mark.parametrize("change", ["dilated", "adapted", "frozen"])
def test_layers_that_someone_changed_run_as_they_are(change, monkeypatch):
    """Though layers run together as one: it is what they compute one by one, in training, statistics included."""
    model, state = from_torch((FAMILY, tiny()), torchvisions())
    if change == "dilated":
        wide = nn.Conv2d(24, 6, 3, padding=2, dilation=2, use_bias=False, key=jax.random.key(0))
        changed = eqx.tree_at(lambda model: model.blocks[1][1].conv2.conv, model, wide)
    elif change == "adapted":
        adapted = tree.lora(model, "blocks.1.1.conv1.conv", dropout=0.1, key=jax.random.key(0))
        adapters, frozen = tree.lora_only(tree.lora_keys(adapted, jax.random.key(1)))
        changed = eqx.combine(tree.add_noise(adapters, jax.random.key(2), 0.1), frozen)
    else:
        changed = eqx.tree_at(lambda model: model.blocks[1][1].conv1.norm.inference, model, True)
    results = [mean_square(each, state, jnp.asarray(batch()))[0][1] for each in (model, changed)]
    monkeypatch.setattr(densenet, "LONGEST_RUN", 1)
    jax.clear_caches()
    alone = mean_square(changed, state, jnp.asarray(batch()))[0][1]
    for together, each in zip(*map(jax.tree.leaves, (results[1], alone)), strict=True):
        assert_close(together, np.asarray(each))
    assert not np.allclose(results[0][0], results[1][0], rtol=1e-3)


def test_a_block_without_layers_is_refused():
    with pytest.raises(ValueError, match=r"layers=\(2, 0\) has a block without layers"):
        tiny(layers=(2, 0))


def test_initial_weights_are_spread_as_upstream():
    """He et al. by the number of inputs; torch's own start for the head, but no bias."""
    model, _ = eqx.nn.make_with_state(DenseNet)(replace(VARIANTS["densenet121"], layers=(2, 2)), key=jax.random.key(0))
    upstream = TorchvisionDenseNet(block_config=(2, 2))  # pyright: ignore[reportArgumentType]
    for ours, theirs in (
        (model.stem[0].conv.weight, upstream.features.conv0.weight),
        (model.blocks[1][1].conv2.conv.weight, upstream.features.denseblock2.denselayer2.conv2.weight),
        (model.transitions[0].conv.weight, upstream.features.transition1.conv.weight),
        (model.head.weight, upstream.classifier.weight),
    ):
        assert abs(float(ours.std()) / theirs.detach().std().item() - 1) < 0.05
    assert not model.head.bias.any()
