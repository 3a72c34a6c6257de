"""T5, T5 1.1, Flan-T5 and mT5 against transformers: names, outputs, gradients, answers, folders."""

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
from eqzoo import generation
from eqzoo._describe import from_config_json
from eqzoo.checkpoint import CheckpointError
from eqzoo.models.language._t5_blocks import distance_buckets
from eqzoo.models.language.t5 import FAMILY, T5, VARIANTS, T5Config
from tests.parity import (
    assert_close,
    assert_names_and_shapes,
    assert_same_gradients,
    from_torch,
    number_of_parameters,
    randomise,
)

LENGTHS = np.array([16, 9, 1])  # of the three texts in the batch
SIZES = {"vocab_size": 61, "d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 3}
SIZES |= {"decoder_start_token_id": 0, "eos_token_id": None}

GENERATOR = np.random.default_rng(0)
MASK = np.arange(16) < LENGTHS[:, None]
TOKENS = np.where(MASK, GENERATOR.integers(2, 61, MASK.shape), 0)
ANSWERS = np.concatenate([np.zeros((3, 1), int), GENERATOR.integers(2, 61, (3, 11))], axis=1)

# Each option, and ours that it sets.
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "default": ({}, ""),
    "gated": ({"feed_forward_proj": "gated-gelu"}, "gated"),
    "gated silu": ({"feed_forward_proj": "gated-silu"}, "activation"),
    "activation": ({"feed_forward_proj": "gelu"}, "activation"),
    "untied": ({"tie_word_embeddings": False}, "tied_head"),
    "buckets": ({"relative_attention_num_buckets": 8}, "buckets"),
    "max distance": ({"relative_attention_max_distance": 20}, "max_distance"),
    "eps": ({"layer_norm_epsilon": 0.1}, "norm_eps"),
    "decoder depth": ({"num_decoder_layers": 3}, "decoder_depth"),
}


def tiny(library: str = "T5", **options: Any) -> Any:
    """Upstream's model in evaluation mode, every weight of which matters."""
    config = getattr(transformers, f"{library}Config")(**SIZES | options)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{library}ForConditionalGeneration")(config).eval()
    if library == "MT5" or options.get("tie_word_embeddings") is False:  # transformers 5 ties whatever is new
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return randomise(model, 0)


def theirs(upstream: Any, tokens: np.ndarray = TOKENS, mask: np.ndarray = MASK, answers: np.ndarray = ANSWERS) -> Any:
    return upstream(
        input_ids=torch.tensor(tokens),
        attention_mask=torch.tensor(mask).long(),
        decoder_input_ids=torch.tensor(answers),
    ).logits


def described(upstream: Any) -> T5Config:
    return from_config_json(upstream.config.to_dict()).config


def converted(upstream: Any, **changes: Any) -> T5:
    return eqx.nn.inference_mode(from_torch((FAMILY, replace(described(upstream), **changes)), upstream)[0])


def outputs(model: T5, tokens: jax.Array, mask: jax.Array, answers: jax.Array) -> jax.Array:
    return jax.vmap(lambda tokens, mask, answer: model(tokens, answer, mask=mask))(tokens, mask, answers)


@eqx.filter_jit
@eqx.filter_value_and_grad(has_aux=True)
def loss_and_gradients(model: T5, tokens: jax.Array, mask: jax.Array, answers: jax.Array) -> tuple[jax.Array, Any]:
    logits = outputs(model, tokens, mask, answers)
    return jnp.mean(logits**2), logits


predict = eqx.filter_jit(outputs)
BATCH = tuple(map(jnp.asarray, (TOKENS, MASK, ANSWERS)))


def assert_same(model: T5, upstream: Any) -> None:
    with torch.no_grad():
        assert_close(predict(model, *BATCH), theirs(upstream), 1e-4)


@pytest.mark.parametrize(("library", "option"), [*(("T5", option) for option in OPTIONS), ("MT5", "default")])
def test_logits_and_gradients_of_a_padded_batch_are_upstreams(library, option):
    upstream = tiny(library, **OPTIONS[option][0])
    expected = theirs(upstream)
    expected.square().mean().backward()
    (_, found), gradients = loss_and_gradients(converted(upstream), *BATCH)
    assert_close(found, expected, 1e-4)
    assert_same_gradients(gradients, upstream, FAMILY.rules["transformers"])


@pytest.mark.parametrize("option", [option for option, (_, field) in OPTIONS.items() if field])
def test_every_option_counts(option):
    """Without it the logits differ, or the weights don't fit."""
    given, field = OPTIONS[option]
    upstream = tiny(**given)
    default = getattr(described(tiny()), field)
    with pytest.raises((AssertionError, CheckpointError)):
        assert_same(converted(upstream, **{field: default}), upstream)


def test_the_mask_counts_and_padding_changes_nothing():
    upstream = tiny()
    model = converted(upstream)
    everywhere = predict(model, BATCH[0], jnp.ones_like(BATCH[1]), BATCH[2])
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(everywhere, theirs(upstream), 1e-3)
    alone = eqx.filter_jit(lambda model, *arrays: model(*arrays))(model, BATCH[0][1, :9], BATCH[2][1])
    assert_close(alone, theirs(upstream)[1], 1e-4)


def test_without_an_answer_the_logits_are_those_of_its_first_token():
    upstream = tiny()
    found = eqx.filter_jit(lambda model, tokens: model(tokens))(converted(upstream), BATCH[0][0])
    assert_close(found, theirs(upstream)[0, :1], 1e-4)


@pytest.mark.parametrize("buckets", [8, 16, 32, 64])
@pytest.mark.parametrize("max_distance", [67, 100, 128, 256, 1000])
def test_every_distance_is_in_upstreams_bucket(buckets, max_distance):
    bucket_of = transformers.models.t5.modeling_t5.T5Attention._relative_position_bucket
    distance = torch.arange(2 * max_distance)
    clipped = np.minimum(distance.numpy(), max_distance)
    for number in (buckets, buckets // 2):
        expected = bucket_of(-distance, bidirectional=False, num_buckets=number, max_distance=max_distance)
        np.testing.assert_array_equal(distance_buckets(number, max_distance)[clipped], expected.numpy())


extend = eqx.filter_jit(lambda model, tokens, cache, count: model.extend(tokens, cache, count=count))


@pytest.mark.parametrize(
    ("counts", "size"),
    [([5, 5, 2], 5), ([3, 5, 0, 1, 3], 5), ([1] * 12, 1)],
    ids=["chunks", "padded", "one by one"],
)
def test_cached_is_uncached(counts, size):
    model = converted(tiny(feed_forward_proj="gated-gelu", num_decoder_layers=3))
    tokens, mask, answer = (array[1] for array in BATCH)
    encoded = eqx.filter_jit(lambda model, *arrays: model.encode(arrays[0], mask=arrays[1]))(model, tokens, mask)
    cache = eqx.filter_jit(lambda model, *arrays: model.empty_cache(14, arrays[0], mask=arrays[1]))(
        model, encoded, mask
    )
    own, source = cache.layers
    assert sum(array.size for array in jax.tree.leaves(own)) == 2 * 3 * 3 * 14 * 8  # layers, heads, tokens, channels
    assert sum(array.size for array in jax.tree.leaves(source)) == 2 * 3 * 3 * 16 * 8 + 16
    found, start = [], 0
    for count in counts:
        chunk = jnp.concatenate([answer[start : start + count], jnp.full(size - count, 7, answer.dtype)])
        states, cache = extend(model, chunk, cache, jnp.int32(count))
        found.append(states[:count])
        start += count
    assert start == len(answer) == cache.position
    whole = eqx.filter_jit(lambda model, *arrays: model.decode(*arrays[:2], mask=arrays[2]))
    assert_close(jnp.concatenate(found), np.asarray(whole(model, answer, encoded, mask)), 1e-5)


@pytest.mark.parametrize("option", ["default", "untied", "gated"])
def test_greedy_answers_are_those_of_transformers(option):
    """64 tokens to each of the texts, of unequal length."""
    upstream = tiny(**OPTIONS[option][0])
    with torch.no_grad():  # what blocks add counts more than the last token, which would be repeated
        for block in upstream.decoder.block:
            block.layer[0].SelfAttention.o.weight.mul_(8)
            block.layer[2].DenseReluDense.wo.weight.mul_(8)
    model = converted(upstream)
    with torch.no_grad():
        expected = upstream.generate(
            torch.tensor(TOKENS), attention_mask=torch.tensor(MASK).long(), max_new_tokens=64, do_sample=False
        )
    answering = eqx.filter_jit(lambda model, tokens, mask: model.answering(tokens, mask=mask))
    for row, text in enumerate(TOKENS):
        decoder = answering(model, jnp.asarray(text), jnp.asarray(MASK[row]))
        (answer,) = generation.generate(decoder, [[model.config.start]], 64)
        assert answer.tokens == expected[row, 1:].tolist()
        assert len(set(answer.tokens)) > 1


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_has_upstreams_names_shapes_and_config(name):
    """The published config.json as transformers 4 wrote it."""
    config = VARIANTS[name]
    is_old = not config.gated
    kind = "mt5" if name.startswith("mt5") else "t5"
    published = {
        "architectures": [f"{kind.upper()}ForConditionalGeneration"],
        "d_ff": config.hidden,
        "d_kv": config.dim_head,
        "d_model": config.dim,
        "decoder_start_token_id": 0,
        "dropout_rate": 0.1,
        "eos_token_id": 1,
        "feed_forward_proj": "relu" if is_old else "gated-gelu",
        "initializer_factor": 1.0,
        "is_encoder_decoder": True,
        "layer_norm_epsilon": 1e-06,
        "model_type": kind,
        "n_positions": 512,
        "num_decoder_layers": config.depth,
        "num_heads": config.heads,
        "num_layers": config.depth,
        "output_past": True,
        "pad_token_id": 0,
        "relative_attention_num_buckets": 32,
        "task_specific_params": {"summarization": {"early_stopping": True, "prefix": "summarize: "}},
        "tie_word_embeddings": is_old,
        "transformers_version": "4.23.1",
        "use_cache": True,
        "vocab_size": config.vocab,
    }
    if is_old:  # as the oldest files have it
        del published["feed_forward_proj"], published["tie_word_embeddings"], published["num_decoder_layers"]
    assert from_config_json(published).config == config
    theirs = {key: value for key, value in published.items() if key not in ("architectures", "model_type")}
    theirs = getattr(transformers, f"{kind.upper()}Config")(**theirs)
    with torch.device("meta"):
        upstream = getattr(transformers, f"{kind.upper()}ForConditionalGeneration")(theirs)
    assert described(upstream) == config
    assert_names_and_shapes(name, upstream.state_dict())


PARAMETERS = {
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "flan-t5-small": 76_961_152,
    "flan-t5-base": 247_577_856,
    "flan-t5-large": 783_150_080,
    "mt5-small": 300_176_768,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_numbers_of_parameters(name):
    assert number_of_parameters(FAMILY, VARIANTS[name]) == PARAMETERS[name]


def test_a_published_width_with_texts_longer_than_the_last_bucket():
    config = VARIANTS["flan-t5-small"]
    sizes = {"d_model": config.dim, "d_kv": config.dim_head, "d_ff": config.hidden, "num_heads": config.heads}
    upstream = tiny(**sizes, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    with torch.no_grad():  # as T5 starts: its scores aren't divided by the root of a head's width
        for name, parameter in upstream.named_parameters():
            if name.endswith("Attention.q.weight"):
                parameter.mul_(config.dim_head**-0.5)
    tokens = np.random.default_rng(1).integers(2, 61, (1, 200))
    answers = np.random.default_rng(2).integers(2, 61, (1, 160))
    with torch.no_grad():
        expected = theirs(upstream, tokens, np.ones_like(tokens), answers)[0]
    found = eqx.filter_jit(lambda model, *arrays: model(*arrays))(
        converted(upstream), jnp.asarray(tokens[0]), jnp.asarray(answers[0])
    )
    assert_close(found, expected, 1e-4)


@pytest.mark.parametrize("option", ["default", "untied", "gated silu", "decoder depth"])
def test_folders_load_and_transformers_reads_what_is_exported(option, tmp_path, saved):
    upstream = tiny(**OPTIONS[option][0])
    model = eqzoo.load(saved(upstream))
    assert_same(model, upstream)
    eqzoo.export(tmp_path / "ours", model, format="transformers")
    back, report = type(upstream).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    state = upstream.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in back.state_dict().items())
    with torch.no_grad():
        assert_close(theirs(back.eval()).numpy(), theirs(upstream), 1e-5)
    assert eqx.tree_equal(eqzoo.load(tmp_path / "ours"), model)


def test_a_head_that_is_tied_but_not_scaled_is_loaded_as_a_copy(saved):
    """As transformers 5 makes and writes T5 1.1."""
    config = transformers.T5Config(**SIZES, tie_word_embeddings=False)
    upstream = randomise(transformers.T5ForConditionalGeneration(config).eval(), 0)
    model = eqzoo.load(saved(upstream))
    assert not model.config.tied_head
    np.testing.assert_array_equal(model.head.weight, model.embedding.weight)
    assert_same(model, upstream)


def test_leftovers_of_old_files(tmp_path):
    upstream = tiny()
    upstream.save_pretrained(tmp_path / "old")
    (tmp_path / "old" / "model.safetensors").unlink()
    tensors = upstream.state_dict()
    assert {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"} <= tensors.keys()
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(32, 3)
    torch.save(tensors, tmp_path / "old" / "pytorch_model.bin")
    assert eqx.tree_equal(eqzoo.load(tmp_path / "old"), converted(upstream))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feed_forward_proj": "gated-mish"}, "dense_act_fn='mish' is not supported; eqzoo has 'relu', "),
        ({"architectures": ["T5EncoderModel"]}, "'T5EncoderModel'.* is not supported"),
        ({"is_decoder": True}, "is_decoder=True is not supported"),
        ({"new_attention": 3}, "option 'new_attention' .of value 3. is not known"),
        ({"relative_attention_num_buckets": 30}, "buckets=30 is not a multiple of 4"),
    ],
)
def test_what_the_zoo_does_not_have_is_refused_by_name(changes, message, saved):
    with pytest.raises(CheckpointError, match=message):
        eqzoo.load(saved(tiny(), changes))


def test_dropout_needs_a_key_and_changes_the_output():
    config = T5Config(dim=8, depth=2, decoder_depth=2, heads=2, hidden=8, dim_head=4, vocab=9, dropout=0.5)
    model = eqx.filter_jit(T5)(config, key=jax.random.key(0))
    tokens = jnp.arange(1, 7)
    with pytest.raises(ValueError, match=r"Dropout.rate=0.5. got no key in training mode"):
        jax.eval_shape(model, tokens)
    with pytest.raises(ValueError, match="T5: tokens is empty"):
        model(jnp.zeros(0, jnp.int32))
    call = eqx.filter_jit(lambda model, key: model(tokens, key=key))
    first, again, other = (call(model, jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_initialisation_is_upstreams():
    """By the number of inputs of each layer, and of the queries by that of a head's scores too."""
    model = eqx.filter_jit(T5)(
        T5Config(dim=64, depth=4, decoder_depth=4, heads=4, hidden=256, dim_head=16, vocab=500, tied_head=False),
        key=jax.random.key(0),
    )
    expected = {
        "embedding": (model.embedding.weight, 1.0),
        "head": (model.head.weight, 1.0),
        "positions": (model.decoder.positions, 1 / 8),
        "query": (model.decoder.blocks.block.cross_attention.query.weight, 1 / 32),
        "key": (model.encoder.blocks.block.attention.key.weight, 1 / 8),
        "out": (model.encoder.blocks.block.attention.out.weight, 1 / 8),
        "fc1": (model.encoder.blocks.block.mlp.fc1.weight, 1 / 8),
        "fc2": (model.encoder.blocks.block.mlp.fc2.weight, 1 / 16),
    }
    for name, (weight, std) in expected.items():
        np.testing.assert_allclose(np.std(weight), std, rtol=0.1, err_msg=name)
