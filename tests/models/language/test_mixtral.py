"""Mixtral and Qwen3-MoE against transformers."""

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
from eqzoo.models.language import _mixtral_upstream as naming
from eqzoo.models.language.mixtral import FAMILY, VARIANTS, Mixtral, MixtralConfig
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
from tests.parity import assert_close, assert_names_and_shapes, number_of_parameters

TINY: dict[str, Any] = {"vocab_size": 61, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"intermediate_size": 20, "num_hidden_layers": 3, "num_experts_per_tok": 2}
TINY |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
QWEN: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts": 5, "head_dim": 8}

PARAMETERS = {
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "Mixtral-8x22B-v0.1": 140_620_634_112,
    "Mixtral-8x22B-Instruct-v0.1": 140_630_071_296,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
}

# With another value of one, the weights don't fit or the logits differ.
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4}),
    "mixtral window": (
        transformers.MixtralConfig,
        {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 4, "tie_word_embeddings": True}
        | {"hidden_act": "gelu", "rms_norm_eps": 0.1, "head_dim": 8}
        | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50.0}},
    ),
    "qwen3": (transformers.Qwen3MoeConfig, QWEN),
    "qwen3 normalised": (
        transformers.Qwen3MoeConfig,
        QWEN | {"norm_topk_prob": True, "attention_bias": True, "use_sliding_window": True, "sliding_window": 4},
    ),
    "qwen3 dense": (
        transformers.Qwen3MoeConfig,
        QWEN | {"mlp_only_layers": [0], "decoder_sparse_step": 2, "num_hidden_layers": 4, "head_dim": 6},
    ),
}


def tiny(option: str, **more: Any) -> Any:
    config, options = MODELS[option]
    return tiny_model(config(**TINY | options | more))


def published(config: MixtralConfig) -> transformers.PretrainedConfig:
    options: dict[str, Any] = {
        "vocab_size": config.vocab,
        "hidden_size": config.dim,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": config.context,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    if not config.qk_norm:
        return transformers.MixtralConfig(intermediate_size=config.hidden, **options)
    options |= {"intermediate_size": config.dense_hidden, "moe_intermediate_size": config.hidden}
    options |= {"head_dim": config.dim_head, "norm_topk_prob": True}
    return transformers.AutoConfig.for_model("qwen3_moe", **options)


def of_each_expert(tensors: dict[str, torch.Tensor], mixtral: bool) -> dict[str, torch.Tensor]:
    """Upstream's state dict as its files have it, which hold each expert by itself."""
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    found = {}
    for name, tensor in tensors.items():
        name = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        if name.endswith("experts.gate_up_proj"):
            parts = dict(zip(names[:2], tensor.chunk(2, dim=1), strict=True))
        elif name.endswith("experts.down_proj"):
            parts = {names[2]: tensor}
        else:
            found[name] = tensor
            continue
        stem = name.rpartition(".")[0]
        for part, each in parts.items():
            found |= {f"{stem}.{number}.{part}.weight": expert for number, expert in enumerate(each)}
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_has_upstreams_names_shapes_size_and_config(name):
    config = VARIANTS[name]
    assert number_of_parameters(FAMILY, config) == PARAMETERS[name]
    stated = published(config)
    assert from_config_json(json.loads(json.dumps(stated.to_dict()))).config == config
    few = replace(config, depth=4)  # of 128 experts each; the whole model has tens of thousands of tensors
    with torch.device("meta"):
        tensors = transformers.AutoModelForCausalLM.from_config(published(few)).state_dict()
    assert_names_and_shapes((FAMILY, few), of_each_expert(tensors, mixtral=not config.qk_norm))
    with torch.device("meta"):
        whole = transformers.AutoModelForCausalLM.from_config(stated)
    assert sum(parameter.numel() for parameter in whole.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("option", MODELS)
def test_logits_gradients_and_export_are_upstreams(option, tmp_path, saved):
    upstream = tiny(option)
    model = eqzoo.load(saved(upstream))
    assert_same_logits_and_gradients(model, upstream, naming.FUSED)
    assert_upstream_reads_the_export(model, upstream, tmp_path / "ours")


@pytest.mark.parametrize("option", ["mixtral", "qwen3 dense"])
def test_experts_in_one_tensor_are_those_by_themselves(option, tmp_path, saved):
    """As `torch.save(model.state_dict())` writes them."""
    upstream = tiny(option)
    expected = eqzoo.load(saved(upstream))
    (tmp_path / "upstream" / "model.safetensors").unlink()
    torch.save(upstream.state_dict(), tmp_path / "upstream" / "pytorch_model.bin")
    assert eqx.tree_equal(eqzoo.load(tmp_path / "upstream"), expected)


@pytest.mark.parametrize(
    ("option", "changed", "value"),
    [
        ("mixtral", "num_experts_per_tok", 1),
        ("mixtral", "num_local_experts", 5),
        ("mixtral", "sliding_window", 4),
        ("mixtral", "hidden_act", "gelu"),
        ("mixtral", "rope_parameters", {"rope_type": "default", "rope_theta": 50.0}),
        ("mixtral window", "rope_parameters", {"rope_type": "default", "rope_theta": 50.0}),
        ("mixtral window", "sliding_window", None),
        ("mixtral window", "tie_word_embeddings", False),
        ("mixtral window", "head_dim", None),
        ("mixtral window", "rms_norm_eps", 1e-5),
        ("qwen3", "norm_topk_prob", True),
        ("qwen3", "moe_intermediate_size", 20),
        ("qwen3", "mlp_only_layers", [1]),
        ("qwen3 normalised", "norm_topk_prob", "absent"),
        ("qwen3 normalised", "use_sliding_window", False),
        ("qwen3 normalised", "attention_bias", False),
        ("qwen3 dense", "intermediate_size", 16),
        ("qwen3 dense", "decoder_sparse_step", 1),
        ("qwen3 dense", "mlp_only_layers", [1]),
    ],
)
def test_every_option_counts(option, changed, value, saved):
    upstream = tiny(option)
    with pytest.raises((AssertionError, CheckpointError)):
        assert_same_logits(eqzoo.load(saved(upstream, {changed: value})), upstream)


def test_a_config_of_transformers_4(saved):
    upstream = tiny("qwen3")
    new = eqzoo.load(saved(upstream))
    old: dict[str, Any] = {"rope_parameters": "absent", "rope_theta": 10000, "rope_scaling": None}
    old |= {"num_local_experts": "absent", "num_experts": 5, "max_window_layers": 3, "torch_dtype": "bfloat16"}
    assert eqx.tree_equal(eqzoo.load(saved(upstream, old)), new)


@pytest.mark.parametrize("config", [transformers.MixtralConfig, transformers.Qwen3MoeConfig])
def test_options_that_are_not_stated_have_upstreams_defaults(config):
    stated = config().to_dict()
    assert from_config_json({"model_type": stated["model_type"]}).config == from_config_json(stated).config


@pytest.mark.parametrize("name", names_of(naming.UPSTREAMS["transformers"].options, "hidden_act"))
def test_every_name_of_an_activation_means_what_it_does_upstream(name, saved):
    upstream = tiny("mixtral", hidden_act=name)
    assert_same_logits(eqzoo.load(saved(upstream)), upstream)


@pytest.mark.parametrize("option", ["mixtral", "qwen3 dense"])
def test_the_loss_that_balances_experts_is_upstreams(option, saved):
    upstream = tiny(option, output_router_logits=True)
    model = eqzoo.load(saved(upstream))
    with torch.no_grad():
        theirs = upstream(torch.from_numpy(TOKENS)).aux_loss

    @eqx.filter_jit
    def ours(model, tokens):
        hidden, routing = jax.vmap(model.hidden_and_routing)(tokens)
        return hidden, eqzoo.nn.load_balancing_loss(routing, model.config.top_k)

    hidden, loss = ours(model, jnp.asarray(TOKENS))
    assert_close(loss, theirs, 1e-5)
    expected = eqx.filter_jit(lambda model, tokens: jax.vmap(model.hidden)(tokens))(model, jnp.asarray(TOKENS))
    np.testing.assert_array_equal(hidden, expected)


@pytest.mark.parametrize(
    ("option", "changes", "message"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not supported; eqzoo has 0.0"),
        ("mixtral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ("mixtral", {"hidden_act": "mish"}, "hidden_act='mish' is not supported"),
        ("mixtral", {"num_key_value_heads": 3}, "heads=4 is not a multiple of kv_heads=3"),
        ("mixtral", {"num_experts_per_tok": 9}, "top_k=9 of 4 experts can't be chosen"),
        ("qwen3", {"mlp_only_layers": [0, 1, 2]}, r"dense_layers=\(0, 1, 2\) should be some of the layers 0 to 2"),
        ("qwen3", {"num_shared_experts": 1}, "option 'num_shared_experts'"),
    ],
)
def test_what_the_zoo_does_not_have_is_refused_by_name(option, changes, message, saved):
    with pytest.raises(CheckpointError, match=message):
        eqzoo.load(saved(tiny(option), changes))


def test_a_single_token_copies_no_experts():
    """Beyond the one at hand, out of 16 in each of 4 layers."""
    config = MixtralConfig(dim=32, depth=4, heads=2, kv_heads=1, hidden=64, experts=16, vocab=9)
    model = eqx.filter_jit(Mixtral)(config, key=jax.random.key(0))
    step: Any = eqx.filter_jit(lambda model, cache: model.extend(jnp.zeros(1, jnp.int32), cache))
    memory = step.lower(model, model.empty_cache(4)).compile().compiled.memory_analysis()
    expert = 3 * 32 * 64 * 4
    assert memory.temp_size_in_bytes < 4 * expert


CONFIG = MixtralConfig(dim=8, depth=2, heads=2, kv_heads=1, hidden=8, experts=3, vocab=9)


def test_wrong_configs_and_no_tokens_are_refused():
    with pytest.raises(ValueError, match="dense_layers have no width; pass dense_hidden"):
        replace(CONFIG, dense_layers=(0,))
    with pytest.raises(ValueError, match="window=0 leaves a token nothing to attend to"):
        replace(CONFIG, window=0)
    with pytest.raises(ValueError, match="Mixtral: tokens is empty; pass at least one"):
        predict(eqx.filter_jit(Mixtral)(CONFIG, key=jax.random.key(0)), jnp.zeros((1, 0), jnp.int32))


def test_every_sharding_rule_is_of_use():
    config = replace(CONFIG, dense_layers=(1,), dense_hidden=8, attention_bias=True)
    assert_every_sharding_rule_is_of_use(FAMILY, config)
