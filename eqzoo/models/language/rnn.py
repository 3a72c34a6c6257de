"""Recurrent language models: long short-term memory (Hochreiter and Schmidhuber, 1997; forget gates of Gers et al.,
2000) or gated recurrent units (Cho et al., 2014), with dropout as in Zaremba et al. (2014, arXiv 1409.2329).

Upstream: torch.nn, in a module that calls its parts so:

    self.embedding = nn.Embedding(vocab, dim)
    self.rnn = nn.LSTM(dim, hidden, depth, dropout=dropout)    # or nn.GRU
    self.head = nn.Linear(hidden, vocab)                       # perhaps with `self.head.weight = self.embedding.weight`

and drops out what the embedding gives and what the head gets, too. Deviations: states are float32 at least also beside
weights in half precision; a fresh embedding has a standard deviation of 0.1 instead of 1.
"""

from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import check_choices, typed
from eqzoo.checkpoint import Alias, Rule
from eqzoo.models._family import Family, Option, Options, Upstream
from eqzoo.nn._init import uniform
from eqzoo.nn._precision import at_least_float32

State = tuple[Float[Array, "*layers hidden"], ...]  # a layer's output, and of an LSTM its cell


@dataclass(frozen=True, kw_only=True)
class RNNConfig:
    """`hidden` is the width of the layers, that of the embedding (`dim`) if None."""

    dim: int
    depth: int
    cell: Literal["lstm", "gru"] = "lstm"
    hidden: int | None = None
    vocab: int = 10000
    tied_head: bool = False
    dropout: float = 0.0

    def __post_init__(self):
        check_choices(self)
        if self.tied_head and self.width != self.dim:
            raise ValueError(
                f"RNNConfig: tied_head=True shares the embedding's vectors of dim={self.dim} with the head, "
                f"which sees hidden={self.hidden}; make both equal, or leave hidden out"
            )

    @property
    def width(self) -> int:
        return self.dim if self.hidden is None else self.hidden


class Layer(eqx.Module):
    """One layer of `torch.nn.LSTM` or `torch.nn.GRU`, in one direction."""

    input: nn.Linear
    recurrent: nn.Linear
    cell: Literal["lstm", "gru"] = eqx.field(static=True)

    def __init__(self, cell: Literal["lstm", "gru"], dim: int, hidden: int, *, key: PRNGKeyArray):
        key_input, key_bias, key_recurrent = jax.random.split(key, 3)
        gates = (4 if cell == "lstm" else 3) * hidden
        bound = 1 / sqrt(hidden)
        layer = nn.Linear(dim, gates, init=partial(uniform, bound=bound), key=key_input)
        self.input = eqx.tree_at(lambda layer: layer.bias, layer, uniform(key_bias, (gates,), bound))
        self.recurrent = nn.Linear(hidden, gates, key=key_recurrent)
        self.cell = cell

    def __call__(
        self, x: Float[Array, "tokens dim"], before: State, count: Int[Array, ""] | None
    ) -> tuple[Float[Array, "tokens hidden"], State]:
        """The outputs, and the state after the first `count` tokens (by default, all)."""
        turn = _lstm if self.cell == "lstm" else _gru

        def step(state, token):
            gates, is_real = token
            recurrent = self.recurrent(state[0].astype(x.dtype))
            new = turn(at_least_float32(gates), at_least_float32(recurrent), state)
            if count is not None:
                new = jax.tree.map(lambda new, old: jnp.where(is_real, new, old), new, state)
            return new, new[0].astype(x.dtype)

        is_real = None if count is None else jnp.arange(x.shape[0]) < count
        start = tuple(part.astype(jnp.promote_types(x.dtype, jnp.float32)) for part in before)
        after, y = jax.lax.scan(step, start, (self.input(x), is_real))
        return y, tuple(part.astype(old.dtype) for part, old in zip(after, before, strict=True))


def _lstm(x: Float[Array, " four_hidden"], recurrent: Float[Array, " four_hidden"], state: State) -> State:
    into, forget, new, out = jnp.split(x + recurrent, 4)
    cell = jax.nn.sigmoid(forget) * state[1] + jax.nn.sigmoid(into) * jnp.tanh(new)
    return jax.nn.sigmoid(out) * jnp.tanh(cell), cell


def _gru(x: Float[Array, " three_hidden"], recurrent: Float[Array, " three_hidden"], state: State) -> State:
    (reset, keep, new), (reset_by, keep_by, new_by) = jnp.split(x, 3), jnp.split(recurrent, 3)
    keep = jax.nn.sigmoid(keep + keep_by)
    new = jnp.tanh(new + jax.nn.sigmoid(reset + reset_by) * new_by)
    return ((1 - keep) * new + keep * state[0],)


class RNN(eqx.Module):
    """Token ids to the logits of each next token.

    Behind a tied head, `head_bias` is what `head.bias` is otherwise.
    """

    embedding: nn.Embedding
    first: Layer
    rest: nn.Stack[Layer] | None
    head: nn.Linear | None
    head_bias: Float[Array, " vocab"] | None
    dropout: nn.Dropout
    config: RNNConfig = eqx.field(static=True)

    def __init__(self, config: RNNConfig, *, key: PRNGKeyArray):
        key_embedding, key_first, key_rest, key_head = jax.random.split(key, 4)
        width = config.width
        self.embedding = nn.Embedding(config.vocab, config.dim, std=0.1, key=key_embedding)
        self.first = Layer(config.cell, config.dim, width, key=key_first)
        make = lambda key: Layer(config.cell, width, width, key=key)
        self.rest = nn.Stack(make, config.depth - 1, key=key_rest) if config.depth > 1 else None
        self.head = None if config.tied_head else nn.Linear(width, config.vocab, key=key_head)
        self.head_bias = uniform(key_head, (config.vocab,), 1 / sqrt(width)) if config.tied_head else None
        self.dropout = nn.Dropout(config.dropout)
        self.config = config

    @typed
    def hidden(
        self, tokens: Int[Array, " tokens"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "tokens hidden"]:
        """What the head sees of each token: the last layer's output."""
        if not tokens.shape[0]:
            raise ValueError("RNN: tokens is empty; pass at least one, such as the end-of-text token")
        return self._run(tokens, self.empty_cache(tokens.shape[0]), None, key)[0]

    @typed
    def __call__(
        self, tokens: Int[Array, " tokens"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "tokens vocab"]:
        return self.logits(self.hidden(tokens, key=key))

    @typed
    def logits(self, hidden: Float[Array, "*axes hidden"]) -> Float[Array, "*axes vocab"]:
        if self.head is not None:
            return self.head(hidden)
        scores = self.embedding.scores(hidden)
        return scores if self.head_bias is None else scores + self.head_bias

    def empty_cache(self, length: int, *, dtype: DTypeLike | None = None) -> nn.Cache:
        """What `extend` keeps before the first token: states, whose size no `length` changes, in float32 at least
        unless a `dtype` is given."""
        dtype = jnp.promote_types(self.embedding.weight.dtype, jnp.float32) if dtype is None else dtype
        parts = 2 if self.config.cell == "lstm" else 1
        state = tuple(jnp.zeros((self.config.depth, self.config.width), dtype) for _ in range(parts))
        return nn.Cache.empty(state, length)

    @typed
    def extend(
        self, tokens: Int[Array, " tokens"], cache: nn.Cache, *, count: Int[Array, ""] | None = None
    ) -> tuple[Float[Array, "tokens hidden"], nn.Cache]:
        """What the head sees of tokens that follow those in the cache, and the cache with the first `count` of them."""
        return self._run(tokens, cache, count, None)

    def _run(
        self, tokens: Int[Array, " tokens"], cache: nn.Cache, count: Int[Array, ""] | None, key: PRNGKeyArray | None
    ) -> tuple[Float[Array, "tokens hidden"], nn.Cache]:
        key_embedding, key_rest, key_out = nn.split_key(key, 3)
        x = self.dropout(self.embedding(tokens), key=key_embedding)
        x, after = self.first(x, tuple(part[0] for part in cache.layers), count)
        after = tuple(part[None] for part in after)
        if self.rest is not None:

            def step(layer, x, each):
                before, key = each
                return layer(self.dropout(x, key=key), before, count)

            keys = None if key_rest is None else jax.random.split(key_rest, self.rest.depth)
            x, more = self.rest.scan(step, x, (tuple(part[1:] for part in cache.layers), keys))
            after = tuple(map(jnp.concatenate, zip(after, more, strict=True)))
        return self.dropout(x, key=key_out), cache.extend(after, tokens.shape[0], count)


# Zaremba et al.'s three models of the Penn Treebank's 10,000 words, and the same of gated recurrent units.
VARIANTS = {
    f"{cell}-{size}": RNNConfig(dim=dim, depth=2, cell=cell, dropout=dropout)
    for cell in ("lstm", "gru")
    for size, dim, dropout in (("small", 200, 0.0), ("medium", 650, 0.5), ("large", 1500, 0.65))
}

TORCH = (
    Rule(r"embedding\.weight", "embedding.weight"),
    Rule(r"rnn\.(weight|bias)_ih_l0", "first.input.{0}"),
    Rule(r"rnn\.(weight|bias)_hh_l0", "first.recurrent.{0}"),
    Rule(r"rnn\.(weight|bias)_ih_l(\d+)", "rest[{1-1}].input.{0}"),
    Rule(r"rnn\.(weight|bias)_hh_l(\d+)", "rest[{1-1}].recurrent.{0}"),
    # A tied head has another place for its bias, and none for its weight.
    Rule(r"head\.(weight|bias)", "head.{0}"),
    Rule(r"head\.bias", "head_bias"),
    Alias(r"head\.weight", "embedding.weight"),
)

# What torch's layers are told.
OPTIONS = Options(
    {
        "num_embeddings": "vocab",
        "embedding_dim": "dim",
        "mode": Option("cell", {"LSTM": "lstm", "GRU": "gru"}),
        "hidden_size": "hidden",
        "num_layers": "depth",
        "dropout": "dropout",
        "tied": "tied_head",
    }
)

SHARDING = (
    # By columns: the vocabulary's size has no useful divisor.
    (r"(embedding|head)\.weight", P(None, ("model", "fsdp"))),
    (r".*(input|recurrent)\.weight", P("model", "fsdp")),
    (r".*(input|recurrent)\.bias", P("model")),
)

FAMILY = Family(
    RNN,
    RNNConfig,
    VARIANTS,
    upstreams={"torch": Upstream(TORCH, OPTIONS, names=("*",), base="lstm-small")},
    sharding=SHARDING,
    adapters={},
)
