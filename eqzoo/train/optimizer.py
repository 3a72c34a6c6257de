"""The usual optimizers and schedules, as options of a script's command line."""

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

import equinox as eqx
import jax
import optax
import optax.contrib
from jaxtyping import Array, Float, PyTree

from eqzoo import nn
from eqzoo.tree import decay_mask, layer_scales, map_with_path
from eqzoo.tree._level import LAYERS

_EMBEDDINGS = (nn.Embedding, eqx.nn.Embedding)
_EMBEDDING_OR_HEAD = re.compile(r"(.*\.)?(wte|(\w+_)?(embed|embedding|head|classifier))(\..*)?")
_ADAM_SIZE = 0.2  # root mean square of a typical update of Adam's


@dataclass(frozen=True)
class OptimizerOptions:
    """An optimizer with its schedule."""

    optimizer: Literal["adamw", "sgd", "lion", "muon"] = "adamw"
    """Muon is for the matrices and convolutions within a model; AdamW does the rest of it at the same learning rate."""
    learning_rate: float = 1e-3
    """The highest, at the end of the warm-up. Of what AdamW wants, Lion wants a tenth, SGD about a hundred times."""
    weight_decay: float = 0.05
    """Of matrices, convolutions and embeddings. SGD adds it to the gradient, and wants much less."""
    layer_decay: float = 1.0
    """Each layer learns at this share of the rate of the layer after it; 1: all learn alike."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup: float = 0.1
    """Share of the steps in which the learning rate rises from 0."""
    final: float = 0.0
    """Share of the learning rate that is left at the end, unless the schedule is constant."""
    clip_norm: float = 1.0
    """The gradient is scaled down to this norm if its own is larger; 0: never."""
    momentum: float | None = None
    """Of SGD and of Muon, both Nesterov's; by default 0.9 and 0.95."""
    betas: tuple[float, float] | None = None
    """Of AdamW, also beside Muon, and of Lion; by default 0.9 0.999 and 0.9 0.99."""

    def __post_init__(self):
        limits = {
            "learning_rate": (self.learning_rate > 0, "more than 0"),
            "weight_decay": (self.weight_decay >= 0, "0 or more"),
            "layer_decay": (0 < self.layer_decay <= 1, "more than 0 and at most 1"),
            "warmup": (0 <= self.warmup < 1, "a share of the steps, from 0 to less than 1"),
            "final": (0 <= self.final <= 1, "a share of the learning rate, from 0 to 1"),
            "clip_norm": (self.clip_norm >= 0, "0 or more"),
            "momentum": (self.momentum is None or 0 <= self.momentum < 1, "from 0 to less than 1"),
            "betas": (self.betas is None or all(0 <= beta < 1 for beta in self.betas), "each from 0 to less than 1"),
        }
        for name, (is_fine, expected) in limits.items():
            if not is_fine:
                raise ValueError(f"{name}={getattr(self, name)}: expected {expected}")

    def make(self, model: PyTree, steps: int) -> optax.GradientTransformation:
        """The optimizer of a training of that many steps, for `model` or its trainable part; one of optax's.

        ```python
        model = eqzoo.create("mlp", hidden=(8,), image_size=4, key=jax.random.key(0))[0]
        optimizer = OptimizerOptions(learning_rate=2e-3, warmup=0.5).make(model, steps=100)
        opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        ```
        """
        decay = optax.add_decayed_weights(self.weight_decay, mask=decay_mask)
        clip = [optax.clip_by_global_norm(self.clip_norm)] if self.clip_norm else []
        by_layer = [_scaled_by(layer_scales(model, self.layer_decay))] if self.layer_decay < 1 else []
        learning_rate = optax.scale_by_learning_rate(self.learning_rates(steps))
        return optax.chain(*clip, *self._steps(decay), *by_layer, learning_rate)

    def _steps(self, decay: optax.GradientTransformation) -> tuple[optax.GradientTransformation, ...]:
        """From gradients to updates, for a learning rate of 1."""
        if self.optimizer == "sgd":
            return decay, optax.trace(0.9 if self.momentum is None else self.momentum, nesterov=True)
        if self.optimizer == "lion":
            return optax.scale_by_lion(*self.betas or (0.9, 0.99)), decay
        adam = optax.scale_by_adam(*self.betas or (0.9, 0.999))
        if self.optimizer == "muon":
            matrices = _muon(0.95 if self.momentum is None else self.momentum)
            return optax.partition({"matrix": matrices, "other": adam}, _groups), decay
        return adam, decay

    def learning_rates(self, steps: int) -> optax.Schedule:
        """The learning rate of each step of a training of that many."""
        if steps < 1:
            raise ValueError(f"steps={steps}: a training takes at least one; give it more data or more epochs")
        warmup = round(self.warmup * steps)
        rest = max(1, steps - warmup)
        falling = {
            "cosine": optax.cosine_decay_schedule(self.learning_rate, rest, alpha=self.final),
            "linear": optax.linear_schedule(self.learning_rate, self.final * self.learning_rate, rest),
            "constant": optax.constant_schedule(self.learning_rate),
        }[self.schedule]
        rising = optax.linear_schedule(0.0, self.learning_rate, warmup) if warmup else falling
        return optax.join_schedules([rising, falling], [warmup])


def _scaled_by(scales: PyTree) -> optax.GradientTransformation:
    scale = lambda update, scale: (update * scale).astype(update.dtype)
    return optax.stateless(lambda updates, params: jax.tree.map(scale, updates, scales))


def _muon(momentum: float) -> optax.GradientTransformation:
    """Muon (Jordan, 2024), with updates as large as Adam's (Liu et al., 2025), so that both learn at one rate."""
    orthogonal = optax.contrib.scale_by_muon(beta=momentum, weight_dimension_numbers=_axes)
    return optax.chain(orthogonal, optax.stateless(lambda updates, params: map_with_path(_as_large_as_adam, updates)))


def _groups(tree: PyTree) -> PyTree[str]:
    """What Muon is for: the matrices within a model, from one hidden layer to the next."""

    def group(path: str, node: Any) -> Any:
        if isinstance(node, _EMBEDDINGS) or _EMBEDDING_OR_HEAD.fullmatch(path):
            return jax.tree.map(lambda leaf: "other", node)
        return "matrix" if node else "other"

    return map_with_path(group, decay_mask(tree), is_leaf=lambda node: isinstance(node, _EMBEDDINGS))


def _axes(matrices: PyTree) -> PyTree[optax.contrib.MuonDimensionNumbers]:
    """Weights are (out, in) or (out, in, height, width), after the layer axes of a stack."""

    def axes(path: str, leaf: Any) -> optax.contrib.MuonDimensionNumbers:
        out = path.count(LAYERS)
        return optax.contrib.MuonDimensionNumbers(tuple(range(out + 1, leaf.ndim)), out)

    return map_with_path(axes, matrices)


def _as_large_as_adam(path: str, update: Float[Array, "..."]) -> Float[Array, "..."]:
    out, *inputs = update.shape[path.count(LAYERS) :]
    return update * (_ADAM_SIZE * math.sqrt(max(out, math.prod(inputs))))
