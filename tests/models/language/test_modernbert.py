"""ModernBERT against transformers: names, hidden states, heads, gradients, folders."""

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
from eqzoo.models.language.modernbert import FAMILY, TRANSFORMERS_BODY, VARIANTS, ModernBert, ModernBertConfig
from tests.parity import (
    assert_close,
    assert_names_and_shapes,
    assert_same_gradients,
    from_torch,
    number_of_parameters,
    randomise,
)

HEADS = {
    "masked_lm": "ForMaskedLM",
    "classifier": "ForSequenceClassification",
    "token_classifier": "ForTokenClassification",
    "question_answering": "ForQuestionAnswering",
    None: "Model",
}
PAD = 3
LENGTHS = np.array([16, 9, 1])  # of the three texts in the batch
SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "local_attention": 6,
    "pad_token_id": PAD,
}

GENERATOR = np.random.default_rng(0)
MASK = np.arange(16) < LENGTHS[:, None]
TOKENS = np.where(MASK, GENERATOR.integers(PAD + 1, 61, MASK.shape), PAD)
WEIGHTS = GENERATOR.standard_normal((*MASK.shape, 1)) * MASK[..., None]

# Each option, and ours that it sets.
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"hidden_activation": "silu"}, "activation"),
    "head activation": ({"classifier_activation": "relu"}, "head_activation"),
    "eps": ({"norm_eps": 0.1}, "norm_eps"),
    "norm bias": ({"norm_bias": True}, "norm_bias"),
    "attention bias": ({"attention_bias": True}, "attention_bias"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias"),
    "head bias": ({"classifier_bias": True}, "head_bias"),
    "no vocabulary bias": ({"decoder_bias": False}, "vocab_bias"),
    "window": ({"local_attention": 3}, "window"),
    "all global": ({"global_attn_every_n_layers": 1}, "global_every"),
    "global base": (
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 100.0}}},
        "global_base",
    ),
    "local base": (
        {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}},
        "local_base",
    ),
}


def tiny(head: str | None = "masked_lm", **options: Any) -> Any:
    """Upstream's model in evaluation mode, every weight of which matters."""
    config = transformers.ModernBertConfig(**SIZES | options)
    config._attn_implementation = "eager"
    return randomise(getattr(transformers, f"ModernBert{HEADS[head]}")(config).eval(), 0)


def theirs(upstream: Any) -> torch.Tensor:
    output = upstream(torch.tensor(TOKENS), attention_mask=torch.tensor(MASK).long())
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    return output.logits if "logits" in output else output.last_hidden_state


def described(upstream: Any) -> ModernBertConfig:
    upstream.config.architectures = [type(upstream).__name__]
    return from_config_json(upstream.config.to_dict()).config


def converted(upstream: Any, **changes: Any) -> Any:
    return eqx.nn.inference_mode(from_torch((FAMILY, replace(described(upstream), **changes)), upstream)[0])


def outputs(model: ModernBert, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    return jax.vmap(lambda tokens, mask: model(tokens, mask=mask))(tokens, mask)


@eqx.filter_jit
@eqx.filter_value_and_grad(has_aux=True)
def loss_and_gradients(model: ModernBert, tokens: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A loss that sees real tokens only."""
    y = outputs(model, tokens, mask)
    return jnp.sum(y**2 * (WEIGHTS.astype(np.float32) if y.ndim == 3 else 1)), y


predict = eqx.filter_jit(outputs)


def real(y: Any) -> Any:
    """Without what comes out for padding."""
    return y[MASK] if y.ndim == 3 else y


def assert_same(model: Any, upstream: Any) -> None:
    with torch.no_grad():
        expected = theirs(upstream)
    assert_close(real(predict(model, jnp.asarray(TOKENS), jnp.asarray(MASK))), real(expected), 1e-4)


@pytest.mark.parametrize(("head", "pool"), [*((head, "mean") for head in HEADS), ("classifier", "cls")])
def test_outputs_and_gradients_of_a_padded_batch_are_upstreams(head, pool):
    upstream = tiny(head, classifier_pooling=pool)
    expected = theirs(upstream)
    (expected**2 * (torch.tensor(WEIGHTS).float() if expected.ndim == 3 else 1)).sum().backward()
    (_, found), gradients = loss_and_gradients(converted(upstream), jnp.asarray(TOKENS), jnp.asarray(MASK))
    assert_close(real(found), real(expected), 1e-4)
    assert_same_gradients(gradients, upstream, TRANSFORMERS_BODY if head is None else FAMILY.rules["transformers"])


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_counts(option):
    """With it the outputs are upstream's; without it they differ, or the weights don't fit."""
    given, field = OPTIONS[option]
    upstream = tiny(**given)
    assert_same(converted(upstream), upstream)
    default = getattr(described(tiny()), field)
    with pytest.raises((AssertionError, CheckpointError)):
        assert_same(converted(upstream, **{field: default}), upstream)


def test_pooling_counts():
    upstream = tiny("classifier", classifier_pooling="mean")
    with pytest.raises(AssertionError):
        assert_same(converted(upstream, pool="first"), upstream)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_has_upstreams_names_shapes_and_config(name):
    """The published config.json as transformers 4 wrote it."""
    config = VARIANTS[name]
    published = {
        "architectures": ["ModernBertForMaskedLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 50281,
        "classifier_activation": "gelu",
        "classifier_bias": False,
        "classifier_dropout": 0.0,
        "classifier_pooling": "mean",
        "cls_token_id": 50281,
        "decoder_bias": True,
        "deterministic_flash_attn": False,
        "embedding_dropout": 0.0,
        "eos_token_id": 50282,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "gradient_checkpointing": False,
        "hidden_activation": "gelu",
        "hidden_size": config.dim,
        "initializer_cutoff_factor": 2.0,
        "initializer_range": 0.02,
        "intermediate_size": config.hidden,
        "layer_norm_eps": 1e-05,
        "local_attention": 128,
        "local_rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "mlp_dropout": 0.0,
        "model_type": "modernbert",
        "norm_bias": False,
        "norm_eps": 1e-05,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.depth,
        "pad_token_id": 50283,
        "position_embedding_type": "absolute",
        "sep_token_id": 50282,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "transformers_version": "4.47.0.dev0",
        "vocab_size": 50368,
    }
    assert from_config_json(published).config == config
    theirs = {key: value for key, value in published.items() if key not in ("architectures", "model_type")}
    theirs = transformers.ModernBertConfig(**theirs)
    with torch.device("meta"):
        upstream = transformers.ModernBertForMaskedLM(theirs)
    assert described(upstream) == config
    assert_names_and_shapes(name, upstream.state_dict())
    assert number_of_parameters(FAMILY, config) == {"base": 149_655_232, "large": 395_881_664}[name.split("-")[1]]


def test_base_at_its_real_width_and_window():
    """Longer than the window, and in the layers of both kinds."""
    config = VARIANTS["ModernBERT-base"]
    sizes = {"hidden_size": config.dim, "num_attention_heads": config.heads, "intermediate_size": config.hidden}
    upstream = tiny(None, **sizes, num_hidden_layers=5, local_attention=128)
    tokens = np.random.default_rng(1).integers(0, 61, 200)
    with torch.no_grad():
        expected = upstream(torch.tensor(tokens)[None]).last_hidden_state[0]
    found = eqx.filter_jit(lambda model, tokens: model.hidden(tokens))(converted(upstream), jnp.asarray(tokens))
    assert_close(found, expected, 1e-4)


@pytest.mark.parametrize("head", HEADS)
def test_folders_load_and_transformers_reads_what_is_exported(head, tmp_path, saved):
    upstream = tiny(head, classifier_pooling="mean", norm_bias=True, attention_bias=True, mlp_bias=True)
    model = eqzoo.load(saved(upstream))
    assert_same(model, upstream)
    eqzoo.export(tmp_path / "ours", model, format="transformers")
    back, report = type(upstream).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    with torch.no_grad():
        assert_close(real(theirs(back.eval())), real(theirs(upstream)), 1e-5)
    assert eqx.tree_equal(eqzoo.load(tmp_path / "ours"), model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention", "full_attention", "sliding_attention"] * 2}, "layer_types=.* not support"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type='yarn' is not supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False is not supported"),
        ({"hidden_activation": "mish"}, "hidden_activation='mish' is not supported; eqzoo has 'gelu', "),
        ({"architectures": ["ModernBertDecoderModel"]}, "'ModernBertDecoderModel' is not supported"),
        ({"new_attention": 3}, "option 'new_attention' .of value 3. is not known"),
        ({"num_attention_heads": 8}, "dim=24 gives no even number of channels to each of heads=8"),
    ],
)
def test_what_the_zoo_does_not_have_is_refused_by_name(changes, message, saved):
    with pytest.raises(CheckpointError, match=message):
        eqzoo.load(saved(tiny(), changes))


@pytest.mark.parametrize("rate", ["embedding_dropout", "attention_dropout", "mlp_dropout", "head_dropout"])
def test_each_dropout_needs_a_key_and_changes_the_output(rate):
    config = ModernBertConfig(
        dim=8, depth=2, heads=2, hidden=8, vocab=9, head="classifier", num_classes=3, **{rate: 0.5}
    )
    model = eqx.filter_jit(ModernBert)(config, key=jax.random.key(0))
    tokens = jnp.arange(1, 7)
    with pytest.raises(ValueError, match=r"Dropout.rate=0.5. got no key in training mode"):
        jax.eval_shape(model, tokens)
    call = eqx.filter_jit(lambda model, key: model(tokens, key=key))
    first, again, other = (call(model, jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
