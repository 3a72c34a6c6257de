"""GoogLeNet, also Inception v1 (Szegedy et al., 2014, arXiv 1409.4842), with batch norm.

Upstream: torchvision `googlenet.py`, whose "5x5" convolutions are 3x3. The variant is the model that torchvision's
builder makes of its published weights: it renormalises its input and has no auxiliary heads, for those in the file were
never trained. Deviations: biases of linear layers start at zero; auxiliary logits come in the network's order.
"""

from dataclasses import dataclass
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

from eqzoo import nn
from eqzoo._types import typed
from eqzoo.checkpoint import BATCH_NORM, Drop, Rule, adapt, prefixed
from eqzoo.models._family import Family, Options, Upstream
from eqzoo.nn._init import normal

AUX_GRID = 4  # the side of the map that an auxiliary head sees

_init = partial(normal, std=0.01)
_conv = partial(nn.ConvNorm, activation=jax.nn.relu, eps=1e-3, init=_init)


@dataclass(frozen=True, kw_only=True)
class GoogLeNetConfig:
    """`blocks` has each block's widths in the order of the paper's table, stage by stage: 1x1; 1x1 and 3x3; 1x1 and
    "5x5"; 1x1 after a pool. Auxiliary heads follow the first and the last but one block of the second stage; the widths
    of their two layers are `aux`. `transform_input` takes images normalised by ImageNet's statistics.
    """

    stem: tuple[int, int, int] = (64, 64, 192)
    blocks: tuple[tuple[tuple[int, int, int, int, int, int], ...], ...] = (
        (
            (64, 96, 128, 16, 32, 32),
            (128, 128, 192, 32, 96, 64),
        ),
        (
            (192, 96, 208, 16, 48, 64),
            (160, 112, 224, 24, 64, 64),
            (128, 128, 256, 24, 64, 64),
            (112, 144, 288, 32, 64, 64),
            (256, 160, 320, 32, 128, 128),
        ),
        (
            (256, 160, 320, 32, 128, 128),
            (384, 192, 384, 48, 128, 128),
        ),
    )
    transform_input: bool = True
    aux_heads: bool = False
    aux: tuple[int, int] = (128, 1024)
    dropout: float = 0.2
    aux_dropout: float = 0.7
    in_channels: int = 3
    num_classes: int = 1000

    def __post_init__(self):
        if len(self.blocks) != 3 or not all(self.blocks) or len(self.blocks[1]) < 2:
            raise ValueError(
                f"blocks={self.blocks} has {list(map(len, self.blocks))} blocks a stage; give three stages at least "
                f"one block each, and the second two"
            )


class Inception(eqx.Module):
    """Four branches side by side, of which the last pools first."""

    branches: tuple[tuple[nn.ConvNorm, ...], ...]

    def __init__(self, in_channels: int, widths: tuple[int, int, int, int, int, int], *, key: PRNGKeyArray):
        keys = jax.random.split(key, 6)
        self.branches = (
            (_conv(in_channels, widths[0], 1, key=keys[0]),),
            (_conv(in_channels, widths[1], 1, key=keys[1]), _conv(widths[1], widths[2], 3, key=keys[2])),
            (_conv(in_channels, widths[3], 1, key=keys[3]), _conv(widths[3], widths[4], 3, key=keys[4])),
            (_conv(in_channels, widths[5], 1, key=keys[5]),),
        )

    def __call__(
        self, x: Float[Array, "height width channels"], state: eqx.nn.State
    ) -> tuple[Float[Array, "height width out"], eqx.nn.State]:
        ys = []
        for convs, y in zip(self.branches, (x, x, x, nn.max_pool(x, 3, stride=1, padding=1)), strict=True):
            y, state = nn.in_turn(convs, y, state)
            ys.append(y)
        return jnp.concatenate(ys, axis=-1), state


class AuxHead(eqx.Module):
    """A classifier halfway, which gives the blocks before it a shorter way to the loss."""

    conv: nn.ConvNorm
    fc1: nn.Linear
    dropout: nn.Dropout
    fc2: nn.Linear | None

    def __init__(
        self, in_channels: int, widths: tuple[int, int], num_classes: int, *, dropout: float, key: PRNGKeyArray
    ):
        key_conv, key1, key2 = jax.random.split(key, 3)
        width, hidden = widths
        self.conv = _conv(in_channels, width, 1, key=key_conv)
        self.fc1 = nn.Linear(AUX_GRID**2 * width, hidden, init=_init, key=key1)
        self.dropout = nn.Dropout(dropout)
        self.fc2 = nn.Linear(hidden, num_classes, init=_init, key=key2) if num_classes else None

    def __call__(
        self, x: Float[Array, "height width channels"], state: eqx.nn.State, *, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, " out"], eqx.nn.State]:
        y, state = self.conv(nn.adaptive_avg_pool(x, AUX_GRID), state)
        y = jax.nn.relu(self.fc1(y.transpose(2, 0, 1).reshape(-1)))  # torch flattens channel by channel
        y = self.dropout(y, key=key)
        return (y if self.fc2 is None else self.fc2(y)), state


class GoogLeNet(eqx.Module):
    stem: tuple[nn.ConvNorm, nn.ConvNorm, nn.ConvNorm]
    stages: tuple[tuple[Inception, ...], ...]
    aux_heads: tuple[AuxHead, AuxHead] | None
    dropout: nn.Dropout
    head: nn.Linear | None
    config: GoogLeNetConfig = eqx.field(static=True)

    def __init__(self, config: GoogLeNetConfig, *, key: PRNGKeyArray):
        number_of_blocks = sum(map(len, config.blocks))
        key1, key2, key3, key_aux1, key_aux2, key_head, *keys = jax.random.split(key, 6 + number_of_blocks)
        width1, width2, width3 = config.stem
        self.stem = (
            _conv(config.in_channels, width1, 7, stride=2, key=key1),
            _conv(width1, width2, 1, key=key2),
            _conv(width2, width3, 3, key=key3),
        )
        stages, channels = [], width3
        for blocks in config.blocks:
            stage = []
            for widths in blocks:
                stage.append(Inception(channels, widths, key=keys.pop(0)))
                channels = _out_channels(widths)
            stages.append(tuple(stage))
        self.stages = tuple(stages)
        aux_head = partial(AuxHead, widths=config.aux, num_classes=config.num_classes, dropout=config.aux_dropout)
        first, last_but_one = _out_channels(config.blocks[1][0]), _out_channels(config.blocks[1][-2])
        if config.aux_heads:
            self.aux_heads = (aux_head(first, key=key_aux1), aux_head(last_but_one, key=key_aux2))
        else:
            self.aux_heads = None
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(channels, config.num_classes, init=_init, key=key_head) if config.num_classes else None
        self.config = config

    @typed
    def features(
        self,
        x: Float[Array, "height width {self.config.in_channels}"],
        state: eqx.nn.State,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[tuple[Float[Array, "_ _ _"], ...], eqx.nn.State]:
        """The last map at 1/2, 1/4, 1/8, 1/16 and 1/32 of the image's size."""
        maps, state = self._maps(x, state)
        return tuple(stage[-1] for stage in maps), state

    @typed
    def logits_with_auxiliary(
        self,
        x: Float[Array, "height width {self.config.in_channels}"],
        state: eqx.nn.State,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[tuple[Float[Array, " _"], ...], eqx.nn.State]:
        """The head's logits; in training mode those of the auxiliary heads too, from the first to the last."""
        key_head, *aux_keys = nn.split_key(key, 3)
        maps, state = self._maps(x, state)
        pooled = self.dropout(nn.global_avg_pool(maps[-1][-1]), key=key_head)
        logits = [pooled if self.head is None else self.head(pooled)]
        if self.aux_heads is not None and not self.dropout.inference:
            for aux_head, y, aux_key in zip(self.aux_heads, (maps[3][0], maps[3][-2]), aux_keys, strict=True):
                y, state = aux_head(y, state, key=aux_key)
                logits.append(y)
        return tuple(logits), state

    @typed
    def __call__(
        self,
        x: Float[Array, "height width {self.config.in_channels}"],
        state: eqx.nn.State,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, " out"], eqx.nn.State]:
        """In training mode the auxiliary heads run too, for their running statistics."""
        logits, state = self.logits_with_auxiliary(x, state, key=key)
        return logits[0], state

    def _maps(
        self, x: Float[Array, "height width channels"], state: eqx.nn.State
    ) -> tuple[list[list[Float[Array, "_ _ _"]]], eqx.nn.State]:
        """What each block gives, stage by stage."""
        pool = partial(nn.max_pool, stride=2, ceil_mode=True)
        y, state = self.stem[0](nn.renormalise(x) if self.config.transform_input else x, state)
        maps = [[y]]
        y, state = nn.in_turn(self.stem[1:], pool(y, 3), state)
        maps.append([y])
        for blocks, window in zip(self.stages, (3, 3, 2), strict=True):
            y = pool(y, window)
            maps.append([])
            for block in blocks:
                y, state = block(y, state)
                maps[-1].append(y)
        return maps, state


def _out_channels(widths: tuple[int, int, int, int, int, int]) -> int:
    return widths[0] + widths[2] + widths[4] + widths[5]


VARIANTS = {
    "googlenet": GoogLeNetConfig(),
}

_CONV = (Rule(r"conv\.weight", "conv.weight"), *prefixed(r"bn\.", "norm.", BATCH_NORM))

_BLOCK = (
    *prefixed(r"branch1\.", "branches.0.0.", _CONV),
    *prefixed(r"branch([23])\.(\d)\.", "branches.{0-1}.{1}.", _CONV),
    *prefixed(r"branch4\.1\.", "branches.3.0.", _CONV),
)

# Files have auxiliary heads whether the model has them or not.
TORCHVISION = (
    *prefixed(r"conv(\d)\.", "stem.{0-1}.", _CONV),
    *(
        rule
        for stage in range(3)
        for block, letter in enumerate("abcde")
        for rule in prefixed(rf"inception{stage + 3}{letter}\.", f"stages.{stage}.{block}.", _BLOCK)
    ),
    *prefixed(r"aux(\d)\.conv\.", "aux_heads.{0-1}.conv.", _CONV),
    Rule(r"aux(\d)\.fc(\d)\.(weight|bias)", "aux_heads.{0-1}.fc{1}.{2}"),
    Drop(r"aux\d\..*"),
    Rule(r"fc\.(weight|bias)", "head.{0}"),
)

TORCHVISION_OPTIONS = Options(
    {
        "num_classes": "num_classes",
        "aux_logits": "aux_heads",
        "transform_input": "transform_input",
        "dropout": "dropout",
        "dropout_aux": "aux_dropout",
    }
)

SHARDING = (
    (r".*conv\.weight", P("model", "fsdp")),
    (r"aux_heads\.\d\.fc1\.weight", P("model", "fsdp")),
    (r"aux_heads\.\d\.fc1\.bias", P("model")),
    (r"aux_heads\.\d\.fc2\.weight", P("fsdp", "model")),
    (r"head\.weight", P("model", "fsdp")),
)

FAMILY = Family(
    GoogLeNet,
    GoogLeNetConfig,
    VARIANTS,
    upstreams={"torchvision": Upstream(TORCHVISION, TORCHVISION_OPTIONS, names=("googlenet",))},
    sharding=SHARDING,
    adapters={"num_classes": adapt.new_head, "in_channels": adapt.mix_channels},
)
