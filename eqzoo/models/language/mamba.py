"""Mamba (Gu and Dao, 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", arXiv 2312.00752).

Upstream: transformers' `MambaForCausalLM`, and the files that the authors' mamba_ssm wrote. Deviations: the state is
float32 at least also beside weights in half precision; a fresh model has upstream's default time steps.
"""

from dataclasses import dataclass
from functools import partial
from math import ceil, sqrt
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
class MambaConfig:
    """A block is `expand` times as wide inside. Its time steps have `time_step_rank` dimensions, a sixteenth of `dim`
    if None. `residual_in_float32` keeps what the blocks add up to in float32 also beside weights in half precision."""

    dim: int
    depth: int
    expand: int = 2
    state: int = 16
    kernel: int = 4
    time_step_rank: int | None = None
    vocab: int = 50280
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "tanh"] = "silu"
    use_bias: bool = False
    use_conv_bias: bool = True
    norm_eps: float = 1e-5
    residual_in_float32: bool = True
    tied_head: bool = True

    def __post_init__(self):
        check_choices(self)

    @property
    def inner(self) -> int:
        return self.expand * self.dim


class Mixer(eqx.Module):
    """The paper's figure 3, right: a gated convolution, then the selective state space."""

    in_proj: nn.Linear
    gate: nn.Linear
    conv: nn.CausalConv1d
    x_proj: nn.Linear
    dt_proj: nn.Linear
    dt_bias: Float[Array, " inner"]
    A_log: Float[Array, "inner state"]
    D: Float[Array, " inner"]
    out_proj: nn.Linear
    activation: str = eqx.field(static=True)

    def __init__(
        self,
        dim: int,
        inner: int,
        state: int,
        kernel: int,
        time_step_rank: int,
        *,
        activation: str,
        use_bias: bool,
        use_conv_bias: bool,
        key: PRNGKeyArray,
    ):
        key_in, key_gate, key_conv, key_x, key_dt, key_bias, key_out = jax.random.split(key, 7)
        init = partial(normal, std=_STD)
        self.in_proj = nn.Linear(dim, inner, use_bias=use_bias, init=init, key=key_in)
        self.gate = nn.Linear(dim, inner, use_bias=use_bias, init=init, key=key_gate)
        init_conv = partial(uniform, bound=1 / sqrt(kernel))
        self.conv = nn.CausalConv1d(inner, kernel, use_bias=use_conv_bias, init=init_conv, key=key_conv)
        self.x_proj = nn.Linear(inner, time_step_rank + 2 * state, use_bias=False, init=init, key=key_x)
        init_dt = partial(uniform, bound=1 / sqrt(time_step_rank))
        self.dt_proj = nn.Linear(time_step_rank, inner, use_bias=False, init=init_dt, key=key_dt)
        self.dt_bias = time_step_bias(key_bias, inner)
        self.A_log = jnp.asarray(np.tile(np.log(np.arange(1, state + 1)), (inner, 1)), jnp.float32)
        self.D = jnp.ones(inner, jnp.float32)
        init_out = partial(uniform, bound=1 / sqrt(inner))
        self.out_proj = nn.Linear(inner, dim, use_bias=use_bias, init=init_out, key=key_out)
        self.activation = activation

    def __call__(
        self, x: Float[Array, "tokens dim"], before: State, count: Int[Array, ""] | None
    ) -> tuple[Float[Array, "tokens dim"], State]:
        rank, state = self.dt_proj.weight.shape[1], self.A_log.shape[1]
        u, inputs = self.conv(self.in_proj(x), before.inputs, count=count)
        u = nn.activation(self.activation)(u)
        dt, B, C = jnp.split(self.x_proj(u), (rank, rank + state), axis=-1)
        dt = jax.nn.softplus(at_least_float32(self.dt_proj(dt)) + self.dt_bias)
        if count is not None:  # the state stands still where no time passes
            dt = jnp.where(jnp.arange(len(dt))[:, None] < count, dt, 0)
        u, B, C = at_least_float32(u), at_least_float32(B), at_least_float32(C)
        y, last = selective_scan(
            dt * u, dt, B, C, -jnp.exp(at_least_float32(self.A_log).T), before.state.astype(dt.dtype)
        )
        y = (y + u * self.D) * jax.nn.silu(at_least_float32(self.gate(x)))
        return self.out_proj(y.astype(x.dtype)), State(inputs, last.astype(before.state.dtype))


def selective_scan(
    u: Float[Array, "tokens inner"],
    dt: Float[Array, "tokens inner"],
    B: Float[Array, "tokens state"],
    C: Float[Array, "tokens state"],
    A: Float[Array, "state inner"],
    start: Float[Array, "state inner"],
) -> tuple[Float[Array, "tokens inner"], Float[Array, "state inner"]]:
    """`C @ h` for each token, where `h = exp(dt * A) * h + outer(B, u)`, and the last `h`.

    For the backward pass only every 64th `h` is kept, and those between are computed again.
    """
    scan = jax.checkpoint(partial(_scan_chunk, A), prevent_cse=False)
    tokens = u.shape[0]
    if tokens <= _CHUNK:
        last, y = scan(start, (u, dt, B, C))
        return y, last
    chunks = -(-tokens // _CHUNK)
    pad = lambda x: jnp.pad(x, ((0, chunks * _CHUNK - tokens), (0, 0))).reshape(chunks, _CHUNK, -1)
    last, y = jax.lax.scan(scan, start, (pad(u), pad(dt), pad(B), pad(C)))
    return y.reshape(chunks * _CHUNK, -1)[:tokens], last


Chunk = tuple[Float[Array, "tokens _"], ...]  # u, dt, B and C


def _scan_chunk(
    A: Float[Array, "state inner"], start: Float[Array, "state inner"], chunk: Chunk
) -> tuple[Float[Array, "state inner"], Float[Array, "tokens inner"]]:
    # Token by token, a CPU reads and writes least; the others need more to do at a time.
    return jax.lax.platform_dependent(A, start, chunk, cpu=_one_by_one, default=_all_at_once)


def _one_by_one(
    A: Float[Array, "state inner"], start: Float[Array, "state inner"], chunk: Chunk
) -> tuple[Float[Array, "state inner"], Float[Array, "tokens inner"]]:
    # As products, these are computed once, and so are their gradients' sums: five times faster on CPU. As products of
    # a batch, though of one, they are not what a `Stack` keeps for the backward pass.
    outer = lambda a, b: jnp.einsum("bs,bi->bsi", a[None], b[None])[0]

    def step(h, token):
        u, dt, B, C = token
        h = jnp.exp(outer(jnp.ones_like(B), dt) * A) * h + outer(B, u)
        return h, C @ h

    return jax.lax.scan(jax.checkpoint(step, prevent_cse=False), start, chunk)


def _all_at_once(
    A: Float[Array, "state inner"], start: Float[Array, "state inner"], chunk: Chunk
) -> tuple[Float[Array, "state inner"], Float[Array, "tokens inner"]]:
    u, dt, B, C = chunk
    combine = lambda earlier, later: (earlier[0] * later[0], later[0] * earlier[1] + later[1])
    steps = jnp.exp(dt[:, None] * A), B[:, :, None] * u[:, None]
    decays, added = jax.lax.associative_scan(combine, steps)
    h = decays * start + added
    return h[-1], jnp.einsum("ts,tsi->ti", C, h)


def _block(config: MambaConfig, key: PRNGKeyArray) -> Block[Mixer]:
    rank = ceil(config.dim / 16) if config.time_step_rank is None else config.time_step_rank
    return Block(
        nn.RMSNorm(config.dim, eps=config.norm_eps),
        Mixer(
            config.dim,
            config.inner,
            config.state,
            config.kernel,
            rank,
            activation=config.activation,
            use_bias=config.use_bias,
            use_conv_bias=config.use_conv_bias,
            key=key,
        ),
    )


class Mamba(eqx.Module):
    """Token ids to the logits of each next token."""

    embedding: nn.Embedding
    blocks: nn.Stack[Block[Mixer]]
    norm: nn.RMSNorm
    head: nn.Linear | None
    config: MambaConfig = eqx.field(static=True)

    def __init__(self, config: MambaConfig, *, key: PRNGKeyArray):
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
            raise ValueError("Mamba: tokens is empty; pass at least one, such as the end-of-text token")
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
        inputs = (config.depth, config.kernel - 1, config.inner)
        state = (config.depth, config.state, config.inner)
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
    "mamba-130m": MambaConfig(dim=768, depth=24),
    "mamba-370m": MambaConfig(dim=1024, depth=48),
    "mamba-790m": MambaConfig(dim=1536, depth=48),
    "mamba-1.4b": MambaConfig(dim=2048, depth=48),
    "mamba-2.8b": MambaConfig(dim=2560, depth=64),
}

_BLOCK = (
    Rule(r"norm\.weight", "norm.weight"),
    Rule(r"mixer\.in_proj\.(weight|bias)", ("mixer.in_proj.{0}", "mixer.gate.{0}"), SPLIT),
    Rule(r"mixer\.conv1d\.(weight|bias)", "mixer.conv.{0}"),
    Rule(r"mixer\.(x_proj|dt_proj|out_proj)\.weight", "mixer.{0}.weight"),
    Rule(r"mixer\.out_proj\.bias", "mixer.out_proj.bias"),
    Rule(r"mixer\.dt_proj\.bias", "mixer.dt_bias"),
    Rule(r"mixer\.(A_log|D)", "mixer.{0}"),
)

TRANSFORMERS = upstream.rules(_BLOCK)
TRANSFORMERS_BODY = upstream.rules(_BLOCK, prefix="")  # as transformers' `MambaModel` is saved
MAMBA_SSM = upstream.rules(_BLOCK, embedding="embedding")


def _prepare(options: dict[str, Any]) -> dict[str, Any]:
    """With upstream's own depth where none is stated, and without the rank that follows from the width."""
    rank, usual = options.get("time_step_rank", "auto"), ceil(options.get("hidden_size", 768) / 16)
    return {"num_hidden_layers": 32, **options, "time_step_rank": None if rank in ("auto", usual) else rank}


def _restore(options: dict[str, Any]) -> dict[str, Any]:
    rank = options["time_step_rank"]
    return {**options, "time_step_rank": "auto" if rank is None else rank}


OPTIONS = Options(
    {**upstream.OPTIONS, "time_step_rank": "time_step_rank"},
    fixed={"rms_norm": True},
    ignored=upstream.IGNORED,
    prepare=_prepare,
    restore=_restore,
)

SHARDING = (
    # By columns: the vocabulary's size has no useful divisor.
    (r"(embedding|head)\.weight", P(None, ("model", "fsdp"))),
    (r".*mixer\.(in_proj|gate|dt_proj)\.weight", P("model", "fsdp")),
    (r".*mixer\.(x_proj|out_proj)\.weight", P("fsdp", "model")),
    (r".*mixer\.((in_proj|gate|conv)\.bias|conv\.weight|dt_bias|A_log|D)", P("model")),
)

FAMILY = Family(
    Mamba,
    MambaConfig,
    VARIANTS,
    upstreams={
        "transformers": Upstream(
            TRANSFORMERS, OPTIONS, names=("*",), model_type="mamba", architecture="MambaForCausalLM", base="mamba-130m"
        ),
        "transformers_body": Upstream(TRANSFORMERS_BODY),
        "mamba_ssm": Upstream(MAMBA_SSM),
    },
    sharding=SHARDING,
    adapters={},
)
