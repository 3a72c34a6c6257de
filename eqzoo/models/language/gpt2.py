"""GPT-2 (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners"), and DistilGPT2.

Upstream: transformers' `GPT2LMHeadModel`. Deviations: no cross-attention.
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
from eqzoo.checkpoint import TRANSPOSE, TRANSPOSE_SPLIT, Alias, Drop, Rule, prefixed
from eqzoo.models._family import Family, Option, Options, Upstream
from eqzoo.nn._init import normal

_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """`hidden` is the width inside an MLP, four times `dim` if None. Attention scores are divided by the root of a
    head's width (`scale_by_width`), and by the number of the layer, counted from one (`scale_by_layer`)."""

    dim: int
    depth: int
    heads: int
    hidden: int | None = None
    vocab: int = 50257
    context: int = 1024
    activation: Literal["gelu_tanh", "gelu", "relu", "silu", "tanh"] = "gelu_tanh"
    norm_eps: float = 1e-5
    scale_by_width: bool = True
    scale_by_layer: bool = False
    tied_head: bool = True
    embedding_dropout: float = 0.1
    attention_dropout: float = 0.1
    residual_dropout: float = 0.1

    def __post_init__(self):
        check_choices(self)
        if self.dim % self.heads:
            raise ValueError(f"dim={self.dim} is not a multiple of heads={self.heads}; choose heads that divide dim")


class Block(eqx.Module):
    norm1: nn.LayerNorm
    attention: nn.Attention
    norm2: nn.LayerNorm
    mlp: nn.MLP
    dropout: nn.Dropout

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int,
        *,
        activation: str,
        norm_eps: float,
        attention_dropout: float,
        residual_dropout: float,
        residual_std: float,
        key: PRNGKeyArray,
    ):
        key_attention, key_mlp, key_attention_out, key_mlp_out = jax.random.split(key, 4)
        init = partial(normal, std=_STD)
        attention = nn.Attention(
            dim, heads, weight_dropout=attention_dropout, out_dropout=residual_dropout, init=init, key=key_attention
        )
        mlp = nn.MLP(dim, hidden, activation=nn.activation(activation), init=init, key=key_mlp)
        # What a block adds to the residual stream starts smaller, so that the stream doesn't grow with depth.
        init = partial(normal, std=residual_std)
        attention_out = nn.Linear(dim, dim, init=init, key=key_attention_out)
        mlp_out = nn.Linear(hidden, dim, init=init, key=key_mlp_out)
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attention = eqx.tree_at(lambda attention: attention.out, attention, attention_out)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = eqx.tree_at(lambda mlp: mlp.fc2, mlp, mlp_out)
        self.dropout = nn.Dropout(residual_dropout)

    def __call__(
        self, x: Float[Array, "tokens dim"], scale: Float[Array, ""], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "tokens dim"]:
        key_attention, key_dropout = nn.split_key(key, 2)
        x = x + self.attention(self.norm1(x), causal=True, scale=scale, key=key_attention)
        return x + self.dropout(self.mlp(self.norm2(x)), key=key_dropout)

    def extend(
        self, x: Float[Array, "tokens dim"], cache: nn.KVCache, position: Int[Array, ""], scale: Float[Array, ""]
    ) -> tuple[Float[Array, "tokens dim"], nn.KVCache]:
        y, new = self.attention.extend(self.norm1(x), cache, position, scale=scale)
        x = x + y
        return x + self.mlp(self.norm2(x)), new


class GPT2(eqx.Module):
    """Token ids to the logits of each next token.

    An id outside of the vocabulary is no error, for JAX reads the nearest row of the table instead (and counts a
    negative id from its end): check ids where they come from.
    """

    embedding: nn.Embedding
    positions: Float[Array, "context dim"]
    dropout: nn.Dropout
    blocks: nn.Stack[Block]
    norm: nn.LayerNorm
    head: nn.Linear | None
    config: GPT2Config = eqx.field(static=True)

    def __init__(self, config: GPT2Config, *, key: PRNGKeyArray):
        key_embedding, key_positions, key_blocks, key_head = jax.random.split(key, 4)
        self.embedding = nn.Embedding(config.vocab, config.dim, std=_STD, key=key_embedding)
        self.positions = normal(key_positions, (config.context, config.dim), _STD)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.blocks = nn.Stack(
            lambda key: Block(
                config.dim,
                config.heads,
                4 * config.dim if config.hidden is None else config.hidden,
                activation=config.activation,
                norm_eps=config.norm_eps,
                attention_dropout=config.attention_dropout,
                residual_dropout=config.residual_dropout,
                residual_std=_STD / sqrt(2 * config.depth),
                key=key,
            ),
            config.depth,
            key=key_blocks,
        )
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.head = (
            None
            if config.tied_head
            else nn.Linear(config.dim, config.vocab, use_bias=False, init=partial(normal, std=_STD), key=key_head)
        )
        self.config = config

    @typed
    def hidden(self, tokens: Int[Array, " tokens"], *, key: PRNGKeyArray | None = None) -> Float[Array, "tokens dim"]:
        """What the head sees of each token: the last block's output, normalised."""
        length = tokens.shape[0]
        if length == 0:
            raise ValueError("GPT2: tokens is empty; pass at least one, such as the end-of-text token")
        if length > self.config.context:
            raise ValueError(
                f"GPT2: {length} tokens are more than context={self.config.context}; pass at most that many, "
                f"such as `tokens[-{self.config.context}:]`, or create the model with a larger context"
            )
        key_embedding, key_blocks = nn.split_key(key, 2)
        x = self.dropout(self.embedding(tokens) + self.positions[:length], key=key_embedding)
        scales = _attention_scales(self.config).astype(x.dtype)
        return self.norm(self.blocks(x, each=scales, key=key_blocks))

    @typed
    def __call__(
        self, tokens: Int[Array, " tokens"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "tokens vocab"]:
        return self.logits(self.hidden(tokens, key=key))

    @typed
    def logits(self, hidden: Float[Array, "*axes dim"]) -> Float[Array, "*axes vocab"]:
        return self.embedding.scores(hidden) if self.head is None else self.head(hidden)

    def empty_cache(self, length: int, *, dtype: DTypeLike | None = None) -> nn.Cache:
        """What `extend` keeps of up to `length` tokens, before the first one."""
        if length > self.config.context:
            raise ValueError(
                f"GPT2: a cache for {length} tokens is longer than context={self.config.context}; ask for at most that "
                f"many, or create the model with a larger context"
            )
        dtype = self.embedding.weight.dtype if dtype is None else dtype
        config = self.config
        layers = nn.KVCache.empty(config.depth, config.heads, length, config.dim // config.heads, dtype=dtype)
        return nn.Cache.empty(layers, length)

    @typed
    def extend(
        self, tokens: Int[Array, " tokens"], cache: nn.Cache, *, count: Int[Array, ""] | None = None
    ) -> tuple[Float[Array, "tokens dim"], nn.Cache]:
        """What the head sees of tokens that follow those in the cache, and the cache with the first `count` of them."""
        position = cache.position
        x = self.embedding(tokens) + self.positions[position + jnp.arange(tokens.shape[0])]
        scales = _attention_scales(self.config).astype(x.dtype)
        step = lambda block, x, layer: block.extend(x, layer[0], position, layer[1])
        x, new = self.blocks.scan(step, x, (cache.layers, scales))
        return self.norm(x), cache.extend(new, tokens.shape[0], count)


def _attention_scales(config: GPT2Config) -> Float[Array, " depth"]:
    """What each layer multiplies its attention scores by."""
    scales = jnp.ones(config.depth, jnp.float32)
    if config.scale_by_width:
        scales = scales / sqrt(config.dim // config.heads)
    if config.scale_by_layer:
        scales = scales / jnp.arange(1, config.depth + 1)
    return scales


VARIANTS = {
    "gpt2": GPT2Config(dim=768, depth=12, heads=12),
    "gpt2-medium": GPT2Config(dim=1024, depth=24, heads=16),
    "gpt2-large": GPT2Config(dim=1280, depth=36, heads=20),
    "gpt2-xl": GPT2Config(dim=1600, depth=48, heads=25),
    "distilgpt2": GPT2Config(dim=768, depth=6, heads=12),
}

# Upstream multiplies by weights of shape (in, out). A bias is its own transpose.
_BLOCK = (
    Rule(r"ln_(\d)\.(weight|bias)", "norm{0}.{1}"),
    Rule(
        r"attn\.c_attn\.(weight|bias)",
        ("attention.query.{0}", "attention.key.{0}", "attention.value.{0}"),
        TRANSPOSE_SPLIT,
    ),
    Rule(r"attn\.c_proj\.(weight|bias)", "attention.out.{0}", TRANSPOSE),
    Rule(r"mlp\.c_fc\.(weight|bias)", "mlp.fc1.{0}", TRANSPOSE),
    Rule(r"mlp\.c_proj\.(weight|bias)", "mlp.fc2.{0}", TRANSPOSE),
)

_BODY = (
    Rule(r"wte\.weight", "embedding.weight"),
    Rule(r"wpe\.weight", "positions"),
    *prefixed(r"h\.(\d+)\.", "blocks[{0}].", _BLOCK),
    Rule(r"ln_f\.(weight|bias)", "norm.{0}"),
)

# A model with a tied head has no `head.weight` for the rule to fill, so there the alias counts.
_HEAD = Rule(r"lm_head\.weight", "head.weight")
_MASKS = Drop(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)")

# The published `gpt2` was saved from transformers' `GPT2Model`, whose names have no prefix.
TRANSFORMERS = (
    *prefixed(r"transformer\.", "", _BODY),
    _HEAD,
    Alias(r"lm_head\.weight", "transformer.wte.weight"),
    _MASKS,
)
TRANSFORMERS_BODY = (*_BODY, _HEAD, Alias(r"lm_head\.weight", "wte.weight"), _MASKS)

OPTIONS = Options(
    {
        "vocab_size": "vocab",
        "n_positions": "context",
        "n_embd": "dim",
        "n_layer": "depth",
        "n_head": "heads",
        "n_inner": "hidden",
        "activation_function": Option(
            "activation",
            {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu"}
            | {"relu": "relu", "silu": "silu", "swish": "silu", "tanh": "tanh"},
        ),
        "layer_norm_epsilon": "norm_eps",
        "scale_attn_weights": "scale_by_width",
        "scale_attn_by_inverse_layer_idx": "scale_by_layer",
        "tie_word_embeddings": "tied_head",
        "embd_pdrop": "embedding_dropout",
        "attn_pdrop": "attention_dropout",
        "resid_pdrop": "residual_dropout",
    },
    fixed={"add_cross_attention": False},
    lenient=True,
)

SHARDING = (
    # By columns: the vocabulary's size has no useful divisor.
    (r"embedding\.weight", P(None, ("model", "fsdp"))),
    (r"positions", P(None, ("model", "fsdp"))),
    (r".*attention\.(query|key|value)\.weight", P("model", "fsdp")),
    (r".*attention\.(query|key|value)\.bias", P("model")),
    (r".*attention\.out\.weight", P("fsdp", "model")),
    (r".*mlp\.fc1\.weight", P("model", "fsdp")),
    (r".*mlp\.fc1\.bias", P("model")),
    (r".*mlp\.fc2\.weight", P("fsdp", "model")),
    (r"head\.weight", P(None, ("model", "fsdp"))),
)

FAMILY = Family(
    GPT2,
    GPT2Config,
    VARIANTS,
    upstreams={
        "transformers": Upstream(
            TRANSFORMERS, OPTIONS, names=("*",), model_type="gpt2", architecture="GPT2LMHeadModel", base="gpt2"
        ),
        "transformers_body": Upstream(TRANSFORMERS_BODY),
    },
    sharding=SHARDING,
    adapters={},
)
