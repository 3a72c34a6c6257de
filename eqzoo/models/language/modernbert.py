"""ModernBERT (Warner et al., 2024, "Smarter, Better, Faster, Longer: A Modern Bidirectional Encoder").

Upstream: transformers' ModernBertModel, ForMaskedLM, ForSequenceClassification, ForTokenClassification and
ForQuestionAnswering. Deviations: weights start from normal distributions that are not cut off, `mlp_dropout` falls on
what an MLP puts out too, the head of masked language models is tied, and rotary positions are never rescaled.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import check_choices, typed
from eqzoo.checkpoint.adapt import new_head
from eqzoo.models._family import Family, Option, Upstream
from eqzoo.models.language._bert_upstream import CLASSIFIERS
from eqzoo.models.language._modernbert_upstream import OPTIONS, TRANSFORMERS, TRANSFORMERS_BODY
from eqzoo.nn._init import normal

_INIT = partial(normal, std=0.02)


@dataclass(frozen=True, kw_only=True)
class ModernBertConfig:
    """Layer 0 and every `global_every`-th after it attend to all tokens; the others to those of a `window`, half of it
    on either side. The angles of their rotary positions have a base of their own each.

    `head` says what a model gives: logits of each token for the vocabulary ("masked_lm"), of the text for
    `num_classes` ("classifier", from its first token or from the mean of all by `pool`; with 0 classes, what the
    classifier would see), of each token for them ("token_classifier"), of each token for being the first and the last
    of an answer ("question_answering"), or the hidden states (None).
    """

    dim: int
    depth: int
    heads: int
    hidden: int
    vocab: int = 50368
    context: int = 8192
    global_every: int = 3
    window: int = 128
    global_base: float = 160000.0
    local_base: float = 10000.0
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    head_activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    vocab_bias: bool = True
    head: Literal["masked_lm", "classifier", "token_classifier", "question_answering"] | None = "masked_lm"
    pool: Literal["first", "mean"] = "mean"
    num_classes: int = 0
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    mlp_dropout: float = 0.0
    head_dropout: float = 0.0

    def __post_init__(self):
        check_choices(self)
        if self.num_classes and self.head not in CLASSIFIERS:
            raise ValueError(
                f"num_classes={self.num_classes} means nothing to head={self.head!r}; choose the head "
                f"{' or '.join(map(repr, CLASSIFIERS))}, or 0 classes"
            )
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"dim={self.dim} gives no even number of channels to each of heads={self.heads}, which rotary "
                f"positions turn in pairs; choose heads that divide {self.dim // 2}"
            )
        if self.depth < 2:
            raise ValueError(f"depth={self.depth} leaves no layer after the first; choose 2 or more")


class Block(eqx.Module):
    """Attention and an MLP, each beside a shortcut; the first block's input is normalised already."""

    norm1: nn.LayerNorm | None
    attention: nn.Attention
    norm2: nn.LayerNorm
    mlp: nn.GatedMLP

    def __init__(
        self, dim: int, attention: nn.Attention, mlp: nn.GatedMLP, *, is_first: bool, norm_eps: float, norm_bias: bool
    ):
        norm = partial(nn.LayerNorm, dim, eps=norm_eps, use_bias=norm_bias)
        self.norm1 = None if is_first else norm()
        self.attention = attention
        self.norm2 = norm()
        self.mlp = mlp

    def __call__(
        self,
        x: Float[Array, "tokens dim"],
        mask: Bool[Array, "1 tokens tokens"],
        angles: Float[Array, "tokens half_dim_head"],
        *,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "tokens dim"]:
        key_attention, key_mlp = nn.split_key(key, 2)
        y = x if self.norm1 is None else self.norm1(x)
        x = x + self.attention(y, mask=mask, rotary=angles, key=key_attention)
        return x + self.mlp(self.norm2(x), key=key_mlp)


def _block(config: ModernBertConfig, key: PRNGKeyArray, *, is_first: bool = False) -> Block:
    key_attention, key_mlp, key_attention_out, key_mlp_out = jax.random.split(key, 4)
    attention = nn.Attention(
        config.dim,
        config.heads,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        weight_dropout=config.attention_dropout,
        out_dropout=config.attention_dropout,
        init=_INIT,
        key=key_attention,
    )
    mlp = nn.GatedMLP(
        config.dim,
        config.hidden,
        activation=nn.activation(config.activation),
        use_bias=config.mlp_bias,
        dropout=config.mlp_dropout,
        init=_INIT,
        key=key_mlp,
    )
    # What a block adds to the residual stream starts smaller.
    out = partial(nn.Linear, init=partial(normal, std=0.02 / sqrt(2 * config.depth)))
    attention_out = out(config.dim, config.dim, use_bias=config.attention_bias, key=key_attention_out)
    mlp_out = out(config.hidden, config.dim, use_bias=config.mlp_bias, key=key_mlp_out)
    attention = eqx.tree_at(lambda attention: attention.out, attention, attention_out)
    mlp = eqx.tree_at(lambda mlp: mlp.down, mlp, mlp_out)
    return Block(config.dim, attention, mlp, is_first=is_first, norm_eps=config.norm_eps, norm_bias=config.norm_bias)


class PreHead(eqx.Module):
    """What every head starts with."""

    dense: nn.Linear
    norm: nn.LayerNorm
    activation: Callable[[Array], Array] = eqx.field(static=True)

    def __init__(
        self, dim: int, *, activation: str, use_bias: bool, norm_eps: float, norm_bias: bool, key: PRNGKeyArray
    ):
        self.dense = nn.Linear(dim, dim, use_bias=use_bias, init=_INIT, key=key)
        self.norm = nn.LayerNorm(dim, eps=norm_eps, use_bias=norm_bias)
        self.activation = nn.activation(activation)

    def __call__(self, x: Float[Array, "*axes dim"]) -> Float[Array, "*axes dim"]:
        return self.norm(self.activation(self.dense(x)))


class ModernBert(eqx.Module):
    """Token ids to hidden states, or to what the head makes of them.

    `mask` is true where a token is real and false where it fills the text up; what comes out there is junk. An id
    outside of the vocabulary is no error: JAX reads the nearest row of the table.
    """

    embedding: nn.Embedding
    embedding_norm: nn.LayerNorm
    embedding_dropout: nn.Dropout
    first: Block
    rest: nn.Stack[Block]
    norm: nn.LayerNorm
    pre_head: PreHead | None
    head_dropout: nn.Dropout
    head: nn.Linear | None
    vocab_bias: Float[Array, " vocab"] | None
    config: ModernBertConfig = eqx.field(static=True)

    def __init__(self, config: ModernBertConfig, *, key: PRNGKeyArray):
        key_embedding, key_first, key_rest, key_pre_head, key_head = jax.random.split(key, 5)
        norm = partial(nn.LayerNorm, config.dim, eps=config.norm_eps, use_bias=config.norm_bias)
        is_masked = config.head == "masked_lm"
        outputs = 2 if config.head == "question_answering" else config.num_classes
        self.embedding = nn.Embedding(config.vocab, config.dim, key=key_embedding)
        self.embedding_norm = norm()
        self.embedding_dropout = nn.Dropout(config.embedding_dropout)
        self.first = _block(config, key_first, is_first=True)
        self.rest = nn.Stack(partial(_block, config), config.depth - 1, key=key_rest)
        self.norm = norm()
        make_pre_head = partial(
            PreHead,
            config.dim,
            activation=config.head_activation,
            use_bias=config.head_bias,
            norm_eps=config.norm_eps,
            norm_bias=config.norm_bias,
        )
        self.pre_head = make_pre_head(key=key_pre_head) if config.head else None
        self.head_dropout = nn.Dropout(config.head_dropout)
        init = partial(normal, std=config.dim**-0.5)
        has_head = config.head and not is_masked and outputs
        self.head = nn.Linear(config.dim, outputs, init=init, key=key_head) if has_head else None
        self.vocab_bias = jnp.zeros(config.vocab, jnp.float32) if is_masked and config.vocab_bias else None
        self.config = config

    @typed
    def hidden(
        self,
        tokens: Int[Array, " tokens"],
        *,
        mask: Bool[Array, " tokens"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "tokens dim"]:
        """The last block's output for each token, normalised."""
        config, length = self.config, tokens.shape[0]
        if length == 0:
            raise ValueError("ModernBert: tokens is empty; pass at least one, such as the token that begins a text")
        key_embedding, key_first, key_rest = nn.split_key(key, 3)
        positions = jnp.arange(length, dtype=jnp.float32)
        everywhere = jnp.broadcast_to(jnp.ones(length, bool) if mask is None else mask, (1, length, length))
        nearby = everywhere & (jnp.abs(positions[:, None] - positions) <= config.window // 2)
        bases = (config.global_base, config.local_base)
        far, near = (nn.rotary_angles(positions, config.dim // config.heads, base=base) for base in bases)

        def step(block: Block, x: Array, layer: Any) -> tuple[Array, None]:
            is_global, key = layer
            choose = partial(jnp.where, is_global)
            return block(x, choose(everywhere, nearby), choose(far, near), key=key), None

        x = self.embedding_dropout(self.embedding_norm(self.embedding(tokens)), key=key_embedding)
        x = self.first(x, everywhere, far, key=key_first)
        is_global = jnp.arange(1, config.depth) % config.global_every == 0
        keys = None if key_rest is None else jax.random.split(key_rest, config.depth - 1)
        return self.norm(self.rest.scan(step, x, (is_global, keys))[0])

    @typed
    def logits(
        self,
        hidden: Float[Array, "tokens dim"],
        *,
        mask: Bool[Array, " tokens"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "*out"]:
        """The head alone: what it makes of the hidden states."""
        if self.pre_head is None:
            return hidden
        if self.config.head == "classifier":
            hidden = hidden[0] if self.config.pool == "first" else _mean(hidden, mask)
        found = self.pre_head(hidden)
        if self.config.head != "masked_lm":
            return found if self.head is None else self.head(self.head_dropout(found, key=key))
        scores = self.embedding.scores(found)
        return scores if self.vocab_bias is None else scores + self.vocab_bias

    @typed
    def __call__(
        self,
        tokens: Int[Array, " tokens"],
        *,
        mask: Bool[Array, " tokens"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "*out"]:
        key_hidden, key_head = nn.split_key(key, 2)
        return self.logits(self.hidden(tokens, mask=mask, key=key_hidden), mask=mask, key=key_head)


def _mean(hidden: Float[Array, "tokens dim"], mask: Bool[Array, " tokens"] | None) -> Float[Array, " dim"]:
    mask = jnp.ones(hidden.shape[0], bool) if mask is None else mask
    wide = jnp.where(mask[:, None], hidden, 0).astype(jnp.promote_types(hidden.dtype, jnp.float32))
    return (jnp.sum(wide, axis=0) / jnp.sum(mask)).astype(hidden.dtype)


VARIANTS = {
    "ModernBERT-base": ModernBertConfig(dim=768, depth=22, heads=12, hidden=1152),
    "ModernBERT-large": ModernBertConfig(dim=1024, depth=28, heads=16, hidden=2624),
}

SHARDING = (
    # By columns: the vocabulary's size has no useful divisor.
    (r"embedding\.weight", P(None, ("model", "fsdp"))),
    (r".*attention\.(query|key|value)\.weight", P("model", "fsdp")),
    (r".*attention\.(query|key|value)\.bias", P("model")),
    (r".*attention\.out\.weight", P("fsdp", "model")),
    (r".*mlp\.(gate|up)\.weight", P("model", "fsdp")),
    (r".*mlp\.(gate|up)\.bias", P("model")),
    (r".*mlp\.down\.weight", P("fsdp", "model")),
    (r"(pre_head\.dense|head)\.weight", P(None, ("model", "fsdp"))),
)

FAMILY = Family(
    ModernBert,
    ModernBertConfig,
    VARIANTS,
    upstreams={
        # First, so that it is written without a prefix; the last of a `model_type` reads every config.json.
        "transformers_body": Upstream(
            TRANSFORMERS_BODY,
            replace(OPTIONS, table={**OPTIONS.table, "architectures": Option("head", {"ModernBertModel": None})}),
            names=("*",),
            model_type="modernbert",
            architecture="ModernBertModel",
            base="ModernBERT-base",
        ),
        "transformers": Upstream(
            TRANSFORMERS,
            OPTIONS,
            names=("*",),
            model_type="modernbert",
            architecture="ModernBertForMaskedLM",
            base="ModernBERT-base",
        ),
    },
    sharding=SHARDING,
    adapters={"num_classes": new_head},
)
