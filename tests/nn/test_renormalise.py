"""One normalisation becomes the other."""

import jax.numpy as jnp
import numpy as np
import torch
from torchvision.models import GoogLeNet
from torchvision.transforms.functional import normalize

from eqzoo import nn

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def test_imagenets_statistics_become_halves_as_in_torchvision():
    image = torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(0))
    x = normalize(image, MEAN, STD)
    ours = nn.renormalise(jnp.asarray(x.permute(1, 2, 0).numpy()))
    np.testing.assert_allclose(ours, normalize(image, [0.5] * 3, [0.5] * 3).permute(1, 2, 0), atol=1e-6)
    with torch.device("meta"):
        theirs = GoogLeNet(init_weights=False, transform_input=True)
    np.testing.assert_allclose(ours, theirs._transform_input(x[None])[0].permute(1, 2, 0), atol=1e-6)


def test_more_channels_take_the_constants_in_turn():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 5)), jnp.bfloat16)
    y = nn.renormalise(x)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y[..., :3], nn.renormalise(x[..., :3]))
    np.testing.assert_array_equal(y[..., 3:], nn.renormalise(x[..., 3:]))
