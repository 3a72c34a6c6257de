"""Mixtral (Jiang et al., 2024, arXiv 2401.04088) and Qwen3-MoE (Yang et al., 2025, arXiv 2505.09388).

Upstream: transformers' `MixtralForCausalLM` and `Qwen3MoeForCausalLM`. Deviations: no jitter on the router's input in
training. Where some layers have no experts, all are laid out one by one instead of scanned.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import check_choices, typed
from eqzoo.models._family import Family
from eqzoo.models.language._mixtral_upstream import SHARDING, UPSTREAMS
from eqzoo.nn._init import normal

_STD = 0.02
_ROTARY = nn.Rotary(base=1e6)


@dataclass(frozen=True, kw_only=True)
class MixtralConfig:
    """`hidden` is the width inside each of the `experts`, of which `top_k` see a token; the weights of those add up to
    one if `normalised`. The `dense_layers`, counted from zero, have one MLP of width `dense_hidden` instead.

    A head is `dim_head` wide, by default `dim / heads`. A token attends to `window` tokens, itself among them, or to
    all. `context` is how many tokens the model was trained on; it takes more.
    """

    dim: int
    depth: int
    heads: int
    kv_heads: int
    hidden: int
    experts: int = 8
    top_k: int = 2
    normalised: bool = True
    dense_layers: tuple[int, ...] = ()
    dense_hidden: int | None = None
    dim_head: int | None = None
    vocab: int = 32000
    context: int = 32768
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    norm_eps: float = 1e-5
    rotary: nn.Rotary = _ROTARY
    window: int | None = None
    qk_norm: bool = False
    attention_bias: bool = False
    tied_head: bool = False
    attention_dropout: float = 0.0

    def __post_init__(self):
        check_choices(self)
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; choose a divisor")
        if self.dim_head is None and self.dim % self.heads:
            raise ValueError(f"dim={self.dim} is not a multiple of heads={self.heads}; pass dim_head")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} leaves a token nothing to attend to; pass at least 1, or None")
        if not {*self.dense_layers} < {*range(self.depth)}:
            raise ValueError(f"dense_layers={self.dense_layers} should be some of the layers 0 to {self.depth - 1}")
        if self.dense_layers and self.dense_hidden is None:
            raise ValueError("dense_layers have no width; pass dense_hidden")

    @property
    def head_width(self) -> int:
        return self.dim // self.heads if self.dim_head is None else self.dim_head


class Block(eqx.Module):
    norm1: nn.RMSNorm
    attention: nn.Attention
    norm2: nn.RMSNorm
    mlp: nn.Experts | nn.GatedMLP

    def __init__(self, dim: int, attention: nn.Attention, mlp: nn.Experts | nn.GatedMLP, *, norm_eps: float):
        self.norm1 = nn.RMSNorm(dim, eps=norm_eps)
        self.attention = attention
        self.norm2 = nn.RMSNorm(dim, eps=norm_eps)
        self.mlp = mlp

    def __call__(
        self,
        x: Float[Array, "tokens dim"],
        angles: Float[Array, "tokens pairs"],
        window: int | None,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "tokens dim"], Float[Array, "tokens experts"] | None]:
        """The output, and the router's logits."""
        return self._with(x, self.attention(self.norm1(x), causal=True, window=window, rotary=angles, key=key))

    def extend(
        self,
        x: Float[Array, "tokens dim"],
        cache: nn.KVCache,
        position: Int[Array, ""],
        angles: Float[Array, "tokens pairs"],
        window: int | None,
        expert: Callable[[Int[Array, ""]], nn.GatedMLP] | None = None,
    ) -> tuple[Float[Array, "tokens dim"], nn.KVCache]:
        attended, new = self.attention.extend(self.norm1(x), cache, position, rotary=angles, window=window)
        return self._with(x, attended, expert)[0], new

    def _with(
        self,
        x: Float[Array, "tokens dim"],
        attended: Float[Array, "tokens dim"],
        expert: Callable[[Int[Array, ""]], nn.GatedMLP] | None = None,
    ) -> tuple[Float[Array, "tokens dim"], Float[Array, "tokens experts"] | None]:
        x = x + attended
        y = self.norm2(x)
        y, logits = self.mlp(y, expert=expert) if isinstance(self.mlp, nn.Experts) else (self.mlp(y), None)
        return x + y, logits


def _make_block(config: MixtralConfig, dense: bool, key: PRNGKeyArray) -> Block:
    key_attention, key_mlp = jax.random.split(key)
    init, activation = partial(normal, std=_STD), nn.activation(config.activation)
    attention = nn.Attention(
        config.dim,
        config.heads,
        kv_heads=config.kv_heads,
        dim_head=config.dim_head,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        qk_norm=nn.RMSNorm if config.qk_norm else None,
        qk_norm_eps=config.norm_eps,
        rotary_scale=config.rotary.scale,
        weight_dropout=config.attention_dropout,
        init=init,
        key=key_attention,
    )
    if dense:
        mlp = nn.GatedMLP(config.dim, config.dense_hidden or 0, activation=activation, init=init, key=key_mlp)
    else:
        mlp = nn.Experts(
            config.dim,
            config.hidden,
            config.experts,
            top_k=config.top_k,
            normalised=config.normalised,
            activation=activation,
            init=init,
            key=key_mlp,
        )
    return Block(config.dim, attention, mlp, norm_eps=config.norm_eps)


class Mixtral(eqx.Module):
    """Token ids to the logits of each next token.

    An id outside of the vocabulary is no error, for JAX reads the nearest row of the table instead (and counts a
    negative id from its end): check ids where they come from.
    """

    embedding: nn.Embedding
    blocks: nn.Stack[Block] | tuple[Block, ...]
    norm: nn.RMSNorm
    head: nn.Linear | None
    config: MixtralConfig = eqx.field(static=True)

    def __init__(self, config: MixtralConfig, *, key: PRNGKeyArray):
        key_embedding, key_blocks, key_head = jax.random.split(key, 3)
        self.embedding = nn.Embedding(config.vocab, config.dim, std=_STD, key=key_embedding)
        if config.dense_layers:
            keys = enumerate(jax.random.split(key_blocks, config.depth))
            self.blocks = tuple(_make_block(config, layer in config.dense_layers, key) for layer, key in keys)
        else:
            self.blocks = nn.Stack(partial(_make_block, config, False), config.depth, key=key_blocks)
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        head = partial(nn.Linear, config.dim, config.vocab, use_bias=False, init=partial(normal, std=_STD))
        self.head = None if config.tied_head else head(key=key_head)
        self.config = config

    @typed
    def hidden(self, tokens: Int[Array, " tokens"], *, key: PRNGKeyArray | None = None) -> Float[Array, "tokens dim"]:
        """What the head sees of each token: the last block's output, normalised."""
        return self.hidden_and_routing(tokens, key=key)[0]

    @typed
    def hidden_and_routing(
        self, tokens: Int[Array, " tokens"], *, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, "tokens dim"], Float[Array, "layers tokens experts"]]:
        """`hidden`, and the logits by which the layers chose experts, for `nn.load_balancing_loss`."""
        length, config = tokens.shape[0], self.config
        if length == 0:
            raise ValueError("Mixtral: tokens is empty; pass at least one, such as the one that starts a text")
        angles = config.rotary.angles(jnp.arange(length), config.head_width, length)
        keys = None if key is None else jax.random.split(key, config.depth)
        step = lambda block, x, key: block(x, angles, config.window, key=key)
        x, logits = self._scan(step, self.embedding(tokens), keys)
        return self.norm(x), logits

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
        places = min(length, config.window or length)
        layers = nn.KVCache.empty(config.depth, config.kv_heads, places, config.head_width, dtype=dtype)
        return nn.Cache.empty(layers, length)

    @typed
    def extend(
        self, tokens: Int[Array, " tokens"], cache: nn.Cache, *, count: Int[Array, ""] | None = None
    ) -> tuple[Float[Array, "tokens dim"], nn.Cache]:
        """What the head sees of tokens that follow those in the cache, and the cache with the first `count` of them."""
        config, position = self.config, cache.position
        angles = config.rotary.angles(position + jnp.arange(tokens.shape[0]), config.head_width, cache.length)
        extend = lambda block, x, held, *expert: block.extend(x, held, position, angles, config.window, *expert)
        x = self.embedding(tokens)
        if len(tokens) == 1 and isinstance(self.blocks, nn.Stack):
            # The loop takes no experts along, of which it would copy every one; each layer asks for those it needs.
            blocks, experts = _without_experts(self.blocks)
            expert = lambda layer: lambda number: nn.entry(experts, layer, number)
            step = lambda block, x, each: extend(block, x, each[0], expert(each[1]))
            x, new = blocks.scan(step, x, (cache.layers, jnp.arange(config.depth)))
        else:
            x, new = self._scan(extend, x, cache.layers)
        return self.norm(x), cache.extend(new, tokens.shape[0], count)

    def _scan(self, step: Callable[[Block, Any, Any], tuple[Any, Any]], x: Array, each: Any) -> tuple[Array, Any]:
        """`x, y = step(block, x, each[layer])` for each layer in turn; each `y` but None is stacked."""
        if not isinstance(self.blocks, tuple):
            return self.blocks.scan(step, x, each)
        ys = []
        for layer, block in enumerate(self.blocks):
            x, y = step(block, x, jax.tree.map(lambda array, layer=layer: array[layer], each))
            ys += [] if y is None else [y]
        return x, jax.tree.map(lambda *arrays: jnp.stack(arrays), *ys)


def _without_experts(blocks: nn.Stack[Block]) -> tuple[nn.Stack[Block], nn.GatedMLP]:
    """The blocks, and apart from them their experts, whose arrays lead with the layer and the expert."""
    where = lambda blocks: blocks.block.mlp.experts
    return eqx.tree_at(where, blocks, None), where(blocks).block


_8X22B = MixtralConfig(dim=6144, depth=56, heads=48, kv_heads=8, hidden=16384, context=65536)
_QWEN3 = partial(
    MixtralConfig,
    kv_heads=4,
    experts=128,
    top_k=8,
    dim_head=128,
    vocab=151936,
    context=40960,
    norm_eps=1e-6,
    qk_norm=True,
)

VARIANTS = {
    "Mixtral-8x7B-v0.1": MixtralConfig(dim=4096, depth=32, heads=32, kv_heads=8, hidden=14336, context=32768),
    "Mixtral-8x22B-v0.1": _8X22B,
    "Mixtral-8x22B-Instruct-v0.1": replace(_8X22B, vocab=32768),
    "Qwen3-30B-A3B": _QWEN3(dim=2048, depth=48, heads=32, hidden=768, dense_hidden=6144),
    "Qwen3-235B-A22B": _QWEN3(dim=4096, depth=94, heads=64, hidden=1536, dense_hidden=12288),
}

FAMILY = Family(Mixtral, MixtralConfig, VARIANTS, upstreams=UPSTREAMS, sharding=SHARDING, adapters={})
