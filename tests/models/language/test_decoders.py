"""What every language model that generates must show: its cache changes nothing, and no token sees those after it.

A family adds a row: upstream's config of a tiny model, and how many numbers a cache of a given length holds.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import eqzoo
from eqzoo import generation, nn
from tests.parity import assert_close, randomise

VOCAB = 61
TOKENS = jnp.asarray(np.random.default_rng(0).permutation(VOCAB)[:16], jnp.int32)  # each a different one
NO_ENDS: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_GEMMA: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 40, "head_dim": 8, **NO_ENDS}
_MOE: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 20, "num_experts_per_tok": 2, **NO_ENDS}
_MOE |= {"num_attention_heads": 4, "num_key_value_heads": 2}
_GEMMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}


class Row(NamedTuple):
    """`numbers` is how many a cache of a length holds. `seed` is of the weights: change it where two tokens tie."""

    name: str
    config: Callable[[], Any]
    numbers: Callable[[int], int]
    seed: int = 0
    embedding: Callable[[Any], Any] = lambda model: model.embedding.weight


def llama_like(kind: str, **options: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "max_position_embeddings": 96}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.AutoConfig.for_model(kind, **sizes, **NO_ENDS, **options)


ROWS = (
    Row(
        "gpt2",
        lambda: transformers.GPT2Config(n_embd=24, n_layer=3, n_head=3, n_positions=96, **NO_ENDS),
        lambda length: 2 * 3 * length * 24,
    ),
    Row(
        "mamba",
        lambda: transformers.MambaConfig(hidden_size=24, num_hidden_layers=3, state_size=5, **NO_ENDS),
        lambda length: 3 * (3 + 5) * 48,
    ),
    Row(
        "mamba2",
        lambda: transformers.Mamba2Config(
            hidden_size=24, num_hidden_layers=3, num_heads=6, head_dim=8, n_groups=2, state_size=5, **NO_ENDS
        ),
        lambda length: 3 * (3 * (48 + 2 * 2 * 5) + 48 * 5),
    ),
    Row(
        "gpt_neox",
        lambda: transformers.GPTNeoXConfig(
            hidden_size=24, num_hidden_layers=3, num_attention_heads=2, intermediate_size=40, rotary_pct=0.5, **NO_ENDS
        ),
        lambda length: 2 * 3 * length * 24,
    ),
    Row(
        "gemma",
        lambda: transformers.GemmaConfig(**_GEMMA, num_hidden_layers=2),
        lambda length: 2 * 2 * length * 2 * 8,
    ),
    Row(
        "gemma2",
        lambda: transformers.Gemma2Config(**_GEMMA, num_hidden_layers=3, sliding_window=6, query_pre_attn_scalar=8),
        lambda length: 2 * (2 * min(length, 6) + length) * 2 * 8,
    ),
    Row(
        "gemma3",
        lambda: transformers.Gemma3TextConfig(**_GEMMA, num_hidden_layers=8, sliding_window=6, query_pre_attn_scalar=8),
        lambda length: 2 * (7 * min(length, 6) + length) * 2 * 8,
    ),
    Row(
        "mixtral",
        lambda: transformers.MixtralConfig(**_MOE, num_hidden_layers=3, num_local_experts=4, sliding_window=6),
        lambda length: 2 * 3 * min(length, 6) * 2 * 6,
    ),
    Row(
        "qwen3_moe",
        lambda: transformers.Qwen3MoeConfig(
            **_MOE, num_hidden_layers=3, num_experts=6, moe_intermediate_size=16, mlp_only_layers=[1], head_dim=8
        ),
        lambda length: 2 * 3 * length * 2 * 8,
    ),
    *(
        Row(name, lambda kind=kind, options=options: llama_like(kind, **options), numbers)
        for name, kind, options, numbers in (
            ("llama", "llama", {}, lambda length: 2 * 3 * length * 2 * 8),
            ("mistral", "mistral", {"sliding_window": 6}, lambda length: 2 * 3 * min(length, 6) * 2 * 8),
            ("qwen2", "qwen2", {"tie_word_embeddings": True}, lambda length: 2 * 3 * length * 2 * 8),
            (
                "qwen3",
                "qwen3",
                {"head_dim": 12, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
                lambda length: 2 * 3 * length * 2 * 12,
            ),
            ("smollm3", "smollm3", {"no_rope_layer_interval": 2}, lambda length: 2 * 3 * length * 2 * 8),
            ("phi3", "phi3", {"sliding_window": 9}, lambda length: 2 * 3 * min(length, 9) * 2 * 8),
            ("olmo2", "olmo2", {}, lambda length: 2 * 3 * length * 2 * 8),
            ("granite", "granite", {"residual_multiplier": 0.5}, lambda length: 2 * 3 * length * 2 * 8),
        )
    ),
)


class Subject(NamedTuple):
    row: Row
    model: Any
    upstream: Any


@pytest.fixture(scope="module", params=ROWS, ids=lambda row: row.name)
def subject(request, tmp_path_factory) -> Subject:
    row = request.param
    upstream = transformers.AutoModelForCausalLM.from_config(row.config(), attn_implementation="eager")
    upstream = randomise(upstream.eval(), row.seed)
    folder = tmp_path_factory.mktemp(row.name)
    upstream.save_pretrained(folder)
    return Subject(row, eqzoo.load(folder), upstream)


hidden = eqx.filter_jit(lambda model, tokens: model.hidden(tokens))
extend = eqx.filter_jit(lambda model, tokens, cache, count: model.extend(tokens, cache, count=count))
to_logits = eqx.filter_jit(lambda model, hidden: model.logits(hidden))


def in_chunks(model: Any, tokens: jax.Array, counts: list[int], size: int, length: int) -> tuple[jax.Array, Any]:
    """The hidden states of `tokens`, extended by `counts` in turn, each filled up to `size` with junk."""
    cache, found, start = model.empty_cache(length), [], 0
    for count in counts:
        chunk = jnp.concatenate([tokens[start : start + count], jnp.full(size - count, start % VOCAB, jnp.int32)])
        states, cache = extend(model, chunk, cache, jnp.int32(count))
        found.append(states[:count])
        start += count
    assert start == len(tokens) == cache.position
    return jnp.concatenate(found), cache


@pytest.mark.parametrize(
    ("counts", "size"),
    [([5, 5, 5, 1], 5), ([3, 5, 0, 1, 4, 3], 5), ([1] * 16, 1)],
    ids=["chunks", "padded", "one by one"],
)
@pytest.mark.parametrize("length", [16, 24])
def test_cached_is_uncached(subject, counts, size, length):
    states, _ = in_chunks(subject.model, TOKENS, counts, size, length)
    assert_close(states, np.asarray(hidden(subject.model, TOKENS)), 1e-5)


def test_padding_leaves_no_trace(subject):
    padded = jnp.concatenate([TOKENS[:3], jnp.zeros(2, jnp.int32)])
    other = padded.at[3:].set(VOCAB - 1)
    (first, cache1), (second, cache2) = (
        extend(subject.model, tokens, subject.model.empty_cache(24), jnp.int32(3)) for tokens in (padded, other)
    )
    np.testing.assert_array_equal(first[:3], second[:3])
    assert eqx.tree_equal(cache1, cache2)


@eqx.filter_jit
def extend_each(model: Any, tokens: jax.Array, caches: Any, counts: jax.Array) -> tuple[jax.Array, Any]:
    return jax.vmap(lambda tokens, cache, count: model.extend(tokens, cache, count=count))(tokens, caches, counts)


def test_each_example_of_a_batch_has_its_own_position(subject):
    """Prompts of 3 and 9 tokens, then one more of each."""
    model, counts = subject.model, jnp.array([3, 9], jnp.int32)
    caches = jax.vmap(lambda _: model.empty_cache(16))(counts)
    first, caches = extend_each(model, jnp.stack([TOKENS[:9]] * 2), caches, counts)
    then, caches = extend_each(model, TOKENS[counts][:, None], caches, jnp.ones(2, jnp.int32))
    expected = np.asarray(hidden(model, TOKENS))
    for example, count in enumerate((3, 9)):
        states = jnp.concatenate([first[example, :count], then[example]])
        assert_close(states, expected[: count + 1], 1e-5)
    assert caches.position.tolist() == [4, 10]


def test_logits_are_upstreams(subject):
    model = subject.model
    ours = to_logits(model, hidden(model, TOKENS))
    with torch.no_grad():
        theirs = subject.upstream(torch.from_numpy(np.asarray(TOKENS, np.int64))[None]).logits[0]
    assert_close(ours, theirs, 1e-4)


def test_greedy_generation_is_upstreams(subject):
    prompts = [TOKENS[:3], TOKENS[3:12]]
    ours = generation.generate(subject.model, prompts, 64)
    for prompt, found in zip(prompts, ours, strict=True):
        with torch.no_grad():
            ids = torch.from_numpy(np.asarray(prompt, np.int64))[None]
            options = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "do_sample": False}
            theirs = subject.upstream.generate(ids, max_new_tokens=64, **options)
        assert found.tokens == theirs[0, len(prompt) :].tolist()


def test_weights_read_in_place_are_the_same_weights(subject):
    """And a cache the same cache."""
    step = eqx.filter_jit(lambda model, token, cache: model.extend(token, cache))
    model, cache, found = nn.in_place(subject.model), nn.in_place(subject.model.empty_cache(24)), []
    for token in TOKENS:
        state, cache = step(model, token[None], cache)
        found.append(state)
    states = jnp.concatenate(found)
    assert_close(states, np.asarray(hidden(subject.model, TOKENS)), 1e-5)


@eqx.filter_jit
def influence(model: Any, embedding: Callable[[Any], Any], weights: jax.Array) -> jax.Array:
    """The derivative of each token's hidden state, weighted, by the embedding of each token."""
    weighted = lambda table: jnp.sum(eqx.tree_at(embedding, model, table).hidden(TOKENS) * weights, axis=-1)
    return jax.jacrev(weighted)(embedding(model))[:, TOKENS]


def test_no_token_sees_those_after_it(subject):
    weights = jax.random.normal(jax.random.key(0), hidden(subject.model, TOKENS).shape)
    size = np.abs(influence(subject.model, subject.row.embedding, weights)).max(axis=-1)
    assert not np.triu(size, 1).any()
    assert (np.diag(size) > 0).all()
    assert (np.diag(size, -1) > 0).all()


@pytest.mark.parametrize("length", [8, 64])
def test_a_cache_takes_the_memory_that_arithmetic_says(subject, length):
    model = eqx.filter_eval_shape(lambda: subject.model)
    cache = eqx.filter_eval_shape(lambda: subject.model.empty_cache(length, dtype=jnp.bfloat16))
    leaves = jax.tree.leaves(cache.layers)
    assert sum(leaf.size for leaf in leaves) == subject.row.numbers(length)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}
    own = jax.tree.leaves(eqx.filter_eval_shape(lambda: subject.model.empty_cache(length)).layers)
    assert {leaf.dtype for leaf in own} == {subject.row.embedding(model).dtype}
