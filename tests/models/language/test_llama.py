"""Llama and its relatives against transformers: names, logits, gradients, config.json both ways."""

import json
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers

import eqzoo
from eqzoo._describe import from_config_json
from eqzoo.checkpoint import CheckpointError, unfill
from eqzoo.models.language.llama import FAMILY, VARIANTS, Llama, LlamaConfig
from tests.parity import assert_close, assert_names_and_shapes, assert_same_gradients, number_of_parameters, randomise

TOKENS = np.random.default_rng(0).integers(0, 61, (2, 12))
TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e3, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e3, "partial_rotary_factor": 0.75}
LONGROPE |= {"short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 4.0, 9.0]}
PHI3_LONG = {"rope_parameters": LONGROPE, "tie_word_embeddings": True}

# Upstream's model type, and its options.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "rms_norm_eps": 0.1}),
    "llama biased": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "head_dim": 10, "hidden_act": "gelu"},
    ),
    "llama dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0}, "max_position_embeddings": 8},
    ),
    "mistral": ("mistral", {"sliding_window": 4}),
    "mistral whole": ("mistral", {"sliding_window": None, "head_dim": 12}),
    "qwen2": ("qwen2", {"rope_parameters": YARN}),
    "qwen2 windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 12, "attention_bias": True}),
    "qwen3 windows": (
        "qwen3",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "smollm3": (
        "smollm3",
        {"no_rope_layers": [1, 0, 1], "rope_parameters": YARN, "attention_bias": True, "mlp_bias": True},
    ),
    "smollm3 windows": ("smollm3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 4}),
    "phi3": ("phi3", {"sliding_window": 4}),
    "phi3 long": ("phi3", {**PHI3_LONG, "original_max_position_embeddings": 8}),
    "phi3 short": ("phi3", {**PHI3_LONG, "original_max_position_embeddings": 32}),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.5,
            "mlp_bias": True,
            "attention_bias": True,
        },
    ),
}


def upstream_of(case: str) -> Any:
    """Upstream's model in evaluation mode, every weight of which matters."""
    model_type, options = CASES[case]
    config = transformers.AutoConfig.for_model(model_type, **{**TINY, **options})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return randomise(model.eval(), 1)


def next_token_loss(model: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = jax.vmap(model)(tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean(), logits


loss_and_gradients = eqx.filter_jit(eqx.filter_value_and_grad(next_token_loss, has_aux=True))
predict = eqx.filter_jit(lambda model, tokens: jax.vmap(model)(tokens))


def rules_of(model_type: str) -> Any:
    return next(each for each in FAMILY.upstreams.values() if each.model_type == model_type).rules


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_upstreams_and_the_export_is_read_back(case, saved, tmp_path):
    upstream = upstream_of(case)
    tokens = torch.from_numpy(TOKENS)
    theirs = upstream(tokens, labels=tokens)
    theirs.loss.backward()
    model = eqzoo.load(saved(upstream))
    (loss, logits), gradients = loss_and_gradients(model, jnp.asarray(TOKENS))
    assert_close(logits, theirs.logits, 1e-4)
    assert_close(loss, theirs.loss, 1e-4)
    assert_same_gradients(gradients, upstream, rules_of(CASES[case][0]))

    eqzoo.export(tmp_path / "ours", model, format="transformers")
    read_back = transformers.AutoModelForCausalLM.from_pretrained
    back, report = read_back(tmp_path / "ours", output_loading_info=True, pad_token_id=None)
    assert not any(report.values())
    with torch.no_grad():
        assert_close(back.eval()(tokens).logits.numpy(), theirs.logits, 1e-5)
    assert eqx.tree_equal(eqzoo.load(tmp_path / "ours"), model)
    assert from_config_json(json.loads((tmp_path / "ours" / "config.json").read_text())).config == model.config


@pytest.mark.parametrize(
    ("case", "changed", "value"),
    [
        ("llama 3", "rms_norm_eps", "absent"),
        ("llama 3", "rope_parameters", {**LLAMA3, "factor": 1.0}),
        ("llama 3", "rope_parameters", {**LLAMA3, "low_freq_factor": 0.1}),
        ("llama 3", "rope_parameters", {**LLAMA3, "high_freq_factor": 8.0}),
        ("llama 3", "rope_parameters", {**LLAMA3, "rope_theta": 1e4}),
        ("llama 3", "tie_word_embeddings", "absent"),
        ("llama biased", "attention_bias", "absent"),
        ("llama biased", "mlp_bias", "absent"),
        ("llama biased", "head_dim", "absent"),
        ("llama biased", "hidden_act", "absent"),
        ("llama", "num_key_value_heads", "absent"),
        ("llama dynamic", "max_position_embeddings", 16),
        ("llama dynamic", "rope_parameters", {"rope_type": "dynamic", "factor": 2.0}),
        ("mistral", "sliding_window", 5),
        ("mistral", "sliding_window", None),
        ("qwen2", "rope_parameters", {**YARN, "factor": 2.0}),
        ("qwen2", "rope_parameters", {**YARN, "beta_slow": 0.2}),
        ("qwen2 windows", "sliding_window", 4),
        ("qwen2 windows", "use_sliding_window", "absent"),
        ("qwen2 windows", "layer_types", ["full_attention", "full_attention", "sliding_attention"]),
        ("smollm3", "no_rope_layers", "absent"),
        ("smollm3", "no_rope_layers", [1, 1, 0]),
        ("smollm3", "rope_parameters", {**YARN, "attention_factor": 1.0}),
        ("smollm3 windows", "use_sliding_window", False),
        ("phi3", "sliding_window", "absent"),
        ("phi3 long", "original_max_position_embeddings", "absent"),
        ("phi3 short", "original_max_position_embeddings", 8),
        ("phi3 short", "rope_parameters", {**LONGROPE, "short_factor": [1.0, 1.5, 1.0]}),
        ("granite", "embedding_multiplier", "absent"),
        ("granite", "residual_multiplier", "absent"),
        ("granite", "attention_multiplier", "absent"),
        ("granite", "logits_scaling", "absent"),
    ],
)
def test_every_option_counts(case, changed, value, saved):
    upstream = upstream_of(case)
    with torch.no_grad():
        theirs = upstream(torch.from_numpy(TOKENS)).logits
    folder = saved(upstream, {changed: value})
    predict_as_changed = lambda: predict(eqzoo.load(folder), jnp.asarray(TOKENS))
    with pytest.raises((AssertionError, CheckpointError), match="relative error|does not fit"):
        assert_close(predict_as_changed(), theirs, 1e-3)


def written(name: str) -> tuple[str, dict[str, Any]]:
    """A variant's model type, and its options as upstream reads them."""
    prefixes = {"Llama": "llama", "SmolLM-": "llama", "SmolLM2": "llama", "Mistral": "mistral", "Qwen2.5": "qwen2"}
    prefixes |= {"Qwen3": "qwen3", "SmolLM3": "smollm3", "Phi": "phi3", "phi": "phi3", "OLMo": "olmo2"}
    prefixes |= {"granite": "granite"}
    model_type = next(kind for prefix, kind in prefixes.items() if name.startswith(prefix))
    upstream = next(each for each in FAMILY.upstreams.values() if each.model_type == model_type)
    return model_type, upstream.options.write(VARIANTS[name])


PARAMETERS = {
    "Llama-2-7b": 6_738_415_616,
    "Llama-3-8B": 8_030_261_248,
    "Llama-3.1-405B": 405_853_388_800,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-8B": 8_190_735_360,
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-360M": 361_821_120,
    "SmolLM2-1.7B": 1_711_376_384,
    "SmolLM3-3B": 3_075_098_624,
    "Phi-3-mini-4k": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "OLMo-2-1124-7B": 7_298_617_344,
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_has_upstreams_names_and_shapes(name):
    model_type, options = written(name)
    stated = json.loads(json.dumps({"model_type": model_type, **options}))
    assert from_config_json(stated).config == VARIANTS[name]
    # All layers are alike, and upstream takes seconds to make a hundred.
    few = options | {
        "num_hidden_layers": 2,
        **({"layer_types": options["layer_types"][:2]} if "layer_types" in options else {}),
    }
    config = transformers.AutoConfig.for_model(model_type, **{**few, "pad_token_id": None})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    if name in PARAMETERS:
        assert number_of_parameters(FAMILY, VARIANTS[name]) == PARAMETERS[name]
    assert_names_and_shapes(
        (FAMILY, from_config_json({"model_type": model_type, **few}).config), model.state_dict(), unused=None
    )


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "olmo2", "granite"])
def test_options_that_are_not_stated_have_upstreams_defaults(model_type):
    stated = transformers.AutoConfig.for_model(model_type).to_dict()
    assert from_config_json({"model_type": model_type}).config == from_config_json(stated).config


def test_the_older_generations_config_is_the_same():
    """As transformers 4 wrote Llama 3.1's and Phi-3-128k's."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    scaling |= {"original_max_position_embeddings": 8192}
    stated = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": scaling,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0",
        "use_cache": True,
        "vocab_size": 128256,
    }
    assert from_config_json(stated).config == VARIANTS["Llama-3.1-8B"]
    qwen = {"model_type": "qwen2", "max_window_layers": 24, "sliding_window": 32768, "use_sliding_window": False}
    qwen |= {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
    qwen |= {"intermediate_size": 4864, "rope_theta": 1000000.0, "tie_word_embeddings": True, "use_mrope": False}
    assert from_config_json(qwen).config == VARIANTS["Qwen2.5-0.5B"]
    phi = {"model_type": "phi3", "original_max_position_embeddings": 4096, "max_position_embeddings": 131072}
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    names = (from_config_json({**phi, "rope_scaling": {"type": kind, **factors}}).config for kind in ("su", "longrope"))
    one, other = names
    assert one == other
    assert (one.rotary.kind, one.rotary.context, one.rotary.factor) == ("longrope", 4096, 32.0)


def test_names_that_old_files_have_besides_are_known(saved):
    upstream = upstream_of("llama")
    folder = saved(upstream)
    expected = eqzoo.load(folder)
    tensors = {name: tensor.clone() for name, tensor in upstream.state_dict().items()}
    for layer in range(3):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert eqx.tree_equal(eqzoo.load(folder), expected)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("llama", {"hidden_act": "mish"}, "hidden_act='mish' is not supported; eqzoo has 'silu'"),
        ("llama", {"sliding_window": 4}, "option 'sliding_window' .* is not known to eqzoo"),
        ("llama", {"num_key_value_heads": 3}, "heads=4 is not a multiple of kv_heads=3; choose a divisor"),
        ("llama", {"rope_parameters": {"rope_type": "spiral"}}, "rope_type='spiral' is not supported"),
        ("qwen3", {"layer_types": ["linear_attention"] * 3}, r"layer_types=\['linear_attention'\] is not supported"),
        ("qwen3", {"layer_types": ["full_attention"] * 2}, "layer_types speaks of 2 layers, but there are 3"),
        ("phi3 short", {"rope_parameters": {**LONGROPE, "partial_rotary_factor": 1.0}}, "has 3 factors for 4 pairs"),
        ("olmo2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported; eqzoo has 1.0"),
        ("phi3", {"attention_bias": True}, "attention_bias=True is not supported; eqzoo has False"),
        ("granite", {"shared_scale": 2.0}, "option 'shared_scale' .* is not known to eqzoo"),
    ],
)
def test_what_the_zoo_does_not_have_is_refused_by_name(case, changes, message, saved):
    with pytest.raises(CheckpointError, match=message):
        eqzoo.load(saved(upstream_of(case), changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 30}, "dim=30 is not a multiple of heads=4; pass dim_head"),
        ({"window": 0}, "window=0 leaves a token nothing to attend to"),
        ({"rotated": (True,)}, "rotated speaks of 1 layers; pass one truth value for each of 2"),
        ({"windowed": (True,) * 3}, "windowed speaks of 3 layers"),
    ],
)
def test_impossible_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig(**{"dim": 32, "depth": 2, "heads": 4, "hidden": 40, **changes})


def test_an_export_that_upstream_has_no_options_for_is_refused(tmp_path):
    config = LlamaConfig(dim=32, depth=2, heads=4, hidden=40, vocab=61, post_norm=True, window=3)
    model = eqx.filter_jit(Llama)(config, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"transformers has no Llama with .*window=3"):
        eqzoo.export(tmp_path / "ours", model, format="transformers")


def test_dropout_needs_a_key_and_empty_text_is_refused():
    config = LlamaConfig(dim=32, depth=2, heads=4, hidden=40, vocab=61, attention_dropout=0.5)
    model = eqx.filter_jit(Llama)(config, key=jax.random.key(0))
    tokens = jnp.asarray(TOKENS[0])
    with pytest.raises(ValueError, match=r"Dropout\(rate=0.5\) got no key"):
        jax.eval_shape(model, tokens)
    call = eqx.filter_jit(lambda model, key: model(tokens, key=key))
    assert jnp.abs(call(model, jax.random.key(0)) - call(model, jax.random.key(1))).max() > 0.01
    with pytest.raises(ValueError, match="Llama: tokens is empty"):
        model(jnp.zeros(0, jnp.int32))


def test_initialisation_is_upstreams():
    """Normal of 0.02 everywhere, biases zero, norms one."""
    config = LlamaConfig(dim=64, depth=4, heads=4, hidden=96, vocab=300, attention_bias="all", qk_norm="whole")
    model = eqx.filter_jit(Llama)(config, key=jax.random.key(0))
    for name, array in unfill(model, rules_of("llama")).items():
        if array.ndim == 2:
            np.testing.assert_allclose(array.std(), 0.02, rtol=0.05, err_msg=name)
        else:
            assert (array == (0 if name.endswith("bias") else 1)).all(), name
