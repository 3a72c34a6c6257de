"""Resizing is torch's, up and down."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from eqzoo import nn
from tests.parity import assert_close


@pytest.mark.parametrize(("size", "new"), [((5, 7), (40, 50)), ((1, 1), (6, 3)), ((9, 8), (9, 8)), ((8, 9), (4, 5))])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_resizing_is_torchs(size, new, mode):
    x = np.random.default_rng(0).normal(size=(*size, 2)).astype(np.float32)
    there = torch.nn.functional.interpolate(torch.tensor(x).permute(2, 0, 1)[None], size=new, mode=mode)[0]
    resize = nn.resize_bilinear if mode == "bilinear" else nn.resize_nearest
    assert_close(resize(jnp.asarray(x), new), there.permute(1, 2, 0))
