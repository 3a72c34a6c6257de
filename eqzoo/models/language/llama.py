"""Llama (Touvron et al., 2023, arXiv 2302.13971 and 2307.09288; Grattafiori et al., 2024, arXiv 2407.21783), and the
models that differ from it in an option or two: Mistral (2310.06825), Qwen2 and 2.5 (2407.10671, 2412.15115), Qwen3
(2505.09388), SmolLM 1 to 3, Phi-3 and 4 (2404.14219, 2412.08905), OLMo 2 (2501.00656) and Granite 3.

Upstream: transformers' `LlamaForCausalLM`, `MistralForCausalLM`, `Qwen2ForCausalLM`, ... Deviations: rotary kinds that
depend on a text's length take a cache's length for it, where upstream turns the keys of later tokens otherwise than it
turned those before.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import check_choices, typed
from eqzoo.models._family import Family
from eqzoo.models.language._llama_upstream import UPSTREAMS
from eqzoo.nn._init import normal

_STD = 0.02
_ROTARY = nn.Rotary()
_EVERY = 2**30  # a window that every text fits into


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """`hidden` is the width inside an MLP, and `dim_head` that of a head, by default `dim / heads`.

    A token attends to `window` tokens, itself among them, or to all, in layers not `windowed` (all are by default); its
    position turns queries and keys but in layers not `rotated`. `attention_bias` is of all four projections or of those
    of query, key and value; `qk_norm` of each head, or of the whole projection. Norms come before attention and MLP, or
    after them (`post_norm`). Scores are multiplied by `attention_scale`, by default the inverse root of a head's width,
    and logits divided by `logit_divisor`. `context` is how many tokens the model was trained on; it takes more.
    """

    dim: int
    depth: int
    heads: int
    hidden: int
    vocab: int = 32000
    context: int = 2048
    kv_heads: int | None = None
    dim_head: int | None = None
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    norm_eps: float = 1e-6
    rotary: nn.Rotary = _ROTARY
    rotated: tuple[bool, ...] | None = None
    window: int | None = None
    windowed: tuple[bool, ...] | None = None
    attention_bias: Literal["none", "qkv", "all"] = "none"
    mlp_bias: bool = False
    qk_norm: Literal["none", "head", "whole"] = "none"
    post_norm: bool = False
    tied_head: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    attention_scale: float | None = None
    logit_divisor: float = 1.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0

    def __post_init__(self):
        check_choices(self)
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; choose a divisor")
        if self.dim_head is None and self.dim % self.heads:
            raise ValueError(f"dim={self.dim} is not a multiple of heads={self.heads}; pass dim_head")
        for name in ("rotated", "windowed"):
            if (layers := getattr(self, name)) is not None and len(layers) != self.depth:
                raise ValueError(
                    f"{name} speaks of {len(layers)} layers; pass one truth value for each of {self.depth}"
                )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} leaves a token nothing to attend to; pass at least 1, or None")
        self.rotary.speeds(self.head_width, self.context)  # refuses what it can't turn
        if self.rotated is not None and self.rotary.partial != 1:
            raise ValueError(f"rotated layers among others need rotary.partial=1, not {self.rotary.partial}")

    @property
    def head_width(self) -> int:
        return self.dim // self.heads if self.dim_head is None else self.dim_head


class Layer(NamedTuple):
    """What a block is told of the layer it is, as arrays with an entry a layer; None where layers don't differ."""

    rotated: Float[Array, "*depth"] | None
    scale: Float[Array, "*depth"]
    window: Int[Array, "*depth"] | None


class Block(eqx.Module):
    norm1: nn.RMSNorm
    attention: nn.Attention
    norm2: nn.RMSNorm
    mlp: nn.GatedMLP
    dropout: nn.Dropout
    post_norm: bool = eqx.field(static=True)
    scale: float = eqx.field(static=True)

    def __init__(
        self,
        dim: int,
        attention: nn.Attention,
        mlp: nn.GatedMLP,
        *,
        norm_eps: float,
        post_norm: bool,
        scale: float,
        dropout: float,
    ):
        self.norm1 = nn.RMSNorm(dim, eps=norm_eps)
        self.attention = attention
        self.norm2 = nn.RMSNorm(dim, eps=norm_eps)
        self.mlp = mlp
        self.dropout = nn.Dropout(dropout)
        self.post_norm = post_norm
        self.scale = scale

    def __call__(
        self,
        x: Float[Array, "tokens dim"],
        angles: Float[Array, "tokens pairs"],
        layer: Layer,
        window: int | None,
        *,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "tokens dim"]:
        key_attention, *keys = nn.split_key(key, 3)
        y = self.attention(
            x if self.post_norm else self.norm1(x),
            causal=True,
            window=window if layer.window is None else layer.window,
            rotary=angles if layer.rotated is None else angles * layer.rotated,
            scale=layer.scale,
            key=key_attention,
        )
        return self._with(x, y, *keys)

    def extend(
        self,
        x: Float[Array, "tokens dim"],
        cache: nn.KVCache,
        position: Int[Array, ""],
        angles: Float[Array, "tokens pairs"],
        layer: Layer,
        window: int | None,
    ) -> tuple[Float[Array, "tokens dim"], nn.KVCache]:
        y, new = self.attention.extend(
            x if self.post_norm else self.norm1(x),
            cache,
            position,
            rotary=angles if layer.rotated is None else angles * layer.rotated,
            window=window if layer.window is None else layer.window,
            scale=layer.scale,
        )
        return self._with(x, y), new

    def _with(
        self,
        x: Float[Array, "tokens dim"],
        attended: Float[Array, "tokens dim"],
        key_attention: PRNGKeyArray | None = None,
        key_mlp: PRNGKeyArray | None = None,
    ) -> Float[Array, "tokens dim"]:
        """The block's output, of its input and of what attention made of that."""
        y = self.norm1(attended) if self.post_norm else attended
        x = x + self.dropout(y, key=key_attention) * self.scale
        y = self.norm2(self.mlp(x)) if self.post_norm else self.mlp(self.norm2(x))
        return x + self.dropout(y, key=key_mlp) * self.scale


def _make_block(config: LlamaConfig, key: PRNGKeyArray) -> Block:
    key_attention, key_mlp = jax.random.split(key)
    init = partial(normal, std=_STD)
    attention = nn.Attention(
        config.dim,
        config.heads,
        kv_heads=config.kv_heads,
        dim_head=config.dim_head,
        qkv_bias=config.attention_bias != "none",
        out_bias=config.attention_bias == "all",
        qk_norm=None if config.qk_norm == "none" else nn.RMSNorm,
        qk_norm_eps=config.norm_eps,
        qk_norm_whole=config.qk_norm == "whole",
        rotary_scale=config.rotary.scale,
        weight_dropout=config.attention_dropout,
        init=init,
        key=key_attention,
    )
    activation = nn.activation(config.activation)
    mlp = nn.GatedMLP(
        config.dim, config.hidden, activation=activation, use_bias=config.mlp_bias, init=init, key=key_mlp
    )
    return Block(
        config.dim,
        attention,
        mlp,
        norm_eps=config.norm_eps,
        post_norm=config.post_norm,
        scale=config.residual_scale,
        dropout=config.residual_dropout,
    )


class Llama(eqx.Module):
    """Token ids to the logits of each next token.

    An id outside of the vocabulary is no error, for JAX reads the nearest row of the table instead (and counts a
    negative id from its end): check ids where they come from.
    """

    embedding: nn.Embedding
    blocks: nn.Stack[Block]
    norm: nn.RMSNorm
    head: nn.Linear | None
    config: LlamaConfig = eqx.field(static=True)

    def __init__(self, config: LlamaConfig, *, key: PRNGKeyArray):
        key_embedding, key_blocks, key_head = jax.random.split(key, 3)
        self.embedding = nn.Embedding(config.vocab, config.dim, std=_STD, key=key_embedding)
        self.blocks = nn.Stack(partial(_make_block, config), config.depth, key=key_blocks)
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        head = partial(nn.Linear, config.dim, config.vocab, use_bias=False, init=partial(normal, std=_STD))
        self.head = None if config.tied_head else head(key=key_head)
        self.config = config

    @typed
    def hidden(self, tokens: Int[Array, " tokens"], *, key: PRNGKeyArray | None = None) -> Float[Array, "tokens dim"]:
        """What the head sees of each token: the last block's output, normalised."""
        length = tokens.shape[0]
        if length == 0:
            raise ValueError("Llama: tokens is empty; pass at least one, such as the one that starts a text")
        config, x = self.config, self._embed(tokens)
        angles = config.rotary.angles(jnp.arange(length), config.head_width, length)
        keys = None if key is None else jax.random.split(key, config.depth)
        step = lambda block, x, each: (block(x, angles, each[0], config.window, key=each[1]), None)
        x, _ = self.blocks.scan(step, x, (_layers(config, x.dtype), keys))
        return self.norm(x)

    @typed
    def __call__(
        self, tokens: Int[Array, " tokens"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "tokens vocab"]:
        return self.logits(self.hidden(tokens, key=key))

    @typed
    def logits(self, hidden: Float[Array, "*axes dim"]) -> Float[Array, "*axes vocab"]:
        logits = self.embedding.scores(hidden) if self.head is None else self.head(hidden)
        return logits / self.config.logit_divisor

    def empty_cache(self, length: int, *, dtype: DTypeLike | None = None) -> nn.Cache:
        """What `extend` keeps of up to `length` tokens, before the first one."""
        config, dtype = self.config, self.embedding.weight.dtype if dtype is None else dtype
        # Layers with and without a window lie in one array, which then keeps every token.
        places = length if config.window is None or config.windowed is not None else min(length, config.window)
        kv_heads = self.blocks.block.attention.kv_heads
        layers = nn.KVCache.empty(config.depth, kv_heads, places, config.head_width, dtype=dtype)
        return nn.Cache.empty(layers, length)

    @typed
    def extend(
        self, tokens: Int[Array, " tokens"], cache: nn.Cache, *, count: Int[Array, ""] | None = None
    ) -> tuple[Float[Array, "tokens dim"], nn.Cache]:
        """What the head sees of tokens that follow those in the cache, and the cache with the first `count` of them."""
        config, position, x = self.config, cache.position, self._embed(tokens)
        angles = config.rotary.angles(position + jnp.arange(tokens.shape[0]), config.head_width, cache.length)
        step = lambda block, x, each: block.extend(x, each[0], position, angles, each[1], config.window)
        x, new = self.blocks.scan(step, x, (cache.layers, _layers(config, x.dtype)))
        return self.norm(x), cache.extend(new, tokens.shape[0], count)

    def _embed(self, tokens: Int[Array, " tokens"]) -> Float[Array, "tokens dim"]:
        return self.embedding(tokens) * self.config.embedding_scale


def _layers(config: LlamaConfig, dtype: jnp.dtype) -> Layer:
    scale = config.head_width**-0.5 if config.attention_scale is None else config.attention_scale
    scales, rotated, windows = jnp.full(config.depth, scale, jnp.float32), None, None
    if config.rotated is not None:
        rotated = jnp.array(config.rotated, jnp.float32)
        # What isn't turned isn't lengthened either; of the product, both factors were.
        scales = jnp.where(rotated, scales, scales / config.rotary.scale**2)
    if config.window is not None and config.windowed is not None:
        windows = jnp.where(jnp.array(config.windowed), config.window, _EVERY)
    return Layer(rotated, scales.astype(dtype), windows)


def _rotary3(factor: float) -> nn.Rotary:
    return nn.Rotary(base=5e5, kind="llama3", factor=factor, low=1.0, high=4.0, context=8192)


def _llama2(dim: int, depth: int, heads: int, hidden: int, kv_heads: int | None = None) -> LlamaConfig:
    return LlamaConfig(dim=dim, depth=depth, heads=heads, hidden=hidden, kv_heads=kv_heads, context=4096, norm_eps=1e-5)


def _llama3(
    dim: int, depth: int, heads: int, hidden: int, rotary: nn.Rotary, *, context: int = 131072, tied: bool = False
) -> LlamaConfig:
    return LlamaConfig(
        dim=dim,
        depth=depth,
        heads=heads,
        hidden=hidden,
        kv_heads=8,
        vocab=128256,
        context=context,
        norm_eps=1e-5,
        rotary=rotary,
        tied_head=tied,
    )


def _mistral(*, vocab: int, base: float, window: int | None) -> LlamaConfig:
    return LlamaConfig(
        dim=4096,
        depth=32,
        heads=32,
        hidden=14336,
        kv_heads=8,
        vocab=vocab,
        context=32768,
        norm_eps=1e-5,
        rotary=nn.Rotary(base=base),
        window=window,
    )


def _qwen2(
    dim: int,
    depth: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    *,
    context: int = 131072,
    norm_eps: float = 1e-6,
    tied: bool = False,
    vocab: int = 152064,
) -> LlamaConfig:
    return LlamaConfig(
        dim=dim,
        depth=depth,
        heads=heads,
        hidden=hidden,
        kv_heads=kv_heads,
        vocab=vocab,
        context=context,
        norm_eps=norm_eps,
        rotary=nn.Rotary(base=1e6),
        attention_bias="qkv",
        tied_head=tied,
    )


def _qwen3(dim: int, depth: int, heads: int, hidden: int, *, tied: bool = False) -> LlamaConfig:
    return LlamaConfig(
        dim=dim,
        depth=depth,
        heads=heads,
        hidden=hidden,
        kv_heads=8,
        dim_head=None if dim == 128 * heads else 128,
        vocab=151936,
        context=40960,
        rotary=nn.Rotary(base=1e6),
        qk_norm="head",
        tied_head=tied,
    )


def _smollm(
    dim: int, depth: int, heads: int, kv_heads: int | None, hidden: int, *, context: int, base: float
) -> LlamaConfig:
    return LlamaConfig(
        dim=dim,
        depth=depth,
        heads=heads,
        hidden=hidden,
        kv_heads=kv_heads,
        vocab=49152,
        context=context,
        norm_eps=1e-5,
        rotary=nn.Rotary(base=base),
        tied_head=True,
    )


def _olmo2(dim: int, depth: int, heads: int, hidden: int, *, kv_heads: int | None = None) -> LlamaConfig:
    return LlamaConfig(
        dim=dim,
        depth=depth,
        heads=heads,
        hidden=hidden,
        kv_heads=kv_heads,
        vocab=100352,
        context=4096,
        rotary=nn.Rotary(base=5e5),
        qk_norm="whole",
        post_norm=True,
    )


def _granite(
    dim: int,
    heads: int,
    hidden: int,
    *,
    logit_divisor: float,
    vocab: int = 49155,
    context: int = 4096,
    base: float = 1e4,
) -> LlamaConfig:
    return LlamaConfig(
        dim=dim,
        depth=40,
        heads=heads,
        hidden=hidden,
        kv_heads=8,
        vocab=vocab,
        context=context,
        norm_eps=1e-5,
        rotary=nn.Rotary(base=base),
        tied_head=True,
        embedding_scale=12.0,
        residual_scale=0.22,
        attention_scale=heads / dim,
        logit_divisor=logit_divisor,
    )


_PLAIN3 = nn.Rotary(base=5e5)

VARIANTS = {
    "Llama-2-7b": _llama2(4096, 32, 32, 11008),
    "Llama-2-13b": _llama2(5120, 40, 40, 13824),
    "Llama-2-70b": _llama2(8192, 80, 64, 28672, kv_heads=8),
    "Llama-3-8B": _llama3(4096, 32, 32, 14336, _PLAIN3, context=8192),
    "Llama-3-70B": _llama3(8192, 80, 64, 28672, _PLAIN3, context=8192),
    "Llama-3.1-8B": _llama3(4096, 32, 32, 14336, _rotary3(8.0)),
    "Llama-3.1-70B": _llama3(8192, 80, 64, 28672, _rotary3(8.0)),
    "Llama-3.1-405B": _llama3(16384, 126, 128, 53248, _rotary3(8.0)),
    "Llama-3.2-1B": _llama3(2048, 16, 32, 8192, _rotary3(32.0), tied=True),
    "Llama-3.2-3B": _llama3(3072, 28, 24, 8192, _rotary3(32.0), tied=True),
    "Llama-3.3-70B": _llama3(8192, 80, 64, 28672, _rotary3(8.0)),
    "Mistral-7B-v0.1": _mistral(vocab=32000, base=1e4, window=4096),
    "Mistral-7B-v0.2": _mistral(vocab=32000, base=1e6, window=None),
    "Mistral-7B-v0.3": _mistral(vocab=32768, base=1e6, window=None),
    "Qwen2.5-0.5B": _qwen2(896, 24, 14, 2, 4864, context=32768, tied=True, vocab=151936),
    "Qwen2.5-1.5B": _qwen2(1536, 28, 12, 2, 8960, tied=True, vocab=151936),
    "Qwen2.5-3B": _qwen2(2048, 36, 16, 2, 11008, context=32768, tied=True, vocab=151936),
    "Qwen2.5-7B": _qwen2(3584, 28, 28, 4, 18944),
    "Qwen2.5-14B": _qwen2(5120, 48, 40, 8, 13824, norm_eps=1e-5),
    "Qwen2.5-32B": _qwen2(5120, 64, 40, 8, 27648, norm_eps=1e-5),
    "Qwen2.5-72B": _qwen2(8192, 80, 64, 8, 29568, norm_eps=1e-5),
    "Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
    "Qwen3-1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
    "Qwen3-4B": _qwen3(2560, 36, 32, 9728, tied=True),
    "Qwen3-8B": _qwen3(4096, 36, 32, 12288),
    "Qwen3-14B": _qwen3(5120, 40, 40, 17408),
    "Qwen3-32B": _qwen3(5120, 64, 64, 25600),
    "SmolLM-135M": _smollm(576, 30, 9, 3, 1536, context=2048, base=1e4),
    "SmolLM-360M": _smollm(960, 32, 15, 5, 2560, context=2048, base=1e4),
    "SmolLM-1.7B": _smollm(2048, 24, 32, None, 8192, context=2048, base=1e4),
    "SmolLM2-135M": _smollm(576, 30, 9, 3, 1536, context=8192, base=1e5),
    "SmolLM2-360M": _smollm(960, 32, 15, 5, 2560, context=8192, base=1e5),
    "SmolLM2-1.7B": _smollm(2048, 24, 32, None, 8192, context=8192, base=1.3e5),
    "SmolLM3-3B": LlamaConfig(
        dim=2048,
        depth=36,
        heads=16,
        hidden=11008,
        kv_heads=4,
        vocab=128256,
        context=65536,
        rotary=nn.Rotary(base=5e6),
        rotated=(True, True, True, False) * 9,
        tied_head=True,
    ),
    "Phi-3-mini-4k": LlamaConfig(
        dim=3072, depth=32, heads=32, hidden=8192, vocab=32064, context=4096, norm_eps=1e-5, window=2047
    ),
    "phi-4": LlamaConfig(
        dim=5120,
        depth=40,
        heads=40,
        hidden=17920,
        kv_heads=10,
        vocab=100352,
        context=16384,
        norm_eps=1e-5,
        rotary=nn.Rotary(base=2.5e5),
    ),
    "OLMo-2-0425-1B": _olmo2(2048, 16, 16, 8192),
    "OLMo-2-1124-7B": _olmo2(4096, 32, 32, 11008),
    "OLMo-2-1124-13B": _olmo2(5120, 40, 40, 13824),
    "OLMo-2-0325-32B": _olmo2(5120, 64, 40, 27648, kv_heads=8),
    "granite-3.0-2b": _granite(2048, 32, 8192, logit_divisor=8.0),
    "granite-3.0-8b": _granite(4096, 32, 12800, logit_divisor=16.0),
    "granite-3.3-8b": _granite(4096, 32, 12800, logit_divisor=16.0, vocab=49159, context=131072, base=1e7),
    "granite-4.1-3b": _granite(2560, 40, 8192, logit_divisor=10.0, vocab=100352, context=131072, base=1e7),
}

SHARDING = (
    # By columns: not every vocabulary's size has a useful divisor.
    (r"embedding\.weight", P(None, ("model", "fsdp"))),
    (r".*attention\.(query|key|value)\.weight", P("model", "fsdp")),
    (r".*attention\.(query|key|value)\.bias", P("model")),
    (r".*attention\.out\.weight", P("fsdp", "model")),
    (r".*mlp\.(gate|up)\.weight", P("model", "fsdp")),
    (r".*mlp\.(gate|up)\.bias", P("model")),
    (r".*mlp\.down\.weight", P("fsdp", "model")),
    (r"head\.weight", P(None, ("model", "fsdp"))),
)

FAMILY = Family(Llama, LlamaConfig, VARIANTS, upstreams=UPSTREAMS, sharding=SHARDING, adapters={})
