"""ConvNeXt is torchvision's and timm's: every variant's names, shapes, options and maps; outputs and gradients of every
option."""

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
from timm.layers.grn import GlobalResponseNorm as TimmGlobalResponseNorm
from timm.models.convnext import ConvNeXt as TimmConvNeXt
from torchvision.models.convnext import CNBlockConfig

from eqzoo._model import _skeleton
from eqzoo.checkpoint import CheckpointError, unfill
from eqzoo.models.vision._convnext_upstream import TIMM, TIMM_OPTIONS, TORCHVISION
from eqzoo.models.vision.convnext import FAMILY, VARIANTS, ConvNeXt, ConvNeXtConfig, GlobalResponseNorm
from tests.parity import (
    array,
    assert_close,
    assert_names_and_shapes,
    assert_same_results,
    from_torch,
    randomise,
)

TORCHVISION_VARIANTS = [name for name in VARIANTS if name in torchvision.models.list_models()]

# The modules that the mathematics of this family is made of. Anything else in an upstream model needs a look.
NORMS = {"LayerNorm": "layer", "RmsNorm": "rms", "SimpleNorm": "simple"}
NORMS |= {f"{name}2d": ours for name, ours in NORMS.items()}
ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "SiLU": "silu", "QuickGELU": "quick_gelu", "ReLU": "relu"}
KNOWN = {
    *("ConvNeXt", "ConvNeXtStage", "ConvNeXtBlock", "Mlp", "GlobalResponseNormMlp", "GlobalResponseNorm", "Sequential"),
    *("NormMlpClassifierHead", "ClassifierHead", "SelectAdaptivePool2d", "AdaptiveAvgPool2d", "FastAdaptiveAvgPool"),
    *("Conv2d", "Linear", "Identity", "Dropout", "Flatten", *NORMS, *ACTIVATIONS),
}
TORCHVISION_KNOWN = {
    *("ConvNeXt", "CNBlock", "Conv2dNormActivation", "LayerNorm2d", "LayerNorm", "Permute", "StochasticDepth"),
    *("Sequential", "Conv2d", "Linear", "GELU", "AdaptiveAvgPool2d", "Flatten"),
}


def kind(module: torch.nn.Module) -> str:
    return type(module).__name__


def config_of(model: TimmConvNeXt) -> ConvNeXtConfig:
    """The config of a timm model, read off the model itself."""
    stem, stages = [kind(module) for module in model.stem], list(model.stages)
    block, head = stages[0].blocks[0], model.head
    if len(stem) == 2:
        shape = "patch"
    elif len(stem) == 4:
        shape = "overlap_act"
    else:
        shape = "overlap" if model.stem[0].out_channels == model.stem[1].out_channels else "overlap_tiered"
    assert kind(getattr(head.pre_logits, "act", torch.nn.GELU())) == "GELU" if hasattr(head, "pre_logits") else True
    return ConvNeXtConfig(
        depths=tuple(len(stage.blocks) for stage in stages),
        widths=tuple(stage.blocks[0].conv_dw.out_channels for stage in stages),
        kernel_sizes=tuple(stage.blocks[0].conv_dw.kernel_size[0] for stage in stages),
        stem=shape,
        patch_size=model.stem[0].stride[0] if shape == "patch" else 4,
        norm=NORMS[kind(block.norm)],
        norm_eps=block.norm.eps,
        activation=ACTIVATIONS[kind(block.mlp.act)],
        response_norm=hasattr(block.mlp, "grn"),
        layer_scale=None if block.gamma is None else 1e-6,
        conv_mlp=kind(block.mlp.fc1) == "Conv2d",
        head_norm_first=kind(head) == "ClassifierHead",
        head_hidden=getattr(head, "hidden_size", None),
        in_channels=model.in_chans,
        num_classes=model.num_classes,
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_timm_variant_has_the_same_options_names_shapes_and_maps(name):
    config = VARIANTS[name]
    with torch.device("meta"):
        upstream = timm.create_model(name).eval()
    assert {kind(module) for module in upstream.modules()} <= KNOWN
    assert config_of(upstream) == replace(config, drop_path=0.0)
    norms = [module for module in upstream.modules() if kind(module) in NORMS]
    assert {norm.eps for norm in norms} == {config.norm_eps}
    assert {kind(norm) for norm in norms} <= {name for name, ours in NORMS.items() if ours == config.norm}
    assert_names_and_shapes((FAMILY, config), upstream.state_dict())
    theirs = upstream.forward_intermediates(torch.empty(1, 3, 75, 97, device="meta"), intermediates_only=True)
    model, _ = _skeleton(partial(ConvNeXt, replace(config, drop_path=0.0)))
    ours = eqx.filter_eval_shape(lambda model: model.features(jnp.zeros((75, 97, 3))), model)
    assert [a.shape for a in ours] == [(*a.shape[2:], a.shape[1]) for a in theirs]


@pytest.mark.parametrize("name", TORCHVISION_VARIANTS)
def test_torchvision_variant_has_the_same_rates_names_shapes_and_parameters(name):
    with torch.device("meta"):
        upstream = torchvision.models.get_model(name)
    assert {kind(module) for module in upstream.modules()} <= TORCHVISION_KNOWN
    assert {norm.eps for norm in upstream.modules() if isinstance(norm, torch.nn.LayerNorm)} == {1e-6}
    rates = [module.p for module in upstream.modules() if kind(module) == "StochasticDepth"]
    np.testing.assert_allclose(rates, np.linspace(0, VARIANTS[name].drop_path, sum(VARIANTS[name].depths)), atol=1e-12)
    assert_names_and_shapes((FAMILY, VARIANTS[name]), upstream.state_dict())
    model, _ = _skeleton(partial(ConvNeXt, VARIANTS[name]))
    number = sum(leaf.size for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.ShapeDtypeStruct))
    for weights in torchvision.models.get_model_weights(name):
        assert weights.meta["num_params"] == number


# Every option, in few models: ours, and timm's for the same.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "layer scale": ({}, {}),
    "response norm, other kernels": (
        {"response_norm": True, "layer_scale": None, "conv_mlp": True, "kernel_sizes": (7, 5, 5, 3)},
        {"use_grn": True, "ls_init_value": None, "conv_mlp": True, "kernel_sizes": (7, 5, 5, 3)},
    ),
    "response norm in linear layers, hidden head": (
        {"response_norm": True, "layer_scale": None, "head_hidden": 10, "activation": "gelu_tanh", "norm_eps": 0.1},
        {"use_grn": True, "ls_init_value": None, "head_hidden_size": 10, "act_layer": "gelu_tanh", "norm_eps": 0.1},
    ),
    "simple norm, overlapping stem with activation": (
        {"norm": "simple", "stem": "overlap_act", "conv_mlp": True, "activation": "silu"},
        {"norm_layer": "simplenorm", "stem_type": "overlap_act", "conv_mlp": True, "act_layer": "silu"},
    ),
    "rms norm, tiered stem, one kernel size": (
        {"norm": "rms", "stem": "overlap_tiered", "kernel_sizes": (5, 5, 5, 5), "num_classes": 0, "norm_eps": 0.1},
        {"norm_layer": "rmsnorm2d", "stem_type": "overlap_tiered", "kernel_sizes": 5, "num_classes": 0}
        | {"norm_eps": 0.1},
    ),
    "head norm first, overlapping stem, one channel": (
        {"head_norm_first": True, "stem": "overlap", "in_channels": 1, "activation": "relu", "norm_eps": 0.1},
        {"head_norm_first": True, "stem_type": "overlap", "in_chans": 1, "act_layer": "relu", "norm_eps": 0.1},
    ),
    "patches of another size": ({"patch_size": 5}, {"patch_size": 5}),
}


def tiny(**options: Any) -> ConvNeXtConfig:
    sizes = {"depths": (1, 3, 2, 1), "widths": (22, 12, 16, 24), "kernel_sizes": (3, 3, 3, 3), "num_classes": 5}
    return ConvNeXtConfig(**{**sizes, **options})


def tiny_timm(**options: Any) -> torch.nn.Module:
    sizes = {"depths": (1, 3, 2, 1), "dims": (22, 12, 16, 24), "kernel_sizes": 3, "num_classes": 5}
    return randomise(TimmConvNeXt(**{**sizes, **options}).eval(), 0)


def tiny_torchvision() -> torch.nn.Module:
    widths = (22, 12, 16, 24, None)
    blocks = [CNBlockConfig(widths[stage], widths[stage + 1], depth) for stage, depth in enumerate((1, 3, 2, 1))]
    return randomise(torchvision.models.ConvNeXt(blocks, num_classes=5).eval(), 0)


def images(channels: int = 3) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(4, 71, 62, channels)).astype(np.float32)


def assert_export_is_the_original(config: ConvNeXtConfig, upstream: torch.nn.Module, rules: Any) -> None:
    exported = unfill(from_torch((FAMILY, config), upstream)[0], rules)
    original = {name: tensor.numpy() for name, tensor in upstream.state_dict().items()}
    assert exported.keys() == original.keys()
    assert all(np.array_equal(exported[name], original[name]) for name in original)


@pytest.mark.parametrize("option", OPTIONS)
def test_outputs_and_gradients_are_those_of_timm(option):
    ours, theirs = OPTIONS[option]
    config, upstream = tiny(**ours), tiny_timm(**theirs)
    assert replace(tiny(), **TIMM_OPTIONS.read(theirs)) == config
    assert_same_results((FAMILY, config), upstream, images(config.in_channels), TIMM)
    assert_export_is_the_original(config, upstream, TIMM)


def test_outputs_and_gradients_are_those_of_torchvision():
    config, upstream = tiny(kernel_sizes=(7, 7, 7, 7)), tiny_torchvision()
    assert_same_results((FAMILY, config), upstream, images(), TORCHVISION)
    assert_export_is_the_original(config, upstream, TORCHVISION)


# Our options, timm's for the same, and whether a model without them notices by its outputs or already by its weights.
FORGOTTEN: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception]]] = {
    "norm_eps": ({"norm_eps": 1e-2}, {"norm_eps": 1e-2}, AssertionError),
    "gelu_tanh": ({"activation": "gelu_tanh"}, {"act_layer": "gelu_tanh"}, AssertionError),
    "quick_gelu": ({"activation": "quick_gelu"}, {"act_layer": "quick_gelu"}, AssertionError),
    "silu": ({"activation": "silu"}, {"act_layer": "silu"}, AssertionError),
    "relu": ({"activation": "relu"}, {"act_layer": "relu"}, AssertionError),
    "kernel_sizes": ({"kernel_sizes": (3, 3, 3, 5)}, {"kernel_sizes": (3, 3, 3, 5)}, CheckpointError),
    "patch_size": ({"patch_size": 5}, {"patch_size": 5}, CheckpointError),
    "overlap": ({"stem": "overlap"}, {"stem_type": "overlap"}, CheckpointError),
    "rms": ({"norm": "rms"}, {"norm_layer": "rmsnorm"}, CheckpointError),
    "simple": ({"norm": "simple"}, {"norm_layer": "simplenorm"}, CheckpointError),
    "response_norm": ({"response_norm": True}, {"use_grn": True}, CheckpointError),
    "layer_scale": ({"layer_scale": None}, {"ls_init_value": None}, CheckpointError),
    "conv_mlp": ({"conv_mlp": True}, {"conv_mlp": True}, CheckpointError),
    "head_norm_first": ({"head_norm_first": True}, {"head_norm_first": True}, CheckpointError),
    "head_hidden": ({"head_hidden": 10}, {"head_hidden_size": 10}, CheckpointError),
    "in_channels": ({"in_channels": 1}, {"in_chans": 1}, CheckpointError),
    "num_classes": ({"num_classes": 0}, {"num_classes": 0}, CheckpointError),
    "depths": ({"depths": (1, 3, 2, 2)}, {"depths": (1, 3, 2, 2)}, CheckpointError),
    "widths": ({"widths": (22, 12, 16, 20)}, {"dims": (22, 12, 16, 20)}, CheckpointError),
}


@pytest.mark.parametrize("option", FORGOTTEN)
def test_a_forgotten_option_is_noticed(option):
    ours, theirs, error = FORGOTTEN[option]
    upstream, x = tiny_timm(**theirs), images(ours.get("in_channels", 3))
    assert replace(tiny(), **TIMM_OPTIONS.read(theirs)) == tiny(**ours)
    with pytest.raises(error, match="relative error" if error is AssertionError else "does not fit"):
        assert_close(_outputs(tiny(), upstream, x), upstream(torch.tensor(x).permute(0, 3, 1, 2)), 1e-4)


def _outputs(config: ConvNeXtConfig, upstream: torch.nn.Module, x: np.ndarray) -> jax.Array:
    model, _ = from_torch((FAMILY, config), upstream)
    return eqx.filter_jit(_mapped)(model, jnp.asarray(x))


def _mapped(model: ConvNeXt, x: jax.Array) -> jax.Array:
    return jax.vmap(model)(x)


def test_the_activation_within_the_stem_counts():
    upstream = tiny_timm(stem_type="overlap_act")
    with pytest.raises(CheckpointError, match="does not fit"):
        from_torch((FAMILY, tiny(stem="overlap")), upstream)
    with pytest.raises(CheckpointError, match="does not fit"):
        from_torch((FAMILY, tiny(stem="overlap_act")), tiny_timm(stem_type="overlap"))


def test_the_epsilon_of_the_last_norm_is_its_own():
    upstream, x = tiny_timm(), images()
    upstream.head.norm.eps = 0.1
    theirs = upstream(torch.tensor(x).permute(0, 3, 1, 2))
    assert_close(_outputs(tiny(head_norm_eps=0.1), upstream, x), theirs, 1e-4)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(_outputs(tiny(), upstream, x), theirs, 1e-4)


def test_a_silent_channel_has_upstreams_gradient():
    """The norm of zeros has no derivative; torch takes 0."""
    x = np.random.default_rng(0).normal(size=(1, 5, 4, 6)).astype(np.float32)
    x[..., 2] = 0
    theirs = TimmGlobalResponseNorm(6)
    torch.nn.init.normal_(theirs.weight)
    torch.nn.init.normal_(theirs.bias)
    ours = eqx.tree_at(
        lambda norm: (norm.weight, norm.bias), GlobalResponseNorm(6), (array(theirs.weight), array(theirs.bias))
    )
    torch_x = torch.tensor(x, requires_grad=True)
    y = theirs(torch_x)
    y.sin().sum().backward()
    assert_close(ours(jnp.asarray(x[0])), y[0], 1e-6)
    assert_close(jax.grad(lambda x: jnp.sin(ours(x)).sum())(jnp.asarray(x[0])), torch_x.grad[0], 1e-5)


def test_initial_weights_are_spread_as_in_timm():
    options = {"depths": (1, 1, 1, 1), "conv_mlp": True, "head_hidden": 40, "response_norm": True}
    config = tiny(**options, widths=(32, 48, 64, 96), num_classes=100)
    upstream = TimmConvNeXt(
        depths=(1, 1, 1, 1),
        dims=(32, 48, 64, 96),
        conv_mlp=True,
        head_hidden_size=40,
        use_grn=True,
        num_classes=100,
    )
    ours = unfill(eqx.filter_jit(ConvNeXt)(config, key=jax.random.key(0)), TIMM)
    for name, theirs in upstream.state_dict().items():
        if theirs.min() == theirs.max():
            np.testing.assert_array_equal(ours[name], theirs, err_msg=name)
        else:
            spread = 5 / np.sqrt(theirs.numel())  # five deviations of what two samples of this size differ by
            assert abs(ours[name].std() / theirs.std() - 1) < spread, name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depths": (1, 3, 2)}, r"depths=\(1, 3, 2\), widths=.* and kernel_sizes=.* differ in length"),
        ({"kernel_sizes": (3, 3, 3, 4)}, "has an even size, which has no centre; use odd ones"),
        ({"stem": "overlap", "patch_size": 2}, "stem='overlap' divides the image's size by 4, but patch_size=2"),
        ({"layer_scale": 0.0}, "layer_scale=0 would silence every block"),
        ({"head_norm_first": True, "head_hidden": 8}, "head_norm_first=True goes with a linear head only"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tiny(**options)


@pytest.mark.parametrize("options", [{"patch_size": 2}, {"patch_size": 8}, {"conv_bias": False}, {"output_stride": 16}])
def test_what_the_zoo_does_not_have_is_refused(options):
    with pytest.raises(ValueError, match="is not supported; eqzoo has"):
        TIMM_OPTIONS.read(options)


def test_options_that_say_nothing_are_defaults():
    assert TIMM_OPTIONS.read({"norm_eps": None, "norm_layer": None, "head_hidden_size": 0}) == {
        "norm_eps": 1e-6,
        "norm": "layer",
        "head_hidden": None,
    }
