"""ShuffleNet V2 is torchvision's: every variant's names and shapes; outputs, gradients and a training step, running
statistics included."""

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
from torchvision.models.shufflenetv2 import ShuffleNetV2 as TorchvisionShuffleNetV2

import eqzoo
from eqzoo._model import _merge, _skeleton
from eqzoo.checkpoint import CheckpointError, unfill
from eqzoo.models.vision.shufflenet_v2 import FAMILY, TORCHVISION, VARIANTS, ShuffleNetV2, ShuffleNetV2Config
from tests.parity import assert_close, assert_names_and_shapes, assert_same_results, from_torch, randomise

KNOWN = {"ShuffleNetV2", "InvertedResidual", "Sequential", "Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d", "Linear"}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_has_the_same_names_shapes_and_parameters(name):
    with torch.device("meta"):
        upstream = torchvision.models.get_model(name)
    assert {type(module).__name__ for module in upstream.modules()} <= KNOWN
    assert {module.eps for module in upstream.modules() if isinstance(module, torch.nn.BatchNorm2d)} == {1e-5}
    assert_names_and_shapes((FAMILY, VARIANTS[name]), upstream.state_dict())
    model, _ = _skeleton(partial(ShuffleNetV2, VARIANTS[name]))
    number = sum(leaf.size for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.ShapeDtypeStruct))
    for weights in torchvision.models.get_model_weights(name):
        assert weights.meta["num_params"] == number


def tiny(**options: Any) -> ShuffleNetV2Config:
    sizes = {"depths": (1, 3, 2), "widths": (12, 16, 24), "stem_width": 8, "last_width": 20, "num_classes": 5}
    return ShuffleNetV2Config(**{**sizes, **options})


def upstreams() -> torch.nn.Module:
    return randomise(TorchvisionShuffleNetV2([1, 3, 2], [8, 12, 16, 24, 20], num_classes=5), 0)


def batch() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(4, 71, 62, 3)).astype(np.float32)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_outputs_gradients_and_running_statistics(training):
    assert_same_results((FAMILY, tiny()), upstreams(), batch(), TORCHVISION, training=training)


def test_features_are_the_stages_and_the_embedding_is_what_the_head_gets():
    upstream = upstreams().eval()
    seen = []
    for module in (upstream.stage2, upstream.stage3, upstream.stage4):
        module.register_forward_hook(lambda module, inputs, output: seen.append(output))
    upstream.fc = torch.nn.Identity()  # what the rules call `fc` is gone
    config = tiny(num_classes=0)
    model = eqzoo.freeze(*from_torch((FAMILY, config), upstream))
    x = batch()
    theirs = upstream(torch.from_numpy(x).movedim(-1, 1))
    maps, embedding = eqx.filter_jit(jax.vmap(lambda x: (model.features(x), model(x))))(jnp.asarray(x))
    assert_close(embedding, theirs, 1e-5)
    for ours, expected in zip(maps, seen, strict=True):
        assert_close(ours, expected.movedim(1, -1), 1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"depths": (1, 3, 3)},
        {"widths": (12, 16, 28)},
        {"stem_width": 12},
        {"last_width": 24},
        {"in_channels": 1},
        {"num_classes": 0},
    ],
    ids=str,
)
def test_every_option_changes_what_fits(changes):
    with pytest.raises(CheckpointError, match="does not fit"):
        from_torch((FAMILY, replace(tiny(), **changes)), upstreams())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depths": (1, 2)}, r"depths=\(1, 2\) and widths=\(12, 16, 24\) differ in length"),
        ({"widths": (12, 15, 24)}, r"widths=\(12, 15, 24\) can't all be halved"),
    ],
)
def test_bad_sizes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tiny(**options)


def test_torchvision_loads_what_is_exported(tmp_path):
    upstream = torchvision.models.shufflenet_v2_x0_5(num_classes=7)
    model, state = from_torch((FAMILY, replace(VARIANTS["shufflenet_v2_x0_5"], num_classes=7)), randomise(upstream, 0))
    eqzoo.export(tmp_path / "model.pth", model, state, format="torchvision")
    back = torch.load(tmp_path / "model.pth", weights_only=True)
    expected = upstream.state_dict()
    torchvision.models.shufflenet_v2_x0_5(num_classes=7).load_state_dict(back)
    assert all(torch.equal(back[name], tensor) for name, tensor in expected.items())


def test_initial_weights_are_spread_as_upstream():
    """torchvision leaves them as torch makes them."""
    ours = unfill(_merge(*eqzoo.create("shufflenet_v2_x0_5", key=jax.random.key(0))), TORCHVISION)
    for name, theirs in torchvision.models.shufflenet_v2_x0_5().state_dict().items():
        if theirs.ndim < 2 and name != "fc.bias":
            np.testing.assert_array_equal(ours[name], theirs, err_msg=name)
        else:
            spread = 6 / np.sqrt(theirs.numel())
            assert abs(ours[name].std() / theirs.std() - 1) < spread, name
