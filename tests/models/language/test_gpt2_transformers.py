"""GPT-2 in transformers' folders: what it wrote is loaded, and what is exported it reads."""

import json
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
from eqzoo.models.language import gpt2
from eqzoo.models.language.gpt2 import GPT2, VARIANTS, GPT2Config
from tests.parity import assert_close, randomise

TINY = {"vocab_size": 61, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 3}
TINY |= {"bos_token_id": None, "eos_token_id": None}
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 16))

# Each in few models; with another value, the weights don't fit or the logits differ.
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "untied": {"tie_word_embeddings": False, "n_inner": 40, "activation_function": "relu"},
    "scaled": {
        "scale_attn_weights": False,
        "scale_attn_by_inverse_layer_idx": True,
        "layer_norm_epsilon": 0.1,
        "activation_function": "gelu",
    },
}


def tiny(option: str, model: Any = transformers.GPT2LMHeadModel) -> Any:
    """Upstream's model in evaluation mode, every weight of which matters."""
    return randomise(model(transformers.GPT2Config(**TINY, **OPTIONS[option])).eval(), 0)


@eqx.filter_jit
def predict(model: Any, tokens: jax.Array) -> jax.Array:
    return jax.vmap(model)(tokens)


def assert_same_logits(model: Any, upstream: torch.nn.Module) -> None:
    with torch.no_grad():
        theirs: Any = upstream(torch.from_numpy(TOKENS))
    assert_close(predict(model, jnp.asarray(TOKENS)), theirs.logits, 1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_published_config_is_its_variants(name):
    config = VARIANTS[name]
    stated = transformers.GPT2Config(n_embd=config.dim, n_layer=config.depth, n_head=config.heads).to_dict()
    assert from_config_json(json.loads(json.dumps(stated))).config == config


def test_options_that_are_not_stated_have_upstreams_defaults():
    stated = transformers.GPT2Config().to_dict()
    assert from_config_json({"model_type": "gpt2"}).config == from_config_json(stated).config


@pytest.mark.parametrize("name", gpt2.OPTIONS.table["activation_function"].values)
def test_every_name_of_an_activation_means_what_it_does_upstream(name, saved):
    config = transformers.GPT2Config(**TINY, activation_function=name)
    upstream = randomise(transformers.GPT2LMHeadModel(config).eval(), 0)
    assert_same_logits(eqzoo.load(saved(upstream)), upstream)


@pytest.mark.parametrize("option", OPTIONS)
def test_the_folders_that_transformers_writes(option, tmp_path, saved):
    """In one file, in shards, and by torch, where a tied head is written twice."""
    upstream = tiny(option)
    one = eqzoo.load(saved(upstream))
    assert_same_logits(one, upstream)

    upstream.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert eqx.tree_equal(eqzoo.load(tmp_path / "shards"), one)

    (tmp_path / "shards" / "model.safetensors.index.json").unlink()
    assert "lm_head.weight" in upstream.state_dict()
    torch.save(upstream.state_dict(), tmp_path / "shards" / "pytorch_model.bin")
    assert eqx.tree_equal(eqzoo.load(tmp_path / "shards"), one)


def test_a_body_is_a_model_with_its_embedding_as_head(saved):
    """As the published `gpt2` is stored."""
    upstream = tiny("default", transformers.GPT2Model)
    model = eqzoo.load(saved(upstream))
    with torch.no_grad():
        theirs = upstream(torch.from_numpy(TOKENS)).last_hidden_state
    assert_close(eqx.filter_jit(jax.vmap(lambda tokens: model.hidden(tokens)))(jnp.asarray(TOKENS)), theirs, 1e-4)
    assert_close(predict(model, jnp.asarray(TOKENS)), theirs @ upstream.wte.weight.T, 1e-4)


def test_a_body_without_its_untied_head_is_refused(saved):
    with pytest.raises(CheckpointError, match=r"1 missing, 0 unexpected[\s\S]*lm_head.weight \(61, 24\)"):
        eqzoo.load(saved(tiny("untied", transformers.GPT2Model)))


@pytest.mark.parametrize("option", OPTIONS)
def test_transformers_reads_what_is_exported(option, tmp_path, saved):
    upstream = tiny(option)
    model = eqzoo.load(saved(upstream))
    eqzoo.export(tmp_path / "ours", model, format="transformers")
    back, report = type(upstream).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in upstream.state_dict().items())
    with torch.no_grad():
        tokens = torch.from_numpy(TOKENS)
        assert_close(back.eval()(tokens).logits.numpy(), upstream(tokens).logits, 1e-6)
    assert eqx.tree_equal(eqzoo.load(tmp_path / "ours"), model)


def test_parameters_of_another_dtype(tmp_path, saved):
    """Rounded once, and written in the dtype they have."""
    upstream = tiny("default")
    model = eqzoo.load(saved(upstream), dtype=jnp.bfloat16)
    arrays = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    assert {array.dtype for array in arrays} == {jnp.dtype(jnp.bfloat16)}
    expected = upstream.transformer.wte.weight.detach().bfloat16().float().numpy()
    np.testing.assert_array_equal(np.asarray(model.embedding.weight, np.float32), expected)

    eqzoo.export(tmp_path / "ours", model, format="transformers")
    back = type(upstream).from_pretrained(tmp_path / "ours")
    assert back.dtype == torch.bfloat16
    rounded = upstream.to(torch.bfloat16).state_dict()
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in rounded.items())


def test_a_half_precision_file_is_loaded_in_single_precision_or_as_it_is(saved):
    upstream = tiny("default").to(torch.bfloat16)
    folder = saved(upstream)
    single, half = eqzoo.load(folder), eqzoo.load(folder, dtype=jnp.bfloat16)
    assert single.embedding.weight.dtype == jnp.float32
    assert half.embedding.weight.dtype == jnp.bfloat16
    stored = upstream.transformer.wte.weight.detach().float().numpy()
    for model in (single, half):
        np.testing.assert_array_equal(np.asarray(model.embedding.weight, np.float32), stored)


@pytest.mark.parametrize(
    ("option", "changed", "value"),
    [
        ("default", "n_layer", 3),
        ("default", "n_head", 2),
        ("default", "n_positions", 8),
        ("default", "vocab_size", 60),
        ("default", "n_embd", 12),
        ("default", "tie_word_embeddings", False),
        ("untied", "n_inner", "absent"),
        ("untied", "tie_word_embeddings", True),
        ("untied", "activation_function", "absent"),
        ("scaled", "activation_function", "relu"),
        ("scaled", "scale_attn_weights", "absent"),
        ("scaled", "scale_attn_by_inverse_layer_idx", "absent"),
        ("scaled", "layer_norm_epsilon", "absent"),
    ],
)
def test_every_option_counts(option, changed, value, saved):
    upstream = tiny(option)
    with pytest.raises((AssertionError, CheckpointError)):
        assert_same_logits(eqzoo.load(saved(upstream, {changed: value})), upstream)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"add_cross_attention": True}, "add_cross_attention=True is not supported; eqzoo has False"),
        ({"activation_function": "mish"}, "activation_function='mish' is not supported; eqzoo has 'gelu_new', "),
        ({"n_head": 5}, "dim=24 is not a multiple of heads=5"),
    ],
)
def test_what_the_zoo_does_not_have_is_refused_by_name(changes, message, saved):
    with pytest.raises(CheckpointError, match=message):
        eqzoo.load(saved(tiny("default"), changes))


def test_dropout_rates_are_read_and_written(tmp_path):
    config = GPT2Config(
        dim=24,
        depth=1,
        heads=3,
        vocab=61,
        context=16,
        embedding_dropout=0.2,
        attention_dropout=0.3,
        residual_dropout=0.0,
    )
    model = eqx.filter_jit(GPT2)(config, key=jax.random.key(0))
    eqzoo.export(tmp_path / "ours", model, format="transformers")
    written: Any = transformers.GPT2Config.from_pretrained(tmp_path / "ours")
    assert (written.embd_pdrop, written.attn_pdrop, written.resid_pdrop) == (0.2, 0.3, 0.0)
    assert eqzoo.load(tmp_path / "ours", trainable=True)[0].config == config
