"""Names: how a checkpoint's tensors map to a model's leaves, written once and run both ways.

    Rule(r"blocks\\.(\\d+)\\.norm1\\.(weight|bias)", "blocks[{0}].norm1.{1}")

The source is a regex of literal text and unnested groups, so that it can be read backwards. The target is a leaf's
path: `{0}` is the first group's text, `{0-1}` that number less one, `[...]` a layer of a `Stack`, `[*]` at once all
layers of one inside another.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

Shapes = Sequence[tuple[int, ...]]

_GROUP = re.compile(r"\(([^()]*)\)")
_SLOT = re.compile(r"\{(\d+)([+-]\d+)?\}")


@dataclass(frozen=True)
class Transform:
    """How one source tensor becomes the leaves of a rule (whose shapes it is told), and how they become it again."""

    forward: Callable[[np.ndarray, Shapes], Sequence[np.ndarray]]
    backward: Callable[[Sequence[np.ndarray]], np.ndarray]


def _split_rows(tensor: np.ndarray, shapes: Shapes) -> Sequence[np.ndarray]:
    return np.split(tensor, np.cumsum([shape[0] for shape in shapes])[:-1])


SAME = Transform(lambda tensor, shapes: [tensor], lambda parts: parts[0])
TRANSPOSE = Transform(lambda tensor, shapes: [tensor.T], lambda parts: parts[0].T)
SPLIT = Transform(_split_rows, np.concatenate)
SPLIT_EACH = Transform(  # one part after the other in each entry of a leading axis
    lambda tensor, shapes: np.split(tensor, np.cumsum([shape[1] for shape in shapes])[:-1], axis=1),
    lambda parts: np.concatenate(parts, axis=1),
)
TRANSPOSE_SPLIT = Transform(
    lambda tensor, shapes: _split_rows(tensor.T, shapes),
    lambda parts: np.concatenate(parts).T,
)


def flattened(size: int) -> Transform:
    """A convolution with a `size` x `size` kernel, as the linear layer on all that one window holds."""
    return Transform(
        lambda tensor, shapes: [tensor.reshape(shapes[0])],
        lambda parts: parts[0].reshape(len(parts[0]), -1, size, size),
    )


@dataclass(frozen=True)
class Rule:
    """Source tensors whose names match `source` fill the leaf, or the leaves, that `target` names.

    An `optional` leaf stays zero where a file doesn't have it.
    """

    source: str
    target: str | tuple[str, ...]
    transform: Transform = SAME
    optional: bool = False

    def __post_init__(self):
        _check_source(self.source)
        groups = len(_GROUP.findall(self.source))
        for target in self.targets:
            for number, _ in _SLOT.findall(target):
                if int(number) >= groups:
                    raise ValueError(f"rule {self.source!r}: target {target!r} uses group {number}, of {groups} groups")

    @cached_property
    def targets(self) -> tuple[str, ...]:
        return (self.target,) if isinstance(self.target, str) else self.target

    @cached_property
    def forward(self) -> re.Pattern[str]:
        """What the names of its source tensors match."""
        return re.compile(self.source)

    @cached_property
    def backward(self) -> tuple[re.Pattern[str], ...]:
        """What the paths of its leaves match, target by target."""
        return tuple(_invert(self.source, target) for target in self.targets)

    def leaves_of(self, source: str) -> tuple[str, ...] | None:
        """The leaves that a source tensor fills, or None if the rule isn't for it."""
        match = self.forward.fullmatch(source)
        return None if match is None else tuple(_fill(target, match.groups()) for target in self.targets)

    def source_of(self, leaf: str) -> str | None:
        """The source tensor that fills a leaf, or None if the rule doesn't speak of it."""
        for target, pattern in zip(self.targets, self.backward, strict=True):
            match = pattern.fullmatch(leaf)
            if match is not None:
                source = _source_name(self.source, target, match)
                return source if self.forward.fullmatch(source) else None  # `{0-1}` of 9 is no `\d`
        return None


@dataclass(frozen=True)
class Drop:
    """Source tensors that are known and not needed: buffers that the model computes."""

    source: str


@dataclass(frozen=True)
class Alias:
    """A second name under which a source may store tensor `of` again (tied weights); it must hold the same numbers."""

    source: str
    of: str


def prefixed(source: str, target: str, rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """The rules of a part (a block, a batch norm) for that part at a place in the model."""
    shift = len(_GROUP.findall(source))
    moved = lambda text: _SLOT.sub(lambda slot: f"{{{int(slot[1]) + shift}{slot[2] or ''}}}", text)
    return tuple(
        replace(rule, source=source + rule.source, target=tuple(target + moved(each) for each in rule.targets))
        for rule in rules
    )


def staged(source: str, target: str, rules: Sequence[Rule], *, start: int = 0) -> tuple[Rule, ...]:
    """The rules of a block for each block of an `nn.Stage`: upstream's number `start` is `first`, the others `rest`."""
    number = len(_GROUP.findall(source))
    return (
        *prefixed(rf"{source}{start}\.", f"{target}first.", rules),
        *prefixed(rf"{source}(\d+)\.", f"{target}rest[{{{number}-{start + 1}}}].", rules),
    )


def _check_source(source: str) -> None:
    literal = re.sub(r"\\\.", "", _GROUP.sub("", source))
    if re.search(r"[^\w-]", literal):
        raise ValueError(
            rf"rule {source!r} can't be read backwards: outside of groups use letters, digits, '_', '-' and '\.' only"
        )


def _fill(template: str, groups: Sequence[str]) -> str:
    return _SLOT.sub(
        lambda slot: str(int(groups[int(slot[1])]) + int(slot[2])) if slot[2] else groups[int(slot[1])], template
    )


def _invert(source: str, target: str) -> re.Pattern[str]:
    """The regex that reads a target's groups out of a leaf's path; group n of the source is named `g<n>`."""
    groups = _GROUP.findall(source)
    pieces, end, seen = [], 0, set()
    for slot in _SLOT.finditer(target):
        number = int(slot[1])
        pieces.append(re.escape(target[end : slot.start()]))
        pattern = r"\d+" if slot[2] else groups[number]
        pieces.append(f"(?P=g{number})" if number in seen else f"(?P<g{number}>{pattern})")
        seen.add(number)
        end = slot.end()
    return re.compile("".join(pieces) + re.escape(target[end:]))


def _source_name(source: str, target: str, match: re.Match[str]) -> str:
    offsets = {int(slot[1]): int(slot[2] or 0) for slot in _SLOT.finditer(target)}
    captured = ((offsets[number], match[f"g{number}"]) for number in range(len(_GROUP.findall(source))))
    texts = (str(int(text) - offset) if offset else text for offset, text in captured)
    return _GROUP.sub(lambda _: next(texts), source).replace(r"\.", ".")


BATCH_NORM = (
    Rule(r"(weight|bias)", "{0}"),
    Rule(r"running_(mean|var)", "running.{0}"),
    Rule(r"num_batches_tracked", "running.count", optional=True),  # files from before torch 0.4.1 have none
)
