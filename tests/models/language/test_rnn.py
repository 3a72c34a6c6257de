"""Recurrent language models against a module of torch.nn's layers."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import eqzoo
from eqzoo.generation import generate
from eqzoo.models.language.rnn import FAMILY, RNN, SHARDING, TORCH, VARIANTS, RNNConfig
from eqzoo.tree import leaves_with_paths
from tests.decoders import TOKENS, assert_same_logits_and_gradients, predict
from tests.models.language import test_decoders
from tests.parity import assert_close, assert_names_and_shapes, from_torch, number_of_parameters, randomise

TINY = RNNConfig(dim=8, depth=3, hidden=10, vocab=61)

MODELS = {
    "lstm": TINY,
    "gru": replace(TINY, cell="gru"),
    "one layer": replace(TINY, depth=1),
    "tied": replace(TINY, hidden=None, tied_head=True),
    "tied gru": replace(TINY, cell="gru", depth=2, hidden=None, tied_head=True),
}


class Upstream(torch.nn.Module):
    """What the family's docstring describes."""

    def __init__(self, config: RNNConfig):
        super().__init__()
        layers = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[config.cell]
        self.embedding = torch.nn.Embedding(config.vocab, config.dim)
        self.rnn = layers(config.dim, config.width, config.depth, dropout=config.dropout, batch_first=True)
        self.head = torch.nn.Linear(config.width, config.vocab)
        if config.tied_head:
            self.head.weight = self.embedding.weight
        self.drop = torch.nn.Dropout(config.dropout)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.head(self.drop(self.rnn(self.drop(self.embedding(tokens)))[0]))
        loss = (
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            if labels is not None
            else None
        )
        return SimpleNamespace(logits=logits, loss=loss)

    def generate(self, tokens: torch.Tensor, *, max_new_tokens: int, **options: Any) -> torch.Tensor:
        """Greedily."""
        for _ in range(max_new_tokens):
            tokens = torch.cat([tokens, self(tokens).logits[:, -1:].argmax(-1)], dim=1)
        return tokens


def tiny(option: str) -> Upstream:
    return randomise(Upstream(MODELS[option]).eval(), 0)


def converted(option: str, upstream: Upstream) -> RNN:
    return eqx.nn.inference_mode(from_torch((FAMILY, MODELS[option]), upstream)[0])


created = eqx.filter_jit(lambda config: RNN(config, key=jax.random.key(0)))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_has_torchs_names_shapes_and_size(name):
    with torch.device("meta"):
        upstream = Upstream(VARIANTS[name])
    assert_names_and_shapes(name, upstream.state_dict())
    assert number_of_parameters(FAMILY, VARIANTS[name]) == sum(each.numel() for each in upstream.parameters())


@pytest.mark.parametrize("option", MODELS)
def test_logits_and_gradients_are_torchs(option):
    upstream = tiny(option)
    assert_same_logits_and_gradients(converted(option, upstream), upstream, TORCH)


run = eqx.filter_jit(lambda model, tokens: model.extend(tokens, model.empty_cache(14)))


def test_the_state_after_each_layer_is_torchs():
    for option in ("lstm", "gru"):
        upstream = tiny(option)
        model = converted(option, upstream)
        _, cache = run(model, jnp.asarray(TOKENS[0]))
        with torch.no_grad():
            _, theirs = upstream.rnn(upstream.embedding(torch.from_numpy(TOKENS[:1])))
        theirs = theirs if option == "lstm" else (theirs,)
        for part, other in zip(cache.layers, theirs, strict=True):
            assert_close(part, other[:, 0], 1e-5)


# The tests of all decoders, on models that transformers doesn't have.
ROWS = (
    test_decoders.Row("lstm", lambda: MODELS["lstm"], lambda length: 2 * 3 * 10),
    test_decoders.Row("gru", lambda: MODELS["gru"], lambda length: 3 * 10),
    test_decoders.Row("tied", lambda: MODELS["tied"], lambda length: 2 * 3 * 8),
)


@pytest.fixture(scope="module", params=ROWS, ids=lambda row: row.name)
def subject(request) -> test_decoders.Subject:
    row = request.param
    upstream = tiny(row.name)
    return test_decoders.Subject(row, converted(row.name, upstream), upstream)


globals().update({name: test for name, test in vars(test_decoders).items() if name.startswith("test_")})


@pytest.mark.parametrize("option", ["lstm", "gru"])
def test_prompts_of_all_lengths_are_continued_together(option):
    upstream = tiny(option)
    prompts = [[5], [17, 3, 60, 0, 8], [9, 11]]
    for prompt, ours in zip(prompts, generate(converted(option, upstream), prompts, 20), strict=True):
        theirs = upstream.generate(torch.tensor([prompt]), max_new_tokens=20)
        assert ours.tokens == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("option", MODELS)
@pytest.mark.parametrize("file", ["lm.pth", "lm.safetensors"])
def test_torch_reads_what_is_exported(option, file, tmp_path):
    upstream = tiny(option)
    model = converted(option, upstream)
    eqzoo.export(tmp_path / file, model, format="torch")
    other = Upstream(MODELS[option]).eval()
    if file == "lm.pth":
        tensors = torch.load(tmp_path / file, weights_only=True)
        tied = {"head.weight": tensors["embedding.weight"]} if MODELS[option].tied_head else {}
        assert (tensors | tied).keys() == upstream.state_dict().keys()
        other.load_state_dict(tensors | tied)
        tokens = torch.from_numpy(TOKENS)
        assert torch.equal(other(tokens).logits, upstream(tokens).logits)
    assert eqx.tree_equal(eqzoo.load(tmp_path / file, like=eqx.filter_eval_shape(created, MODELS[option])), model)


def test_a_torch_file_of_a_named_model(tmp_path):
    torch.save(randomise(Upstream(VARIANTS["gru-small"]), 0).state_dict(), tmp_path / "lm.pt")
    model = eqzoo.load(tmp_path / "lm.pt", name="gru-small")
    eqzoo.save(tmp_path / "ours.safetensors", model)
    assert eqx.tree_equal(eqzoo.load(tmp_path / "ours.safetensors"), model)


@pytest.mark.parametrize("option", ["lstm", "gru"])
def test_dropout_falls_on_what_goes_up_and_not_on_what_goes_on(option, monkeypatch):
    """As upstream in training, if both drop the same: of the embedding, of each layer's output, of the last one's."""
    upstream, config = tiny(option).train(), replace(MODELS[option], dropout=0.5)
    model, _ = from_torch((FAMILY, config), upstream)
    drop = lambda x: np.where(np.arange(x.shape[-1]) % 2, 0, 2) * x

    places = []
    monkeypatch.setattr(eqzoo.nn.Dropout, "__call__", lambda self, x, *, key: places.append(key) or drop(x))
    ours = model.hidden(jnp.asarray(TOKENS[0]), key=jax.random.key(0))
    assert len(places) == 3
    x = drop(upstream.embedding.weight.detach().numpy()[TOKENS[:1]])
    for layer in range(config.depth):
        single = type(upstream.rnn)(x.shape[-1], config.width, batch_first=True)
        names = [name for name in upstream.rnn.state_dict() if name.endswith(f"_l{layer}")]
        single.load_state_dict({f"{name[:-1]}0": upstream.rnn.state_dict()[name] for name in names})
        with torch.no_grad():
            x = drop(single(torch.tensor(x, dtype=torch.float32))[0].numpy())
    assert_close(ours, x[0], 1e-5)


def test_dropout_needs_a_key_and_each_place_has_its_own():
    model = created(replace(TINY, dropout=0.5))
    with pytest.raises(ValueError, match=re.escape("Dropout(rate=0.5) got no key in training mode")):
        jax.eval_shape(model.hidden, jnp.asarray(TOKENS[0]))
    call = eqx.filter_jit(lambda model, key: model.hidden(jnp.asarray(TOKENS[0]), key=key))
    first, again, other = (call(model, jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert 0.35 < np.mean(first == 0) < 0.65
    assert not np.array_equal(first == 0, other == 0)


def test_initialisation_is_torchs():
    """But for the embedding, which is a tenth of torch's."""
    config = RNNConfig(dim=30, depth=3, hidden=40, vocab=300)
    upstream, ours = Upstream(config), eqzoo.checkpoint.unfill(created(config), TORCH)
    for name, theirs in upstream.state_dict().items():
        theirs, own = theirs.numpy() * (0.1 if name.startswith("embedding") else 1), ours[name]
        np.testing.assert_allclose(own.std(), theirs.std(), rtol=0.2, err_msg=name)
        assert abs(own.mean()) < 0.2 * theirs.std(), name
        assert name.startswith("embedding") or np.abs(own).max() <= 1 / np.sqrt(40), name


def test_states_are_float32_unless_asked():
    model = eqzoo.tree.cast(created(MODELS["lstm"]), jnp.bfloat16)
    dtypes = lambda cache: [leaf.dtype for leaf in jax.tree.leaves(cache.layers)]
    asked = model.empty_cache(9, dtype=jnp.bfloat16)
    assert dtypes(model.empty_cache(9)) == 2 * [jnp.float32]
    assert dtypes(asked) == 2 * [jnp.bfloat16]
    for cache in (model.empty_cache(9), asked):
        states, after = eqx.filter_eval_shape(lambda tokens, cache: model.extend(tokens, cache), jnp.arange(3), cache)
        assert dtypes(after) == dtypes(cache)
        assert states.dtype == jnp.bfloat16


def test_a_half_precision_model_is_near():
    model = created(MODELS["gru"])
    half = predict(eqzoo.tree.cast(model, jnp.bfloat16), jnp.asarray(TOKENS))
    assert half.dtype == jnp.bfloat16
    assert_close(half, np.asarray(predict(model, jnp.asarray(TOKENS))), 0.03)


def test_mistakes_are_refused():
    with pytest.raises(
        ValueError, match=r"shares the embedding's vectors of dim=8 with the head, which sees hidden=10"
    ):
        replace(TINY, tied_head=True)
    with pytest.raises(ValueError, match="RNN: tokens is empty; pass at least one"):
        predict(created(TINY), jnp.zeros((1, 0), jnp.int32))
    with pytest.raises(ValueError, match="export: timm has no RNN; use format='torch'"):
        eqzoo.export("lm.pth", created(TINY), format="timm")
    with pytest.raises(ValueError, match="export: torch has no folders; let lm end in .pth or .safetensors"):
        eqzoo.export("lm", created(TINY), format="torch")


def test_every_sharding_rule_is_of_use():
    paths = [path for path, _ in leaves_with_paths(eqx.filter_eval_shape(created, TINY))]
    for pattern, _ in SHARDING:
        assert any(re.fullmatch(pattern, path) for path in paths), pattern
