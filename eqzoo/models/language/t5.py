"""T5 (Raffel et al., 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer"),
T5 1.1 with gated MLPs (Shazeer, 2020), Flan-T5 (Chung et al., 2022) and mT5 (Xue et al., 2021).

Upstream: transformers' `T5ForConditionalGeneration` and `MT5ForConditionalGeneration`. Deviations: none.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import check_choices, typed
from eqzoo.models._family import Family, Upstream
from eqzoo.models.language._t5_blocks import Attention, DecoderBlock, EncoderBlock, Tower
from eqzoo.models.language._t5_upstream import MT5_OPTIONS, OPTIONS, TRANSFORMERS, TRANSFORMERS_COPIED_HEAD
from eqzoo.nn._init import normal


@dataclass(frozen=True, kw_only=True)
class T5Config:
    """Distances between tokens fall into `buckets`: the near ones into one each, those from `max_distance` on into the
    last. A `tied_head` is the embedding, and sees hidden states divided by the root of `dim`. `start` is the token that
    an answer begins with. Trained on texts of `context` tokens, a model takes longer ones too."""

    dim: int
    depth: int
    decoder_depth: int
    heads: int
    hidden: int
    dim_head: int = 64
    vocab: int = 32128
    context: int = 512
    buckets: int = 32
    max_distance: int = 128
    gated: bool = False
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "relu"
    norm_eps: float = 1e-6
    tied_head: bool = True
    start: int = 0
    dropout: float = 0.1

    def __post_init__(self):
        check_choices(self)
        if self.buckets % 4 or self.max_distance <= self.buckets // 2:
            raise ValueError(
                f"buckets={self.buckets} is not a multiple of 4, or max_distance={self.max_distance} is not above half "
                f"of it; a quarter of the buckets is for near tokens on either side, such as buckets=32, "
                f"max_distance=128"
            )


def _mlp(config: T5Config, key: PRNGKeyArray) -> nn.MLP | nn.GatedMLP:
    """Its last layer starts by its own number of inputs."""
    key_mlp, key_out = jax.random.split(key)
    make, last = (nn.GatedMLP, "down") if config.gated else (nn.MLP, "fc2")
    options = {"activation": nn.activation(config.activation), "use_bias": False, "dropout": config.dropout}
    mlp = make(config.dim, config.hidden, **options, init=partial(normal, std=config.dim**-0.5), key=key_mlp)
    init = partial(normal, std=config.hidden**-0.5)
    out = nn.Linear(config.hidden, config.dim, use_bias=False, init=init, key=key_out)
    return eqx.tree_at(lambda mlp: getattr(mlp, last), mlp, out)


def _attention(config: T5Config, key: PRNGKeyArray) -> Attention:
    return Attention(config.dim, config.heads, config.dim_head, dropout=config.dropout, key=key)


def _encoder_block(config: T5Config, key: PRNGKeyArray) -> EncoderBlock:
    key_attention, key_mlp = jax.random.split(key)
    parts = _attention(config, key_attention), _mlp(config, key_mlp)
    return EncoderBlock(config.dim, *parts, norm_eps=config.norm_eps, dropout=config.dropout)


def _decoder_block(config: T5Config, key: PRNGKeyArray) -> DecoderBlock:
    key_attention, key_cross, key_mlp = jax.random.split(key, 3)
    parts = _attention(config, key_attention), _attention(config, key_cross), _mlp(config, key_mlp)
    return DecoderBlock(config.dim, *parts, norm_eps=config.norm_eps, dropout=config.dropout)


class T5(eqx.Module):
    """A text to another: the tokens of the one, and those of the other so far, to the logits of the next.

    `mask` is true where a token of the text is real and false where it fills it up. Without `answer`, the logits are
    those of its first token. An id outside of the vocabulary is no error: JAX reads the nearest row of the table.
    """

    embedding: nn.Embedding
    encoder: Tower[EncoderBlock]
    decoder: Tower[DecoderBlock]
    head: nn.Linear | None
    dropout: nn.Dropout
    config: T5Config = eqx.field(static=True)

    def __init__(self, config: T5Config, *, key: PRNGKeyArray):
        key_embedding, key_encoder, key_decoder, key_head = jax.random.split(key, 4)
        self.embedding = nn.Embedding(config.vocab, config.dim, std=1.0, key=key_embedding)
        tower = partial(Tower, config.dim, config.heads, config.buckets, norm_eps=config.norm_eps)
        self.encoder = tower(partial(_encoder_block, config), config.depth, key=key_encoder)
        self.decoder = tower(partial(_decoder_block, config), config.decoder_depth, key=key_decoder)
        init = partial(normal, std=1.0)
        self.head = (
            None if config.tied_head else nn.Linear(config.dim, config.vocab, use_bias=False, init=init, key=key_head)
        )
        self.dropout = nn.Dropout(config.dropout)
        self.config = config

    @typed
    def encode(
        self,
        tokens: Int[Array, " tokens"],
        *,
        mask: Bool[Array, " tokens"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "tokens dim"]:
        """What the decoder sees of each token of the text."""
        length = tokens.shape[0]
        if length == 0:
            raise ValueError("T5: tokens is empty; pass at least one, such as the token that ends a text")
        key_in, key_blocks, key_out = nn.split_key(key, 3)
        positions = jnp.arange(length)
        bias = self.encoder.bias(positions, positions, self.config.max_distance, both_ways=True)
        mask = _source_mask(mask, length)
        step = lambda block, x, key: (block(x, mask, bias, key=key), None)
        x = self.dropout(self.embedding(tokens), key=key_in)
        x, _ = self.encoder.blocks.scan(step, x, _layer_keys(key_blocks, self.config.depth))
        return self.dropout(self.encoder.norm(x), key=key_out)

    @typed
    def decode(
        self,
        answer: Int[Array, " answer"],
        encoded: Float[Array, "tokens dim"],
        *,
        mask: Bool[Array, " tokens"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "answer dim"]:
        """What the head sees of each token of the answer, which begins with the start token."""
        key_in, key_blocks, key_out = nn.split_key(key, 3)
        positions = jnp.arange(answer.shape[0])
        bias = self.decoder.bias(positions, positions, self.config.max_distance, both_ways=False)
        own, source_mask = nn.causal_mask(answer.shape[0]), _source_mask(mask, encoded.shape[0])

        def step(block: DecoderBlock, x: Array, key: PRNGKeyArray | None) -> tuple[Array, None]:
            source = block.cross_attention.keys_and_values(encoded)
            return block(x, None, source, mask=own, bias=bias, source_mask=source_mask, key=key)[0], None

        x = self.dropout(self.embedding(answer), key=key_in)
        x, _ = self.decoder.blocks.scan(step, x, _layer_keys(key_blocks, self.config.decoder_depth))
        return self.dropout(self.decoder.norm(x), key=key_out)

    @typed
    def hidden(
        self,
        tokens: Int[Array, " tokens"],
        answer: Int[Array, " answer"] | None = None,
        *,
        mask: Bool[Array, " tokens"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "answer dim"]:
        """`encode` and `decode`."""
        key_encoder, key_decoder = nn.split_key(key, 2)
        answer = jnp.full(1, self.config.start, tokens.dtype) if answer is None else answer
        return self.decode(answer, self.encode(tokens, mask=mask, key=key_encoder), mask=mask, key=key_decoder)

    @typed
    def logits(self, hidden: Float[Array, "*axes dim"]) -> Float[Array, "*axes vocab"]:
        return self.embedding.scores(hidden * self.config.dim**-0.5) if self.head is None else self.head(hidden)

    @typed
    def __call__(
        self,
        tokens: Int[Array, " tokens"],
        answer: Int[Array, " answer"] | None = None,
        *,
        mask: Bool[Array, " tokens"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "answer vocab"]:
        return self.logits(self.hidden(tokens, answer, mask=mask, key=key))

    def empty_cache(
        self,
        length: int,
        encoded: Float[Array, "tokens dim"],
        *,
        mask: Bool[Array, " tokens"] | None = None,
        dtype: DTypeLike | None = None,
    ) -> nn.Cache:
        """What `extend` keeps of up to `length` tokens of an answer, before the first; and of the encoded text."""
        config = self.config
        dtype = self.embedding.weight.dtype if dtype is None else dtype
        step = lambda block, carry, x: (carry, block.cross_attention.keys_and_values(encoded))
        _, source = self.decoder.blocks.scan(step, None)
        own = nn.KVCache.empty(config.decoder_depth, config.heads, length, config.dim_head, dtype=dtype)
        held = (source.key.astype(dtype), source.value.astype(dtype), _source_mask(mask, encoded.shape[0]))
        return nn.Cache.empty((own, held), length)

    @typed
    def extend(
        self, tokens: Int[Array, " tokens"], cache: nn.Cache, *, count: Int[Array, ""] | None = None
    ) -> tuple[Float[Array, "tokens dim"], nn.Cache]:
        """What the head sees of the answer's next tokens, and the cache with the first `count` of them."""
        length, position = tokens.shape[0], cache.position
        own, (keys, values, source_mask) = cache.layers
        positions = position + jnp.arange(length)
        seen = jnp.concatenate([own.positions(position), positions])
        bias = self.decoder.bias(positions, seen, self.config.max_distance, both_ways=False)
        mask = nn.cached_mask(own, position, length)

        def step(block: DecoderBlock, x: Array, layer: Any) -> tuple[Array, nn.KVCache]:
            held, source = layer
            return block(x, held, source, mask=mask, bias=bias, source_mask=source_mask)

        x, new = self.decoder.blocks.scan(step, self.embedding(tokens), (own, nn.KVCache(keys, values)))
        return self.decoder.norm(x), cache.extend((new, (keys, values, source_mask)), length, count)

    def answering(self, tokens: Int[Array, " tokens"], *, mask: Bool[Array, " tokens"] | None = None) -> "Answering":
        """A decoder like any other, for `eqzoo.generation`: its prompt is `[config.start]`, and it answers a text."""
        return Answering(self, self.encode(tokens, mask=mask), mask)


class Answering(eqx.Module):
    """A T5 and the text that it answers."""

    model: T5
    encoded: Float[Array, "tokens dim"]
    mask: Bool[Array, " tokens"] | None

    def empty_cache(self, length: int, *, dtype: DTypeLike | None = None) -> nn.Cache:
        return self.model.empty_cache(length, self.encoded, mask=self.mask, dtype=dtype)

    def extend(
        self, tokens: Int[Array, " tokens"], cache: nn.Cache, *, count: Int[Array, ""] | None = None
    ) -> tuple[Float[Array, "tokens dim"], nn.Cache]:
        return self.model.extend(tokens, cache, count=count)

    def logits(self, hidden: Float[Array, "*axes dim"]) -> Float[Array, "*axes vocab"]:
        return self.model.logits(hidden)


def _source_mask(mask: Bool[Array, " tokens"] | None, length: int) -> Bool[Array, "1 1 tokens"]:
    return (jnp.ones(length, bool) if mask is None else mask)[None, None]


def _layer_keys(key: PRNGKeyArray | None, depth: int) -> Any:
    return None if key is None else jax.random.split(key, depth)


def _variant(dim: int, depth: int, heads: int, hidden: int, **options: Any) -> T5Config:
    return T5Config(dim=dim, depth=depth, decoder_depth=depth, heads=heads, hidden=hidden, **options)


_SIZES = {
    "small": (512, 8, 6, 1024),
    "base": (768, 12, 12, 2048),
    "large": (1024, 24, 16, 2816),
    "xl": (2048, 24, 32, 5120),
    "xxl": (4096, 24, 64, 10240),
}
_GATED: dict[str, Any] = {"gated": True, "activation": "gelu_tanh", "tied_head": False}

VARIANTS = {
    "t5-small": _variant(512, 6, 8, 2048),
    "t5-base": _variant(768, 12, 12, 3072),
    "t5-large": _variant(1024, 24, 16, 4096),
    "t5-3b": _variant(1024, 24, 32, 16384, dim_head=128),
    "t5-11b": _variant(1024, 24, 128, 65536, dim_head=128),
    **{f"t5-v1_1-{name}": _variant(*size, **_GATED) for name, size in _SIZES.items()},
    **{f"flan-t5-{name}": _variant(*size, **_GATED) for name, size in _SIZES.items()},
    **{f"mt5-{name}": _variant(*size, **_GATED, vocab=250112) for name, size in _SIZES.items()},
}

SHARDING = (
    # By columns: the vocabulary's size has no useful divisor.
    (r"(embedding|head)\.weight", P(None, ("model", "fsdp"))),
    (r".*attention\.(query|key|value)\.weight", P("model", "fsdp")),
    (r".*attention\.out\.weight", P("fsdp", "model")),
    (r".*mlp\.(fc1|gate|up)\.weight", P("model", "fsdp")),
    (r".*mlp\.(fc2|down)\.weight", P("fsdp", "model")),
)

FAMILY = Family(
    T5,
    T5Config,
    VARIANTS,
    upstreams={
        "transformers": Upstream(
            TRANSFORMERS,
            OPTIONS,
            names=("t5-*", "flan-t5-*"),
            model_type="t5",
            architecture="T5ForConditionalGeneration",
            base="t5-small",
        ),
        "transformers_mt5": Upstream(
            TRANSFORMERS,
            MT5_OPTIONS,
            names=("mt5-*",),
            model_type="mt5",
            architecture="MT5ForConditionalGeneration",
            base="mt5-small",
        ),
        "transformers_copied_head": Upstream(TRANSFORMERS_COPIED_HEAD),
    },
    sharding=SHARDING,
    adapters={},
)
