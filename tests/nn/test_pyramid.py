"""The feature pyramid is torchvision's, over the maps of any backbone."""

from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torchvision.ops import FeaturePyramidNetwork

import eqzoo
from eqzoo import nn
from tests.parity import assert_close


def test_levels_and_gradients_are_torchvisions():
    sizes, channels = [(13, 10), (7, 5), (3, 3)], [4, 6, 8]
    pyramid = nn.FeaturePyramid(channels, 5, key=jax.random.key(0))
    upstream = FeaturePyramidNetwork(channels, 5)
    for blocks, convs in ((upstream.inner_blocks, pyramid.lateral), (upstream.layer_blocks, pyramid.smooth)):
        for block, conv in zip(blocks, convs, strict=True):
            block[0].load_state_dict(
                {name: torch.tensor(np.asarray(getattr(conv, name))) for name in ("weight", "bias")}
            )
    generator = np.random.default_rng(0)
    maps = [
        generator.normal(size=(*size, width)).astype(np.float32) for size, width in zip(sizes, channels, strict=True)
    ]
    there = [torch.tensor(each).permute(2, 0, 1)[None].requires_grad_() for each in maps]
    levels = upstream(OrderedDict(enumerate(there)))
    sum(level.square().sum() for level in levels.values()).backward()

    ours = pyramid(tuple(map(jnp.asarray, maps)))
    total = lambda maps: sum(jnp.sum(level**2) for level in pyramid(maps))
    gradients = jax.grad(total)(tuple(map(jnp.asarray, maps)))
    for level, gradient, theirs, tensor in zip(ours, gradients, levels.values(), there, strict=True):
        assert_close(level, theirs[0].permute(1, 2, 0))
        assert_close(gradient, tensor.grad[0].permute(1, 2, 0))


def test_over_a_backbone():
    model, state = eqzoo.create("resnet10t", num_classes=0, key=jax.random.key(0))
    maps = eqzoo.freeze(model, state).features(jnp.zeros((64, 96, 3)))
    pyramid = nn.FeaturePyramid([each.shape[-1] for each in maps], 16, key=jax.random.key(1))
    assert [level.shape for level in pyramid(maps)] == [(16, 24, 16), (8, 12, 16), (4, 6, 16), (2, 3, 16)]


def test_another_number_of_maps_is_refused():
    pyramid = nn.FeaturePyramid([4, 6], 5, key=jax.random.key(0))
    with pytest.raises(ValueError, match="got 1 maps, but was made for 2; pass as many"):
        pyramid((jnp.zeros((4, 4, 4)),))
