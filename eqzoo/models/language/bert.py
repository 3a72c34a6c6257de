"""BERT (Devlin et al., 2019, "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding"),
RoBERTa (Liu et al., 2019) with XLM-R (Conneau et al., 2020), and DistilBERT (Sanh et al., 2019).

Upstream: transformers' Bert-, Roberta-, XLMRoberta- and DistilBert- Model, ForMaskedLM, ForSequenceClassification,
ForTokenClassification and ForQuestionAnswering. Deviations: no decoders (`is_decoder`), no untied heads of masked
language models, no prediction of the next sentence.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import check_choices, typed
from eqzoo.checkpoint.adapt import new_head
from eqzoo.models._family import Family, Upstream
from eqzoo.models.language._bert_upstream import (
    BERT,
    BERT_BODY,
    BERT_OPTIONS,
    DISTILBERT,
    DISTILBERT_BODY,
    DISTILBERT_OPTIONS,
    ROBERTA,
    ROBERTA_OPTIONS,
    XLM_ROBERTA_OPTIONS,
)
from eqzoo.nn._init import normal

_INIT = partial(normal, std=0.02)


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """`head` says what a model gives: logits of each token for the vocabulary ("masked_lm"), of the text for
    `num_classes` ("classifier"; with 0, what the classifier would see), of each token for them ("token_classifier"), of
    each token for being the first and the last of an answer ("question_answering"), or the hidden states (None), with
    BERT's `pooler` beside them or without.

    A "roberta" counts positions from 0 at the first token that is not `padding`, and does not count padding; its
    classifier has a dense layer of its own. A "distilbert" has that too, with a ReLU, and no types of tokens.
    """

    dim: int
    depth: int
    heads: int
    hidden: int
    vocab: int
    style: Literal["bert", "roberta", "distilbert"] = "bert"
    context: int = 512
    token_types: int = 2
    padding: int = 0
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    norm_eps: float = 1e-12
    head: Literal["masked_lm", "classifier", "token_classifier", "question_answering"] | None = "masked_lm"
    pooler: bool = False
    num_classes: int = 2
    dropout: float = 0.1
    attention_dropout: float = 0.1
    head_dropout: float = 0.1

    def __post_init__(self):
        check_choices(self)
        if self.dim % self.heads:
            raise ValueError(f"dim={self.dim} is not a multiple of heads={self.heads}; choose heads that divide dim")
        if (self.style == "distilbert") != (self.token_types == 0):
            raise ValueError(
                f"token_types={self.token_types} does not go with style={self.style!r}: a distilbert has 0, "
                f"the others have 1 or more"
            )

    @property
    def outputs(self) -> int:
        """How many numbers the head gives."""
        return {"question_answering": 2, "classifier": self.num_classes, "token_classifier": self.num_classes}.get(
            self.head or "", 0
        )


class Block(eqx.Module):
    """Attention and an MLP, each added to its input and then normalised."""

    attention: nn.Attention
    norm1: nn.LayerNorm
    mlp: nn.MLP
    norm2: nn.LayerNorm
    dropout: nn.Dropout

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int,
        *,
        activation: str,
        norm_eps: float,
        weight_dropout: float,
        out_dropout: float,
        dropout: float,
        key: PRNGKeyArray,
    ):
        key_attention, key_mlp = jax.random.split(key)
        self.attention = nn.Attention(
            dim, heads, weight_dropout=weight_dropout, out_dropout=out_dropout, init=_INIT, key=key_attention
        )
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = nn.MLP(dim, hidden, activation=nn.activation(activation), init=_INIT, key=key_mlp)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.dropout = nn.Dropout(dropout)

    def __call__(
        self, x: Float[Array, "tokens dim"], mask: Bool[Array, "1 tokens tokens"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "tokens dim"]:
        key_attention, key_mlp = nn.split_key(key, 2)
        x = self.norm1(x + self.attention(x, mask=mask, key=key_attention))
        return self.norm2(x + self.dropout(self.mlp(x), key=key_mlp))


class Bert(eqx.Module):
    """Token ids to hidden states, or to what the head makes of them.

    `mask` is true where a token is real and false where it fills the text up; what comes out there is junk.
    `token_types` tell two texts in one apart, all of type 0 by default. An id outside of the vocabulary is no error:
    JAX reads the nearest row of the table.
    """

    embedding: nn.Embedding
    positions: Float[Array, "rows dim"]
    token_types: nn.Embedding | None
    norm: nn.LayerNorm
    embedding_dropout: nn.Dropout
    blocks: nn.Stack[Block]
    pooler: nn.Linear | None
    pre_head: nn.Linear | None
    pre_head_norm: nn.LayerNorm | None
    head_dropout: nn.Dropout
    head: nn.Linear | None
    head_bias: Float[Array, " vocab"] | None
    config: BertConfig = eqx.field(static=True)

    def __init__(self, config: BertConfig, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 7)
        dim, is_distilled = config.dim, config.style == "distilbert"
        has_own_dense = config.head == "masked_lm" or (config.head == "classifier" and config.style != "bert")
        has_pooler = config.pooler if config.head is None else config.head == "classifier" and config.style == "bert"
        self.embedding = nn.Embedding(config.vocab, dim, key=keys[0])
        self.positions = _INIT(keys[1], (config.context + _first_position(config), dim))
        self.token_types = nn.Embedding(config.token_types, dim, key=keys[2]) if config.token_types else None
        self.norm = nn.LayerNorm(dim, eps=config.norm_eps)
        self.embedding_dropout = nn.Dropout(config.dropout)
        self.blocks = nn.Stack(
            lambda key: Block(
                dim,
                config.heads,
                config.hidden,
                activation=config.activation,
                norm_eps=config.norm_eps,
                weight_dropout=config.attention_dropout,
                out_dropout=0.0 if is_distilled else config.dropout,
                dropout=config.dropout,
                key=key,
            ),
            config.depth,
            key=keys[3],
        )
        self.pooler = nn.Linear(dim, dim, init=_INIT, key=keys[4]) if has_pooler else None
        self.pre_head = nn.Linear(dim, dim, init=_INIT, key=keys[5]) if has_own_dense else None
        self.pre_head_norm = nn.LayerNorm(dim, eps=config.norm_eps) if config.head == "masked_lm" else None
        self.head_dropout = nn.Dropout(config.head_dropout)
        self.head = nn.Linear(dim, config.outputs, init=_INIT, key=keys[6]) if config.outputs else None
        self.head_bias = jnp.zeros(config.vocab, jnp.float32) if config.head == "masked_lm" else None
        self.config = config

    @typed
    def hidden(
        self,
        tokens: Int[Array, " tokens"],
        *,
        mask: Bool[Array, " tokens"] | None = None,
        token_types: Int[Array, " tokens"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "tokens dim"]:
        """What the last block gives for each token."""
        length, context = tokens.shape[0], self.config.context
        if not 0 < length <= context:
            raise ValueError(f"Bert: {length} tokens, but it takes 1 to context={context}; cut or split the text")
        key_embedding, key_blocks = nn.split_key(key, 2)
        x = self.embedding(tokens) + self.positions[self._places(tokens)]
        if self.token_types is not None:
            x = x + self.token_types(jnp.zeros_like(tokens) if token_types is None else token_types)
        elif token_types is not None:
            raise ValueError("Bert: token_types were given, but a distilbert knows none; leave them out")
        x = self.embedding_dropout(self.norm(x), key=key_embedding)
        mask = jnp.ones(length, bool) if mask is None else mask
        mask = jnp.broadcast_to(mask, (1, length, length))
        return self.blocks.scan(partial(_step, mask), (x, key_blocks))[0][0]

    def _places(self, tokens: Int[Array, " tokens"]) -> Int[Array, " tokens"]:
        if self.config.style != "roberta":
            return jnp.arange(tokens.shape[0])
        real = tokens != self.config.padding
        return jnp.cumsum(real) * real + self.config.padding

    @typed
    def pooled(
        self, hidden: Float[Array, "tokens dim"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, " dim"]:
        """The text as one vector, made of the hidden state of its first token."""
        is_distilled = self.config.style == "distilbert"
        if self.pooler is not None:
            return jnp.tanh(self.pooler(hidden[0]))
        if self.pre_head is None or self.config.head != "classifier":
            raise ValueError(f"Bert: a model with head={self.config.head!r} and without a pooler has no pooled output")
        first = hidden[0] if is_distilled else self.head_dropout(hidden[0], key=key)
        return (jax.nn.relu if is_distilled else jnp.tanh)(self.pre_head(first))

    @typed
    def logits(self, hidden: Float[Array, "tokens dim"], *, key: PRNGKeyArray | None = None) -> Float[Array, "*out"]:
        """The head alone: what it makes of the hidden states."""
        key_pool, key_head = nn.split_key(key, 2)
        if self.pre_head is not None and self.pre_head_norm is not None:
            hidden = self.pre_head_norm(nn.activation(self.config.activation)(self.pre_head(hidden)))
            return hidden @ self.embedding.weight.T + self.head_bias
        if self.config.head == "classifier":
            hidden = self.pooled(hidden, key=key_pool)
        drops = self.config.head != "question_answering" or self.config.style == "distilbert"
        return hidden if self.head is None else self.head(self.head_dropout(hidden, key=key_head) if drops else hidden)

    @typed
    def __call__(
        self,
        tokens: Int[Array, " tokens"],
        *,
        mask: Bool[Array, " tokens"] | None = None,
        token_types: Int[Array, " tokens"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "*out"]:
        key_hidden, key_head = nn.split_key(key, 2)
        hidden = self.hidden(tokens, mask=mask, token_types=token_types, key=key_hidden)
        return hidden if self.config.head is None else self.logits(hidden, key=key_head)
