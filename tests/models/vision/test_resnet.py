"""ResNet is torchvision's and timm's: every variant's names and shapes; outputs, gradients and a training step of every
option, running statistics included."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import timm
import torch
import torchvision
from timm.layers import BlurPool2d, GroupNorm, SEModule
from timm.models.resnet import BasicBlock, Bottleneck
from timm.models.resnet import ResNet as TimmResNet

from eqzoo import apply, freeze
from eqzoo._model import _merge, _skeleton
from eqzoo.checkpoint import CheckpointError, unfill
from eqzoo.models.vision._resnet_upstream import TIMM
from eqzoo.models.vision.resnet import FAMILY, VARIANTS, ResNet, ResNetConfig
from tests.parity import (
    assert_close,
    assert_names_and_shapes,
    assert_same_results,
    from_torch,
    randomise,
)

TORCHVISION_VARIANTS = [name for name in VARIANTS if name in torchvision.models.list_models()]
KNOWN = {
    *("ResNet", "BasicBlock", "Bottleneck", "Sequential", "Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d", "Identity"),
    *("AvgPool2d", "SEModule", "Sigmoid", "SelectAdaptivePool2d", "AdaptiveAvgPool2d", "FastAdaptiveAvgPool"),
    *("Flatten", "Linear", "EcaModule", "Conv1d", "BlurPool2d", "GroupNorm"),
}
LEFT_OUT = {"ecaresnet50d_pruned", "ecaresnet101d_pruned"}  # a width of its own for every convolution


def test_every_model_of_timms_module_is_there():
    assert {*timm.list_models(module="resnet")} == {*VARIANTS} | LEFT_OUT


def assert_same_parts(config: ResNetConfig, upstream: torch.nn.Module) -> None:
    """What names and shapes don't show."""
    assert {type(module).__name__ for module in upstream.modules()} <= KNOWN
    norms = [module for module in upstream.modules() if isinstance(module, torch.nn.BatchNorm2d | torch.nn.GroupNorm)]
    assert {module.eps for module in norms} == {1e-5}
    assert {getattr(module, "num_groups", 0) for module in norms} == {config.norm_groups}
    places: dict[str, set[str]] = {"AvgPool2d": set(), "BlurPool2d": set(), "MaxPool2d": set()}
    for name, module in upstream.named_modules():
        if type(module).__name__ in places:
            places[type(module).__name__].add(name.split(".")[2 if name.startswith("layer") else 0])
    pooled = {"downsample"} if config.shortcut == "pool" else set()
    smoothed = {"aa", "maxpool"}
    assert places == {
        "AvgPool2d": pooled | (smoothed if config.antialias == "average" else set()),
        "BlurPool2d": smoothed if config.antialias == "blur" else set(),
        "MaxPool2d": {"maxpool"} if config.stem_pool == "max" and config.antialias != "average" else set(),
    }


# Averaging halves even sizes only.
SIZES = {"none": (75, 97), "average": (64, 96), "blur": (75, 97)}


@pytest.mark.parametrize("name", VARIANTS)
def test_timm_variant_has_the_same_names_shapes_and_maps(name):
    config = VARIANTS[name]
    with torch.device("meta"):
        upstream = timm.create_model(name).eval()
    assert_same_parts(config, upstream)
    assert_names_and_shapes((FAMILY, config), upstream.state_dict())
    size = SIZES[config.antialias]
    theirs = upstream.forward_intermediates(torch.empty(1, 3, *size, device="meta"), intermediates_only=True)
    ours = eqx.filter_eval_shape(lambda: _features(config, size))
    assert [a.shape for a in ours] == [(*a.shape[2:], a.shape[1]) for a in theirs[1:]]


def _features(config: ResNetConfig, size: tuple[int, int]) -> Any:
    model, state = eqx.nn.make_with_state(ResNet)(config, key=jax.random.key(0))
    return freeze(model, state).features(jnp.zeros((*size, 3)))


@pytest.mark.parametrize("name", TORCHVISION_VARIANTS)
def test_torchvision_variant_has_the_same_names_shapes_and_parameters(name):
    with torch.device("meta"):
        upstream = torchvision.models.get_model(name)
    assert_names_and_shapes((FAMILY, VARIANTS[name]), upstream.state_dict())
    model, _ = _skeleton(lambda key: ResNet(VARIANTS[name], key=key))
    number = sum(leaf.size for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.ShapeDtypeStruct))
    for weights in torchvision.models.get_model_weights(name):
        assert weights.meta["num_params"] == number


RS = {"attention": "squeeze_excite", "squeeze": 0.25, "stem_pool": "conv"}
GROUP_NORMS = {"norm_groups": 4}
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "basic": ({"block": "basic"}, {"block": BasicBlock}),
    "basic with everything": (
        {"block": "basic", "stem": "deep", "stem_width": 8, "shortcut": "pool", "attention": "squeeze_excite"},
        {
            "block": BasicBlock,
            "stem_type": "deep",
            "stem_width": 8,
            "avg_down": True,
            "block_args": {"attn_layer": "se"},
        },
    ),
    "bottleneck": ({"block": "bottleneck"}, {"block": Bottleneck}),
    "groups": (
        {"block": "bottleneck", "cardinality": 4, "base_width": 32},
        {"block": Bottleneck, "cardinality": 4, "base_width": 32},
    ),
    "tiered stem and pooled shortcut": (
        {"block": "bottleneck", "stem": "tiered", "stem_width": 8, "shortcut": "pool"},
        {"block": Bottleneck, "stem_type": "deep_tiered", "stem_width": 8, "avg_down": True},
    ),
    "dilated from stride 8": (
        {"block": "bottleneck", "output_stride": 8, "shortcut": "pool"},
        {"block": Bottleneck, "output_stride": 8, "avg_down": True},
    ),
    "basic, dilated from stride 16": (
        {"block": "basic", "output_stride": 16},
        {"block": BasicBlock, "output_stride": 16},
    ),
    "squeeze and excite, one channel, no head": (
        {"block": "bottleneck", "attention": "squeeze_excite", "in_channels": 1, "num_classes": 0},
        {"block": Bottleneck, "block_args": {"attn_layer": "se"}, "in_chans": 1, "num_classes": 0},
    ),
    "efficient channel attention": (
        {"block": "bottleneck", "attention": "eca"},
        {"block": Bottleneck, "block_args": {"attn_layer": "eca"}},
    ),
    "averaged strides": (
        {"block": "bottleneck", "antialias": "average", "shortcut": "pool"},
        {"block": Bottleneck, "aa_layer": torch.nn.AvgPool2d, "avg_down": True},
    ),
    "basic, averaged strides, dilated from stride 16": (
        {"block": "basic", "antialias": "average", "output_stride": 16},
        {"block": BasicBlock, "aa_layer": torch.nn.AvgPool2d, "output_stride": 16},
    ),
    "blurred strides, dilated from stride 16": (
        {"block": "bottleneck", "antialias": "blur", "output_stride": 16},
        {"block": Bottleneck, "aa_layer": BlurPool2d, "output_stride": 16},
    ),
    "basic, blurred strides": (
        {"block": "basic", "antialias": "blur"},
        {"block": BasicBlock, "aa_layer": BlurPool2d},
    ),
    "ResNet-RS": (
        {**RS, "block": "bottleneck", "stem": "deep", "stem_width": 8, "shortcut": "pool"},
        {
            "block": Bottleneck,
            "stem_type": "deep",
            "stem_width": 8,
            "replace_stem_pool": True,
            "avg_down": True,
            "block_args": {"attn_layer": partial(SEModule, rd_ratio=0.25)},
        },
    ),
    "SENet, dilated from stride 8": (
        {"block": "bottleneck", "cardinality": 4, "reduce_first": 2, "shortcut_kernel": 3, "output_stride": 8},
        {
            "block": Bottleneck,
            "cardinality": 4,
            "block_reduce_first": 2,
            "down_kernel_size": 3,
            "output_stride": 8,
        },
    ),
    "basic, reduced": (
        {"block": "basic", "reduce_first": 2, "shortcut_kernel": 3},
        {"block": BasicBlock, "block_reduce_first": 2, "down_kernel_size": 3},
    ),
    "group norms": (
        {**GROUP_NORMS, "block": "bottleneck", "stem": "tiered", "stem_width": 16, "shortcut": "pool"},
        {
            "block": Bottleneck,
            "norm_layer": partial(GroupNorm, num_groups=4),
            "stem_type": "deep_tiered",
            "stem_width": 16,
            "avg_down": True,
        },
    ),
    "group norms, one convolution for a stem": (
        {**GROUP_NORMS, "block": "basic", "stem_pool": "conv"},
        {"block": BasicBlock, "norm_layer": partial(GroupNorm, num_groups=4), "replace_stem_pool": True},
    ),
    "blocks by stage": (
        {"block": ("basic", "bottleneck", "bottleneck", "basic")},
        {"block": [BasicBlock, Bottleneck, Bottleneck, BasicBlock]},
    ),
}


def pair(option: str) -> tuple[ResNetConfig, torch.nn.Module]:
    ours, theirs = OPTIONS[option]
    config = ResNetConfig(**{"depths": (1, 3, 1, 2), "widths": (8, 12, 16, 24), "num_classes": 5, **ours})
    sizes = {"layers": (1, 3, 1, 2), "channels": (8, 12, 16, 24), "num_classes": 5}
    return config, randomise(TimmResNet(**{**sizes, **theirs}), 0)


def batch(channels: int, size: tuple[int, int] = (71, 62)) -> tuple[np.ndarray, torch.Tensor]:
    images = np.random.default_rng(1).normal(size=(4, *size, channels)).astype(np.float32)
    return images, torch.tensor(images).permute(0, 3, 1, 2)


def assert_option_is_timms(option: str, *, training: bool) -> None:
    config, upstream = pair(option)
    size = (64, 32) if config.antialias == "average" else (47, 38)
    assert_same_results((FAMILY, config), upstream, batch(config.in_channels, size)[0], TIMM, training=training)


@pytest.mark.parametrize("option", OPTIONS)
def test_outputs_gradients_and_running_statistics_in_training(option):
    assert_option_is_timms(option, training=True)


@pytest.mark.parametrize("option", ["basic with everything", "groups", "dilated from stride 8", "ResNet-RS"])
def test_outputs_and_gradients_in_inference(option):
    assert_option_is_timms(option, training=False)


@pytest.mark.parametrize("name", ["resnet18", "resnext50_32x4d", "wide_resnet50_2"])
def test_torchvisions_own_blocks_in_training(name):
    upstream = randomise(torchvision.models.get_model(name, num_classes=5), 0).train()
    config = replace(VARIANTS[name], num_classes=5)
    model, state = from_torch((FAMILY, config), upstream)
    images, torch_images = batch(3)
    forward = lambda model, state, image: apply(model, state, image)
    outputs, state = eqx.filter_jit(
        eqx.filter_vmap(forward, in_axes=(None, None, 0), axis_name="batch", out_axes=(0, None))
    )(model, state, jnp.asarray(images))
    assert_close(outputs, upstream(torch_images), 1e-4)
    after = unfill(_merge(model, state), TIMM)
    for buffer, value in upstream.named_buffers():
        assert_close(after[buffer], value, 1e-4)


def test_three_training_steps_with_momentum_equal_torchs():
    config, upstream = pair("bottleneck")
    model, state = from_torch((FAMILY, config), upstream)
    upstream.train()
    images, torch_images = batch(3)
    labels = np.array([0, 3, 1, 4])
    optimizer = optax.chain(optax.add_decayed_weights(1e-2), optax.sgd(1e-3, momentum=0.9))
    torch_optimizer = torch.optim.SGD(upstream.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-2)

    @eqx.filter_jit
    def train_step(model, state, opt_state, images, labels):
        def loss_fn(model, state):
            logits, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(images, state)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), state

        (loss, state), gradients = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, state)
        updates, opt_state = optimizer.update(gradients, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, opt_state, loss

    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    for _ in range(3):
        model, state, opt_state, loss = train_step(model, state, opt_state, jnp.asarray(images), jnp.asarray(labels))
        torch_optimizer.zero_grad()
        torch_loss = torch.nn.functional.cross_entropy(upstream(torch_images), torch.tensor(labels))
        torch_loss.backward()
        torch_optimizer.step()
        assert_close(loss, torch_loss, 1e-4)
    after = unfill(_merge(model, state), TIMM)
    for name, tensor in upstream.state_dict().items():
        assert_close(after[name], tensor, 1e-4)


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("bottleneck", {"shortcut": "pool"}),
        ("bottleneck", {"shortcut_kernel": 3}),
        ("bottleneck", {"stem": "deep", "stem_width": 32}),
        ("bottleneck", {"stem_pool": "conv"}),
        ("bottleneck", {"attention": "squeeze_excite"}),
        ("bottleneck", {"attention": "eca"}),
        ("ResNet-RS", {"squeeze": 1 / 16}),
        ("bottleneck", {"cardinality": 2, "base_width": 32}),
        ("bottleneck", {"reduce_first": 2}),
        ("bottleneck", {"block": "basic"}),
        ("bottleneck", {"block": ("bottleneck", "bottleneck", "bottleneck", "basic")}),
        ("bottleneck", {"norm_groups": 4}),
        ("bottleneck", {"in_channels": 1}),
        ("bottleneck", {"num_classes": 0}),
        ("bottleneck", {"depths": (1, 3, 1, 1)}),
    ],
    ids=str,
)
def test_every_option_changes_what_fits(option, changes):
    config, upstream = pair(option)
    with pytest.raises(CheckpointError, match="does not fit"):
        from_torch((FAMILY, replace(config, **changes)), upstream)


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("bottleneck", {"output_stride": 16}),
        ("bottleneck", {"antialias": "average"}),
        ("averaged strides", {"antialias": "blur"}),
        ("group norms", {"norm_groups": 2}),
    ],
    ids=str,
)
def test_every_other_option_changes_the_numbers(option, changes):
    config, upstream = pair(option)
    images, torch_images = batch(3, (64, 96))
    theirs = upstream.eval()(torch_images)
    for other, differs in ((config, False), (replace(config, **changes), True)):
        outputs = jax.jit(jax.vmap(freeze(*from_torch((FAMILY, other), upstream))))(jnp.asarray(images))
        with pytest.raises(AssertionError, match="relative error above") if differs else nullcontext():
            assert_close(outputs, theirs, 1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"block": ("basic", "bottleneck")},
            r"block=\('basic', 'bottleneck'\) differ in length; give one kind a stage",
        ),
        ({"depths": (1, 1)}, r"depths=\(1, 1\) and widths=\(8, 12, 16, 24\) differ in length"),
        ({"block": "basic", "cardinality": 4}, "block='basic' has no groups, but cardinality=4"),
        ({"squeeze": 16.0}, "squeeze=16.0 is no fraction of a block's channels; choose one such as 1 / 16"),
        (
            {"stem_pool": "conv", "antialias": "blur"},
            "antialias='blur' has no max pool to smooth with stem_pool='conv'",
        ),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(changes, message):
    config, _ = pair("bottleneck")
    with pytest.raises(ValueError, match=message):
        replace(config, **changes)


def test_averages_of_odd_maps_are_refused():
    """Upstream can't add them to the shortcut either."""
    config, upstream = pair("averaged strides")
    images, torch_images = batch(3, (64, 72))
    model = freeze(*from_torch((FAMILY, config), upstream))
    with pytest.raises(ValueError, match="got a map of 8 x 9; resize the image to multiples of 32"):
        eqx.filter_eval_shape(model, jnp.asarray(images[0]))
    with pytest.raises(RuntimeError, match="must match the size"):
        upstream(torch_images)


def test_group_norms_leave_no_state_to_carry():
    config, _ = pair("group norms")
    _, state = _skeleton(lambda key: ResNet(config, key=key))
    assert not jax.tree.leaves(state)


def test_a_file_without_batch_counters_loads():
    config, upstream = pair("basic")
    state_dict = {k: v for k, v in upstream.state_dict().items() if not k.endswith("num_batches_tracked")}
    upstream.state_dict = lambda: state_dict
    model, state = from_torch((FAMILY, config), upstream)
    images, torch_images = batch(3)
    outputs = jax.vmap(freeze(model, state))(jnp.asarray(images))
    assert_close(outputs, upstream.eval()(torch_images), 1e-4)
