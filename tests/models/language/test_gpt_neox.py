"""GPT-NeoX against transformers' GPTNeoXForCausalLM."""

import json
import re
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
from eqzoo.models.language._gpt_neox_upstream import OPTIONS, TRANSFORMERS_5
from eqzoo.models.language.gpt_neox import FAMILY, VARIANTS, GPTNeoX, GPTNeoXConfig
from tests.decoders import (
    assert_every_sharding_rule_is_of_use,
    assert_same_logits,
    assert_same_logits_and_gradients,
    assert_upstream_reads_the_export,
    names_of,
    predict,
    tiny_model,
)
from tests.parity import assert_close, assert_names_and_shapes, from_torch, number_of_parameters

TINY: dict[str, Any] = {"vocab_size": 61, "max_position_embeddings": 32, "hidden_size": 24, "num_hidden_layers": 3}
TINY |= {"num_attention_heads": 2, "intermediate_size": 40, "rotary_pct": 0.5}
TINY |= {"bos_token_id": None, "eos_token_id": None}

PARAMETERS = {
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
}

# With another value of one, the weights don't fit or the logits differ.
MODELS: dict[str, dict[str, Any]] = {
    "default": {},
    "sequential": {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0, "hidden_act": "relu"},
    "scaled": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0.5, "beta_slow": 0.1},
        "rotary_emb_base": 9,
    },
    "tied": {"tie_word_embeddings": True, "hidden_act": "gelu_fast", "layer_norm_eps": 0.1, "rotary_emb_base": 50},
}


def tiny(option: str, **more: Any) -> Any:
    return tiny_model(transformers.GPTNeoXConfig(**TINY | MODELS[option] | more))


def published(config: GPTNeoXConfig) -> transformers.GPTNeoXConfig:
    names = {"gelu": "gelu", "gelu_tanh": "gelu_fast"}
    return transformers.GPTNeoXConfig(
        vocab_size=config.vocab,
        hidden_size=config.dim,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        intermediate_size=config.hidden,
        hidden_act=names[config.activation],
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_has_upstreams_names_shapes_and_size(name):
    with torch.device("meta"):
        model = transformers.GPTNeoXForCausalLM(published(VARIANTS[name]))
    assert_names_and_shapes(name, model.state_dict())
    assert number_of_parameters(FAMILY, VARIANTS[name]) == PARAMETERS[name]
    # What `save_pretrained` writes, and all published files hold.
    old = {re.sub("^lm_head", "embed_out", key): value for key, value in model.state_dict().items()}
    assert_names_and_shapes(name, old)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_published_config_is_its_variants(name):
    stated = published(VARIANTS[name]).to_dict()
    assert from_config_json(json.loads(json.dumps(stated))).config == VARIANTS[name]


@pytest.mark.parametrize("option", MODELS)
def test_logits_gradients_and_export_are_upstreams(option, tmp_path, saved):
    upstream = tiny(option)
    model = eqzoo.load(saved(upstream))
    assert_same_logits_and_gradients(model, upstream, TRANSFORMERS_5)
    assert_upstream_reads_the_export(model, upstream, tmp_path / "ours")


@pytest.mark.parametrize(
    ("option", "changed", "value"),
    [
        ("default", "num_hidden_layers", 2),
        ("default", "num_attention_heads", 3),
        ("default", "vocab_size", 60),
        ("default", "intermediate_size", 32),
        ("default", "use_parallel_residual", False),
        ("default", "attention_bias", False),
        ("default", "hidden_act", "gelu_new"),
        ("default", "tie_word_embeddings", True),
        ("default", "rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.25}),
        ("sequential", "use_parallel_residual", True),
        ("sequential", "hidden_act", "silu"),
        ("scaled", "rope_parameters", {"rope_theta": 9.0, "partial_rotary_factor": 0.5}),
        ("tied", "layer_norm_eps", "absent"),
        ("tied", "rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("tied", "hidden_act", "absent"),
    ],
)
def test_every_option_counts(option, changed, value, saved):
    upstream = tiny(option)
    with pytest.raises((AssertionError, CheckpointError)):
        assert_same_logits(eqzoo.load(saved(upstream, {changed: value})), upstream)


def test_a_config_of_transformers_4(saved):
    """Its names, and those of versions that wrote both."""
    upstream = tiny("tied")
    new = eqzoo.load(saved(upstream))
    old = {"rope_parameters": "absent", "rotary_pct": 0.5, "rotary_emb_base": 50, "rope_scaling": None}
    old |= {"dtype": "absent", "torch_dtype": "float16"}
    assert eqx.tree_equal(eqzoo.load(saved(upstream, old)), new)
    both = {**old, "rope_theta": 50, "partial_rotary_factor": 0.5}
    assert eqx.tree_equal(eqzoo.load(saved(upstream, both)), new)
    with pytest.raises(CheckpointError, match="rotary_emb_base=50 contradicts rope_theta=60"):
        eqzoo.load(saved(upstream, {**both, "rope_theta": 60}))


def test_options_that_are_not_stated_have_upstreams_defaults():
    stated = transformers.GPTNeoXConfig().to_dict()
    assert from_config_json({"model_type": "gpt_neox"}).config == from_config_json(stated).config


@pytest.mark.parametrize("name", names_of(OPTIONS, "hidden_act"))
def test_every_name_of_an_activation_means_what_it_does_upstream(name, saved):
    upstream = tiny("default", hidden_act=name)
    assert_same_logits(eqzoo.load(saved(upstream)), upstream)


def test_old_files_hold_masks_and_frequencies_too(tmp_path, saved):
    upstream = tiny("default")
    expected = eqzoo.load(saved(upstream))
    tensors = {re.sub("^lm_head", "embed_out", name): each for name, each in upstream.state_dict().items()}
    for layer in range(3):
        attention = f"gpt_neox.layers.{layer}.attention"
        tensors[f"{attention}.bias"] = torch.ones(1, 1, 32, 32).tril().bool()
        tensors[f"{attention}.masked_bias"] = torch.tensor(-1e9)
        tensors[f"{attention}.rotary_emb.inv_freq"] = torch.ones(3)
    (tmp_path / "upstream" / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "upstream" / "pytorch_model.bin")
    assert eqx.tree_equal(eqzoo.load(tmp_path / "upstream"), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type='spiral' is not supported"),
        ({"hidden_act": "mish"}, "hidden_act='mish' is not supported; eqzoo has 'gelu', "),
        ({"num_attention_heads": 5}, "dim=24 is not a multiple of heads=5"),
        ({"sliding_window": 4}, r"option 'sliding_window' \(of value 4\) is not known to eqzoo"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.1}},
            "0.1 of a head's 12 channels can't turn in pairs",
        ),
    ],
)
def test_what_the_zoo_does_not_have_is_refused_by_name(changes, message, saved):
    with pytest.raises(CheckpointError, match=message):
        eqzoo.load(saved(tiny("default"), changes))


@pytest.mark.parametrize("place", ["attention_dropout", "residual_dropout"])
def test_each_dropout_needs_a_key_and_changes_the_output(place):
    config = replace(GPTNeoXConfig(dim=32, depth=2, heads=2, hidden=40, vocab=61), **{place: 0.5})
    model = eqx.filter_jit(GPTNeoX)(config, key=jax.random.key(0))
    tokens = jnp.arange(9)
    with pytest.raises(ValueError, match=re.escape("Dropout(rate=0.5) got no key in training mode")):
        jax.eval_shape(model, tokens)
    call = eqx.filter_jit(lambda model, key: model(tokens, key=key))
    first, again, other = (call(model, jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.01 * np.abs(first).max()


def test_no_tokens_are_refused():
    model = eqx.filter_jit(GPTNeoX)(GPTNeoXConfig(dim=16, depth=1, heads=2, hidden=8, vocab=9), key=jax.random.key(0))
    with pytest.raises(ValueError, match="GPTNeoX: tokens is empty; pass at least one"):
        predict(model, jnp.zeros((1, 0), jnp.int32))


def test_every_sharding_rule_is_of_use():
    assert_every_sharding_rule_is_of_use(FAMILY, VARIANTS["pythia-70m"])


def test_pythia_at_its_real_size():
    upstream = tiny_model(published(VARIANTS["pythia-70m"]))
    tokens = np.random.default_rng(1).integers(0, 50304, (1, 24))
    with torch.no_grad():
        theirs = upstream(torch.from_numpy(tokens)).logits
    assert_close(predict(from_torch("pythia-70m", upstream)[0], jnp.asarray(tokens)), theirs, 1e-4)
