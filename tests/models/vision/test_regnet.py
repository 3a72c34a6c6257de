"""RegNet is torchvision's, timm's and transformers': every variant's names and shapes; outputs, gradients and a
training step of every option, running statistics included."""

import json
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
import transformers
from jaxtyping import Array
from timm.layers import GroupNormAct
from timm.models.regnet import RegNet as TimmRegNet
from timm.models.regnet import RegNetCfg
from torchvision.models.regnet import BlockParams
from torchvision.models.regnet import RegNet as TorchvisionRegNet

import eqzoo
from eqzoo._describe import from_config_json
from eqzoo._model import _skeleton
from eqzoo.checkpoint import CheckpointError
from eqzoo.models.vision._regnet_upstream import TIMM, TORCHVISION
from eqzoo.models.vision.regnet import FAMILY, VARIANTS, RegNet, RegNetConfig
from tests.parity import (
    assert_close,
    assert_names_and_shapes,
    assert_same_results,
    from_torch,
    randomise,
)

TORCHVISION_VARIANTS = [name for name in VARIANTS if name.startswith("regnet_")]
TIMM_VARIANTS = [name for name in VARIANTS if name not in TORCHVISION_VARIANTS]
NORMS = (torch.nn.BatchNorm2d, torch.nn.GroupNorm)
KNOWN = {
    *("RegNet", "RegStage", "Bottleneck", "PreBottleneck", "ConvNormAct", "SEModule", "ClassifierHead", "Sequential"),
    *("Conv2d", "BatchNorm2d", "BatchNormAct2d", "GroupNormAct", "Linear", "ReLU", "SiLU", "Sigmoid", "Identity"),
    *("AvgPool2d", "AdaptiveAvgPool2d", "SelectAdaptivePool2d", "FastAdaptiveAvgPool", "Flatten", "Dropout"),
    *("SimpleStemIN", "AnyStage", "ResBottleneckBlock", "BottleneckTransform"),
    *("Conv2dNormActivation", "SqueezeExcitation"),
    *("RegNetForImageClassification", "RegNetModel", "RegNetEmbeddings", "RegNetEncoder", "RegNetStage"),
    *("RegNetXLayer", "RegNetYLayer", "RegNetConvLayer", "RegNetSELayer", "RegNetShortCut", "ReLU", "ModuleList"),
}


def assert_same_parts(config: RegNetConfig, upstream: torch.nn.Module) -> None:
    """What names and shapes don't show: kinds of modules, activations, and the epsilon of every norm."""
    kinds = {type(module).__name__ for module in upstream.modules()}
    assert kinds <= KNOWN
    assert kinds & {"ReLU", "SiLU"} == {{"relu": "ReLU", "silu": "SiLU"}[config.activation]}
    assert ("AvgPool2d" in kinds) == (config.shortcut == "pool")
    norms = [module for module in upstream.modules() if isinstance(module, NORMS)]
    assert {module.eps for module in norms} == {1e-5}
    groups = [module.num_channels / module.num_groups for module in norms if isinstance(module, torch.nn.GroupNorm)]
    assert set(groups) == ({config.group_norm} if config.group_norm else set())


@pytest.mark.parametrize("name", {name: VARIANTS[name] for name in TIMM_VARIANTS})
def test_timm_variant_has_the_same_names_shapes_and_maps(name):
    with torch.device("meta"):
        upstream = timm.create_model(name).eval()
    assert_same_parts(VARIANTS[name], upstream)
    assert_names_and_shapes((FAMILY, VARIANTS[name]), upstream.state_dict())
    theirs = upstream.forward_intermediates(torch.empty(1, 3, 75, 97, device="meta"), intermediates_only=True)
    ours = eqx.filter_eval_shape(lambda: _features(VARIANTS[name]))
    assert [a.shape for a in ours] == [(*a.shape[2:], a.shape[1]) for a in theirs[1:]]


def _features(config: RegNetConfig) -> Any:
    model, state = eqx.nn.make_with_state(RegNet)(config, key=jax.random.key(0))
    return eqzoo.freeze(model, state).features(jnp.zeros((75, 97, 3)))


@pytest.mark.parametrize("name", TORCHVISION_VARIANTS)
def test_torchvision_variant_has_the_same_names_shapes_and_parameters(name, monkeypatch):
    monkeypatch.setattr(torchvision.models.regnet, "_regnet", lambda params, *_: params)
    params = torchvision.models.get_model(name)  # computed with tensors, which on the meta device have no values
    with torch.device("meta"):
        upstream = TorchvisionRegNet(params)
    assert_same_parts(VARIANTS[name], upstream)
    assert_names_and_shapes((FAMILY, VARIANTS[name]), upstream.state_dict())
    model, _ = _skeleton(partial(RegNet, VARIANTS[name]))
    number = sum(leaf.size for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.ShapeDtypeStruct))
    for weights in torchvision.models.get_model_weights(name):
        assert weights.meta["num_params"] == number


# Widths by the parametrisation upstream, here a stage each: 16, 24, 40, 64 (bottlenecks) or multiples of them.
SIZES: dict[str, Any] = {"w0": 16, "wa": 10.0, "wm": 1.6, "depth": 7, "stem_width": 12}
DEPTHS, WIDTHS = (1, 1, 2, 3), (16, 24, 40, 64)
SILU: dict[str, Any] = {"act_layer": "silu"}

OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "squeeze and excite": ({"squeeze_excite": 0.25}, {"se_ratio": 0.25}),
    "pooled shortcut, silu, last convolution": (
        {"shortcut": "pool", "squeeze_excite": 0.5, "activation": "silu", "last_width": 20},
        {"downsample": "avg", "se_ratio": 0.5, "num_features": 20, **SILU},
    ),
    "linear output, no shortcut": (
        {"bottleneck": 2.0, "shortcut": "none", "linear_out": True, "activation": "silu", "squeeze_excite": 0.25},
        {"bottle_ratio": 2.0, "downsample": None, "linear_out": True, "se_ratio": 0.25, **SILU},
    ),
    "pre-activation": (
        {"pre_activation": True, "activation": "silu", "squeeze_excite": 0.25, "num_classes": 0},
        {"preact": True, "se_ratio": 0.25, **SILU},
    ),
    "pre-activation, pooled shortcut, last convolution, one channel": (
        {"pre_activation": True, "shortcut": "pool", "last_width": 20, "in_channels": 1},
        {"preact": True, "downsample": "avg", "num_features": 20},
    ),
    "pre-activation, no shortcut": ({"pre_activation": True, "shortcut": "none"}, {"preact": True, "downsample": None}),
    "group norm": (
        {"group_norm": 4, "activation": "silu", "squeeze_excite": 0.25, "last_width": 20},
        {"norm_layer": partial(GroupNormAct, group_size=4), "se_ratio": 0.25, "num_features": 20, **SILU},
    ),
}


def pair(option: str) -> tuple[RegNetConfig, torch.nn.Module]:
    ours, theirs = OPTIONS[option]
    sizes = {"depths": DEPTHS, "widths": WIDTHS, "group_size": 8, "stem_width": 12, "num_classes": 5}
    config = RegNetConfig(**{**sizes, **ours})
    cfg = RegNetCfg(group_size=8, **{**SIZES, **theirs})
    upstream = TimmRegNet(cfg, in_chans=config.in_channels, num_classes=config.num_classes)
    return config, randomise(upstream, 0)


def batch(channels: int = 3) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(4, 71, 62, channels)).astype(np.float32)


@pytest.mark.parametrize("option", OPTIONS)
def test_outputs_gradients_and_running_statistics_in_training(option):
    config, upstream = pair(option)
    assert_same_results((FAMILY, config), upstream, batch(config.in_channels), TIMM, training=True)


@pytest.mark.parametrize("option", ["plain", "pre-activation"])
def test_outputs_and_gradients_in_inference(option):
    config, upstream = pair(option)
    assert_same_results((FAMILY, config), upstream, batch(config.in_channels), TIMM)


def test_torchvisions_own_blocks_in_training():
    sizes = BlockParams(list(DEPTHS), list(WIDTHS), [8] * 4, [1.0] * 4, [2] * 4, se_ratio=0.25)
    upstream = randomise(TorchvisionRegNet(sizes, stem_width=12, num_classes=5), 0)
    config, _ = pair("squeeze and excite")
    assert_same_results((FAMILY, config), upstream, batch(), TORCHVISION, training=True)


@pytest.mark.parametrize("name", [*TORCHVISION_VARIANTS, "regnety_040", "regnety_2560"])
def test_widths_of_the_parametrisation_fit_the_paper(name):
    """Few stages of multiples of 8 that grow, and whole groups."""
    config = VARIANTS[name]
    assert len(config.widths) == 4
    assert list(config.widths) == sorted(set(config.widths))
    assert all(width % min(config.group_size, width) == 0 for width in config.widths)


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("squeeze and excite", {"squeeze_excite": 0.0}),
        ("squeeze and excite", {"squeeze_excite": 0.5}),
        ("plain", {"squeeze_excite": 0.25}),
        ("plain", {"shortcut": "pool"}),
        ("plain", {"shortcut": "none"}),
        ("plain", {"bottleneck": 2.0}),
        ("plain", {"group_size": 4}),
        ("plain", {"pre_activation": True}),
        ("plain", {"group_norm": 4}),
        ("plain", {"last_width": 64}),
        ("plain", {"stem_width": 16}),
        ("plain", {"in_channels": 1}),
        ("plain", {"num_classes": 0}),
        ("plain", {"depths": (1, 1, 2, 2)}),
    ],
    ids=str,
)
def test_every_option_changes_what_fits(option, changes):
    config, upstream = pair(option)
    with pytest.raises(CheckpointError, match="does not fit"):
        from_torch((FAMILY, replace(config, **changes)), upstream)


@pytest.mark.parametrize("changes", [{"activation": "silu"}, {"linear_out": True}], ids=str)
def test_every_other_option_changes_the_numbers(changes):
    config, upstream = pair("plain")
    with pytest.raises(AssertionError, match="relative error above"):
        assert_same_results((FAMILY, replace(config, **changes)), upstream, batch(), TIMM)


def test_rates_are_off_in_inference():
    config, upstream = pair("plain")
    assert_same_results((FAMILY, replace(config, dropout=0.5, drop_path=0.5)), upstream, batch(), TIMM)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depths": (1,)}, r"depths=\(1,\) and widths=\(16, 24\) differ in length"),
        ({"group_size": 10}, "group_size=10 makes no whole groups of 16 channels"),
        ({"pre_activation": True, "linear_out": True}, "pre_activation=True has no activation behind a block"),
        ({"pre_activation": True, "group_norm": 8}, "pre_activation=True has no activation behind a block"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RegNetConfig(**{"depths": (1, 1), "widths": (16, 24), "group_size": 8, **options})


def test_a_model_of_torchvisions_is_exported_to_timm_and_back(tmp_path):
    """The same weights under other names; both load strictly."""
    upstream = randomise(torchvision.models.regnet_y_400mf(), 0).eval()
    loaded = from_torch("regnet_y_400mf", upstream)
    eqzoo.export(tmp_path / "folder", *loaded, format="timm")
    described = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert described["architecture"] == "regnety_004"
    assert described["pretrained_cfg"]["first_conv"] == "stem.conv"
    there = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert_close(there(x).numpy(), upstream(x), 1e-5)
    eqzoo.export(tmp_path / "back.pth", *eqzoo.load(tmp_path / "folder", trainable=True), format="torchvision")
    back = torch.load(tmp_path / "back.pth", weights_only=True)
    assert all(torch.equal(back[name], tensor) for name, tensor in upstream.state_dict().items())


# transformers

PUBLISHED = {
    "regnetx_002": {"hidden_sizes": [24, 56, 152, 368], "depths": [1, 1, 4, 7], "groups_width": 8, "layer_type": "x"},
    "regnety_040": {},
    "regnety_160": {"hidden_sizes": [224, 448, 1232, 3024], "depths": [2, 4, 11, 1], "groups_width": 112},
    "regnety_1280": {"hidden_sizes": [528, 1056, 2904, 7392], "depths": [2, 7, 17, 1], "groups_width": 264},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_published_model_is_a_variant(name):
    with torch.device("meta"):
        upstream = transformers.RegNetForImageClassification(
            transformers.RegNetConfig(**PUBLISHED[name], num_labels=1000)
        )
    assert_same_parts(VARIANTS[name], upstream)
    described = {**upstream.config.to_dict(), "architectures": ["RegNetForImageClassification"]}
    _, family, config = from_config_json(json.loads(json.dumps(described)))
    assert family is FAMILY
    assert config == VARIANTS[name]
    assert_names_and_shapes(name, upstream.state_dict())


def tiny(model: Any, **options: Any) -> Any:
    sizes = {"hidden_sizes": [16, 24], "depths": [1, 3], "groups_width": 8, "embedding_size": 12, "num_labels": 5}
    return randomise(model(transformers.RegNetConfig(**{**sizes, **options})).eval(), 0)


@eqx.filter_jit
def outputs(model: Any, x: Array) -> Array:
    return jax.vmap(model)(x)


@pytest.mark.parametrize("options", [{"layer_type": "x", "num_channels": 1}, {"groups_width": 24}], ids=str)
def test_transformers_folders_are_read_and_written(options, tmp_path, saved):
    upstream = tiny(transformers.RegNetForImageClassification, **options)
    pair = eqzoo.load(saved(upstream), trainable=True)
    x = np.random.default_rng(0).normal(size=(2, 50, 41, pair[0].config.in_channels)).astype(np.float32)
    ours = outputs(eqzoo.freeze(*pair), jnp.asarray(x))
    with torch.no_grad():
        theirs = upstream(torch.from_numpy(x).movedim(-1, 1)).logits
    assert_close(ours, theirs, 1e-4)
    eqzoo.export(tmp_path / "ours", *pair, format="transformers")
    back, report = type(upstream).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in upstream.state_dict().items())


def test_a_body_of_transformers_has_no_head(saved):
    upstream = tiny(transformers.RegNetModel)
    model = eqzoo.load(saved(upstream))
    assert model.config.num_classes == 0
    x = np.random.default_rng(0).normal(size=(2, 50, 41, 3)).astype(np.float32)
    with torch.no_grad():
        theirs = upstream(torch.from_numpy(x).movedim(-1, 1)).pooler_output.flatten(1)
    assert_close(outputs(model, jnp.asarray(x)), theirs, 1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act='silu' is not supported; eqzoo has 'relu'"),
        ({"downsample_in_first_stage": False}, "downsample_in_first_stage=False is not supported"),
        ({"layer_type": "z"}, "layer_type='z' is not supported; eqzoo has 'x', 'y'"),
        ({"layer_type": "x"}, "does not fit regnet"),
        ({"depths": [1, 2]}, "does not fit regnet"),
        ({"groups_width": 4}, "does not fit regnet"),
    ],
    ids=str,
)
def test_transformers_options_count_or_are_refused(changes, message, saved):
    with pytest.raises(CheckpointError, match=message):
        eqzoo.load(saved(tiny(transformers.RegNetForImageClassification), changes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"linear_out": True}, "linear_out=True"),
        ({"activation": "silu"}, "activation='silu'"),
        ({"squeeze_excite": 0.5}, "squeeze_excite"),
    ],
    ids=str,
)
def test_what_transformers_does_not_have_is_not_exported(options, message, tmp_path):
    config = RegNetConfig(depths=(1,), widths=(16,), group_size=8, **options)
    pair = eqx.filter_eval_shape(eqx.nn.make_with_state(RegNet), config, key=jax.random.key(0))
    with pytest.raises(ValueError, match=message):
        eqzoo.export(tmp_path / "ours", *pair, format="transformers")
