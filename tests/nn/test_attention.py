"""Attention against torch, timm and JAX's own: values, gradients, masks, grouped queries, dtypes, dropout."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import timm
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import sliding_window_overlay
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from eqzoo import nn
from eqzoo.nn.stack import keep_products
from tests.parity import array, assert_close

TOKENS, KEYS, HEADS, DIM_HEAD, DIM_VALUE = 5, 7, 4, 8, 6


def tensors(kv_heads=HEADS, keys=KEYS):
    """Queries and keys large enough that attention is far from uniform."""
    torch.manual_seed(0)
    query = 2 * torch.randn(HEADS, TOKENS, DIM_HEAD)
    key = 2 * torch.randn(kv_heads, keys, DIM_HEAD)
    value = torch.randn(kv_heads, keys, DIM_VALUE)
    return tuple(tensor.requires_grad_() for tensor in (query, key, value))


def mask_of(*shape):
    mask = torch.rand(*shape) < 0.6
    mask[..., 0] = True
    return mask


CASES = {
    "plain": {},
    "mask": {"mask": (1, TOKENS, KEYS)},
    "mask_per_head": {"mask": (HEADS, TOKENS, KEYS)},
    "mask_of_keys": {"mask": (1, 1, KEYS)},
    "causal": {"causal": True, "keys": TOKENS},
    "grouped": {"kv_heads": 2},
    "grouped_mask_per_head": {"kv_heads": 2, "mask": (HEADS, TOKENS, KEYS)},
    "one_key_head": {"kv_heads": 1},
    "scale": {"scale": 0.7},
}


@pytest.mark.parametrize("case", CASES)
def test_attend_is_torchs_in_value_and_gradient(case):
    options = dict(CASES[case])
    q, k, v = tensors(options.get("kv_heads", HEADS), options.get("keys", KEYS))
    mask = mask_of(*options["mask"]) if "mask" in options else None
    causal, scale = options.get("causal", False), options.get("scale")
    y = scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
    )[0]
    cotangent = torch.randn_like(y)
    y.backward(cotangent)

    our_mask = nn.causal_mask(TOKENS) if causal else None if mask is None else array(mask)
    ours, pull = jax.vjp(lambda *qkv: nn.attend(*qkv, mask=our_mask, scale=scale), array(q), array(k), array(v))
    assert_close(ours, y.detach())
    for gradient, tensor in zip(jax.jit(pull)(array(cotangent)), (q, k, v), strict=True):
        assert_close(gradient, tensor.grad)


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_attend_is_jaxs_dot_product_attention(kv_heads, masked):
    q, k, v = (array(tensor) for tensor in tensors(kv_heads))
    mask = array(mask_of(HEADS, TOKENS, KEYS)) if masked else None
    v = jnp.concatenate([v, v[..., :2]], -1)  # which wants values as wide as keys
    there = jax.nn.dot_product_attention(*(x.transpose(1, 0, 2) for x in (q, k, v)), mask=mask)
    assert_close(jax.jit(nn.attend)(q, k, v, mask=mask), there.transpose(1, 0, 2))


def test_derivatives_agree_with_plain_softmax_in_float64():
    with jax.enable_x64(True):
        qkv = tuple(array(tensor).astype(jnp.float64) for tensor in tensors())
        direction = tuple(jnp.sin(10 * x) for x in qkv)

        def plain(q, k, v):
            return jax.nn.softmax(q @ k.mT / np.sqrt(DIM_HEAD)) @ v

        def derivatives(f):
            gradient = jax.grad(lambda *qkv: jnp.sum(jnp.sin(f(*qkv))), argnums=(0, 1, 2))
            return jax.jit(lambda qkv: (f(*qkv), jax.jvp(f, qkv, direction)[1], jax.jvp(gradient, qkv, direction)[1]))(
                qkv
            )

        ours, theirs = (jax.tree.leaves(derivatives(f)) for f in (nn.attend, plain))
        for left, right in zip(ours, theirs, strict=True):
            assert left.dtype == jnp.float64
            assert_close(left, right, 1e-10)


def test_a_fully_masked_row_is_finite_and_leaves_the_other_rows_alone():
    q, k, v = (array(tensor) for tensor in tensors())
    mask = jnp.ones((1, TOKENS, KEYS), bool).at[0, 2].set(False)

    def loss(q, k, v):
        y = nn.attend(q, k, v, mask=mask)
        return jnp.sum(jnp.sin(y)), y

    gradients, y = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    assert all(jnp.all(jnp.isfinite(x)) for x in (*gradients, y))
    np.testing.assert_array_equal(gradients[0][:, 2], 0)
    rest = jnp.array([0, 1, 3, 4])
    np.testing.assert_allclose(y[:, rest], nn.attend(q[:, rest], k, v), rtol=1e-5, atol=1e-6)


def test_large_scores_do_not_overflow():
    q, k, v = (array(tensor) for tensor in tensors())
    y = nn.attend(1e3 * q, 1e3 * k, v)
    best = jnp.argmax(q @ k.mT, -1)
    np.testing.assert_allclose(y, jnp.take_along_axis(v, best[..., None], 1), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_as_exact_as_half_precision_inputs_allow(dtype):
    q, k, v = (array(tensor).astype(dtype) for tensor in tensors())
    y, pull = jax.vjp(nn.attend, q, k, v)
    wide, wide_pull = jax.vjp(nn.attend, *(x.astype(jnp.float32) for x in (q, k, v)))
    assert y.dtype == dtype
    assert_close(y, wide, 8 * float(jnp.finfo(dtype).eps))
    for gradient, wide_gradient in zip(pull(jnp.ones_like(y)), wide_pull(jnp.ones_like(wide)), strict=True):
        assert gradient.dtype == dtype
        assert jnp.all(jnp.isfinite(gradient))
        assert_close(gradient, wide_gradient, 0.05)


def test_the_softmax_of_bfloat16_runs_in_float32():
    """Scores near 1000 that differ by one: bfloat16, which steps by four there, would find them equal."""
    q = jnp.full((1, 1, 4), 16.0, jnp.bfloat16)
    k = jnp.array([[[15.5, 15.625, 15.625, 15.625], [15.625, 15.625, 15.625, 15.625]]], jnp.bfloat16)
    v = jnp.array([[[0.0], [1.0]]], jnp.bfloat16)
    np.testing.assert_allclose(
        nn.attend(q, k, v, scale=1.0)[0, 0, 0].astype(jnp.float32), 1 / (1 + np.exp(-2)), rtol=0.005
    )


def test_dropout_of_the_weights_keeps_their_expectation():
    q, k, v = (array(tensor) for tensor in tensors())
    keys = jax.random.split(jax.random.key(0), 20000)
    drop = jax.vmap(lambda key: nn.attend(q, k, v, dropout=nn.Dropout(0.3), dropout_key=key))
    y = drop(keys)
    deviation = jnp.std(y, axis=0) / np.sqrt(len(keys))
    assert jnp.all(jnp.std(y, axis=0) > 0.01)
    assert jnp.max(jnp.abs(jnp.mean(y, axis=0) - nn.attend(q, k, v)) / deviation) < 5


def test_causal_mask_lets_a_token_see_itself_and_the_past():
    np.testing.assert_array_equal(nn.causal_mask(3)[0], [[1, 0, 0], [1, 1, 0], [1, 1, 1]])


def test_a_window_counts_the_token_itself_as_upstreams_does():
    expected = np.array([[sliding_window_overlay(2)(0, 0, q, k) and k <= q for k in range(5)] for q in range(5)])
    np.testing.assert_array_equal(nn.causal_mask(5, 2)[0], expected)
    np.testing.assert_array_equal(jax.jit(lambda window: nn.causal_mask(5, window))(2)[0], expected)
    np.testing.assert_array_equal(nn.causal_mask(5, 5), nn.causal_mask(5))


def test_a_cap_is_gemmas():
    module = torch.nn.Module().eval()
    module.num_key_value_groups = 1
    q, k, v = (4 * torch.randn(1, 3, TOKENS, 8) for _ in range(3))
    there, _ = eager_attention_forward(module, q, k, v, None, scaling=0.5, softcap=3.0)
    here = nn.attend(*(array(each[0]) for each in (q, k, v)), scale=0.5, cap=3.0)
    assert_close(here, there[0].transpose(0, 1))
    assert jnp.max(jnp.abs(here - nn.attend(*(array(each[0]) for each in (q, k, v)), scale=0.5))) > 0.1


LONG = 700  # several runs of several blocks, and a last one that isn't full
CAUSAL = {
    "one_block": {"tokens": 100},
    "one_block_window": {"tokens": 100, "window": 20},
    "odd": {"tokens": 257},
    "long": {},
    "window_below_a_block": {"window": 20},
    "window_above_a_block": {"window": 300},
    "window_above_all": {"window": 5000},
    "window_as_an_array": {"window": 150, "as_array": True},
    "grouped_cap_scale": {"kv_heads": 1, "window": 150, "cap": 3.0, "scale": 0.7},
    "bfloat16": {"dtype": jnp.bfloat16},
}


def long_tensors(tokens=LONG, kv_heads=2, dtype=jnp.float32):
    shapes = ((2, tokens, 4), (kv_heads, tokens, 4), (kv_heads, tokens, 3))
    return tuple(
        2 * jax.random.normal(key, shape, dtype)
        for key, shape in zip(jax.random.split(jax.random.key(0), 3), shapes, strict=True)
    )


def masked(q, k, v, *, window=None, **options):
    return nn.attend(q, k, v, mask=nn.causal_mask(q.shape[1], window), **options)


def gradient_of(attend):
    return jax.grad(lambda qkv: jnp.sum(jnp.sin(attend(*qkv).astype(jnp.float32))))


@pytest.mark.parametrize("case", CAUSAL)
def test_causal_attention_in_blocks_is_attend_with_the_mask(case):
    options = dict(CAUSAL[case])
    shape = {name: options.pop(name) for name in ("tokens", "kv_heads", "dtype") if name in options}
    if options.pop("as_array", False):
        options["window"] = jnp.int32(options["window"])
    qkv, found = long_tensors(**shape), []
    for attend in (partial(nn.attend_causal, **options), partial(masked, **options)):
        value_and_gradient = lambda qkv, attend=attend: (attend(*qkv), gradient_of(attend)(qkv))
        found.append(jax.tree.leaves(jax.jit(value_and_gradient)(qkv)))
    for ours, expected in zip(*found, strict=True):
        assert ours.dtype == expected.dtype == qkv[0].dtype
        assert_close(ours, expected, 1e-5 if ours.dtype == jnp.float32 else 0.02)


def test_causal_attention_in_blocks_has_forward_mode_and_second_derivatives():
    qkv = long_tensors()
    direction = tuple(jnp.sin(10 * x) for x in qkv)

    def derivatives(attend, window):
        attend = partial(attend, window=window)
        first = jax.jvp(lambda qkv: attend(*qkv), (qkv,), (direction,))[1]
        return first, jax.jvp(gradient_of(attend), (qkv,), (direction,))[1]

    ours, expected = (jax.jit(partial(derivatives, attend))(150) for attend in (nn.attend_causal, masked))
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert_close(left, right, 1e-4)


def causal_layers(attend, depth=2):
    """What a stack's scan makes of `depth` layers of attention alone, the gradient for each example of a batch."""

    def layers(qkv):
        step = keep_products(lambda query, _: (query + jnp.sin(attend(query, *qkv[1:]))[..., [0, 1, 2, 0]], None))
        return jax.lax.scan(step, qkv[0], length=depth)[0]

    return jax.jit(jax.vmap(jax.grad(lambda qkv: jnp.sum(jnp.sin(layers(qkv))))))


def test_causal_attention_in_blocks_works_in_a_scan_under_vmap():
    batch = jax.tree.map(lambda x: jnp.stack([x, x[:, ::-1]]), long_tensors())
    ours, expected = (causal_layers(attend)(batch) for attend in (nn.attend_causal, masked))
    for left, right in zip(ours, expected, strict=True):
        assert_close(left, right, 1e-4)


def test_a_stack_computes_the_scores_of_blocks_twice_and_not_three_times():
    batch = jax.tree.map(lambda x: x[None], long_tensors())
    computed = str(jax.make_jaxpr(causal_layers(nn.attend_causal))(batch)).count(" = exp ")
    assert computed == 2 * 4  # for the result and for the gradient, in four runs


def test_causal_attention_looks_at_no_block_that_lies_ahead_or_behind_the_window():
    """Not a number where no token may look is seen by nobody; a mask alone would multiply it by zero."""
    q, k, v = long_tensors()
    attend = jax.jit(nn.attend_causal, static_argnames="window")
    assert jnp.all(jnp.isfinite(attend(q, k, v.at[:, -1].set(jnp.nan))[:, : LONG // 2]))
    windowed = attend(q, k, v.at[:, 0].set(jnp.nan), window=20)
    assert jnp.all(jnp.isfinite(windowed[:, LONG // 2 :]))
    assert jnp.all(jnp.isnan(windowed[:, :20]))


@pytest.mark.parametrize("window", [None, 100])
def test_memory_of_causal_attention_grows_with_the_tokens(window):
    def temporary(attend, tokens):
        shapes = jax.eval_shape(lambda: jax.tree.map(lambda x: x[None], long_tensors(tokens)))
        compiled = causal_layers(partial(attend, window=window)).lower(shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(nn.attend_causal, 4096) < 2.1 * temporary(nn.attend_causal, 2048)
    assert temporary(nn.attend_causal, 4096) < 0.2 * temporary(masked, 4096)


def test_dropout_of_causal_attention_draws_for_every_weight_and_the_same_again_for_the_gradient():
    q, k, _ = long_tensors()
    every = jnp.broadcast_to(jnp.eye(LONG), (2, LONG, LONG))  # so that what comes out are the weights
    dropped = lambda v: nn.attend_causal(q, k, v, dropout=nn.Dropout(0.3), dropout_key=jax.random.key(0))
    weights, pull = jax.jit(lambda v: jax.vjp(dropped, v))(every)
    plain = nn.attend_causal(q, k, every)
    is_seen, is_kept = plain > 1e-30, weights > 0
    np.testing.assert_allclose(weights, jnp.where(is_kept, plain / 0.7, 0), rtol=1e-5)
    for part in (slice(None), slice(0, 100), slice(600, None)):
        seen = jnp.sum(is_seen[:, part])
        assert abs(jnp.sum(is_kept[:, part]) / seen - 0.7) < 5 * np.sqrt(0.21 / seen)
    for head, block in ((0, 1), (1, 0), (1, 1)):
        rows = slice(50 + 117 * block, 117 + 117 * block)
        same = is_kept[head, rows, :50] == is_kept[0, 50:117, :50]
        assert jnp.mean(same) < 0.7  # 0.58 if independent
    cotangent = jax.random.normal(jax.random.key(1), weights.shape)
    assert_close(jax.jit(pull)(cotangent)[0], weights.mT @ cotangent)


@pytest.mark.parametrize(("window", "places"), [(None, 9), (3, 9), (3, 4), (3, 3)])
def test_the_mask_of_a_cache_is_the_causal_one_wherever_tokens_lie(window, places):
    for position in range(8):
        cache = nn.KVCache.empty(1, 1, places, 1, dtype=jnp.float32)
        held = np.asarray(cache.positions(jnp.int32(position)))
        mask = np.asarray(nn.cached_mask(cache, jnp.int32(position), 2, window))[0]
        for token in range(2):
            seen = [int(p) for p in [*held, position, position + 1] if p >= 0]
            allowed = {int(p) for p, can in zip([*held, position, position + 1], mask[token], strict=True) if can}
            first = 0 if window is None else position + token - window + 1
            assert allowed == set(range(max(first, 0), position + token + 1))
            assert allowed <= {*seen}


def test_heads_split_as_torch_reshapes_them_and_merge_back():
    x = jnp.arange(5 * 12.0).reshape(5, 12)
    heads = nn.split_heads(x, 3)
    np.testing.assert_array_equal(heads, np.asarray(x).reshape(5, 3, 4).transpose(1, 0, 2))
    np.testing.assert_array_equal(nn.merge_heads(heads), x)


def set_linear(layer, weight, bias):
    layer = eqx.tree_at(lambda part: part.weight, layer, array(weight))
    return layer if bias is None else eqx.tree_at(lambda part: part.bias, layer, array(bias))


def from_packed(here, weight, bias, out):
    """`here` with torch's weights, whose query, key and value are one matrix."""
    weights = weight.chunk(3)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    parts = [
        set_linear(part, w, b) for part, w, b in zip((here.query, here.key, here.value), weights, biases, strict=True)
    ]
    return eqx.tree_at(
        lambda a: (a.query, a.key, a.value, a.out), here, (*parts, set_linear(here.out, out.weight, out.bias))
    )


def randomise(module):
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter) * (0.6 if parameter.ndim > 1 else 1)
    return module


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_torchs_multi_head_attention_in_value_and_gradient(bias, causal):
    there = randomise(torch.nn.MultiheadAttention(12, 3, bias=bias, batch_first=True))
    here = nn.Attention(12, 3, qkv_bias=bias, out_bias=bias, key=jax.random.key(0))
    assert (here.query.bias is None) == (here.out.bias is None) == (not bias)
    here = from_packed(here, there.in_proj_weight, there.in_proj_bias, there.out_proj)
    x = torch.randn(1, TOKENS, 12, requires_grad=True)
    forbidden = torch.ones(TOKENS, TOKENS).triu(1).bool() if causal else None
    y = there(x, x, x, attn_mask=forbidden, need_weights=False)[0]
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    ours, pull = jax.vjp(lambda layer, x: layer(x, causal=causal), here, array(x)[0])
    gradient, dx = jax.jit(pull)(array(cotangent)[0])
    assert_close(ours, y[0].detach())
    assert_close(dx, x.grad[0])
    weights = (gradient.query.weight, gradient.key.weight, gradient.value.weight)
    assert_close(jnp.concatenate(weights), there.in_proj_weight.grad)
    assert_close(gradient.out.weight, there.out_proj.weight.grad)


@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize(("norm", "eps"), [("LayerNorm", 0.1), ("RmsNorm", 0.1), (None, 1e-6)])
@pytest.mark.parametrize("dim_head", [None, 6])
def test_attention_is_timms_with_its_options(qkv_bias, norm, eps, dim_head):
    def make_norm(dim, **kwargs):
        return getattr(timm.layers, norm)(dim, eps=eps)

    options = {"attn_head_dim": dim_head, "qkv_bias": qkv_bias, "qk_norm": norm is not None}
    there = randomise(timm.layers.Attention(12, 3, norm_layer=make_norm if norm else None, **options))
    qk_norm = {"LayerNorm": nn.LayerNorm, "RmsNorm": nn.RMSNorm, None: None}[norm]
    here = nn.Attention(
        12, 3, dim_head=dim_head, qkv_bias=qkv_bias, qk_norm=qk_norm, qk_norm_eps=eps, key=jax.random.key(0)
    )
    here = from_packed(here, there.qkv.weight, there.qkv.bias, there.proj)
    if norm:
        for name, ours in (("q_norm", "query_norm"), ("k_norm", "key_norm")):
            theirs = getattr(there, name)
            here = eqx.tree_at(lambda a, ours=ours: getattr(a, ours).weight, here, array(theirs.weight))
            if norm == "LayerNorm":
                here = eqx.tree_at(lambda a, ours=ours: getattr(a, ours).bias, here, array(theirs.bias))
    x = torch.randn(1, TOKENS, 12)
    assert_close(here(array(x)[0]), there(x)[0].detach())


def test_attention_turns_queries_and_keys_by_the_rotary_angles():
    here = nn.Attention(12, 3, kv_heads=1, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (TOKENS, 12)) * 3
    angles = nn.rotary_angles(jnp.arange(TOKENS) * 1.0, 4)
    query, key = nn.rotate(nn.split_heads(here.query(x), 3), angles), nn.rotate(nn.split_heads(here.key(x), 1), angles)
    expected = here.out(nn.merge_heads(nn.attend(query, key, nn.split_heads(here.value(x), 1), scale=0.9)))
    assert_close(here(x, rotary=angles, scale=0.9), expected)
    assert jnp.max(jnp.abs(here(x) - expected)) > 0.01


def test_norms_of_the_whole_projection_come_before_heads_are_split():
    options = {"kv_heads": 1, "qk_norm": nn.RMSNorm, "qk_norm_eps": 0.1}
    here = nn.Attention(12, 3, qk_norm_whole=True, key=jax.random.key(0), **options)
    assert (here.query_norm.weight.shape, here.key_norm.weight.shape) == ((12,), (4,))
    x = jax.random.normal(jax.random.key(1), (TOKENS, 12)) * 3
    query = nn.split_heads(here.query_norm(here.query(x)), 3)
    key, value = nn.split_heads(here.key_norm(here.key(x)), 1), nn.split_heads(here.value(x), 1)
    assert_close(here(x), here.out(nn.merge_heads(nn.attend(query, key, value))))
    by_head = nn.Attention(12, 3, key=jax.random.key(0), **options)
    assert jnp.max(jnp.abs(by_head(x) - here(x))) > 1e-3


def test_causal_attention_takes_a_window_and_no_mask():
    here = nn.Attention(12, 3, cap=3.0, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (TOKENS, 12)) * 9
    mask = nn.causal_mask(TOKENS, 2)
    assert_close(here(x, causal=True, window=2, scale=0.9), here(x, mask=mask, scale=0.9))
    with pytest.raises(ValueError, match="Attention: got a mask beside causal=True; pass one of them"):
        here(x, causal=True, mask=mask)
    with pytest.raises(ValueError, match="Attention: window=2 means nothing without causal=True; pass that too"):
        here(x, window=2)


def test_attention_with_dropout_needs_a_key_and_draws_two_independent_masks():
    here = nn.Attention(12, 3, weight_dropout=0.4, key=jax.random.key(0))
    x = jnp.ones((TOKENS, 12))
    with pytest.raises(ValueError, match=r"Dropout\(rate=0.4\) got no key"):
        here(x)
    assert jnp.max(jnp.abs(here(x, key=jax.random.key(0)) - here(x, key=jax.random.key(1)))) > 0.01
    dropped = nn.Attention(12, 3, out_dropout=0.4, key=jax.random.key(0))(x, key=jax.random.key(0))
    assert 0.1 < jnp.mean(dropped == 0) < 0.7
    assert_close(eqx.nn.inference_mode(here)(x), nn.Attention(12, 3, key=jax.random.key(0))(x))


def test_attention_in_bfloat16_stays_in_bfloat16():
    here = nn.Attention(12, 3, qk_norm=nn.RMSNorm, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (TOKENS, 12))
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf, here)
    angles = nn.rotary_angles(jnp.arange(TOKENS) * 1.0, 4)
    y = half(x.astype(jnp.bfloat16), rotary=angles)
    assert y.dtype == jnp.bfloat16
    assert_close(y, here(x, rotary=angles), 0.03)


def test_impossible_head_numbers_are_refused():
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="Attention: dim=10 is not a multiple of heads=4; pass dim_head explicitly"):
        nn.Attention(10, 4, key=key)
    with pytest.raises(ValueError, match="Attention: heads=4 is not a multiple of kv_heads=3; pass a divisor"):
        nn.Attention(12, 4, kv_heads=3, key=key)
    with pytest.raises(ValueError, match="attend: 4 query heads can't share 3 key heads; pass a divisor of 4"):
        nn.attend(jnp.ones((4, 2, 2)), jnp.ones((3, 2, 2)), jnp.ones((3, 2, 2)))
