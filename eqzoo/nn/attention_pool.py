"""Pooling by attention."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo.nn._init import Init
from eqzoo.nn.attention import attend, merge_heads, split_heads
from eqzoo.nn.linear import MLP, Embedding, Linear, Norm
from eqzoo.nn.norm import LayerNorm, RMSNorm


class AttentionPool(eqx.Module):
    """A learned query attends to all tokens, and a normalised MLP follows (Lee et al., 2019; Zhai et al., 2022).

    What SigLIP calls "map", multi-head attention pooling.
    """

    latent: Embedding
    query: Linear
    key: Linear
    value: Linear
    out: Linear
    norm: LayerNorm | RMSNorm
    mlp: MLP
    heads: int = eqx.field(static=True)

    def __init__(self, dim: int, heads: int, *, mlp: MLP, norm: Norm, init: Init | None = None, key: PRNGKeyArray):
        if dim % heads:
            raise ValueError(f"AttentionPool: dim={dim} is not a multiple of heads={heads}; choose a divisor of dim")
        key_latent, *keys = jax.random.split(key, 5)
        linear = partial(Linear, dim, dim, init=init)
        self.latent = Embedding(1, dim, std=dim**-0.5, key=key_latent)
        self.query, self.key, self.value, self.out = (linear(key=key) for key in keys)
        self.norm = norm(dim)
        self.mlp = mlp
        self.heads = heads

    def __call__(self, x: Float[Array, "tokens dim"], *, key: PRNGKeyArray | None = None) -> Float[Array, " dim"]:
        query = split_heads(self.query(self.latent(jnp.arange(1))), self.heads)
        keys, value = split_heads(self.key(x), self.heads), split_heads(self.value(x), self.heads)
        y = self.out(merge_heads(attend(query, keys, value)))
        return (y + self.mlp(self.norm(y), key=key))[0]
