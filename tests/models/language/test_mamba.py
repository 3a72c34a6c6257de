"""Mamba against transformers' MambaForCausalLM."""

import json
import re
from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import eqzoo
from eqzoo._describe import from_config_json
from eqzoo.checkpoint import CheckpointError
from eqzoo.generation import generate
from eqzoo.models.language import mamba
from eqzoo.models.language.mamba import FAMILY, OPTIONS, SHARDING, TRANSFORMERS, VARIANTS, Mamba, MambaConfig
from eqzoo.tree import leaves_with_paths
from tests.decoders import (
    assert_same_logits,
    assert_same_logits_and_gradients,
    assert_upstream_reads_the_export,
    predict,
)
from tests.parity import assert_close, assert_names_and_shapes, from_torch, number_of_parameters, randomise

TINY: dict[str, Any] = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 3, "state_size": 5}
TINY |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

PARAMETERS = {
    "mamba-130m": 129_135_360,
    "mamba-370m": 371_516_416,
    "mamba-790m": 793_204_224,
    "mamba-1.4b": 1_372_178_432,
    "mamba-2.8b": 2_768_345_600,
}

# With another value of one, the weights don't fit or the logits differ.
MODELS: dict[str, dict[str, Any]] = {
    "default": {},
    "biased": {"use_bias": True, "use_conv_bias": False, "expand": 3, "time_step_rank": 4, "hidden_act": "gelu"},
    "untied": {"tie_word_embeddings": False, "conv_kernel": 3, "layer_norm_epsilon": 0.1, "time_step_rank": "auto"},
}


def tiny(option: str, **more: Any) -> transformers.MambaForCausalLM:
    """Upstream's model in evaluation mode, every weight of which matters, and which remembers for long."""
    upstream = transformers.MambaForCausalLM(transformers.MambaConfig(**TINY | MODELS[option] | more))
    upstream = randomise(upstream.eval(), 0)
    with torch.no_grad():
        for layer in upstream.backbone.layers:
            layer.mixer.A_log -= 3
    return upstream


def published(config: MambaConfig) -> transformers.MambaConfig:
    return transformers.MambaConfig(
        vocab_size=config.vocab, hidden_size=config.dim, num_hidden_layers=config.depth, state_size=config.state
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_has_upstreams_names_shapes_and_size(name):
    """The names of three layers, for all have the same; the size of the whole."""
    config = VARIANTS[name]
    few = replace(config, depth=3)
    with torch.device("meta"):
        whole, model = (transformers.MambaForCausalLM(published(each)) for each in (config, few))
    assert_names_and_shapes((FAMILY, few), model.state_dict())
    assert sum(parameter.numel() for parameter in whole.parameters()) == PARAMETERS[name]
    assert number_of_parameters(FAMILY, config) == PARAMETERS[name]


def test_other_names_of_the_same_tensors():
    """What the authors' own library writes, and a model without a head."""
    with torch.device("meta"):
        model = transformers.MambaForCausalLM(published(VARIANTS["mamba-130m"]))
    original = {key.replace("embeddings", "embedding"): value for key, value in model.state_dict().items()}
    assert_names_and_shapes("mamba-130m", original)
    assert_names_and_shapes("mamba-130m", model.backbone.state_dict())


def test_at_its_real_size():
    upstream = randomise(transformers.MambaForCausalLM(published(VARIANTS["mamba-130m"])).eval(), 0)
    tokens = np.random.default_rng(1).integers(0, 50280, (1, 70))
    with torch.no_grad():
        theirs = upstream(torch.from_numpy(tokens)).logits
    assert_close(predict(from_torch("mamba-130m", upstream)[0], jnp.asarray(tokens)), theirs, 1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_published_config_is_its_variants(name):
    stated = published(VARIANTS[name]).to_dict()
    assert from_config_json(json.loads(json.dumps(stated))).config == VARIANTS[name]


def test_a_config_of_transformers_4():
    """As that of `state-spaces/mamba-370m-hf`, which repeats what the authors' config says."""
    stated = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "torch_dtype": "float32"}
    stated |= {"hidden_size": 1024, "d_model": 1024, "intermediate_size": 2048, "d_inner": 2048, "expand": 2}
    stated |= {"num_hidden_layers": 48, "n_layer": 48, "vocab_size": 50280, "pad_vocab_size_multiple": 8}
    stated |= {"conv_kernel": 4, "state_size": 16, "time_step_rank": 64, "use_bias": False, "use_conv_bias": True}
    stated |= {"layer_norm_epsilon": 1e-5, "rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True}
    stated |= {"time_step_floor": 1e-4, "time_step_max": 0.1, "time_step_min": 1e-3, "time_step_scale": 1.0}
    stated |= {"time_step_init_scheme": "random", "initializer_range": 0.1, "rescale_prenorm_residual": False}
    stated |= {"hidden_act": "silu", "use_cache": True, "transformers_version": "4.39.0.dev0", "ssm_cfg": {}}
    stated |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    assert from_config_json(stated).config == VARIANTS["mamba-370m"]


def test_options_that_are_not_stated_have_upstreams_defaults():
    stated = transformers.MambaConfig().to_dict()
    assert from_config_json({"model_type": "mamba"}).config == from_config_json(stated).config


@pytest.mark.parametrize("option", MODELS)
def test_logits_gradients_and_export_are_upstreams(option, tmp_path, saved):
    upstream = tiny(option)
    model = eqzoo.load(saved(upstream))
    assert_same_logits_and_gradients(model, upstream, TRANSFORMERS)
    assert_upstream_reads_the_export(model, upstream, tmp_path / "ours")


@pytest.mark.parametrize(
    ("option", "changed", "value"),
    [
        ("default", "num_hidden_layers", 2),
        ("default", "vocab_size", 60),
        ("default", "hidden_size", 48),
        ("default", "expand", 1),
        ("default", "state_size", 4),
        ("default", "conv_kernel", 3),
        ("default", "time_step_rank", 3),
        ("default", "use_bias", True),
        ("default", "use_conv_bias", False),
        ("default", "hidden_act", "relu"),
        ("default", "tie_word_embeddings", False),
        ("biased", "hidden_act", "absent"),
        ("biased", "hidden_act", "tanh"),
        ("untied", "tie_word_embeddings", True),
        ("untied", "layer_norm_epsilon", "absent"),
    ],
)
def test_every_option_counts(option, changed, value, saved):
    upstream = tiny(option)
    with pytest.raises((AssertionError, CheckpointError)):
        assert_same_logits(eqzoo.load(saved(upstream, {changed: value})), upstream)


@pytest.mark.parametrize("name", OPTIONS.table["hidden_act"].values)
def test_every_name_of_an_activation_means_what_it_does_upstream(name, saved):
    upstream = tiny("default", hidden_act=name, num_hidden_layers=1)
    assert_same_logits(eqzoo.load(saved(upstream)), upstream)


@pytest.mark.parametrize("length", [64, 65, 150])
def test_more_tokens_than_a_chunk(length, saved):
    upstream = tiny("default")
    tokens = np.random.default_rng(1).integers(0, 61, (1, length))
    with torch.no_grad():
        theirs = upstream(torch.from_numpy(tokens)).logits
    assert_close(predict(eqzoo.load(saved(upstream)), jnp.asarray(tokens)), theirs, 1e-4)


def _scan_arguments(tokens: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = ((tokens, 4), (tokens, 4), (tokens, 3), (tokens, 3), (3, 4), (3, 4))
    u, dt, B, C, A, start = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return u, jax.nn.softplus(dt), B, C, -0.1 * jnp.exp(A), start


def _by_definition(u, dt, B, C, A, start):
    def step(h, token):
        u, dt, B, C = token
        h = jnp.exp(dt * A) * h + B[:, None] * u
        return h, jnp.sum(C[:, None] * h, axis=0)

    last, y = jax.lax.scan(step, start, (u, dt, B, C))
    return y, last


def _all_at_once(u, dt, B, C, A, start):
    last, y = mamba._all_at_once(A, start, (u, dt, B, C))
    return y, last


@pytest.mark.parametrize(
    ("scan", "tokens"), [(mamba.selective_scan, 64), (mamba.selective_scan, 150), (_all_at_once, 20)]
)
def test_a_scan_is_the_definition_and_so_are_its_derivatives(scan, tokens):
    """In float64. What runs on a CPU, and what on other devices for each chunk."""

    def derivatives(scan, arguments):
        loss = lambda arguments: sum(jnp.sum(jnp.sin(out)) for out in scan(*arguments))
        gradient = jax.grad(loss)(arguments)
        return scan(*arguments), jax.jvp(jax.grad(loss), (arguments,), (gradient,))

    with jax.enable_x64(True):
        arguments = tuple(jnp.asarray(x, jnp.float64) for x in _scan_arguments(tokens))
        ours, expected = (jax.jit(partial(derivatives, each))(arguments) for each in (scan, _by_definition))
        for own, other in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
            assert_close(own, np.asarray(other), 1e-10)


def test_other_devices_have_a_program_too():
    """What runs on these isn't what runs on a CPU; here it is only compiled."""
    loss = lambda arguments: sum(jnp.sum(jnp.sin(out)) for out in mamba.selective_scan(*arguments))
    exported = jax.export.export(jax.jit(jax.grad(loss)), platforms=["cpu", "cuda", "tpu"])(_scan_arguments(100))
    ours = jax.jit(exported.call)(_scan_arguments(100))
    for own, other in zip(ours, jax.jit(jax.grad(loss))(_scan_arguments(100)), strict=True):
        assert_close(own, np.asarray(other), 1e-5)


def test_a_gradient_keeps_no_state_of_every_token():
    """Of 64 tokens at a time, and of what the layers' products gave."""
    config = MambaConfig(dim=32, depth=4, vocab=61, state=64)
    model = eqx.filter_eval_shape(Mamba, config, key=jax.random.key(0))
    tokens = 1024
    loss = lambda model, tokens: jnp.sum(model(tokens) ** 2)
    arrays, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    gradient = jax.jit(jax.grad(lambda arrays, tokens: loss(eqx.combine(arrays, static), tokens)))
    lowered = gradient.lower(arrays, jax.ShapeDtypeStruct((tokens,), jnp.int32))
    states = 4 * config.depth * tokens * config.state * config.inner
    assert lowered.compile().memory_analysis().temp_size_in_bytes < states / 4


@pytest.mark.parametrize("in_float32", [True, False])
def test_the_residual_stream_in_half_precision(in_float32, saved):
    """Beside weights in bfloat16, each block adds too little to a large number for bfloat16 to tell."""
    upstream = tiny("default", use_bias=True, residual_in_fp32=in_float32)
    with torch.no_grad():
        for name, parameter in upstream.named_parameters():
            if name.endswith("out_proj.bias"):
                parameter.copy_(torch.tensor([0.45, -0.45]).repeat(12))
            elif "embeddings" in name:
                parameter.fill_(256)
            elif "norm" in name:
                parameter.fill_(1)
            else:
                parameter.fill_(0)
    upstream = upstream.to(torch.bfloat16)
    model = eqzoo.load(saved(upstream), dtype=jnp.bfloat16)
    tokens = torch.arange(3)[None]
    with torch.no_grad():
        theirs = upstream.backbone(tokens).last_hidden_state[0]
    ours = jax.jit(lambda model, tokens: model.hidden(tokens))(model, jnp.arange(3))
    assert ours.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(ours, np.float32), theirs.to(torch.bfloat16).float())
    assert (np.ptp(np.asarray(ours, np.float32)) > 0) == in_float32


def test_a_state_is_float32_unless_asked(saved):
    model = eqzoo.load(saved(tiny("default")), dtype=jnp.bfloat16)
    dtypes = lambda cache: [leaf.dtype for leaf in jax.tree.leaves(cache.layers)]
    assert dtypes(model.empty_cache(9)) == [jnp.bfloat16, jnp.float32]
    asked = model.empty_cache(9, dtype=jnp.bfloat16)
    assert dtypes(asked) == [jnp.bfloat16, jnp.bfloat16]
    for cache in (model.empty_cache(9), asked):
        _, after = eqx.filter_eval_shape(lambda tokens, cache: model.extend(tokens, cache), jnp.arange(3), cache)
        assert dtypes(after) == dtypes(cache)


def test_prompts_of_all_lengths_are_continued_together(saved):
    """Longer than a chunk, too; on one side of it or the other."""
    upstream = tiny("default")
    prompts = [list(range(1, 1 + length % 60)) * (1 + length // 60) for length in (3, 12, 90)]
    together = generate(eqzoo.load(saved(upstream)), prompts, 20)
    for prompt, ours in zip(prompts, together, strict=True):
        with torch.no_grad():
            theirs = upstream.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert ours.tokens == theirs[0, len(prompt) :].tolist()


def test_initialisation_is_upstreams():
    """The same spread, of every kind of weight, as upstream draws; no two layers alike."""
    sizes = {"vocab_size": 400, "hidden_size": 64, "num_hidden_layers": 6, "tie_word_embeddings": False}
    upstream = transformers.MambaForCausalLM(transformers.MambaConfig(**TINY | sizes | {"use_bias": True}))
    config = MambaConfig(dim=64, depth=6, vocab=400, state=5, use_bias=True, tied_head=False)
    model = eqx.filter_jit(partial(Mamba, config))(key=jax.random.key(0))
    ours = eqzoo.checkpoint.unfill(model, TRANSFORMERS)
    for name, theirs in upstream.state_dict().items():
        theirs, own = theirs.numpy(), ours[name]
        assert own.shape == theirs.shape
        spread = max(0.1, 4 / np.sqrt(theirs.size))
        np.testing.assert_allclose(own.std(), theirs.std(), rtol=spread, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(
            own.mean(), theirs.mean(), atol=5 * theirs.std() / np.sqrt(theirs.size) + 1e-6, err_msg=name
        )
        np.testing.assert_allclose(np.abs(own).max(), np.abs(theirs).max(), rtol=0.3, atol=1e-6, err_msg=name)
    weights = np.asarray(model.blocks.block.mixer.out_proj.weight).reshape(6, -1)
    assert np.abs(np.corrcoef(weights) - np.eye(6)).max() < 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "mish"}, "hidden_act='mish' is not supported; eqzoo has 'silu', "),
        ({"rms_norm": False}, "rms_norm=False is not supported; eqzoo has True"),
        ({"mixer_rms_eps": 1e-6}, r"option 'mixer_rms_eps' \(of value 1e-06\) is not known to eqzoo"),
    ],
)
def test_what_the_zoo_does_not_have_is_refused_by_name(changes, message, saved):
    with pytest.raises(CheckpointError, match=message):
        eqzoo.load(saved(tiny("default"), changes))


def test_no_tokens_are_refused():
    model = eqx.filter_eval_shape(Mamba, MambaConfig(dim=16, depth=1, vocab=9), key=jax.random.key(0))
    with pytest.raises(ValueError, match="Mamba: tokens is empty; pass at least one"):
        eqx.filter_eval_shape(model, jnp.zeros(0, jnp.int32))


def test_every_sharding_rule_is_of_use():
    config = MambaConfig(dim=16, depth=2, vocab=9, use_bias=True, tied_head=False)
    paths = [path for path, _ in leaves_with_paths(eqx.filter_eval_shape(Mamba, config, key=jax.random.key(0)))]
    for pattern, _ in SHARDING:
        assert any(re.fullmatch(pattern, path) for path in paths), pattern
