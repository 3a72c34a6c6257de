"""Windows against timm's: cutting, merging, regions of a rolled map, offsets; and attention in them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from timm.models.swin_transformer import SwinTransformerBlock, window_partition, window_reverse
from timm.models.swin_transformer_v2 import WindowAttention as WindowAttentionV2
from torch.nn.functional import scaled_dot_product_attention

from eqzoo import nn
from tests.parity import array, assert_close


@pytest.mark.parametrize("window", [(2, 3), (4, 6), (1, 1), (4, 2)])
def test_windows_are_timms_and_merge_back(window):
    x = torch.randn(1, 4, 6, 5)
    theirs = window_partition(x, window)
    ours = nn.partition_windows(array(x)[0], window)
    assert_close(ours, theirs.flatten(1, 2), 0)
    assert_close(nn.merge_windows(ours, window, (4, 6)), window_reverse(theirs, window, 4, 6)[0], 0)


@pytest.mark.parametrize(("size", "shift"), [((8, 12), (2, 2)), ((4, 12), (0, 2)), ((8, 8), (1, 3)), ((8, 8), (0, 0))])
def test_regions_are_what_timm_masks(size, shift):
    regions = nn.shifted_regions(size, 4, shift)
    block = SwinTransformerBlock(8, size, num_heads=2, window_size=4, always_partition=True)
    block.window_size, block.shift_size = (4, 4), shift
    mask = block.get_attn_mask(torch.zeros(1, *size, 1))
    apart = regions[:, :, None] != regions[:, None]
    assert regions.shape == (size[0] * size[1] // 16, 16)
    assert np.array_equal(apart, np.zeros_like(apart) if mask is None else mask.numpy() == -100)


@pytest.mark.parametrize(("window", "pretrained"), [(4, 0), (4, 3), (3, 8), (1, 0), (16, 12)])
def test_offsets_and_their_order_are_timms(window, pretrained):
    theirs = WindowAttentionV2(8, (window, window), 2, pretrained_window_size=(pretrained, pretrained))
    assert_close(nn.log_offsets(window, pretrained), theirs.relative_coords_table.reshape(-1, 2), 1e-6)
    assert np.array_equal(nn.relative_index(window), theirs.relative_position_index.numpy())


@pytest.mark.parametrize("shape", [(4, 5, 7), (1, 5, 7), (4, 1, 7)])
def test_a_bias_is_added_to_the_scores(shape):
    query, key, value = torch.randn(4, 5, 8), torch.randn(2, 7, 8), torch.randn(2, 7, 6)
    bias = torch.randn(shape)
    theirs = scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=bias, enable_gqa=True)[0]
    assert_close(nn.attend(array(query), array(key), array(value), bias=array(bias)), theirs)


@pytest.mark.parametrize("attention", [nn.WindowAttention, nn.CosineWindowAttention])
def test_each_window_and_region_is_by_itself(attention):
    layer = attention(8, 2, 2, key=jax.random.key(0))
    x, y = jax.random.normal(jax.random.key(1), (2, 3, 4, 8))
    regions = jnp.array([[0, 0, 1, 1]] * 3)
    call = eqx.filter_jit(lambda x: layer(x, regions=regions))
    changed = call(x.at[1, 2:].set(y[1, 2:])) - call(x)
    assert jnp.abs(changed[1, 2:]).max() > 1e-3
    assert jnp.abs(changed.at[1, 2:].set(0)).max() == 0


@pytest.mark.parametrize("attention", [nn.WindowAttention, nn.CosineWindowAttention])
def test_dropout_needs_a_key_and_drops_in_each_window_anew(attention):
    layer = attention(8, 2, 2, weight_dropout=0.5, key=jax.random.key(0))
    x = jnp.broadcast_to(jax.random.normal(jax.random.key(1), (4, 8)), (3, 4, 8))
    with pytest.raises(ValueError, match="got no key in training mode"):
        eqx.filter_eval_shape(layer, x)
    one, two, _ = layer(x, key=jax.random.key(2))
    assert jnp.abs(one - two).max() > 1e-3


def test_gradients_of_padding_are_finite():
    """The cosine of a vector of zeros is zero, and so is what it passes back to the weights."""
    layer = nn.CosineWindowAttention(8, 2, 2, key=jax.random.key(0))
    gradients = eqx.filter_grad(lambda layer: layer(jnp.zeros((1, 4, 8))).sum())(layer)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
