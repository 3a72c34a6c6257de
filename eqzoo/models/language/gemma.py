"""Gemma (2024, arXiv 2403.08295), Gemma 2 (2024, arXiv 2408.00118), the text part of Gemma 3 (2025, arXiv 2503.19786).

Upstream: transformers' `GemmaForCausalLM`, `Gemma2ForCausalLM` and `Gemma3ForCausalLM`, and the text part of
`Gemma3ForConditionalGeneration`, as which most of Gemma 3 is published. Deviations: none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import check_choices, typed
from eqzoo.models._family import Family, Upstream
from eqzoo.models.language import _gemma_upstream as upstream
from eqzoo.nn._init import normal

_STD = 0.02
_ROTARY = nn.Rotary()
_WIDE = nn.Rotary(base=1e6)
_WIDEST = nn.Rotary(base=1e6, kind="linear", factor=8.0)

Kind = Literal["local", "global"]
Look = Callable[[Array, nn.KVCache], Array]


@dataclass(frozen=True, kw_only=True)
class GemmaConfig:
    """`pattern` is repeated over the layers: a "local" one attends to the last `window` tokens only, and turns queries
    and keys as `local_rotary` says if that is given.

    Attention scores are divided by the root of `query_scalar` (`dim_head` if None) and bent to lie below
    `attention_cap`, logits below `final_cap`. With `post_norms`, what attention and MLP put out is normalised too.
    `context` is how many tokens the model was trained on; it takes more.
    """

    dim: int
    depth: int
    heads: int
    kv_heads: int
    hidden: int
    dim_head: int = 256
    vocab: int = 256000
    context: int = 8192
    activation: Literal["gelu_tanh", "gelu", "relu", "silu"] = "gelu_tanh"
    norm_eps: float = 1e-6
    pattern: tuple[Kind, ...] = ("global",)
    window: int | None = None
    rotary: nn.Rotary = _ROTARY
    local_rotary: nn.Rotary | None = None
    query_scalar: int | float | None = None
    attention_cap: float | None = None
    final_cap: float | None = None
    post_norms: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    tied_head: bool = True
    attention_dropout: float = 0.0

    def __post_init__(self):
        check_choices(self)
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; pass a divisor")
        if not self.pattern or {*self.pattern} - {"local", "global"}:
            raise ValueError(f"pattern={self.pattern!r} is not understood; make it of 'local' and 'global'")
        if "local" in self.pattern and (self.window is None or self.window < 1):
            raise ValueError(f"window={self.window} is no number of tokens for local layers; pass window >= 1")
        if self.local_rotary is not None and self.local_rotary.scale != self.rotary.scale:
            raise ValueError(
                f"local_rotary.scale={self.local_rotary.scale} is not rotary.scale={self.rotary.scale}; use one"
            )

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What each layer is."""
        return tuple(self.pattern[layer % len(self.pattern)] for layer in range(self.depth))


class Block(eqx.Module):
    norm1: nn.RMSNorm
    attention: nn.Attention
    post_norm1: nn.RMSNorm | None
    norm2: nn.RMSNorm
    mlp: nn.GatedMLP
    post_norm2: nn.RMSNorm | None

    def __init__(
        self,
        dim: int,
        attention: nn.Attention,
        mlp: nn.GatedMLP,
        *,
        norm: Callable[[int], nn.RMSNorm],
        post_norms: bool,
    ):
        self.norm1 = norm(dim)
        self.attention = attention
        self.post_norm1 = norm(dim) if post_norms else None
        self.norm2 = norm(dim)
        self.mlp = mlp
        self.post_norm2 = norm(dim) if post_norms else None

    def __call__(
        self,
        x: Float[Array, "tokens dim"],
        *,
        window: Int[Array, ""] | None,
        rotary: Float[Array, "tokens pairs"],
        scale: float,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "tokens dim"]:
        attend = partial(self.attention, causal=True, window=window, rotary=rotary, scale=scale, key=key)
        return self._joined(x, attend(self.norm1(x)))

    def extend(
        self, x: Float[Array, "tokens dim"], look: Look, rotary: Float[Array, "tokens pairs"]
    ) -> tuple[Float[Array, "tokens dim"], nn.KVCache]:
        mixed, new = self.attention.around(look, self.norm1(x), rotary=rotary)
        return self._joined(x, mixed), new

    def _joined(self, x: Float[Array, "tokens dim"], mixed: Float[Array, "tokens dim"]) -> Float[Array, "tokens dim"]:
        """The block's output, of its input and of what attention made of that."""
        x = x + (mixed if self.post_norm1 is None else self.post_norm1(mixed))
        y = self.mlp(self.norm2(x))
        return x + (y if self.post_norm2 is None else self.post_norm2(y))


class Gemma(eqx.Module):
    """Token ids to the logits of each next token.

    An id outside of the vocabulary is no error, for JAX reads the nearest row of the table instead (and counts a
    negative id from its end): check ids where they come from.
    """

    embedding: nn.Embedding
    blocks: nn.Stack[Block]
    norm: nn.RMSNorm
    head: nn.Linear | None
    config: GemmaConfig = eqx.field(static=True)

    def __init__(self, config: GemmaConfig, *, key: PRNGKeyArray):
        key_embedding, key_blocks, key_head = jax.random.split(key, 3)
        init, norm = partial(normal, std=_STD), partial(nn.RMSNorm, offset=1.0)

        def make_block(key: PRNGKeyArray) -> Block:
            key_attention, key_mlp = jax.random.split(key)
            attention = nn.Attention(
                config.dim,
                config.heads,
                kv_heads=config.kv_heads,
                dim_head=config.dim_head,
                qkv_bias=config.attention_bias,
                out_bias=config.attention_bias,
                qk_norm=norm if config.qk_norm else None,
                qk_norm_eps=config.norm_eps,
                rotary_scale=config.rotary.scale,
                cap=config.attention_cap,
                weight_dropout=config.attention_dropout,
                init=init,
                key=key_attention,
            )
            activation = nn.activation(config.activation)
            mlp = nn.GatedMLP(config.dim, config.hidden, activation=activation, init=init, key=key_mlp)
            return Block(
                config.dim, attention, mlp, norm=partial(norm, eps=config.norm_eps), post_norms=config.post_norms
            )

        self.embedding = nn.Embedding(config.vocab, config.dim, std=_STD, key=key_embedding)
        self.blocks = nn.Stack(make_block, config.depth, key=key_blocks)
        self.norm = norm(config.dim, eps=config.norm_eps)
        head = partial(nn.Linear, config.dim, config.vocab, use_bias=False, init=init)
        self.head = None if config.tied_head else head(key=key_head)
        self.config = config

    @typed
    def hidden(self, tokens: Int[Array, " tokens"], *, key: PRNGKeyArray | None = None) -> Float[Array, "tokens dim"]:
        """What the head sees of each token: the last block's output, normalised."""
        length = tokens.shape[0]
        if length == 0:
            raise ValueError("Gemma: tokens is empty; pass at least one, such as the begin-of-text token")
        angles = self._angles(jnp.arange(length), length)
        scale, window = self._scale, self.config.window

        def step(block: Block, x: Array, layer: tuple[Array, Array | None]) -> tuple[Array, None]:
            is_local, key = layer
            of_layer = None if window is None else jnp.where(is_local, window, length)
            rotary = jnp.where(is_local, angles["local"], angles["global"])
            return block(x, window=of_layer, rotary=rotary, scale=scale, key=key), None

        keys = None if key is None else jax.random.split(key, self.config.depth)
        return self.norm(self.blocks.scan(step, self._embedded(tokens), (jnp.asarray(self._is_local), keys))[0])

    @typed
    def __call__(
        self, tokens: Int[Array, " tokens"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "tokens vocab"]:
        return self.logits(self.hidden(tokens, key=key))

    @typed
    def logits(self, hidden: Float[Array, "*axes dim"]) -> Float[Array, "*axes vocab"]:
        """The scores of each next token."""
        logits, cap = self.embedding.scores(hidden) if self.head is None else self.head(hidden), self.config.final_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def empty_cache(self, length: int, *, dtype: DTypeLike | None = None) -> nn.Cache:
        """What `extend` keeps of up to `length` tokens, before the first one; local layers keep their window."""
        config, dtype = self.config, self.embedding.weight.dtype if dtype is None else dtype
        places = {"local": min(length, config.window or length), "global": length}
        empty = partial(nn.KVCache.empty, kv_heads=config.kv_heads, dim_head=config.dim_head, dtype=dtype)
        kinds = config.kinds
        return nn.Cache.empty({kind: empty(kinds.count(kind), places=places[kind]) for kind in {*kinds}}, length)

    @typed
    def extend(
        self, tokens: Int[Array, " tokens"], cache: nn.Cache, *, count: Int[Array, ""] | None = None
    ) -> tuple[Float[Array, "tokens dim"], nn.Cache]:
        """What the head sees of tokens that follow those in the cache, and the cache with the first `count` of them."""
        config, position, length = self.config, cache.position, tokens.shape[0]
        angles = self._angles(position + jnp.arange(length), cache.length)

        def look(kind: Kind, number: Array) -> Look:
            """How the layer that is the `number`th of its kind attends."""
            window = config.window if kind == "local" else None
            attend = partial(nn.attend_cached, position=position, window=window, scale=self._scale)
            held = cache.layers[kind]
            return lambda query, new: attend(query, new, nn.entry(held, number), cap=config.attention_cap)

        def step(block: Block, x: Array, layer: tuple[Array, Array]) -> tuple[Array, nn.KVCache]:
            of_window, number = layer
            looks = {kind: look(kind, number) for kind in cache.layers}
            either = lambda query, new: jax.lax.cond(of_window, looks["local"], looks["global"], query, new)
            rotary = jnp.where(of_window, angles["local"], angles["global"])
            return block.extend(x, either if len(looks) == 2 else looks[config.kinds[0]], rotary)

        is_local = self._is_local
        numbers = np.where(is_local, np.cumsum(is_local), np.cumsum(~is_local)) - 1
        x, new = self.blocks.scan(step, self._embedded(tokens), (jnp.asarray(is_local), jnp.asarray(numbers)))
        of_kind = {"local": np.flatnonzero(is_local), "global": np.flatnonzero(~is_local)}
        new = {kind: jax.tree.map(lambda array, of=of_kind[kind]: array[of], new) for kind in cache.layers}
        return self.norm(x), cache.extend(new, length, count)

    def _embedded(self, tokens: Int[Array, " tokens"]) -> Float[Array, "tokens dim"]:
        x = self.embedding(tokens)
        return x * jnp.asarray(sqrt(self.config.dim), x.dtype)  # rounded to it, as upstream

    def _angles(self, positions: Int[Array, " tokens"], length: int) -> dict[Kind, Float[Array, "tokens pairs"]]:
        config = self.config
        rotary: dict[Kind, nn.Rotary] = {"local": config.local_rotary or config.rotary, "global": config.rotary}
        return {kind: each.angles(positions, config.dim_head, length) for kind, each in rotary.items()}

    @property
    def _is_local(self) -> Bool[np.ndarray, " depth"]:
        return np.array([kind == "local" for kind in self.config.kinds])

    @property
    def _scale(self) -> float:
        return 1 / sqrt(self.config.query_scalar or self.config.dim_head)


# What the sizes of a generation have in common.
_GEMMA2 = partial(
    GemmaConfig,
    dim_head=256,
    query_scalar=256,
    pattern=("local", "global"),
    window=4096,
    attention_cap=50.0,
    final_cap=30.0,
    post_norms=True,
)
_GEMMA3 = partial(
    GemmaConfig,
    dim_head=256,
    query_scalar=256,
    vocab=262208,
    context=131072,
    pattern=("local", "local", "local", "local", "local", "global"),
    window=1024,
    rotary=_WIDEST,
    local_rotary=_ROTARY,
    post_norms=True,
    qk_norm=True,
)
_GEMMA3_TEXT = partial(_GEMMA3, window=512, vocab=262144, context=32768, rotary=_WIDE)

VARIANTS = {
    "gemma-2b": GemmaConfig(dim=2048, depth=18, heads=8, kv_heads=1, hidden=16384),
    "gemma-7b": GemmaConfig(dim=3072, depth=28, heads=16, kv_heads=16, hidden=24576),
    "gemma-2-2b": _GEMMA2(dim=2304, depth=26, heads=8, kv_heads=4, hidden=9216),
    "gemma-2-9b": _GEMMA2(dim=3584, depth=42, heads=16, kv_heads=8, hidden=14336),
    "gemma-2-27b": _GEMMA2(dim=4608, depth=46, heads=32, kv_heads=16, hidden=36864, dim_head=128, query_scalar=144),
    "gemma-3-270m": _GEMMA3_TEXT(dim=640, depth=18, heads=4, kv_heads=1, hidden=2048),
    "gemma-3-1b": _GEMMA3_TEXT(dim=1152, depth=26, heads=4, kv_heads=1, hidden=6912),
    "gemma-3-4b": _GEMMA3(dim=2560, depth=34, heads=8, kv_heads=4, hidden=10240),
    "gemma-3-12b": _GEMMA3(dim=3840, depth=48, heads=16, kv_heads=8, hidden=15360),
    "gemma-3-27b": _GEMMA3(dim=5376, depth=62, heads=32, kv_heads=16, hidden=21504, dim_head=128, query_scalar=168),
}

FAMILY = Family(
    Gemma,
    GemmaConfig,
    VARIANTS,
    upstreams={
        "transformers_gemma": Upstream(
            upstream.GEMMA,
            upstream.GEMMA_OPTIONS,
            names=("gemma-[27]b",),
            model_type="gemma",
            architecture="GemmaForCausalLM",
            base="gemma-7b",
        ),
        "transformers_gemma2": Upstream(
            upstream.GEMMA2,
            upstream.GEMMA2_OPTIONS,
            names=("gemma-2-*",),
            model_type="gemma2",
            architecture="Gemma2ForCausalLM",
            base="gemma-2-2b",
        ),
        "transformers_gemma3": Upstream(
            upstream.GEMMA2,
            upstream.GEMMA3_OPTIONS,
            names=("gemma-3-*",),
            model_type="gemma3_text",
            architecture="Gemma3ForCausalLM",
            base="gemma-3-4b",
        ),
        "transformers_gemma3_whole": Upstream(
            upstream.GEMMA3_WHOLE, upstream.GEMMA3_WHOLE_OPTIONS, model_type="gemma3", base="gemma-3-4b"
        ),
        "transformers_gemma3_whole_5": Upstream(upstream.GEMMA3_WHOLE_5),
    },
    sharding=upstream.SHARDING,
    adapters={},
)
