"""GPT-NeoX (Black et al., 2022, arXiv 2204.06745), and Pythia (Biderman et al., 2023, arXiv 2304.01373).

Upstream: transformers' `GPTNeoXForCausalLM`. Deviations: none.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import check_choices, typed
from eqzoo.models._family import Family, Upstream
from eqzoo.models.language import _gpt_neox_upstream as upstream
from eqzoo.nn._init import normal

_STD = 0.02
_A_QUARTER = nn.Rotary(partial=0.25)


@dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig:
    """`hidden` is the width inside an MLP.

    Attention and MLP both see what the block gets if they are `parallel`, else the MLP sees what attention made of it.
    `context` is how many tokens the model was trained on; it takes more.
    """

    dim: int
    depth: int
    heads: int
    hidden: int
    vocab: int = 50432
    context: int = 2048
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    norm_eps: float = 1e-5
    rotary: nn.Rotary = _A_QUARTER
    parallel: bool = True
    attention_bias: bool = True
    tied_head: bool = False
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0

    def __post_init__(self):
        check_choices(self)
        if self.dim % self.heads:
            raise ValueError(f"dim={self.dim} is not a multiple of heads={self.heads}; choose heads that divide dim")
        if int(self.dim_head * self.rotary.partial) % 2:
            raise ValueError(
                f"{self.rotary.partial} of a head's {self.dim_head} channels can't turn in pairs; let rotary.partial "
                f"give an even number"
            )

    @property
    def dim_head(self) -> int:
        return self.dim // self.heads


class FusedAttention(eqx.Module):
    """Self-attention whose `qkv` puts out each head's query, key and value next to each other, head by head."""

    qkv: nn.Linear
    out: nn.Linear
    dropout: nn.Dropout
    heads: int = eqx.field(static=True)
    rotary_scale: float = eqx.field(static=True)

    def __init__(self, dim: int, heads: int, *, rotary_scale: float, use_bias: bool, dropout: float, key: PRNGKeyArray):
        key_qkv, key_out = jax.random.split(key)
        init = partial(normal, std=_STD)
        self.qkv = nn.Linear(dim, 3 * dim, use_bias=use_bias, init=init, key=key_qkv)
        self.out = nn.Linear(dim, dim, use_bias=use_bias, init=init, key=key_out)
        self.dropout = nn.Dropout(dropout)
        self.heads = heads
        self.rotary_scale = rotary_scale

    def __call__(
        self, x: Float[Array, "tokens dim"], angles: Float[Array, "tokens pairs"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "tokens dim"]:
        query, keys, value = self._heads(x, angles)
        mixed = nn.attend_causal(query, keys, value, dropout=self.dropout, dropout_key=key)
        return self.out(nn.merge_heads(mixed))

    def extend(
        self,
        x: Float[Array, "tokens dim"],
        cache: nn.KVCache,
        position: Int[Array, ""],
        angles: Float[Array, "tokens pairs"],
    ) -> tuple[Float[Array, "tokens dim"], nn.KVCache]:
        """As `nn.Attention` has it: what becomes of tokens from `position` on, and their keys and values."""
        query, keys, value = self._heads(x, angles)
        new = nn.KVCache(keys, value)
        return self.out(nn.merge_heads(nn.attend_cached(query, new, cache, position))), new

    def _heads(
        self, x: Float[Array, "tokens dim"], angles: Float[Array, "tokens pairs"]
    ) -> tuple[Float[Array, "heads tokens dim_head"], ...]:
        query, key, value = jnp.split(nn.split_heads(self.qkv(x), self.heads), 3, axis=-1)
        turn = partial(nn.rotate, angles=angles, scale=self.rotary_scale)
        return turn(query), turn(key), value


class Block(eqx.Module):
    norm1: nn.LayerNorm
    attention: FusedAttention
    norm2: nn.LayerNorm
    mlp: nn.MLP
    dropout: nn.Dropout
    parallel: bool = eqx.field(static=True)

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int,
        *,
        activation: str,
        norm_eps: float,
        rotary_scale: float,
        parallel: bool,
        attention_bias: bool,
        attention_dropout: float,
        residual_dropout: float,
        key: PRNGKeyArray,
    ):
        key_attention, key_mlp = jax.random.split(key)
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attention = FusedAttention(
            dim,
            heads,
            rotary_scale=rotary_scale,
            use_bias=attention_bias,
            dropout=attention_dropout,
            key=key_attention,
        )
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        init = partial(normal, std=_STD)
        self.mlp = nn.MLP(dim, hidden, activation=nn.activation(activation), init=init, key=key_mlp)
        self.dropout = nn.Dropout(residual_dropout)
        self.parallel = parallel

    def __call__(
        self, x: Float[Array, "tokens dim"], angles: Float[Array, "tokens pairs"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "tokens dim"]:
        key_attention, *keys = nn.split_key(key, 3)
        return self._joined(x, self.attention(self.norm1(x), angles, key=key_attention), *keys)

    def extend(
        self,
        x: Float[Array, "tokens dim"],
        cache: nn.KVCache,
        position: Int[Array, ""],
        angles: Float[Array, "tokens pairs"],
    ) -> tuple[Float[Array, "tokens dim"], nn.KVCache]:
        mixed, new = self.attention.extend(self.norm1(x), cache, position, angles)
        return self._joined(x, mixed), new

    def _joined(
        self,
        x: Float[Array, "tokens dim"],
        mixed: Float[Array, "tokens dim"],
        key_attention: PRNGKeyArray | None = None,
        key_mlp: PRNGKeyArray | None = None,
    ) -> Float[Array, "tokens dim"]:
        """The block's output, of its input and of what attention made of that."""
        with_mixed = x + self.dropout(mixed, key=key_attention)
        seen = self.norm2(x if self.parallel else with_mixed)
        return with_mixed + self.dropout(self.mlp(seen), key=key_mlp)


class GPTNeoX(eqx.Module):
    """Token ids to the logits of each next token.

    An id outside of the vocabulary is no error, for JAX reads the nearest row of the table instead (and counts a
    negative id from its end): check ids where they come from.
    """

    embedding: nn.Embedding
    dropout: nn.Dropout
    blocks: nn.Stack[Block]
    norm: nn.LayerNorm
    head: nn.Linear | None
    config: GPTNeoXConfig = eqx.field(static=True)

    def __init__(self, config: GPTNeoXConfig, *, key: PRNGKeyArray):
        key_embedding, key_blocks, key_head = jax.random.split(key, 3)
        self.embedding = nn.Embedding(config.vocab, config.dim, std=_STD, key=key_embedding)
        self.dropout = nn.Dropout(config.residual_dropout)
        self.blocks = nn.Stack(
            lambda key: Block(
                config.dim,
                config.heads,
                config.hidden,
                activation=config.activation,
                norm_eps=config.norm_eps,
                rotary_scale=config.rotary.scale,
                parallel=config.parallel,
                attention_bias=config.attention_bias,
                attention_dropout=config.attention_dropout,
                residual_dropout=config.residual_dropout,
                key=key,
            ),
            config.depth,
            key=key_blocks,
        )
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        init = partial(normal, std=_STD)
        head = partial(nn.Linear, config.dim, config.vocab, use_bias=False, init=init)
        self.head = None if config.tied_head else head(key=key_head)
        self.config = config

    @typed
    def hidden(self, tokens: Int[Array, " tokens"], *, key: PRNGKeyArray | None = None) -> Float[Array, "tokens dim"]:
        """What the head sees of each token: the last block's output, normalised."""
        if tokens.shape[0] == 0:
            raise ValueError("GPTNeoX: tokens is empty; pass at least one, such as the end-of-text token")
        key_embedding, key_blocks = nn.split_key(key, 2)
        x = self.dropout(self.embedding(tokens), key=key_embedding)
        length = tokens.shape[0]
        angles = self.config.rotary.angles(jnp.arange(length), self.config.dim_head, length)
        step = lambda block, x, key: (block(x, angles, key=key), None)
        keys = None if key_blocks is None else jax.random.split(key_blocks, self.config.depth)
        return self.norm(self.blocks.scan(step, x, keys)[0])

    @typed
    def __call__(
        self, tokens: Int[Array, " tokens"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "tokens vocab"]:
        return self.logits(self.hidden(tokens, key=key))

    @typed
    def logits(self, hidden: Float[Array, "*axes dim"]) -> Float[Array, "*axes vocab"]:
        """The scores of each next token."""
        return self.embedding.scores(hidden) if self.head is None else self.head(hidden)

    def empty_cache(self, length: int, *, dtype: DTypeLike | None = None) -> nn.Cache:
        """What `extend` keeps of up to `length` tokens, before the first one."""
        config, dtype = self.config, self.embedding.weight.dtype if dtype is None else dtype
        layers = nn.KVCache.empty(config.depth, config.heads, length, config.dim_head, dtype=dtype)
        return nn.Cache.empty(layers, length)

    @typed
    def extend(
        self, tokens: Int[Array, " tokens"], cache: nn.Cache, *, count: Int[Array, ""] | None = None
    ) -> tuple[Float[Array, "tokens dim"], nn.Cache]:
        """What the head sees of tokens that follow those in the cache, and the cache with the first `count` of them."""
        positions = cache.position + jnp.arange(tokens.shape[0])
        angles = self.config.rotary.angles(positions, self.config.dim_head, cache.length)
        step = lambda block, x, layer: block.extend(x, layer, cache.position, angles)
        x, new = self.blocks.scan(step, self.embedding(tokens), cache.layers)
        return self.norm(x), cache.extend(new, tokens.shape[0], count)


def _pythia(dim: int, depth: int, heads: int, vocab: int = 50304) -> GPTNeoXConfig:
    return GPTNeoXConfig(dim=dim, depth=depth, heads=heads, hidden=4 * dim, vocab=vocab)


VARIANTS = {
    "pythia-70m": _pythia(512, 6, 8),
    "pythia-160m": _pythia(768, 12, 12),
    "pythia-410m": _pythia(1024, 24, 16),
    "pythia-1b": _pythia(2048, 16, 8),
    "pythia-1.4b": _pythia(2048, 24, 16),
    "pythia-2.8b": _pythia(2560, 32, 32),
    "pythia-6.9b": _pythia(4096, 32, 32, vocab=50432),
    "pythia-12b": _pythia(5120, 36, 40, vocab=50688),
    "gpt-neox-20b": GPTNeoXConfig(dim=6144, depth=44, heads=64, hidden=24576, activation="gelu_tanh"),
}

FAMILY = Family(
    GPTNeoX,
    GPTNeoXConfig,
    VARIANTS,
    upstreams={
        "transformers": Upstream(
            upstream.TRANSFORMERS,
            upstream.OPTIONS,
            names=("*",),
            model_type="gpt_neox",
            architecture="GPTNeoXForCausalLM",
            base="gpt-neox-20b",
        ),
        "transformers_5": Upstream(upstream.TRANSFORMERS_5),
    },
    sharding=upstream.SHARDING,
    adapters={},
)
