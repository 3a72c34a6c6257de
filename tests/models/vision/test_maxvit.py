"""MaxViT is torchvision's: names, shapes and parameters; outputs, gradients and a training step; what is exported."""

from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torchvision
from torchvision.models.maxvit import MaxVit

from eqzoo._model import _merge, _skeleton
from eqzoo.checkpoint import CheckpointError, unfill
from eqzoo.models.vision._maxvit_upstream import TORCHVISION
from eqzoo.models.vision.maxvit import FAMILY, VARIANTS, MaxViT, MaxViTConfig
from tests.parity import assert_names_and_shapes, assert_same_results, from_torch, randomise

KNOWN = {
    *("MaxVit", "MaxVitBlock", "MaxVitLayer", "MBConv", "PartitionAttentionLayer", "WindowPartition"),
    *("WindowDepartition", "SwapAxes", "RelativePositionalMultiHeadAttention", "Conv2dNormActivation", "Conv2d"),
    *("SqueezeExcitation", "BatchNorm2d", "LayerNorm", "Linear", "GELU", "SiLU", "Sigmoid", "Tanh", "Dropout"),
    *("StochasticDepth", "AvgPool2d", "AdaptiveAvgPool2d", "Sequential", "ModuleList", "Identity", "Flatten"),
}


def test_variant_has_torchvisions_options_names_shapes_and_parameters():
    (name, config), *_ = VARIANTS.items()
    with torch.device("meta"):
        upstream: Any = torchvision.models.get_model(name)
    assert {type(module).__name__ for module in upstream.modules()} <= KNOWN
    batch_norms = [module for module in upstream.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert {(norm.eps, norm.momentum) for norm in batch_norms} == {(1e-3, 0.01)}
    layer_norms = [module for module in upstream.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert {norm.eps for norm in layer_norms} == {1e-5}
    assert upstream.blocks[-1].layers[-1].layers.grid_attention.stochastic_dropout.p == config.drop_path
    assert_names_and_shapes((FAMILY, config), upstream.state_dict())
    model, state = _skeleton(partial(MaxViT, config))
    number = sum(leaf.size for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.ShapeDtypeStruct))
    for weights in torchvision.models.get_model_weights(name):
        assert weights.meta["num_params"] == number
    features = lambda model, state: eqx.nn.inference_mode(model).features(jnp.zeros((224, 224, 3)), state)
    maps, _ = eqx.filter_eval_shape(features, model, state)
    assert [each.shape for each in maps] == [(56, 56, 64), (28, 28, 128), (14, 14, 256), (7, 7, 512)]


def model_of(config: MaxViTConfig) -> tuple[MaxViT, eqx.nn.State]:
    return eqx.nn.make_with_state(MaxViT)(config, key=jax.random.key(0))


def pair(image_size: int = 32) -> tuple[MaxViTConfig, torch.nn.Module]:
    """Ours and torchvision's, with every size another than its default."""
    ours = {"depths": (1, 3), "widths": (8, 12), "stem_width": 6, "dim_head": 4, "window": 2, "squeeze": 0.5}
    sizes = {"block_layers": [1, 3], "block_channels": [8, 12], "stem_channels": 6, "head_dim": 4, "partition_size": 2}
    upstream = MaxVit(
        (image_size, image_size),
        **sizes,
        squeeze_ratio=0.5,
        expansion_ratio=3,
        mlp_ratio=2,
        stochastic_depth_prob=0.0,
        num_classes=5,
    )
    config = MaxViTConfig(**ours, expansion=3.0, mlp_ratio=2, drop_path=0.0, num_classes=5)
    return config, randomise(upstream, 0)


def images(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(4, height, width, 3)).astype(np.float32)


@pytest.mark.parametrize(("training", "size"), [(False, 48), (True, 32)], ids=["inference", "training"])
def test_outputs_gradients_and_running_statistics(training, size):
    config, upstream = pair(size)
    assert_same_results((FAMILY, config), upstream, images(size, size), TORCHVISION, training=training)


@pytest.mark.parametrize(
    "changes",
    [
        {"depths": (1, 2)},
        {"widths": (8, 16)},
        {"stem_width": 8},
        {"dim_head": 2},
        {"window": 3},
        {"squeeze": 0.25},
        {"expansion": 4.0},
        {"mlp_ratio": 4},
        {"in_channels": 1},
        {"num_classes": 0},
    ],
    ids=str,
)
def test_every_option_changes_what_fits(changes):
    config, upstream = pair()
    with pytest.raises(CheckpointError, match="does not fit"):
        from_torch((FAMILY, replace(config, **changes)), upstream)


def test_what_torchvision_stores_comes_back():
    """Number by number, with the indices that it stores."""
    config, upstream = pair()
    back = {**unfill(_merge(*from_torch((FAMILY, config), upstream)), TORCHVISION)}
    back |= FAMILY.upstreams["torchvision"].buffers(config)
    state_dict = upstream.state_dict()
    assert back.keys() == state_dict.keys()
    for name, ours in back.items():
        assert np.array_equal(ours, state_dict[name].numpy()), name


def test_grids_of_an_oblong_image_reach_across_it():
    """A change in one corner is seen in the opposite one already after the first block."""
    config, upstream = pair()
    model, state = from_torch((FAMILY, config), upstream)
    frozen = eqx.filter_jit(lambda x: eqx.nn.inference_mode(model).features(x, state)[0][0])
    x = jnp.asarray(images(32, 64)[0])
    difference = jnp.abs(frozen(x) - frozen(x.at[0, 0].add(1.0))).max(axis=-1)
    assert difference.shape == (8, 16)
    assert difference[4, 8] > 1e-6  # the token of the same place in the opposite quarter


@pytest.mark.parametrize("size", [(33, 32), (32, 40)])
def test_an_image_that_windows_do_not_divide_is_refused(size):
    model, state = model_of(pair()[0])
    with pytest.raises(ValueError, match=rf"image of {size[0]}x{size[1]}; resize it to multiples of 16"):
        model.features(jnp.zeros((*size, 3)), state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depths": (1,)}, r"depths=\(1,\) and widths=.* differ in length"),
        ({"dim_head": 48}, "holds 64, no multiple of dim_head=48"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MaxViTConfig(**options)


def test_initial_weights_are_spread_as_in_torchvision():
    config = replace(pair()[0], widths=(32, 64), dim_head=32, stem_width=32, depths=(1, 1), num_classes=100)
    upstream = MaxVit(
        (32, 32),
        stem_channels=32,
        partition_size=2,
        block_channels=[32, 64],
        block_layers=[1, 1],
        head_dim=32,
        stochastic_depth_prob=0.0,
        squeeze_ratio=0.5,
        expansion_ratio=3,
        mlp_ratio=2,
        num_classes=100,
    )
    ours = unfill(_merge(*model_of(config)), TORCHVISION)
    for name, theirs in upstream.state_dict().items():
        if name.endswith("relative_position_index"):
            continue
        if theirs.ndim == 0 or theirs.double().std() == 0:
            np.testing.assert_array_equal(ours[name], theirs, err_msg=name)
        else:
            spread = 5 / np.sqrt(theirs.numel())  # five deviations of what two samples of this size differ by
            assert abs(ours[name].std() / theirs.std() - 1) < spread, name
