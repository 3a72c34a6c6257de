"""Mamba-2 (Dao and Gu, 2024, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured
State Space Duality", arXiv 2405.21060).

Upstream: transformers' `Mamba2ForCausalLM`, and the files that the authors' mamba_ssm wrote. Deviations: the state is
float32 at least also beside weights in half precision; `time_step_limit` holds while tokens are generated one by one
too, which upstream forgets; a fresh model has upstream's default time steps.
"""

from dataclasses import dataclass
from functools import partial
from math import inf, sqrt
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import check_choices, typed
from eqzoo.checkpoint import SPLIT, Rule
from eqzoo.models._family import Family, Options, Upstream
from eqzoo.models.language import _mamba_upstream as upstream
from eqzoo.models.language._mamba_blocks import Block, State, time_step_bias
from eqzoo.nn._init import normal, uniform
from eqzoo.nn._precision import at_least_float32

_STD = 0.1
_CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class Mamba2Config:
    """A block is `expand` times as wide inside, in heads of `dim_head` channels; heads of one of the `groups` share
    what they write to their states and read from them. `residual_in_float32` keeps what the blocks add up to in float32
    also beside weights in half precision."""

    dim: int
    depth: int
    expand: int = 2
    dim_head: int = 64
    groups: int = 1
    state: int = 128
    kernel: int = 4
    time_step_limit: tuple[float, float] = (0.0, inf)
    vocab: int = 50288
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "tanh"] = "silu"
    use_bias: bool = False
    use_conv_bias: bool = True
    norm_eps: float = 1e-5
    residual_in_float32: bool = True
    tied_head: bool = True

    def __post_init__(self):
        check_choices(self)
        if self.inner % self.dim_head:
            raise ValueError(
                f"dim_head={self.dim_head} does not divide expand={self.expand} times dim={self.dim}; choose a divisor"
            )
        if self.heads % self.groups:
            raise ValueError(f"{self.heads} heads can't share groups={self.groups}; choose a divisor")

    @property
    def inner(self) -> int:
        return self.expand * self.dim

    @property
    def heads(self) -> int:
        return self.inner // self.dim_head


class Mixer(eqx.Module):
    """The paper's figure 6, right, but that time steps are not convolved."""

    gate: nn.Linear
    in_proj: nn.Linear
    dt_proj: nn.Linear
    conv: nn.CausalConv1d
    dt_bias: Float[Array, " heads"]
    A_log: Float[Array, " heads"]
    D: Float[Array, " heads"]
    norm: nn.RMSNorm
    out_proj: nn.Linear
    groups: int = eqx.field(static=True)
    time_step_limit: tuple[float, float] = eqx.field(static=True)
    activation: str = eqx.field(static=True)

    def __init__(
        self,
        dim: int,
        inner: int,
        heads: int,
        groups: int,
        state: int,
        kernel: int,
        *,
        time_step_limit: tuple[float, float],
        activation: str,
        use_bias: bool,
        use_conv_bias: bool,
        norm_eps: float,
        key: PRNGKeyArray,
    ):
        key_gate, key_in, key_dt, key_conv, key_bias, key_out = jax.random.split(key, 6)
        init = partial(normal, std=_STD)
        channels = inner + 2 * groups * state
        self.gate = nn.Linear(dim, inner, use_bias=use_bias, init=init, key=key_gate)
        self.in_proj = nn.Linear(dim, channels, use_bias=use_bias, init=init, key=key_in)
        self.dt_proj = nn.Linear(dim, heads, use_bias=use_bias, init=init, key=key_dt)
        init_conv = partial(uniform, bound=1 / sqrt(kernel))
        self.conv = nn.CausalConv1d(channels, kernel, use_bias=use_conv_bias, init=init_conv, key=key_conv)
        self.dt_bias = time_step_bias(key_bias, heads)
        self.A_log = jnp.asarray(np.log(np.arange(1, heads + 1)), jnp.float32)
        self.D = jnp.ones(heads, jnp.float32)
        self.norm = nn.RMSNorm(inner, eps=norm_eps, groups=groups)
        init_out = partial(uniform, bound=1 / sqrt(inner))
        self.out_proj = nn.Linear(inner, dim, use_bias=use_bias, init=init_out, key=key_out)
        self.groups = groups
        self.time_step_limit = time_step_limit
        self.activation = activation

    def __call__(
        self, x: Float[Array, "tokens dim"], before: State, count: Int[Array, ""] | None
    ) -> tuple[Float[Array, "tokens dim"], State]:
        tokens, (inner,), (heads,) = x.shape[0], self.norm.weight.shape, self.D.shape
        u, inputs = self.conv(self.in_proj(x), before.inputs, count=count)
        u = at_least_float32(nn.activation(self.activation)(u))
        u, B, C = jnp.split(u, (inner, (inner + u.shape[1]) // 2), axis=-1)
        dt = jax.nn.softplus(at_least_float32(self.dt_proj(x)) + self.dt_bias)
        dt = jnp.clip(dt, *self.time_step_limit)
        if count is not None:  # the state stands still where no time passes
            dt = jnp.where(jnp.arange(tokens)[:, None] < count, dt, 0)
        u = u.reshape(tokens, heads, -1)
        y, last = structured_scan(
            u * dt[:, :, None],
            -dt * jnp.exp(at_least_float32(self.A_log)),
            B.reshape(tokens, self.groups, -1),
            C.reshape(tokens, self.groups, -1),
            before.state.astype(dt.dtype),
        )
        y = (y + u * self.D[:, None]).reshape(tokens, inner)
        y = self.norm(y * jax.nn.silu(at_least_float32(self.gate(x))))
        return self.out_proj(y.astype(x.dtype)), State(inputs, last.astype(before.state.dtype))


def structured_scan(
    u: Float[Array, "tokens heads dim_head"],
    a: Float[Array, "tokens heads"],
    B: Float[Array, "tokens groups state"],
    C: Float[Array, "tokens groups state"],
    start: Float[Array, "heads dim_head state"],
) -> tuple[Float[Array, "tokens heads dim_head"], Float[Array, "heads dim_head state"]]:
    """`h @ C` for each token and head, where `h = exp(a) * h + outer(u, B)`, and the last `h`.

    As matrix products within chunks of 64 tokens (the paper's section 6). For the backward pass only the `h` before
    each chunk is kept.
    """
    tokens, heads, dim_head = u.shape
    groups = B.shape[1]
    u, a = (x.reshape(tokens, groups, heads // groups, *x.shape[2:]) for x in (u, a))
    h = start.reshape(groups, heads // groups, dim_head, -1)
    scan = jax.checkpoint(_scan_chunk, prevent_cse=False)
    if tokens <= _CHUNK:
        h, y = scan(h, (u, a, B, C))
    else:
        chunks = -(-tokens // _CHUNK)
        room = chunks * _CHUNK - tokens
        pad = lambda x: jnp.pad(x, ((0, room), *[(0, 0)] * (x.ndim - 1))).reshape(chunks, _CHUNK, *x.shape[1:])
        h, y = jax.lax.scan(scan, h, (pad(u), pad(a), pad(B), pad(C)))
    return y.reshape(-1, heads, dim_head)[:tokens], h.reshape(start.shape)


def _scan_chunk(
    h: Float[Array, "groups heads dim_head state"],
    chunk: tuple[
        Float[Array, "tokens groups heads dim_head"],
        Float[Array, "tokens groups heads"],
        Float[Array, "tokens groups state"],
        Float[Array, "tokens groups state"],
    ],
) -> tuple[Float[Array, "groups heads dim_head state"], Float[Array, "tokens groups heads dim_head"]]:
    u, a, B, C = chunk
    a = a.transpose(1, 2, 0)
    order = jnp.arange(len(u))
    later, not_before = order[:, None] > order, order[:, None] >= order
    # What token t finds of what token s wrote: a sum from s to t, for a difference of two sums would round.
    decay = jnp.exp(jnp.cumsum(jnp.where(later, a[..., None], 0), axis=-2))
    decay = jnp.where(not_before, decay, 0)
    since_start = jnp.exp(jnp.cumsum(a, axis=-1))
    weights = jnp.einsum("tgn,sgn->gts", C, B)[:, None] * decay
    old = jnp.einsum("tgn,grpn->grtp", C, h) * since_start[..., None]
    y = jnp.einsum("grts,sgrp->grtp", weights, u) + old
    left = u * decay[:, :, -1].transpose(2, 0, 1)[..., None]
    return h * since_start[:, :, -1, None, None] + jnp.einsum("sgrp,sgn->grpn", left, B), y.transpose(2, 0, 1, 3)


def _block(config: Mamba2Config, key: PRNGKeyArray) -> Block[Mixer]:
    return Block(
        nn.RMSNorm(config.dim, eps=config.norm_eps),
        Mixer(
            config.dim,
            config.inner,
            config.heads,
            config.groups,
            config.state,
            config.kernel,
            time_step_limit=config.time_step_limit,
            activation=config.activation,
            use_bias=config.use_bias,
            use_conv_bias=config.use_conv_bias,
            norm_eps=config.norm_eps,
            key=key,
        ),
    )


class Mamba2(eqx.Module):
    """Token ids to the logits of each next token."""

    embedding: nn.Embedding
    blocks: nn.Stack[Block[Mixer]]
    norm: nn.RMSNorm
    head: nn.Linear | None
    config: Mamba2Config = eqx.field(static=True)

    def __init__(self, config: Mamba2Config, *, key: PRNGKeyArray):
        key_embedding, key_blocks, key_head = jax.random.split(key, 3)
        self.embedding = nn.Embedding(config.vocab, config.dim, std=_STD, key=key_embedding)
        self.blocks = nn.Stack(partial(_block, config), config.depth, key=key_blocks)
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        head = partial(nn.Linear, config.dim, config.vocab, use_bias=False, init=partial(normal, std=_STD))
        self.head = None if config.tied_head else head(key=key_head)
        self.config = config

    @typed
    def hidden(self, tokens: Int[Array, " tokens"], *, key: PRNGKeyArray | None = None) -> Float[Array, "tokens dim"]:
        """What the head sees of each token: the last block's output, normalised."""
        if not tokens.shape[0]:
            raise ValueError("Mamba2: tokens is empty; pass at least one, such as the end-of-text token")
        return self.extend(tokens, self.empty_cache(tokens.shape[0]))[0]

    @typed
    def __call__(
        self, tokens: Int[Array, " tokens"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "tokens vocab"]:
        return self.logits(self.hidden(tokens, key=key))

    @typed
    def logits(self, hidden: Float[Array, "*axes dim"]) -> Float[Array, "*axes vocab"]:
        return self.embedding.scores(hidden) if self.head is None else self.head(hidden)

    def empty_cache(self, length: int, *, dtype: DTypeLike | None = None) -> nn.Cache:
        """The states before any token, of one size whatever the `length`; without a `dtype`, in float32 at least."""
        config = self.config
        inputs = (config.depth, config.kernel - 1, config.inner + 2 * config.groups * config.state)
        state = (config.depth, config.heads, config.dim_head, config.state)
        return nn.Cache.empty(State.empty(inputs, state, dtype=dtype, own=self.embedding.weight.dtype), length)

    @typed
    def extend(
        self, tokens: Int[Array, " tokens"], cache: nn.Cache, *, count: Int[Array, ""] | None = None
    ) -> tuple[Float[Array, "tokens dim"], nn.Cache]:
        """What the head sees of tokens that follow those in the cache, and the cache with the first `count` of them."""
        x = self.embedding(tokens)
        dtype = x.dtype
        x = at_least_float32(x) if self.config.residual_in_float32 else x
        x, after = self.blocks.scan(lambda block, x, before: block(x, before, count), x, cache.layers)
        return self.norm(x).astype(dtype), cache.extend(after, tokens.shape[0], count)


VARIANTS = {
    "mamba2-130m": Mamba2Config(dim=768, depth=24),
    "mamba2-370m": Mamba2Config(dim=1024, depth=48),
    "mamba2-780m": Mamba2Config(dim=1536, depth=48),
    "mamba2-1.3b": Mamba2Config(dim=2048, depth=48),
    "mamba2-2.7b": Mamba2Config(dim=2560, depth=64),
    "Mamba-Codestral-7B-v0.1": Mamba2Config(dim=4096, depth=64, groups=8, vocab=32768, tied_head=False),
}

_BLOCK = (
    Rule(r"norm\.weight", "norm.weight"),
    Rule(
        r"mixer\.in_proj\.(weight|bias)",
        ("mixer.gate.{0}", "mixer.in_proj.{0}", "mixer.dt_proj.{0}"),
        SPLIT,
    ),
    Rule(r"mixer\.conv1d\.(weight|bias)", "mixer.conv.{0}"),
    Rule(r"mixer\.(dt_bias|A_log|D)", "mixer.{0}"),
    Rule(r"mixer\.norm\.weight", "mixer.norm.weight"),
    Rule(r"mixer\.out_proj\.(weight|bias)", "mixer.out_proj.{0}"),
)

TRANSFORMERS = upstream.rules(_BLOCK)
TRANSFORMERS_BODY = upstream.rules(_BLOCK, prefix="")  # as transformers' `Mamba2Model` is saved
MAMBA_SSM = upstream.rules(_BLOCK, embedding="embedding")


def _prepare(options: dict[str, Any]) -> dict[str, Any]:
    """Without the number of heads, which follows from the widths, and with infinity as a number."""
    options = dict(options)
    heads, width = options.pop("num_heads", 128), options.get("head_dim", 64)
    dim, expand = options.get("hidden_size", 4096), options.get("expand", 2)
    if heads * width != expand * dim:
        raise ValueError(
            f"num_heads={heads} times head_dim={width} is not expand={expand} times hidden_size={dim}, as it should be"
        )
    if "time_step_limit" in options:
        # transformers 5 writes what JSON has no number for as an object.
        number = lambda limit: float(limit["__float__"] if isinstance(limit, dict) else limit)
        options["time_step_limit"] = list(map(number, options["time_step_limit"]))
    return options


def _restore(options: dict[str, Any]) -> dict[str, Any]:
    heads = options["expand"] * options["hidden_size"] // options["head_dim"]
    return {**options, "num_heads": heads}


OPTIONS = Options(
    {**upstream.OPTIONS, "head_dim": "dim_head", "n_groups": "groups", "time_step_limit": "time_step_limit"},
    fixed={"rms_norm": True},
    # There is no rank, and the gate comes before the norm whatever a file says.
    ignored=(*upstream.IGNORED, "time_step_rank|norm_before_gate"),
    prepare=_prepare,
    restore=_restore,
)

SHARDING = (
    # By columns: the vocabulary's size has no useful divisor.
    (r"(embedding|head)\.weight", P(None, ("model", "fsdp"))),
    (r".*mixer\.(gate|in_proj|dt_proj)\.weight", P("model", "fsdp")),
    (r".*mixer\.out_proj\.weight", P("fsdp", "model")),
    (r".*mixer\.((gate|in_proj|dt_proj|conv)\.bias|(conv|norm)\.weight|dt_bias|A_log|D)", P("model")),
)

FAMILY = Family(
    Mamba2,
    Mamba2Config,
    VARIANTS,
    upstreams={
        "transformers": Upstream(
            TRANSFORMERS,
            OPTIONS,
            names=("*",),
            model_type="mamba2",
            architecture="Mamba2ForCausalLM",
            base="Mamba-Codestral-7B-v0.1",
        ),
        "transformers_body": Upstream(TRANSFORMERS_BODY),
        "mamba_ssm": Upstream(MAMBA_SSM),
    },
    sharding=SHARDING,
    adapters={},
)
