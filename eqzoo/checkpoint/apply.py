"""The strict applier: each tensor is used exactly once and each leaf filled exactly once, or a report says why not."""

import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from eqzoo._memory import aligned
from eqzoo.checkpoint.errors import CheckpointError
from eqzoo.checkpoint.formats import Tensor
from eqzoo.checkpoint.rules import Alias, Drop, Rule
from eqzoo.tree import leaves_with_paths

Rules = Sequence[Rule | Drop | Alias]
Slot = tuple[str, tuple[int, ...]]
Place = Callable[[str, jax.ShapeDtypeStruct, np.ndarray], jax.Array]

_LAYER = re.compile(r"\[(\d+)\]")
_CHUNK = 2**24  # bytes
_MAX_COMPARED = 40_000  # pairs of names take a fraction of a second; of two sides with more, none is a misspelling
_MAX_COMPARED_NAME = 200


@dataclass
class Plan:
    """Which source tensor fills which leaves, and everything that doesn't fit."""

    moves: list[tuple[str, Rule, list[Slot]]] = field(default_factory=list)
    aliases: list[tuple[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # each a name and what it should be: "head.bias (10,)"
    unexpected: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def problems(self) -> int:
        return len(self.missing) + len(self.unexpected) + len(self.wrong)

    def report(self, source: str, model: str) -> str:
        """One sentence, then both sides in full."""
        lines = [
            f"{source} does not fit {model}: {len(self.missing)} missing, {len(self.unexpected)} unexpected, "
            f"{len(self.wrong)} of a wrong shape or kind"
        ]
        absent = [line.partition(" ")[0] for line in self.missing]
        for title, names in (
            ("missing from the file", _with_nearest(self.missing, absent, self.unexpected)),
            ("unexpected in the file", _with_nearest(self.unexpected, self.unexpected, absent)),
            ("wrong", self.wrong),
        ):
            if names:
                lines += [f"  {title}:", *[f"    {name}" for name in names]]
        return "\n".join(lines)


def plan(skeleton: PyTree, tensors: Mapping[str, Tensor], rules: Rules) -> Plan:
    """Match a checkpoint's names and shapes with a model's, without reading a number."""
    leaves = dict(_array_leaves(skeleton))
    slots = {slot: None for path, leaf in leaves.items() for slot in _slots_and_groups(path, leaf.shape)}
    open_slots = {slot: None for path, leaf in leaves.items() for slot in _slots(path, leaf.shape)}
    result = Plan()
    for name, tensor in tensors.items():
        rule, targets = _first_that_applies(name, rules, slots)
        if rule is None or (isinstance(rule, Alias) and rule.of not in tensors):
            result.unexpected.append(name)
        elif isinstance(rule, Alias):
            result.aliases.append((name, rule.of))
        elif isinstance(rule, Rule):
            filled = [each for slot in targets for each in _within(slot, leaves[slot[0]].shape)]
            taken = [_format(slot) for slot in filled if slot not in open_slots]
            if taken:
                result.wrong.append(f"{name}: another tensor already fills {', '.join(taken)}")
                continue
            misfit = _misfit(tensor, rule, [_slot_leaf(leaves, slot) for slot in targets])
            if misfit:
                result.wrong.append(f"{name}: {misfit}")
            for slot in filled:
                del open_slots[slot]
            result.moves.append((name, rule, targets))
    result.missing = _missing(open_slots, leaves, rules)
    return result


def fill(skeleton: PyTree, tensors: Mapping[str, Tensor], fit: Plan, place: Place | None = None) -> PyTree:
    """The skeleton with its arrays read from the checkpoint: each number is copied once, straight into its place.

    `place(path, leaf, array)` makes a leaf's JAX array of its numbers, by default on the default device. Each leaf is
    placed before the next is read.
    """
    leaves = dict(_array_leaves(skeleton))
    parts: dict[str, list[Part]] = {path: [] for path in leaves}
    for name, rule, slots in fit.moves:
        shapes = [_slot_leaf(leaves, slot).shape for slot in slots]
        for number, (path, index) in enumerate(slots):
            parts[path].append(Part(tensors[name], rule, shapes, number, index))
    for name, of in fit.aliases:
        if not np.array_equal(tensors[name].view(), tensors[of].view()):
            raise CheckpointError(
                f"tensor {name!r} should repeat {of!r} but holds other numbers, so its weights are not tied; "
                f"load it into a model with a separate head"
            )
        tensors[name].release()
        tensors[of].release()
    place = place or place_on_default_device
    filled = []
    for path, leaf in leaves.items():
        # Waiting for each transfer bounds the host's memory by one leaf.
        filled.append(jax.block_until_ready(place(path, leaf, _read_leaf(path, leaf, parts[path]))))
    placed = iter(filled)
    return jax.tree.map(lambda leaf: next(placed) if _is_array(leaf) else leaf, skeleton)


def place_on_default_device(path: str, leaf: jax.ShapeDtypeStruct, array: np.ndarray) -> jax.Array:
    """The numbers as a JAX array; on a CPU they stay where they are, for `fill` has aligned them."""
    return jax.device_put(array)  # jnp.asarray would compile a program that copies them


class Part(NamedTuple):
    """One part of what a tensor becomes by a rule, and the layer it is for (or none, of an unstacked leaf)."""

    tensor: Tensor
    rule: Rule
    shapes: Sequence[tuple[int, ...]]
    number: int
    layer: tuple[int, ...]


def _read_leaf(path: str, leaf: jax.ShapeDtypeStruct, parts: Sequence[Part]) -> np.ndarray:
    array = aligned(leaf.shape, np.dtype(leaf.dtype))
    held = sum(len(_within((path, part.layer), leaf.shape)) for part in parts)
    if held < len(_slots(path, leaf.shape)):  # the tensor of an optional rule isn't there
        array[...] = 0
    for tensor, rule, shapes, number, layer in parts:
        _copy(rule.transform.forward(tensor.view(), shapes)[number], array[(*layer, ...)], tensor.release)
    return array


def _copy(source: np.ndarray, target: np.ndarray, release: Callable[[], None]) -> None:
    """Row by row where there are many, so that the file's pages don't add up beside their copies."""
    if source.shape != target.shape:
        raise ValueError(f"a rule made an array of shape {source.shape} for a leaf of shape {target.shape}")
    source, target = np.atleast_1d(source, target)
    rows = max(1, _CHUNK // max(1, target[:1].nbytes))
    for begin in range(0, len(target), rows):
        target[begin : begin + rows] = source[begin : begin + rows]
        release()


def unfill(model: PyTree, rules: Rules) -> dict[str, np.ndarray]:
    """The rules run backwards: the tensors of an upstream checkpoint of this model."""
    leaves = _array_leaves(model)
    slots = {slot for path, leaf in leaves for slot in _slots_and_groups(path, leaf.shape)}
    parts: dict[str, dict[str, np.ndarray]] = {}
    used: dict[str, Rule] = {}
    lost = []
    for path, leaf in leaves:
        array = np.asarray(leaf)
        for slot in _slots(path, leaf.shape):
            slot, rule, source = _rule_and_source(slot, rules, slots)
            if rule is None:
                lost.append(_format(slot))
            else:
                parts.setdefault(source, {})[_format(slot)] = array[(*slot[1], ...)]
                used[source] = rule
    if lost:
        raise CheckpointError(f"no rule names a place upstream for {', '.join(lost)}; add a rule for it to the family")
    return {
        source: used[source].transform.backward([named[leaf] for leaf in used[source].leaves_of(source) or ()])
        for source, named in parts.items()
    }


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _array_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    return [(path, leaf) for path, leaf in leaves_with_paths(tree) if _is_array(leaf)]


def _slots(path: str, shape: tuple[int, ...]) -> list[Slot]:
    """A leaf's places to fill: one, or one for each layer of the stacks around it."""
    return [(path, index) for index in np.ndindex(shape[: path.count("[*]")])]


def _slots_and_groups(path: str, shape: tuple[int, ...]) -> list[Slot]:
    """The slots, and what a rule may fill at once: all that inner stacks hold of one layer of the outer ones."""
    stacks = path.count("[*]")
    return [(path, index) for depth in range(stacks + 1) for index in np.ndindex(shape[:depth])]


def _within(slot: Slot, shape: tuple[int, ...]) -> list[Slot]:
    """The slots of a group; a slot itself is a group of one."""
    path, index = slot
    return [(path, (*index, *inner)) for inner in np.ndindex(shape[len(index) : path.count("[*]")])]


def _slot_leaf(leaves: Mapping[str, Any], slot: Slot) -> jax.ShapeDtypeStruct:
    leaf = leaves[slot[0]]
    return jax.ShapeDtypeStruct(leaf.shape[len(slot[1]) :], leaf.dtype)


def _parse(target: str) -> Slot:
    """A slot, or of a target that ends in `[*]`s, a group."""
    return _LAYER.sub("[*]", target), tuple(int(number) for number in _LAYER.findall(target))


def _format(slot: Slot) -> str:
    numbers = iter(slot[1])
    return re.sub(r"\[\*\]", lambda _: f"[{next(numbers, '*')}]", slot[0])


def _first_that_applies(
    name: str, rules: Rules, slots: Mapping[Slot, None]
) -> tuple[Rule | Drop | Alias | None, list[Slot]]:
    for rule in rules:
        if isinstance(rule, Rule):
            if rule.forward.fullmatch(name):
                targets = [_parse(leaf) for leaf in rule.leaves_of(name) or ()]
                if all(target in slots for target in targets):
                    return rule, targets
        elif re.fullmatch(rule.source, name):
            return rule, []
    return None, []


def _rule_and_source(slot: Slot, rules: Rules, slots: Collection[Slot]) -> tuple[Slot, Rule | None, str]:
    """The first rule backwards that has a place in the model for all it would fill, its tensor, and the slot or the
    smallest group around it that the rule speaks of.
    """
    path, index = slot
    for group in [(path, index[:depth]) for depth in range(len(index), -1, -1)]:
        target = _format(group)
        for rule in rules:
            if not isinstance(rule, Rule) or not any(pattern.fullmatch(target) for pattern in rule.backward):
                continue
            if (source := rule.source_of(target)) is not None:
                targets = rule.leaves_of(source) or ()
                if len(targets) == 1 or all(_parse(leaf) in slots for leaf in targets):
                    return group, rule, source
    return slot, None, _format(slot)


def _misfit(tensor: Tensor, rule: Rule, leaves: list[jax.ShapeDtypeStruct]) -> str | None:
    expected = _upstream_shape(rule, leaves)
    if tensor.shape != expected:
        return f"shape {tensor.shape} in the file, {expected} in the model"
    for kind in (jnp.floating, jnp.integer):
        if jnp.issubdtype(leaves[0].dtype, kind) and not jnp.issubdtype(tensor.dtype, kind):
            return f"dtype {tensor.dtype} in the file, {leaves[0].dtype} in the model"
    return None


def _upstream_shape(rule: Rule, leaves: list[jax.ShapeDtypeStruct]) -> tuple[int, ...]:
    """The shape of the source tensor of these leaves: a one-byte stand-in of each goes through the rule backwards."""
    return rule.transform.backward([np.empty(leaf.shape, np.int8) for leaf in leaves]).shape


def _missing(open_slots: Mapping[Slot, None], leaves: Mapping[str, Any], rules: Rules) -> list[str]:
    """What is missing by its upstream name, once a tensor."""
    slots = {slot for path, leaf in leaves.items() for slot in _slots_and_groups(path, leaf.shape)}
    missing: dict[str, str] = {}
    for slot in open_slots:
        _, rule, source = _rule_and_source(slot, rules, slots)
        if rule is None:
            missing[source] = f"{source} {_slot_leaf(leaves, slot).shape}, a leaf that no rule names"
        elif source not in missing and not rule.optional:
            parts = [_slot_leaf(leaves, _parse(leaf)) for leaf in rule.leaves_of(source) or ()]
            missing[source] = f"{source} {_upstream_shape(rule, parts)}"
    return list(missing.values())


def _with_nearest(lines: Sequence[str], names: Sequence[str], others: Sequence[str]) -> Sequence[str]:
    """The lines, each with the nearest of the other side's names where one is near."""
    others = [name for name in others if len(name) <= _MAX_COMPARED_NAME]
    if len(names) * len(others) > _MAX_COMPARED:
        return lines
    near = [difflib.get_close_matches(name[:_MAX_COMPARED_NAME], others, n=1, cutoff=0.8) for name in names]
    return [f"{line} (near {found[0]})" if found else line for line, found in zip(lines, near, strict=True)]
