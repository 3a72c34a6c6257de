"""Position tables and rotary angles against timm, transformers and MAE."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import timm
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama

from eqzoo import nn
from eqzoo.models.language._rotary import read_rotary, write_rotary
from tests.parity import assert_close


def test_sincos_1d_is_sines_then_cosines():
    positions = np.array([0.0, 1.0, 2.5, 30.0], np.float32)
    angles = positions[:, None] / 1000.0 ** (np.arange(3) / 3)
    assert_close(
        nn.sincos_1d(jnp.asarray(positions), 6, base=1000.0), np.concatenate([np.sin(angles), np.cos(angles)], 1)
    )


def mae_table(height, width, dim):
    """MAE's own arithmetic (util/pos_embed.py), whose grid has the column first."""
    columns, rows = np.meshgrid(np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32))
    omega = 1 / 10000 ** (np.arange(dim // 4, dtype=float) / (dim / 4))
    halves = [np.einsum("m,d->md", axis.reshape(-1), omega) for axis in (columns, rows)]
    return np.concatenate([f(half) for half in halves for f in (np.sin, np.cos)], axis=1)


@pytest.mark.parametrize(("height", "width"), [(3, 3), (2, 5), (14, 14)])
def test_sincos_2d_is_maes_and_timms_up_to_the_order_of_channels(height, width):
    table = nn.sincos_2d(height, width, 24)
    assert_close(table, mae_table(height, width, 24))
    timms = timm.layers.build_sincos2d_pos_embed([height, width], dim=24).numpy()
    # timm: sine of row, sine of column, cosine of row, cosine of column.
    sine_column, cosine_column, sine_row, cosine_row = np.split(np.asarray(table), 4, axis=1)
    assert_close(np.concatenate([sine_row, sine_column, cosine_row, cosine_column], axis=1), timms)


def test_sincos_2d_takes_another_base():
    assert_close(nn.sincos_2d(2, 3, 8, base=100.0)[:, :4], nn.sincos_1d(jnp.arange(6.0) % 3, 4, base=100.0))


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize(
    ("old", "new"),
    [((4, 4), (7, 7)), ((7, 7), (4, 4)), ((14, 14), (5, 5)), ((4, 6), (9, 5)), ((6, 3), (6, 3)), ((3, 4), (4, 3))],
)
def test_resample_positions_is_timms(old, new, prefix):
    torch.manual_seed(0)
    table = torch.randn(1, prefix + old[0] * old[1], 5)
    there = timm.layers.resample_abs_pos_embed(table, list(new), list(old), num_prefix_tokens=prefix)
    assert_close(nn.resample_positions(jnp.asarray(table[0].numpy()), old, new, prefix=prefix), there[0])


def test_resample_positions_keeps_the_dtype_and_an_unchanged_grid():
    table = jax.random.normal(jax.random.key(0), (1 + 6, 4)).astype(jnp.bfloat16)
    assert nn.resample_positions(table, (2, 3), (4, 4), prefix=1).dtype == jnp.bfloat16
    np.testing.assert_array_equal(nn.resample_positions(table, (2, 3), (2, 3), prefix=1), table)


def test_resample_positions_in_bfloat16_interpolates_in_float32():
    table = jax.random.normal(jax.random.key(0), (49, 4)).astype(jnp.bfloat16)
    there = timm.layers.resample_abs_pos_embed(
        torch.tensor(np.asarray(table, np.float32)).bfloat16()[None], [4, 4], [7, 7], num_prefix_tokens=0
    )
    assert_close(nn.resample_positions(table, (7, 7), (4, 4)), there[0].float(), 2**-8)


@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize("dim", [16, 96, 128])
def test_rotary_angles_are_llamas_to_one_rounding_and_the_same_under_jit(base, dim):
    config = LlamaConfig(
        hidden_size=dim, num_attention_heads=1, rope_parameters={"rope_type": "default", "rope_theta": base}
    )
    there = modeling_llama.LlamaRotaryEmbedding(config).inv_freq.numpy()
    positions = np.array([0, 1, 17, 100000], np.float32)
    angles = nn.rotary_angles(jnp.asarray(positions), dim, base=base)
    np.testing.assert_allclose(angles, positions[:, None] * there, rtol=2e-7)
    np.testing.assert_array_equal(jax.jit(lambda p: nn.rotary_angles(p, dim, base=base))(positions), angles)


LONGROPE = {"short_factor": [1.0, 1.1, 1.3, 1.7, 2, 3, 4, 5], "long_factor": [1.2, 2.0, 3, 4, 6, 8, 9, 20]}

# Upstream's parameters of each kind.
KINDS = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 300,
    },
    "yarn": {"factor": 3.0, "original_max_position_embeddings": 300},
    "yarn untruncated": {"factor": 3.0, "beta_fast": 16, "beta_slow": 2, "truncate": False, "mscale": 1.4},
    "yarn scales": {"factor": 3.0, "mscale": 1.4, "mscale_all_dim": 0.7, "original_max_position_embeddings": 300},
    "yarn scale": {"factor": 0.5, "attention_factor": 1.3},
    "longrope": {"original_max_position_embeddings": 300, **LONGROPE},
    "longrope scale": {"factor": 1.5, "attention_factor": 1.3, "original_max_position_embeddings": 300, **LONGROPE},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [200, 1200])
@pytest.mark.parametrize("generation", [4, 5])
def test_rotary_speeds_are_upstreams_for_every_kind(kind, length, generation):
    scaling = {"rope_type": kind.split()[0], **KINDS[kind]}
    config = LlamaConfig(
        hidden_size=16,
        num_attention_heads=1,
        max_position_embeddings=900,
        rope_parameters={"rope_theta": 5000.0, **scaling},
    )
    if kind == "default":
        speeds, scale = modeling_llama.LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        speeds, scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, seq_len=length)
    options = {"max_position_embeddings": 900}
    if generation == 4:
        options |= {"rope_theta": 5000.0, "rope_scaling": None if kind == "default" else scaling}
    else:
        options |= {"rope_parameters": config.rope_parameters}
    read = read_rotary(options, context=1)
    rotary = read["rotary"]
    assert (rotary.scale, read) == (pytest.approx(scale), {"max_position_embeddings": 900, "rotary": rotary})
    np.testing.assert_allclose(rotary.speeds(16, length), speeds.numpy(), rtol=2e-7)
    assert read_rotary(write_rotary(read), context=1) == read
    again = LlamaConfig(**json.loads(json.dumps(write_rotary(read))), hidden_size=16, num_attention_heads=1)
    if kind != "default":
        np.testing.assert_array_equal(ROPE_INIT_FUNCTIONS[rotary.kind](again, seq_len=length)[0], speeds)


def test_rotary_of_a_part_of_the_channels():
    rotary = nn.Rotary(partial=0.5)
    np.testing.assert_array_equal(rotary.speeds(16, 1), nn.Rotary().speeds(8, 1))
    x = jax.random.normal(jax.random.key(0), (3, 5, 16))
    angles = rotary.angles(jnp.arange(7, 12), 16, 12)
    turned = nn.rotate(x, angles, scale=1.5)
    np.testing.assert_array_equal(turned[..., 8:], x[..., 8:])
    np.testing.assert_allclose(turned[..., :8], 1.5 * nn.rotate(x[..., :8], angles), rtol=1e-6)


def test_an_unknown_kind_or_parameter_of_rotary_positions_is_refused_by_name():
    with pytest.raises(ValueError, match="rope_type='spiral' is not supported; eqzoo has default, linear"):
        read_rotary({"rope_scaling": {"type": "spiral"}}, context=8)
    with pytest.raises(
        ValueError, match=r"option 'mrope_section' \(of value \[1, 2\]\) is not known .* rope_type='default'"
    ):
        read_rotary({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}}, context=8)
    with pytest.raises(ValueError, match="Rotary: kind='yarn' needs context"):
        nn.Rotary(kind="yarn")


def test_rotary_angles_2d_turn_half_with_the_row_and_half_with_the_column():
    angles = np.asarray(nn.rotary_angles_2d(3, 5, 16, base=100.0)).reshape(3, 5, 2, 4)
    for row in range(3):
        for column in range(5):
            expected = nn.rotary_angles(jnp.array([row, column], jnp.float32), 8, base=100.0)
            np.testing.assert_array_equal(angles[row, column], expected)


def rotary_inputs(tokens=6, dim=8):
    torch.manual_seed(0)
    x = torch.randn(3, tokens, dim, requires_grad=True)
    return x, nn.rotary_angles(jnp.arange(tokens, dtype=jnp.float32), dim)


def test_rotate_is_llamas_in_value_and_gradient():
    x, angles = rotary_inputs()
    both = torch.tensor(np.concatenate([angles, angles], -1))[None]
    y, _ = modeling_llama.apply_rotary_pos_emb(x[None], x[None], both.cos(), both.sin())
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    ours, pull = jax.vjp(lambda x: nn.rotate(x, angles), jnp.asarray(x.detach().numpy()))
    assert_close(ours, y[0].detach())
    assert_close(pull(jnp.asarray(cotangent[0].numpy()))[0], x.grad)


def test_rotate_interleaved_is_gptjs_and_timms():
    x, angles = rotary_inputs()
    theta = torch.tensor(np.asarray(angles))
    ours = nn.rotate(jnp.asarray(x.detach().numpy()), angles, interleaved=True)
    gptj = modeling_gptj.apply_rotary_pos_emb(x.transpose(0, 1)[None], theta.sin()[None], theta.cos()[None])
    assert_close(ours, gptj[0].transpose(0, 1).detach())
    twice = torch.repeat_interleave(theta, 2, -1)
    timms = timm.layers.apply_rot_embed_cat(x, torch.cat([twice.sin(), twice.cos()], -1))
    assert_close(ours, timms.detach())


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotated_products_depend_on_the_distance_only(interleaved):
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 8))

    def product(position_q, position_k):
        turned = (
            nn.rotate(x, nn.rotary_angles(jnp.array([p]), 8), interleaved=interleaved)
            for x, p in ((q, position_q), (k, position_k))
        )
        return jnp.sum(jnp.prod(jnp.stack(tuple(turned)), 0))

    np.testing.assert_allclose(product(9.0, 5.0), product(4.0, 0.0), rtol=1e-5)
    assert abs(product(9.0, 5.0) - product(9.0, 6.0)) > 1e-3


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotate_keeps_bfloat16(interleaved):
    x, angles = rotary_inputs()
    x = jnp.asarray(x.detach().numpy())
    y = nn.rotate(x.astype(jnp.bfloat16), angles, interleaved=interleaved)
    assert y.dtype == jnp.bfloat16
    assert_close(y, nn.rotate(x, angles, interleaved=interleaved), 0.01)


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match=r"sincos_1d: dim=5 is odd; .* pass an even dim"):
        nn.sincos_1d(jnp.arange(3.0), 5)
    with pytest.raises(ValueError, match="sincos_2d: dim=6 is not a multiple of 4"):
        nn.sincos_2d(2, 2, 6)
    with pytest.raises(ValueError, match=r"rotary_angles: dim=5 is odd; .* pass an even dim"):
        nn.rotary_angles(jnp.arange(3.0), 5)
    with pytest.raises(ValueError, match="rotary_angles_2d: dim=6 is not a multiple of 4"):
        nn.rotary_angles_2d(2, 2, 6)
    with pytest.raises(
        ValueError, match="the table has 17 rows, but prefix=0 and a grid of 4x4 make 16; pass the grid"
    ):
        nn.resample_positions(jnp.ones((17, 2)), (4, 4), (5, 5))


def test_rows_and_columns_may_lie_anywhere_and_come_in_either_order():
    rows, columns = jnp.array([0.5, -2.0]), jnp.array([1.0, 3.0, 7.0])
    angles = np.asarray(nn.rotary_angles_2d(2, 3, 8, base=100.0, rows=rows, columns=columns)).reshape(2, 3, 2, 2)
    np.testing.assert_allclose(angles[:, 1, 0], rows[:, None] * np.array([1, 0.1]), rtol=1e-6)
    np.testing.assert_allclose(angles[1, :, 1], columns[:, None] * np.array([1, 0.1]), rtol=1e-6)
    swapped = nn.rotary_angles_2d(2, 3, 8, base=100.0, rows=rows, columns=columns, columns_first=True)
    np.testing.assert_array_equal(np.asarray(swapped).reshape(2, 3, 2, 2), angles[:, :, ::-1])


def test_each_head_may_turn_by_angles_of_its_own():
    x = jax.random.normal(jax.random.key(0), (3, 4, 8))
    angles = jax.random.normal(jax.random.key(1), (3, 4, 4))
    turned = nn.rotate(x, angles, interleaved=True)
    for head in range(3):
        alone = nn.rotate(x[head : head + 1], angles[head], interleaved=True)[0]
        np.testing.assert_allclose(turned[head], alone, rtol=1e-6)
