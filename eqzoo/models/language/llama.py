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


# What the sizes of a generation have in common.
_LLAMA2 = partial(LlamaConfig, context=4096, norm_eps=1e-5)
_LLAMA3 = partial(LlamaConfig, kv_heads=8, vocab=128256, norm_eps=1e-5)
_LLAMA3_0 = partial(_LLAMA3, context=8192, rotary=nn.Rotary(base=5e5))
_LLAMA3_1 = partial(_LLAMA3, context=131072, rotary=_rotary3(8.0))
_LLAMA3_2 = partial(_LLAMA3, context=131072, rotary=_rotary3(32.0), tied_head=True)
_MISTRAL = partial(LlamaConfig, dim=4096, depth=32, heads=32, hidden=14336, kv_heads=8, context=32768, norm_eps=1e-5)
_QWEN2_5 = partial(LlamaConfig, vocab=152064, context=131072, rotary=nn.Rotary(base=1e6), attention_bias="qkv")
_QWEN2_5_SMALL = partial(_QWEN2_5, vocab=151936, kv_heads=2, tied_head=True)
_QWEN3 = partial(LlamaConfig, kv_heads=8, vocab=151936, context=40960, rotary=nn.Rotary(base=1e6), qk_norm="head")
_SMOLLM = partial(LlamaConfig, vocab=49152, norm_eps=1e-5, tied_head=True, context=2048)
_SMOLLM2 = partial(_SMOLLM, context=8192, rotary=nn.Rotary(base=1e5))
_OLMO2 = partial(LlamaConfig, vocab=100352, context=4096, rotary=nn.Rotary(base=5e5), qk_norm="whole", post_norm=True)
_GRANITE = partial(
    LlamaConfig, depth=40, kv_heads=8, norm_eps=1e-5, tied_head=True, embedding_scale=12.0, residual_scale=0.22
)
_GRANITE3 = partial(_GRANITE, heads=32, vocab=49155, context=4096)
_LONG_GRANITE = partial(_GRANITE, context=131072, rotary=nn.Rotary(base=1e7))

VARIANTS = {
    "Llama-2-7b": _LLAMA2(dim=4096, depth=32, heads=32, hidden=11008),
    "Llama-2-13b": _LLAMA2(dim=5120, depth=40, heads=40, hidden=13824),
    "Llama-2-70b": _LLAMA2(dim=8192, depth=80, heads=64, hidden=28672, kv_heads=8),
    "Llama-3-8B": _LLAMA3_0(dim=4096, depth=32, heads=32, hidden=14336),
    "Llama-3-70B": _LLAMA3_0(dim=8192, depth=80, heads=64, hidden=28672),
    "Llama-3.1-8B": _LLAMA3_1(dim=4096, depth=32, heads=32, hidden=14336),
    "Llama-3.1-70B": _LLAMA3_1(dim=8192, depth=80, heads=64, hidden=28672),
    "Llama-3.1-405B": _LLAMA3_1(dim=16384, depth=126, heads=128, hidden=53248),
    "Llama-3.2-1B": _LLAMA3_2(dim=2048, depth=16, heads=32, hidden=8192),
    "Llama-3.2-3B": _LLAMA3_2(dim=3072, depth=28, heads=24, hidden=8192),
    "Llama-3.3-70B": _LLAMA3_1(dim=8192, depth=80, heads=64, hidden=28672),
    "Mistral-7B-v0.1": _MISTRAL(window=4096),
    "Mistral-7B-v0.2": _MISTRAL(rotary=nn.Rotary(base=1e6)),
    "Mistral-7B-v0.3": _MISTRAL(vocab=32768, rotary=nn.Rotary(base=1e6)),
    "Qwen2.5-0.5B": _QWEN2_5_SMALL(dim=896, depth=24, heads=14, hidden=4864, context=32768),
    "Qwen2.5-1.5B": _QWEN2_5_SMALL(dim=1536, depth=28, heads=12, hidden=8960),
    "Qwen2.5-3B": _QWEN2_5_SMALL(dim=2048, depth=36, heads=16, hidden=11008, context=32768),
    "Qwen2.5-7B": _QWEN2_5(dim=3584, depth=28, heads=28, hidden=18944, kv_heads=4),
    "Qwen2.5-14B": _QWEN2_5(dim=5120, depth=48, heads=40, hidden=13824, kv_heads=8, norm_eps=1e-5),
    "Qwen2.5-32B": _QWEN2_5(dim=5120, depth=64, heads=40, hidden=27648, kv_heads=8, norm_eps=1e-5),
    "Qwen2.5-72B": _QWEN2_5(dim=8192, depth=80, heads=64, hidden=29568, kv_heads=8, norm_eps=1e-5),
    "Qwen3-0.6B": _QWEN3(dim=1024, depth=28, heads=16, hidden=3072, dim_head=128, tied_head=True),
    "Qwen3-1.7B": _QWEN3(dim=2048, depth=28, heads=16, hidden=6144, tied_head=True),
    "Qwen3-4B": _QWEN3(dim=2560, depth=36, heads=32, hidden=9728, dim_head=128, tied_head=True),
    "Qwen3-8B": _QWEN3(dim=4096, depth=36, heads=32, hidden=12288),
    "Qwen3-14B": _QWEN3(dim=5120, depth=40, heads=40, hidden=17408),
    "Qwen3-32B": _QWEN3(dim=5120, depth=64, heads=64, hidden=25600, dim_head=128),
    "SmolLM-135M": _SMOLLM(dim=576, depth=30, heads=9, hidden=1536, kv_heads=3),
    "SmolLM-360M": _SMOLLM(dim=960, depth=32, heads=15, hidden=2560, kv_heads=5),
    "SmolLM-1.7B": _SMOLLM(dim=2048, depth=24, heads=32, hidden=8192),
    "SmolLM2-135M": _SMOLLM2(dim=576, depth=30, heads=9, hidden=1536, kv_heads=3),
    "SmolLM2-360M": _SMOLLM2(dim=960, depth=32, heads=15, hidden=2560, kv_heads=5),
    "SmolLM2-1.7B": _SMOLLM2(dim=2048, depth=24, heads=32, hidden=8192, rotary=nn.Rotary(base=1.3e5)),
    "SmolLM3-3B": LlamaConfig(
        dim=2048,
        depth=36,
        heads=16,
        hidden=11008,
        vocab=128256,
        context=65536,
        kv_heads=4,
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
        vocab=100352,
        context=16384,
        kv_heads=10,
        norm_eps=1e-5,
        rotary=nn.Rotary(base=2.5e5),
    ),
    "OLMo-2-0425-1B": _OLMO2(dim=2048, depth=16, heads=16, hidden=8192),
    "OLMo-2-1124-7B": _OLMO2(dim=4096, depth=32, heads=32, hidden=11008),
    "OLMo-2-1124-13B": _OLMO2(dim=5120, depth=40, heads=40, hidden=13824),
    "OLMo-2-0325-32B": _OLMO2(dim=5120, depth=64, heads=40, hidden=27648, kv_heads=8),
    "granite-3.0-2b": _GRANITE3(dim=2048, hidden=8192, attention_scale=0.015625, logit_divisor=8.0),
    "granite-3.0-8b": _GRANITE3(dim=4096, hidden=12800, attention_scale=0.0078125, logit_divisor=16.0),
    "granite-3.3-8b": _LONG_GRANITE(
        dim=4096, heads=32, hidden=12800, vocab=49159, attention_scale=0.0078125, logit_divisor=16.0
    ),
    "granite-4.1-3b": _LONG_GRANITE(
        dim=2560, heads=40, hidden=8192, vocab=100352, attention_scale=0.015625, logit_divisor=10.0
    ),
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
