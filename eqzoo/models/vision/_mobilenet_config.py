"""What a mobile network is made of: runs of like blocks, in stages, between a stem and a top.

Papers, TensorFlow's model garden and timm write such networks as tables, one row a run: `ir_r2_k5_s2_e6_c40_se0.25` is
an inverted residual, 2 in a row, kernel 5, stride 2 for the first, expansion 6, 40 channels, squeeze-and-excite to a
quarter. `table` reads that notation, and `scaled` widens and deepens what it says, as EfficientNet does.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal, NamedTuple, get_args

from eqzoo import nn
from eqzoo._types import check_choices

Kernel = int | tuple[int, ...]
Kind = Literal["conv", "separable", "inverted", "fused", "universal", "attention"]


class Run(NamedTuple):
    """`repeats` blocks of one kind; the first takes the `stride` and comes to `channels`.

    `expansion` is the width within a block by that of its input, `squeeze` that of its gate (0: none; see
    `MobileNetConfig`). `activation` and `group_size` (the channels that a filter sees) are the block's where they
    differ from the network's and from 1. Without `shortcut`, a block is not added to its input. Kernels that are tuples
    divide the channels among sizes. `start_kernel` and `end_kernel` are those of an inverted residual's 1x1
    convolutions, or of a universal one's filter before its expansion (0: none). `heads`, `dim_head` and `kv_stride` are
    an attention's.
    """

    kind: Kind
    channels: int
    repeats: int = 1
    kernel: Kernel = 3
    stride: int = 1
    expansion: float = 1.0
    squeeze: float = 0.0
    activation: str | None = None
    shortcut: bool = True
    group_size: int = 1
    start_kernel: Kernel = 1
    end_kernel: Kernel = 1
    last_activation: bool = False
    heads: int = 0
    dim_head: int = 0
    kv_stride: int = 1

    def __repr__(self) -> str:
        """Only what is not the default."""
        options = zip(self._fields[2:], self[2:], strict=True)
        words = [f", {name}={value!r}" for name, value in options if value != self._field_defaults[name]]
        return f"Run({self.kind!r}, {self.channels}{''.join(words)})"


Stages = tuple[tuple[Run, ...], ...]


@dataclass(frozen=True, kw_only=True)
class MobileNetConfig:
    """`stages` are tuples of runs; see `Run`.

    `top` is what comes before the head: nothing, a 1x1 convolution with norm before the pool ("conv"), or a linear
    layer after the pool: with a bias, without, or with a norm ("pooled_bias", "pooled", "pooled_norm"). The hidden
    width of a block's gate is its `squeeze` by the width of the block's "input" or of the "expanded" channels that it
    gates, rounded to a multiple of `squeeze_divisor` (the next if that is below `squeeze_limit` of it); its activation
    is the block's if none is named.

    `output_stride` is how many times smaller than the image the last map is: below 32, the last stages dilate their
    filters instead of striding, from the block that would have strided on with `dilate_at_once` (torchvision), or
    else from the one after it (timm).
    """

    stages: tuple[tuple[Any, ...], ...]
    stem_width: int = 32
    stem_kernel: int = 3
    top: Literal["none", "conv", "pooled_bias", "pooled", "pooled_norm"] = "conv"
    top_width: int = 1280
    activation: str = "relu"
    padding: Literal["centred", "same_tf"] = "centred"
    norm_eps: float = 1e-5
    norm_momentum: float = 0.1
    squeeze_of: Literal["input", "expanded"] = "input"
    squeeze_divisor: int = 1
    squeeze_limit: float = 0.9
    squeeze_activation: str | None = None
    squeeze_gate: Literal["sigmoid", "hard_sigmoid"] = "sigmoid"
    layer_scale: float | None = None
    output_stride: Literal[8, 16, 32] = 32
    dilate_at_once: bool = False
    dropout: float = 0.0
    drop_path: float = 0.0
    in_channels: int = 3
    num_classes: int = 1000

    def __post_init__(self):
        check_choices(self)
        stages = tuple(tuple(Run(*run) for run in stage) for stage in self.stages)  # tuples, if it was read from JSON
        object.__setattr__(self, "stages", stages)
        for run in self.runs:
            _check(run)

    @property
    def runs(self) -> Iterator[Run]:
        return (run for stage in self.stages for run in stage)

    @property
    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Each block in order: its stage, the index within the stage of its run's first block, and its own in the run.

        Both indices count blocks, so that they add up to the number that upstream gives the block.
        """
        for index, stage in enumerate(self.stages):
            start = 0
            for run in stage:
                yield from ((index, start, position) for position in range(run.repeats))
                start += run.repeats


def _check(run: Run) -> None:
    if run.kind not in get_args(Kind):
        raise ValueError(f"Run: kind={run.kind!r} is unknown; choose {', '.join(map(repr, get_args(Kind)))}")
    if run.repeats < 1 or run.stride not in (1, 2):
        raise ValueError(f"{run} has repeats below 1 or a stride that is neither 1 nor 2; change them")
    if run.kind == "universal" and run.start_kernel == 1:
        raise ValueError(f"{run} has start_kernel=1, which filters nothing; pass 0 for none, or a size")
    if run.kind == "universal" and run.stride > 1 and not (run.start_kernel or run.kernel):
        raise ValueError(f"{run} has no filter to take its stride; give it a kernel")
    if run.kind == "attention" and not (run.heads and run.dim_head):
        raise ValueError(f"{run} needs heads and dim_head; pass both")


def table(*stages: str) -> Stages:
    """The stages that strings describe, each with its runs separated by spaces."""
    return tuple(tuple(_run(word) for word in stage.split()) for stage in stages)


_KINDS: dict[str, Kind] = {
    "cn": "conv",
    "ds": "separable",
    "dsa": "separable",
    "ir": "inverted",
    "er": "fused",
    "uir": "universal",
    "mqa": "attention",
}
_ACTIVATIONS = {"re": "relu", "r6": "relu6", "hs": "hard_swish", "sw": "silu"}
_NUMBERS = {
    "r": "repeats",
    "k": "kernel",
    "s": "stride",
    "e": "expansion",
    "c": "channels",
    "se": "squeeze",
    "a": "start_kernel",
    "p": "end_kernel",
    "gs": "group_size",
    "h": "heads",
    "d": "dim_head",
    "v": "kv_stride",
}


def _run(word: str) -> Run:
    """One row of the notation. `skip` and `noskip` force a shortcut on or off, `nre` an activation."""
    kind, *options = word.split("_")
    fields: dict[str, Any] = {"shortcut": kind not in ("cn", "dsa"), "last_activation": kind == "dsa"}
    for option in options:
        if option in ("skip", "noskip"):
            fields["shortcut"] = option == "skip"
        elif option[0] == "n":
            fields["activation"] = _ACTIVATIONS[option[1:]]
        else:
            letters, number, _ = re.split(r"(\d.*)", option)
            fields[_NUMBERS[letters]] = _number(letters, number)
    return Run(kind=_KINDS[kind], **fields)


def _number(letters: str, number: str) -> float | Kernel:
    if letters in ("e", "se"):
        return float(number)
    sizes = tuple(map(int, number.split(".")))
    return sizes if "." in number else int(number)


def scaled(
    stages: Stages,
    *,
    width: float = 1.0,
    depth: float | Sequence[float] = 1.0,
    divisor: int = 8,
    limit: float = 0.9,
    fixed_ends: bool = False,
    rounded: bool = False,
) -> Stages:
    """Stages with `width` times the channels and `depth` times the blocks (or each stage's own times).

    Channels are rounded to multiples of `divisor`, and up where that takes more than a tenth (1 - `limit`) away.
    Blocks are rounded up, or to the nearest with `rounded`; with `fixed_ends`, the first and last stage keep theirs.
    """
    depths = [depth] * len(stages) if isinstance(depth, int | float) else list(depth)
    if fixed_ends:
        depths[0] = depths[-1] = 1.0
    return tuple(
        tuple(
            run._replace(channels=nn.round_channels(run.channels * width, divisor, limit=limit), repeats=repeats)
            for run, repeats in zip(stage, _repeats(stage, times, rounded=rounded), strict=True)
        )
        for stage, times in zip(stages, depths, strict=True)
    )


def _repeats(stage: tuple[Run, ...], times: float, *, rounded: bool) -> list[int]:
    """A stage's blocks shared out among its runs in proportion, from the last run to the first."""
    old = sum(run.repeats for run in stage)
    new = max(1, round(old * times)) if rounded else ceil(old * times)
    shares: list[int] = []
    for run in reversed(stage):
        shares.append(max(1, round(run.repeats / old * new)))
        old, new = old - run.repeats, new - shares[-1]
    return shares[::-1]
