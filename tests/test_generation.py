"""Generation against transformers: the processors of logits, their order, and whole texts."""

import re
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.generation import logits_process

from eqzoo import generation, nn
from eqzoo.generation import Sampling, generate, stream
from eqzoo.models.language.gpt2 import FAMILY, GPT2, GPT2Config
from tests.parity import assert_close, from_torch, randomise

CONFIG = GPT2Config(dim=24, depth=2, heads=3, vocab=61, context=700)
PROMPTS = [[5, 17, 3], [60, 0, 8, 9, 11, 2, 7], [1]]


@pytest.fixture(scope="module")
def upstream() -> Any:
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=700, n_embd=24, n_layer=2, n_head=3, bos_token_id=None, eos_token_id=None
    )
    return randomise(transformers.GPT2LMHeadModel(config).eval(), 5)


@pytest.fixture(scope="module")
def model(upstream) -> GPT2:
    return eqx.nn.inference_mode(from_torch((FAMILY, CONFIG), upstream)[0])


def theirs(upstream: Any, prompt: list[int], tokens: int, **options: Any) -> Any:
    with torch.no_grad():
        return upstream.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=tokens,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
            **{"do_sample": False, **options},
        )


def logits_of(seed: int, vocab: int = 500) -> np.ndarray:
    return 4 * np.random.default_rng(seed).standard_normal(vocab).astype(np.float32)


def warped(processor: Any, logits: np.ndarray, ids: list[int] | None = None) -> np.ndarray:
    return processor(torch.tensor([ids or [0]]), torch.tensor(logits)[None])[0].numpy()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("ours", "processor"),
    [
        *[(lambda x, k=k: generation.keep_top_k(x, k), logits_process.TopKLogitsWarper(k)) for k in (1, 7, 499, 900)],
        *[
            (lambda x, p=p: generation.keep_top_p(x, p), logits_process.TopPLogitsWarper(p))
            for p in (0.01, 0.3, 0.9, 0.999)
        ],
        *[(lambda x, p=p: generation.keep_min_p(x, p), logits_process.MinPLogitsWarper(p)) for p in (0.0, 0.1, 1.0)],
    ],
)
def test_each_filter_keeps_what_upstreams_does(ours, processor, seed):
    logits = logits_of(seed)
    np.testing.assert_array_equal(jax.jit(ours)(logits), warped(processor, logits))


def test_top_p_after_another_filter_and_of_everything():
    logits = np.where(logits_of(0) > 2, logits_of(0), -np.inf).astype(np.float32)
    kept = warped(logits_process.TopPLogitsWarper(0.5), logits)
    np.testing.assert_array_equal(generation.keep_top_p(jnp.asarray(logits), 0.5), kept)
    np.testing.assert_array_equal(generation.keep_top_p(jnp.asarray(logits), 1.0), logits)


def test_the_penalty_on_repetitions_is_upstreams():
    logits, ids = logits_of(0), [3, 8, 3, 499]
    seen = np.isin(np.arange(500), ids)
    expected = warped(logits_process.RepetitionPenaltyLogitsProcessor(1.7), logits, ids)
    np.testing.assert_allclose(generation.penalise(jnp.asarray(logits), jnp.asarray(seen), 1.7), expected, rtol=1e-6)


ALL = {"temperature": 4.0, "top_k": 20, "top_p": 0.7, "min_p": 0.2, "repetition_penalty": 1.8}


def processed(upstream: Any, options: dict[str, Any], ids: list[int], seed: int) -> np.ndarray:
    config = transformers.GenerationConfig(do_sample=True, **{"top_k": 0, **options})
    upstream._prepare_special_tokens(config)
    return warped(upstream._get_logits_processor(config, input_ids_seq_length=len(ids)), logits_of(seed), ids)


@pytest.mark.parametrize("without", [None, *ALL])
def test_the_processors_have_upstreams_order(upstream, without):
    """All of them, and all but one: each of them matters."""
    options = {name: value for name, value in ALL.items() if name != without}
    ids = np.random.default_rng(9).integers(0, 500, 200)
    rules = generation._Rules.of(Sampling(**{"temperature": 1.0, **options}), (), jax.random.key(0), None)
    seen = jnp.isin(jnp.arange(500), ids)
    matters = False
    for seed in range(20):
        expected = processed(upstream, options, ids.tolist(), seed)
        ours = generation._scores(jnp.asarray(logits_of(seed)), jnp.asarray(ids), jnp.int32(200), seen, rules)
        np.testing.assert_allclose(ours, expected, rtol=1e-5)
        matters |= not np.allclose(expected, processed(upstream, ALL, ids.tolist(), seed))
    assert matters == (without is not None)


def test_tokens_are_drawn_as_often_as_they_are_likely():
    logits = jnp.where(jnp.arange(40) % 3 == 0, -jnp.inf, jax.random.normal(jax.random.key(0), (40,)))
    number = 20000
    drawn = jax.vmap(generation.draw, (None, 0))(logits, jax.random.split(jax.random.key(1), number))
    frequencies = np.bincount(drawn, minlength=40) / number
    likely = np.asarray(jax.nn.softmax(logits))
    assert (frequencies[likely == 0] == 0).all()
    assert np.abs(frequencies - likely).max() < 4 * np.sqrt(likely.max() / number)


def test_unequal_prompts_together_are_upstreams_one_by_one(model, upstream):
    found = generate(model, PROMPTS, 40)
    for prompt, ours in zip(PROMPTS, found, strict=True):
        there = theirs(upstream, prompt, 40)
        assert ours.tokens == there.sequences[0, len(prompt) :].tolist()
        logits = torch.stack(there.logits)[:, 0].log_softmax(-1)
        expected = logits[torch.arange(40), torch.tensor(ours.tokens)].numpy()
        np.testing.assert_allclose(ours.log_probabilities, expected, atol=1e-4)
        assert not ours.stopped


def test_a_prompt_alone_is_the_same_as_among_others(model):
    together = generate(model, PROMPTS, 20)
    alone = [generate(model, [prompt], 20)[0] for prompt in PROMPTS]
    assert [each.tokens for each in alone] == [each.tokens for each in together]


class Own(eqx.Module):
    """A reader's model, which multiplies by a weight itself."""

    model: GPT2

    def empty_cache(self, length: int) -> nn.Cache:
        return self.model.empty_cache(length)

    def extend(self, tokens: jax.Array, cache: nn.Cache, *, count: Any = None) -> tuple[jax.Array, nn.Cache]:
        return self.model.extend(tokens, cache, count=count)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return hidden @ self.model.embedding.weight.T


def test_one_text_is_written_in_place_but_not_by_a_model_that_may_know_nothing_of_it(model, monkeypatch):
    made = []
    in_place = lambda tree: [made.append(tree), nn.in_place(tree)][1]
    monkeypatch.setattr(generation, "nn", SimpleNamespace(in_place=in_place))
    (expected,) = generate(model, PROMPTS[:1], 11)
    models = lambda: [tree for tree in made if not isinstance(tree, nn.Cache)]
    assert models() == [model]
    assert generate(Own(model), PROMPTS[:1], 11)[0].tokens == expected.tokens
    assert generate(model, PROMPTS[:2], 11)[0].tokens == expected.tokens
    assert len(models()) == 1
    assert generate(nn.in_place(model), PROMPTS[:2], 11)[0].tokens == expected.tokens


def test_a_long_prompt_is_read_in_parts(model, upstream):
    long = np.random.default_rng(0).integers(0, 61, 650)
    ours = generate(model, [[4, 2], long, long[:513]], 9)
    for prompt, found in zip([[4, 2], long.tolist(), long[:513].tolist()], ours, strict=True):
        assert found.tokens == theirs(upstream, prompt, 9).sequences[0, len(prompt) :].tolist()


def test_the_penalty_counts_the_prompt_and_what_followed(model, upstream):
    ours = generate(model, PROMPTS, 30, sampling=Sampling(repetition_penalty=1.5))
    plain = generate(model, PROMPTS, 30)
    for prompt, found in zip(PROMPTS, ours, strict=True):
        expected = theirs(upstream, prompt, 30, repetition_penalty=1.5).sequences[0, len(prompt) :].tolist()
        assert found.tokens == expected
    assert [found.tokens for found in ours] != [found.tokens for found in plain]


def test_a_stop_token_ends_its_text_as_upstreams_does_and_no_other(model, upstream):
    texts = [each.tokens for each in generate(model, PROMPTS, 30)]
    stops = [texts[0][9], texts[1][20]]
    ours = generate(model, PROMPTS, 30, stop_tokens=stops)
    for prompt, found in zip(PROMPTS, ours, strict=True):
        expected = theirs(upstream, prompt, 30, eos_token_id=stops).sequences[0, len(prompt) :].tolist()
        assert found.tokens == expected
        assert len(found.log_probabilities) == len(expected)
        assert found.stopped == (expected[-1] in stops)
    assert ours[0].stopped


class Letters:
    """A tokenizer that writes each token as one letter, or as two."""

    def decode(self, tokens):
        return "".join(chr(65 + token) if token < 30 else chr(65 + token) * 2 for token in tokens)


def test_a_stop_string_ends_the_text_after_the_token_that_completes_it(model):
    whole = generate(model, PROMPTS, 80)
    tokens = whole[1].tokens
    string = Letters().decode(tokens[37:40])[:-1]
    end = next(end for end in range(80) if string in Letters().decode(tokens[:end]))
    found = generate(model, PROMPTS, 80, stop_strings=[string, "never"], tokenizer=Letters())
    assert found[1].tokens == tokens[:end]
    assert found[1].stopped
    for ours, all_of_it in zip(found, whole, strict=True):
        assert ours.stopped == (string in Letters().decode(all_of_it.tokens))
        assert ours.tokens == all_of_it.tokens[: len(ours.tokens)]


@pytest.mark.parametrize("every", [1, 7])
def test_a_stream_is_the_same_text_in_parts(model, every):
    sampling = Sampling(temperature=1.3, top_k=30)
    options = {"sampling": sampling, "key": jax.random.key(3), "stop_tokens": [7]}
    whole = generate(model, PROMPTS, 30, **options)
    parts = list(stream(model, PROMPTS, 30, every=every, **options))
    assert [len(each.tokens) for each in parts[0]] == [1, 1, 1]
    assert max(len(each.tokens) for part in parts[1:] for each in part) == every
    for number, text in enumerate(whole):
        assert [token for part in parts for token in part[number].tokens] == text.tokens
        found = [each for part in parts for each in part[number].log_probabilities]
        assert found == pytest.approx(text.log_probabilities)
        assert parts[-1][number].stopped == text.stopped


def test_the_key_decides_what_is_drawn(model):
    keys = [jax.random.key(seed) for seed in range(2)]
    texts = lambda seed: generate(model, [[1, 2], [1, 2]], 20, sampling=Sampling(temperature=1.0), key=keys[seed])
    first, again, other = texts(0), texts(0), texts(1)
    assert first == again
    assert first != other
    assert first[0] != first[1]


def test_drawn_texts_are_as_likely_as_the_model_says(model):
    """Of many first tokens; and the log-probabilities are the model's own, whatever the temperature."""
    sampling = Sampling(temperature=2.0)
    found = generate(model, [[9, 4]] * 3000, 1, sampling=sampling, key=jax.random.key(0))
    logits = model(jnp.array([9, 4]))[-1]
    likely = np.asarray(jax.nn.softmax(logits / 2))
    frequencies = np.bincount([each.tokens[0] for each in found], minlength=61) / 3000
    assert np.abs(frequencies - likely).max() < 4 * np.sqrt(likely.max() / 3000)
    own = np.asarray(jax.nn.log_softmax(logits))
    np.testing.assert_allclose(
        [each.log_probabilities[0] for each in found], [own[each.tokens[0]] for each in found], atol=1e-4
    )


def test_a_logit_function_sees_the_tokens_and_changes_the_logits(model):
    def alternate(logits, tokens, count):
        """After an even token an odd one."""
        return jnp.where(jnp.arange(61) % 2 == tokens[count - 1] % 2, -jnp.inf, logits)

    for prompt, found in zip(PROMPTS, generate(model, PROMPTS, 20, logit_function=alternate), strict=True):
        parities = np.array([prompt[-1], *found.tokens]) % 2
        assert (parities[1:] != parities[:-1]).all()


def test_one_program_serves_all_that_fit_into_its_shapes():
    traces = []

    class Counting(GPT2):
        def extend(self, tokens, cache, *, count=None):
            traces.append(tokens.shape)
            return super().extend(tokens, cache, count=count)

    model = eqx.nn.inference_mode(eqx.filter_jit(Counting)(CONFIG, key=jax.random.key(0)))
    call = lambda prompts, tokens, temperature: generate(
        model, prompts, tokens, sampling=Sampling(temperature=temperature), key=jax.random.key(0)
    )
    call([[1] * 5, [2]], 20, 0.5)
    before = len(traces)
    assert {shape for (shape,) in traces} == {8, 1}
    call([[1] * 8, [2] * 3], 24, 0.9)
    call([[3], [2] * 7], 11, 2.0)
    assert len(traces) == before
    call([[1] * 9, [2]], 20, 0.5)
    assert {shape for (shape,) in traces} == {16, 8, 1}


def test_the_whole_context_may_be_filled(model):
    prompt = np.random.default_rng(0).integers(0, 61, 690).tolist()
    assert len(generate(model, [prompt], 10)[0].tokens) == 10
    with pytest.raises(
        ValueError,
        match=r"generate: 11 tokens after a prompt of 690 are too many. GPT2: a cache for 701 tokens .* context=700",
    ):
        generate(model, [prompt], 11)


def test_a_model_in_bfloat16_generates(model):
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf, model)
    found = generate(half, PROMPTS, 5)
    logits = half(jnp.array([*PROMPTS[0], *found[0].tokens[:-1]]))[-5:].astype(jnp.float32)
    own = jax.nn.log_softmax(logits)[jnp.arange(5), jnp.array(found[0].tokens)]
    assert_close(jnp.array(found[0].log_probabilities), np.asarray(own), 0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "there are no prompts; pass a list of them"),
        ({"prompts": [[1], []]}, "a prompt is empty; pass at least one token"),
        ({"prompts": [1, 2]}, "a prompt is an array of shape () and dtype int64, expected a list of token ids"),
        ({"prompts": [[0.5]]}, "a prompt is an array of shape (1,) and dtype float64"),
        ({"prompts": [[1, 61]]}, "a prompt has a token that is negative or not in the model's vocabulary"),
        ({"prompts": [[-1]]}, "a prompt has a token that is negative or not in the model's vocabulary"),
        ({"max_tokens": 0}, "max_tokens=0 and every=8 should both be at least 1"),
        ({"sampling": Sampling(temperature=1.0)}, "drawing tokens needs a key; pass `key=jax.random.key(0)`"),
        ({"stop_strings": ["a"]}, "stop_strings need the tokenizer"),
        ({"stop_strings": "a", "tokenizer": Letters()}, "stop_strings='a' should be a list of strings"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(model, arguments, message):
    with pytest.raises(ValueError, match=re.escape(f"generate: {message}")):
        list(stream(model, **{"prompts": PROMPTS, "max_tokens": 4, **arguments}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0 should be at least 0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0 should be at least 1"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0 should be above 0 and at most 1"),
        ({"temperature": 1.0, "min_p": 1.5}, "min_p=1.5 should be between 0 and 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 should be above 0"),
        ({"top_k": 5}, "top_k=5 does nothing where the likeliest token is taken; pass `temperature` too"),
    ],
)
def test_impossible_samplings_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(f"Sampling: {message}")):
        Sampling(**options)
