"""BERT (Devlin et al., 2019, "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding"),
RoBERTa (Liu et al., 2019) with XLM-R (Conneau et al., 2020), and DistilBERT (Sanh et al., 2019).

Upstream: transformers' Bert-, Roberta-, XLMRoberta- and DistilBert- Model, ForMaskedLM, ForSequenceClassification,
ForTokenClassification and ForQuestionAnswering. Deviations: no decoders (`is_decoder`), no untied heads of masked
language models, no prediction of the next sentence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import check_choices, typed
from eqzoo.checkpoint import Alias, Drop, Rule
from eqzoo.checkpoint.adapt import new_head
from eqzoo.models._family import Family, Options, Upstream
from eqzoo.models.language._bert_upstream import (
    BERT,
    BERT_BODY,
    BERT_OPTIONS,
    CLASSIFIERS,
    DISTILBERT,
    DISTILBERT_BODY,
    DISTILBERT_OPTIONS,
    ROBERTA,
    ROBERTA_OPTIONS,
    XLM_ROBERTA_OPTIONS,
    of_body,
)
from eqzoo.nn._init import normal

_INIT = partial(normal, std=0.02)

Rules = tuple[Rule | Drop | Alias, ...]


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
    num_classes: int = 0
    dropout: float = 0.1
    attention_dropout: float = 0.1
    head_dropout: float = 0.1

    def __post_init__(self):
        check_choices(self)
        if self.num_classes and self.head not in CLASSIFIERS:
            raise ValueError(
                f"num_classes={self.num_classes} means nothing to head={self.head!r}; choose the head "
                f"{' or '.join(map(repr, CLASSIFIERS))}, or 0 classes"
            )
        if self.dim % self.heads:
            raise ValueError(f"dim={self.dim} is not a multiple of heads={self.heads}; choose heads that divide dim")
        if (self.style == "distilbert") != (self.token_types == 0):
            raise ValueError(
                f"token_types={self.token_types} does not go with style={self.style!r}: a distilbert has 0, "
                f"the others have 1 or more"
            )

    @property
    def first_position(self) -> int:
        """Of the table, the row for the first token."""
        return self.padding + 1 if self.style == "roberta" else 0


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


class MaskedHead(eqx.Module):
    """What the embedding's scores are taken of, and what is added to them."""

    dense: nn.Linear
    norm: nn.LayerNorm
    bias: Float[Array, " vocab"]
    activation: Callable[[Array], Array] = eqx.field(static=True)

    def __init__(self, dim: int, vocab: int, *, activation: str, norm_eps: float, key: PRNGKeyArray):
        self.dense = nn.Linear(dim, dim, init=_INIT, key=key)
        self.norm = nn.LayerNorm(dim, eps=norm_eps)
        self.bias = jnp.zeros(vocab, jnp.float32)
        self.activation = nn.activation(activation)

    def __call__(self, hidden: Float[Array, "tokens dim"], embedding: nn.Embedding) -> Float[Array, "tokens vocab"]:
        return embedding.scores(self.norm(self.activation(self.dense(hidden)))) + self.bias


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
    masked_head: MaskedHead | None
    pooler: nn.Linear | None
    pre_head: nn.Linear | None
    head_dropout: nn.Dropout
    head: nn.Linear | None
    token_head: nn.Linear | None
    answer_head: nn.Linear | None
    config: BertConfig = eqx.field(static=True)

    def __init__(self, config: BertConfig, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 7)
        dim, head, is_bert = config.dim, config.head, config.style == "bert"
        linear = partial(nn.Linear, dim, init=_INIT)
        self.embedding = nn.Embedding(config.vocab, dim, key=keys[0])
        self.positions = _INIT(keys[1], (config.context + config.first_position, dim))
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
                out_dropout=0.0 if config.style == "distilbert" else config.dropout,
                dropout=config.dropout,
                key=key,
            ),
            config.depth,
            key=keys[3],
        )
        self.masked_head = (
            MaskedHead(dim, config.vocab, activation=config.activation, norm_eps=config.norm_eps, key=keys[4])
            if head == "masked_lm"
            else None
        )
        has_pooler = config.pooler if head is None else head == "classifier" and is_bert
        self.pooler = linear(dim, key=keys[5]) if has_pooler else None
        self.pre_head = linear(dim, key=keys[5]) if head == "classifier" and not is_bert else None
        self.head_dropout = nn.Dropout(config.head_dropout)
        classes = linear(config.num_classes, key=keys[6]) if config.num_classes else None
        self.head = classes if head == "classifier" else None
        self.token_head = classes if head == "token_classifier" else None
        self.answer_head = linear(2, key=keys[6]) if head == "question_answering" else None
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
        keys = None if key_blocks is None else jax.random.split(key_blocks, self.config.depth)
        return self.blocks.scan(lambda block, x, key: (block(x, mask, key=key), None), x, keys)[0]

    def _places(self, tokens: Int[Array, " tokens"]) -> Int[Array, " tokens"]:
        if self.config.style != "roberta":
            return jnp.arange(tokens.shape[0])
        real = tokens != self.config.padding
        return jnp.cumsum(real) * real + self.config.padding

    @typed
    def pooled(self, hidden: Float[Array, "tokens dim"], *, key: PRNGKeyArray | None = None) -> Float[Array, " dim"]:
        """The text as one vector, made of the hidden state of its first token."""
        if self.pooler is not None:
            return jnp.tanh(self.pooler(hidden[0]))
        if self.pre_head is None:
            raise ValueError(
                f"Bert: a {self.config.style} with head={self.config.head!r} and pooler={self.config.pooler} has no "
                f"pooled output; take the mean of the hidden states"
            )
        if self.config.style == "distilbert":
            return jax.nn.relu(self.pre_head(hidden[0]))
        return jnp.tanh(self.pre_head(self.head_dropout(hidden[0], key=key)))

    @typed
    def logits(self, hidden: Float[Array, "tokens dim"], *, key: PRNGKeyArray | None = None) -> Float[Array, "*out"]:
        """The head alone: what it makes of the hidden states."""
        key_pooled, key_head = nn.split_key(key, 2)
        if self.masked_head is not None:
            return self.masked_head(hidden, self.embedding)
        if self.answer_head is not None:
            drops = self.config.style == "distilbert"
            return self.answer_head(self.head_dropout(hidden, key=key_head) if drops else hidden)
        if self.config.head == "classifier":
            hidden = self.pooled(hidden, key=key_pooled)
        head = self.token_head if self.head is None else self.head
        return hidden if head is None else head(self.head_dropout(hidden, key=key_head))

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
        return self.logits(hidden, key=key_head)


_LARGE: dict[str, Any] = {"dim": 1024, "depth": 24, "heads": 16, "hidden": 4096}
_BASE: dict[str, Any] = {"dim": 768, "depth": 12, "heads": 12, "hidden": 3072}
_ROBERTA: dict[str, Any] = {"style": "roberta", "vocab": 50265, "token_types": 1, "padding": 1, "norm_eps": 1e-5}
_DISTILBERT: dict[str, Any] = {**_BASE, "style": "distilbert", "depth": 6, "token_types": 0, "head_dropout": 0.2}
_SMALL: dict[str, Any] = {"dim": 384, "depth": 12, "heads": 12, "hidden": 1536, "head": None, "pooler": True}

VARIANTS = {
    "bert-base-uncased": BertConfig(**_BASE, vocab=30522),
    "bert-base-cased": BertConfig(**_BASE, vocab=28996),
    "bert-large-uncased": BertConfig(**_LARGE, vocab=30522),
    "bert-large-cased": BertConfig(**_LARGE, vocab=28996),
    "bert-base-multilingual-uncased": BertConfig(**_BASE, vocab=105879),
    "bert-base-multilingual-cased": BertConfig(**_BASE, vocab=119547),
    "bert-base-chinese": BertConfig(**_BASE, vocab=21128),
    "all-MiniLM-L6-v2": BertConfig(**{**_SMALL, "depth": 6}, vocab=30522),
    "all-MiniLM-L12-v2": BertConfig(**_SMALL, vocab=30522),
    "bge-small-en-v1.5": BertConfig(**_SMALL, vocab=30522),
    "bge-base-en-v1.5": BertConfig(**_BASE, vocab=30522, head=None, pooler=True),
    "bge-large-en-v1.5": BertConfig(**_LARGE, vocab=30522, head=None, pooler=True),
    "roberta-base": BertConfig(**_BASE, **_ROBERTA),
    "roberta-large": BertConfig(**_LARGE, **_ROBERTA),
    "distilroberta-base": BertConfig(**{**_BASE, "depth": 6}, **_ROBERTA),
    "xlm-roberta-base": BertConfig(**_BASE, **{**_ROBERTA, "vocab": 250002}),
    "xlm-roberta-large": BertConfig(**_LARGE, **{**_ROBERTA, "vocab": 250002}),
    "distilbert-base-uncased": BertConfig(**_DISTILBERT, vocab=30522),
    "distilbert-base-cased": BertConfig(**_DISTILBERT, vocab=28996),
    "distilbert-base-multilingual-cased": BertConfig(**_DISTILBERT, vocab=119547),
}

SHARDING = (
    # By columns: the vocabulary's size has no useful divisor.
    (r"(embedding|token_types)\.weight|positions", P(None, ("model", "fsdp"))),
    (r".*attention\.(query|key|value)\.weight", P("model", "fsdp")),
    (r".*attention\.(query|key|value)\.bias", P("model")),
    (r".*attention\.out\.weight", P("fsdp", "model")),
    (r".*mlp\.fc1\.weight", P("model", "fsdp")),
    (r".*mlp\.fc1\.bias", P("model")),
    (r".*mlp\.fc2\.weight", P("fsdp", "model")),
    (r"(pooler|pre_head|masked_head\.dense|head|token_head|answer_head)\.weight", P(None, ("model", "fsdp"))),
)


def _upstreams(
    library: str, options: Options, rules: Rules, body: Rules, *, model_type: str, names: tuple[str, ...], base: str
) -> dict[str, Upstream]:
    """A body first, so that one is written without a prefix; the last of a `model_type` reads every config.json."""
    make = partial(Upstream, names=names, model_type=model_type, base=base)
    return {
        f"transformers_{model_type}_body": make(body, of_body(options), architecture=f"{library}Model"),
        f"transformers_{model_type}": make(rules, options, architecture=f"{library}ForMaskedLM"),
    }


FAMILY = Family(
    Bert,
    BertConfig,
    VARIANTS,
    upstreams={
        **_upstreams(
            "Bert",
            BERT_OPTIONS,
            BERT,
            BERT_BODY,
            model_type="bert",
            names=("bert-*", "all-*", "bge-*"),
            base="bert-base-uncased",
        ),
        **_upstreams(
            "Roberta",
            ROBERTA_OPTIONS,
            ROBERTA,
            BERT_BODY,
            model_type="roberta",
            names=("roberta-*", "distilroberta-*"),
            base="roberta-base",
        ),
        **_upstreams(
            "XLMRoberta",
            XLM_ROBERTA_OPTIONS,
            ROBERTA,
            BERT_BODY,
            model_type="xlm-roberta",
            names=("xlm-roberta-*",),
            base="xlm-roberta-base",
        ),
        **_upstreams(
            "DistilBert",
            DISTILBERT_OPTIONS,
            DISTILBERT,
            DISTILBERT_BODY,
            model_type="distilbert",
            names=("distilbert-*",),
            base="distilbert-base-uncased",
        ),
    },
    sharding=SHARDING,
    adapters={"num_classes": new_head},
)
