"""Mixed convolutions are timm's, depthwise and not, at both paddings; channels that don't divide go to the first."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from timm.layers import MixedConv2d as TimmMixedConv2d

from eqzoo import nn
from tests.parity import assert_close


@pytest.mark.parametrize("depthwise", [True, False])
@pytest.mark.parametrize(("padding", "theirs"), [(None, ""), ("same_tf", "same")])
@pytest.mark.parametrize("options", [{"stride": 2}, {"dilation": 2}], ids=str)
def test_mixed_conv_is_timms(depthwise, padding, theirs, options):
    sizes, out = (3, 5, 7), 11 if depthwise else 8
    upstream = TimmMixedConv2d(11, out, list(sizes), padding=theirs, depthwise=depthwise, bias=False, **options)
    ours = nn.MixedConv2d(11, out, sizes, padding=padding, depthwise=depthwise, key=jax.random.key(0), **options)
    weights = [jnp.asarray(conv.weight.detach().numpy()) for conv in upstream.values()]
    assert [conv.weight.shape for conv in ours.convs] == [weight.shape for weight in weights]
    ours = eqx.tree_at(lambda ours: [conv.weight for conv in ours.convs], ours, weights)
    image = np.random.default_rng(0).normal(size=(15, 18, 11)).astype(np.float32)
    expected = upstream(torch.tensor(image).permute(2, 0, 1)[None])[0].permute(1, 2, 0)
    assert_close(ours(jnp.asarray(image)), expected)
