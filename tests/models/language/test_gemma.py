"""Gemma, Gemma 2 and Gemma 3's text part against transformers."""

import json
from dataclasses import replace
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
from eqzoo.models.language import _gemma_upstream as naming
from eqzoo.models.language.gemma import FAMILY, VARIANTS, Gemma, GemmaConfig
from tests.decoders import (
    TOKENS,
    assert_every_sharding_rule_is_of_use,
    assert_same_logits,
    assert_same_logits_and_gradients,
    assert_upstream_reads_the_export,
    names_of,
    predict,
    tiny_model,
)
from tests.parity import assert_close, assert_names_and_shapes, from_torch, number_of_parameters, randomise

CONFIGS = {1: transformers.GemmaConfig, 2: transformers.Gemma2Config, 3: transformers.Gemma3TextConfig}
MODELS = {1: transformers.GemmaForCausalLM, 2: transformers.Gemma2ForCausalLM, 3: transformers.Gemma3ForCausalLM}
RULES = {1: naming.GEMMA, 2: naming.GEMMA2, 3: naming.GEMMA2}

TINY: dict[str, Any] = {"vocab_size": 61, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"head_dim": 8, "intermediate_size": 40, "num_hidden_layers": 3}
TINY |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

PARAMETERS = {
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
}

# With another value of one, the weights don't fit or the logits differ.
OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "1 untied": (1, {"tie_word_embeddings": False, "attention_bias": True, "hidden_act": "silu", "rms_norm_eps": 0.1}),
    "2": (2, {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 1.5, "query_pre_attn_scalar": 3}),
    "2 uncapped": (
        2,
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "hidden_activation": "relu"}
        | {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}
        | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50.0}},
    ),
    "3": (3, {"num_hidden_layers": 7, "query_pre_attn_scalar": 12, "sliding_window": 5}),
    "3 scaled": (
        3,
        {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "attention_bias": True}
        | {"final_logit_softcapping": 1.5, "tie_word_embeddings": False}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 9.0},
            }
        },
    ),
}


def tiny(option: str, **more: Any) -> Any:
    version, options = OPTIONS[option]
    options = ({} if version == 1 else {"sliding_window": 4}) | options
    return tiny_model(CONFIGS[version](**TINY | options | more))


def published(config: GemmaConfig) -> transformers.PretrainedConfig:
    """Upstream's config, whose defaults say the rest."""
    version = 3 if config.qk_norm else 2 if config.post_norms else 1
    options: dict[str, Any] = {
        "vocab_size": config.vocab,
        "hidden_size": config.dim,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.hidden,
        "head_dim": config.dim_head,
        "max_position_embeddings": config.context,
    }
    if version > 1:
        options |= {"query_pre_attn_scalar": config.query_scalar, "sliding_window": config.window}
    if version == 3 and config.rotary.kind == "linear":
        options |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    return CONFIGS[version](**options)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_has_upstreams_names_shapes_size_and_config(name):
    stated = published(VARIANTS[name])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(stated)
    tensors = {key: each for key, each in model.state_dict().items() if key != "lm_head.weight"}  # which is tied
    assert_names_and_shapes(name, tensors)
    assert number_of_parameters(FAMILY, VARIANTS[name]) == PARAMETERS[name]
    assert from_config_json(json.loads(json.dumps(stated.to_dict()))).config == VARIANTS[name]


@pytest.mark.parametrize("option", OPTIONS)
def test_logits_gradients_and_export_are_upstreams(option, tmp_path, saved):
    upstream = tiny(option)
    model = eqzoo.load(saved(upstream))
    assert_same_logits_and_gradients(model, upstream, RULES[OPTIONS[option][0]])
    assert_upstream_reads_the_export(model, upstream, tmp_path / "ours")


ROTARY = {"rope_type": "default", "rope_theta": 50.0}


@pytest.mark.parametrize(
    ("option", "changed", "value"),
    [
        ("1", "num_attention_heads", 2),
        ("1", "num_key_value_heads", 4),
        ("1", "head_dim", 6),
        ("1", "rope_parameters", {"rope_type": "default", "rope_theta": 50.0}),
        ("1 untied", "tie_word_embeddings", True),
        ("1 untied", "attention_bias", False),
        ("1 untied", "hidden_act", "gelu"),
        ("1 untied", "rms_norm_eps", "absent"),
        ("2", "attn_logit_softcapping", None),
        ("2", "final_logit_softcapping", None),
        ("2", "query_pre_attn_scalar", 8),
        ("2", "sliding_window", 5),
        ("2", "layer_types", ["full_attention"] * 3),
        ("2 uncapped", "attn_logit_softcapping", 2.0),
        ("2 uncapped", "final_logit_softcapping", 2.0),
        ("2 uncapped", "hidden_activation", "silu"),
        ("2 uncapped", "layer_types", "absent"),
        ("2 uncapped", "rope_parameters", {"rope_type": "default", "rope_theta": 50.0}),
        ("3", "layer_types", ["sliding_attention"] * 7),
        ("3", "sliding_window", 4),
        ("3", "query_pre_attn_scalar", 8),
        ("3 scaled", "rope_parameters", {"full_attention": ROTARY, "sliding_attention": ROTARY | {"rope_theta": 9.0}}),
        ("3 scaled", "rope_parameters", {"full_attention": ROTARY | {"rope_type": "linear", "factor": 4.0}}),
        ("3 scaled", "final_logit_softcapping", None),
    ],
)
def test_every_option_counts(option, changed, value, saved):
    upstream = tiny(option)
    with pytest.raises((AssertionError, CheckpointError)):
        assert_same_logits(eqzoo.load(saved(upstream, {changed: value})), upstream)


def test_configs_of_transformers_4(saved):
    """Without the kinds of the layers, and with rotary positions beside the other options."""
    upstream = tiny("2")
    new = eqzoo.load(saved(upstream))
    old: dict[str, Any] = {"rope_parameters": "absent", "rope_theta": 10000.0, "layer_types": "absent"}
    old |= {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid", "torch_dtype": "bfloat16"}
    assert eqx.tree_equal(eqzoo.load(saved(upstream, old)), new)

    upstream = tiny("3 scaled", layer_types=None, sliding_window_pattern=2)
    new = eqzoo.load(saved(upstream))
    assert new.config.pattern == ("local", "global")
    old = {"rope_parameters": "absent", "rope_theta": 50, "rope_local_base_freq": 9, "layer_types": "absent"}
    old |= {"rope_scaling": {"rope_type": "linear", "factor": 4}, "sliding_window_pattern": 2}
    assert eqx.tree_equal(eqzoo.load(saved(upstream, old)), new)


def test_the_text_part_of_a_model_that_sees_images_too(tmp_path, saved):
    """From its folder as published, where little is stated; and from torch's file of what is in memory."""
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 7, "sliding_window": 5, "vocab_size": 61}
    scaling = {"rope_type": "linear", "factor": 8.0}
    text = {**sizes, "rope_scaling": scaling, "pad_token_id": None}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    upstream = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager")
    upstream = randomise(upstream.eval(), 0)

    stated = {"model_type": "gemma3_text", "rope_scaling": scaling, **sizes}
    folder = saved(upstream, {"text_config": stated})
    model = eqzoo.load(folder)
    assert_same_logits(model, upstream)
    (folder / "model.safetensors").unlink()
    torch.save(upstream.state_dict(), folder / "pytorch_model.bin")
    assert eqx.tree_equal(eqzoo.load(folder), model)


def test_the_first_gemmas_gelu_is_the_approximation(saved):
    """Which the published files call `gelu`."""
    upstream = tiny("1")
    expected = eqzoo.load(saved(upstream))
    assert expected.config.activation == "gelu_tanh"
    for changes in ({"hidden_act": "gelu"}, {"hidden_act": "gelu", "hidden_activation": None}):
        assert eqx.tree_equal(eqzoo.load(saved(upstream, changes)), expected)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_options_that_are_not_stated_have_upstreams_defaults(version):
    stated = CONFIGS[version]().to_dict()
    assert from_config_json({"model_type": stated["model_type"]}).config == from_config_json(stated).config


@pytest.mark.parametrize("name", names_of(naming.GEMMA2_OPTIONS, "hidden_activation"))
def test_every_name_of_an_activation_means_what_it_does_upstream(name, saved):
    upstream = tiny("2", hidden_activation=name)
    assert_same_logits(eqzoo.load(saved(upstream)), upstream)


def test_the_embeddings_factor_is_rounded_to_its_dtype(saved):
    """As in the first layer of upstream's model in half precision."""
    upstream = tiny("2").bfloat16()
    model = eqzoo.load(saved(upstream), dtype=jnp.bfloat16)
    tokens = torch.from_numpy(TOKENS[0])
    theirs = upstream.model.embed_tokens(tokens).float().detach().numpy()
    np.testing.assert_array_equal(np.asarray(model._embedded(jnp.asarray(TOKENS[0])), np.float32), theirs)
    exact = np.asarray(model.embedding.weight, np.float32)[TOKENS[0]] * np.sqrt(np.float32(24))
    assert np.abs(exact - theirs).max() > 1e-3


def test_a_window_longer_than_the_text_is_none(saved):
    upstream = tiny("2", sliding_window=14)
    model = eqzoo.load(saved(upstream))
    everything = eqzoo.load(saved(upstream, {"layer_types": ["full_attention"] * 3}))
    assert_close(predict(model, jnp.asarray(TOKENS)), np.asarray(predict(everything, jnp.asarray(TOKENS))), 1e-6)


@pytest.mark.parametrize(
    ("option", "changes", "message"),
    [
        ("2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("2", {"layer_types": ["linear_attention"] * 3}, "layer_types has 'linear_attention', which is not supported"),
        ("2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers=3"),
        ("2", {"sliding_window": None}, "window=None is no number of tokens for local layers"),
        ("2", {"num_key_value_heads": 3}, "heads=4 is not a multiple of kv_heads=3"),
        ("3", {"attn_logit_softcapping": 30.0}, r"option 'attn_logit_softcapping' \(of value 30.0\) is not known"),
        ("3", {"rope_parameters": {"rope_theta": 1.0}}, "rope_parameters has 'rope_theta', which is no kind of layer"),
        ("3", {"hidden_activation": "mish"}, "hidden_activation='mish' is not supported"),
    ],
)
def test_what_the_zoo_does_not_have_is_refused_by_name(option, changes, message, saved):
    with pytest.raises(CheckpointError, match=message):
        eqzoo.load(saved(tiny(option), changes))


def test_a_pattern_of_unknown_kinds_and_no_tokens_are_refused():
    config = GemmaConfig(dim=8, depth=1, heads=1, kv_heads=1, hidden=8, dim_head=4, vocab=9)
    with pytest.raises(ValueError, match=r"pattern=\(\) is not understood"):
        replace(config, pattern=())
    with pytest.raises(ValueError, match="Gemma: tokens is empty; pass at least one"):
        eqx.filter_jit(Gemma)(config, key=jax.random.key(0))(jnp.zeros(0, jnp.int32))


def test_every_sharding_rule_is_of_use():
    config = replace(VARIANTS["gemma-3-270m"], attention_bias=True, tied_head=False)
    assert_every_sharding_rule_is_of_use(FAMILY, config)


def test_gemma_3_at_its_real_size():
    """But for the vocabulary, which would be two thirds of it."""
    config = replace(VARIANTS["gemma-3-270m"], vocab=1000)
    upstream = tiny_model(published(config))
    tokens = np.random.default_rng(1).integers(0, config.vocab, (1, 24))
    with torch.no_grad():
        theirs = upstream(torch.from_numpy(tokens)).logits
    assert_close(predict(from_torch((FAMILY, config), upstream)[0], jnp.asarray(tokens)), theirs, 1e-4)
