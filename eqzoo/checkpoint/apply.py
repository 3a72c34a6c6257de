"""The strict applier: each tensor is used exactly once and each leaf filled exactly once, or a report says why not."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from eqzoo.checkpoint.errors import CheckpointError
from eqzoo.checkpoint.formats import Tensor
from eqzoo.checkpoint.rules import Alias, Drop, Rule
from eqzoo.tree import leaves_with_paths

Rules = Sequence[Rule | Drop | Alias]
Slot = tuple[str, tuple[int, ...]]

_LAYER = re.compile(r"\[(\d+)\]")


@dataclass
class Plan:
    """Which source tensor fills which leaves, and everything that doesn't fit."""

    moves: list[tuple[str, Rule, list[Slot]]] = field(default_factory=list)
    aliases: list[tuple[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
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
        for title, names in (
            ("missing from the file", self.missing),
            ("unexpected in the file", self.unexpected),
            ("wrong", self.wrong),
        ):
            if names:
                lines += [f"  {title}:", *[f"    {name}" for name in names]]
        return "\n".join(lines)


def plan(skeleton: PyTree, tensors: Mapping[str, Tensor], rules: Rules) -> Plan:
    """Match a checkpoint's names and shapes with a model's, without reading a number."""
    leaves = dict(_array_leaves(skeleton))
    slots = {slot: None for path, leaf in leaves.items() for slot in _slots(path, leaf.shape)}
    open_slots = dict(slots)
    result = Plan()
    for name, tensor in tensors.items():
        rule, targets = _first_that_applies(name, rules, slots)
        if rule is None or (isinstance(rule, Alias) and rule.of not in tensors):
            result.unexpected.append(name)
        elif isinstance(rule, Alias):
            result.aliases.append((name, rule.of))
        elif isinstance(rule, Rule):
            taken = [_format(slot) for slot in targets if slot not in open_slots]
            if taken:
                result.wrong.append(f"{name}: another tensor already fills {', '.join(taken)}")
                continue
            misfit = _misfit(tensor, rule, [_slot_leaf(leaves, slot) for slot in targets])
            if misfit:
                result.wrong.append(f"{name}: {misfit}")
            for slot in targets:
                del open_slots[slot]
            result.moves.append((name, rule, targets))
    _name_the_missing(result, open_slots, leaves, rules)
    return result


def fill(skeleton: PyTree, tensors: Mapping[str, Tensor], moves: Plan) -> PyTree:
    """The skeleton with its arrays read from the checkpoint; each tensor is read once, straight into its place."""
    leaves = dict(_array_leaves(skeleton))
    arrays = {path: np.zeros(leaf.shape, leaf.dtype) for path, leaf in leaves.items()}
    for name, rule, slots in moves.moves:
        shapes = [_slot_leaf(leaves, slot).shape for slot in slots]
        parts = rule.transform.forward(tensors[name].read(), shapes)
        for (path, index), part in zip(slots, parts, strict=True):
            arrays[path][index] = part
    for name, of in moves.aliases:
        if not np.array_equal(tensors[name].read(), tensors[of].read()):
            raise CheckpointError(
                f"tensor {name!r} should repeat {of!r} but holds other numbers, so its weights are not tied; "
                f"load it into a model with a separate head"
            )
    filled = iter([jnp.asarray(arrays[path]) for path in arrays])
    return jax.tree.map(lambda leaf: next(filled) if _is_array(leaf) else leaf, skeleton)


def unfill(model: PyTree, rules: Rules) -> dict[str, np.ndarray]:
    """The rules run backwards: the tensors of an upstream checkpoint of this model."""
    parts: dict[str, dict[str, np.ndarray]] = {}
    used: dict[str, Rule] = {}
    lost = []
    for path, leaf in _array_leaves(model):
        array = np.asarray(leaf)
        for slot in _slots(path, leaf.shape):
            target = _format(slot)
            for rule in (rule for rule in rules if isinstance(rule, Rule)):
                source = rule.source_of(target)
                if source is not None:
                    parts.setdefault(source, {})[target] = array[(*slot[1], ...)]
                    used[source] = rule
                    break
            else:
                lost.append(target)
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


def _slot_leaf(leaves: Mapping[str, Any], slot: Slot) -> jax.ShapeDtypeStruct:
    leaf = leaves[slot[0]]
    return jax.ShapeDtypeStruct(leaf.shape[len(slot[1]) :], leaf.dtype)


def _parse(target: str) -> Slot:
    return _LAYER.sub("[*]", target), tuple(int(number) for number in _LAYER.findall(target))


def _format(slot: Slot) -> str:
    numbers = iter(slot[1])
    return re.sub(r"\[\*\]", lambda _: f"[{next(numbers)}]", slot[0])


def _first_that_applies(
    name: str, rules: Rules, slots: Mapping[Slot, None]
) -> tuple[Rule | Drop | Alias | None, list[Slot]]:
    for rule in rules:
        if isinstance(rule, Rule):
            leaves = rule.leaves_of(name)
            targets = [_parse(leaf) for leaf in leaves or ()]
            if leaves is not None and all(target in slots for target in targets):
                return rule, targets
        elif re.fullmatch(rule.source, name):
            return rule, []
    return None, []


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


def _name_the_missing(result: Plan, open_slots: Mapping[Slot, None], leaves: Mapping[str, Any], rules: Rules) -> None:
    """Say what is missing by its upstream name, once a tensor, each side with the nearest name of the other."""
    absent: dict[str, str] = {}
    for slot in open_slots:
        target = _format(slot)
        rule, source = next(
            ((rule, source) for rule in rules if isinstance(rule, Rule) and (source := rule.source_of(target))),
            (None, target),
        )
        if rule is None:
            absent[source] = f"{source} {_slot_leaf(leaves, slot).shape}, a leaf that no rule names"
        elif source not in absent and not rule.optional:
            parts = [_slot_leaf(leaves, _parse(leaf)) for leaf in rule.leaves_of(source) or ()]
            absent[source] = f"{source} {_upstream_shape(rule, parts)}"
    unexpected = list(result.unexpected)
    result.missing = [line + _nearest(source, unexpected) for source, line in absent.items()]
    result.unexpected = [name + _nearest(name, list(absent)) for name in unexpected]


def _nearest(name: str, others: list[str]) -> str:
    near = difflib.get_close_matches(name, others, n=1, cutoff=0.8)
    return f" (near {near[0]})" if near else ""
