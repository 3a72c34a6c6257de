"""Meshes and partition rules: where a model's numbers live. Models never mention a mesh.

A mesh has three axes. "data" splits the batch; "fsdp" splits the batch and the weights; "model" splits the weights so
that each device computes a part of every layer (tensor parallelism). Any of them may be 1.
"""

import re
from collections.abc import Sequence
from typing import TypeVar

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from eqzoo._model import Frozen
from eqzoo._registry import family_of
from eqzoo.tree import map_with_path

Tree = TypeVar("Tree")
Rules = Sequence[tuple[str, PartitionSpec]]


def make_mesh(*, data: int = 1, fsdp: int = 1, model: int = 1) -> Mesh:
    """A mesh over all devices (of all hosts); the three sizes multiply to their number."""
    devices = jax.device_count()
    if data * fsdp * model != devices:
        raise ValueError(
            f"make_mesh: data={data} x fsdp={fsdp} x model={model} is {data * fsdp * model}, "
            f"but there are {devices} devices; choose sizes that multiply to {devices}"
        )
    return jax.make_mesh((data, fsdp, model), ("data", "fsdp", "model"), axis_types=(AxisType.Auto,) * 3)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """For arrays whose first axis is the batch."""
    # In this order: with ("data", "fsdp"), XLA's partitioner mixes up the examples of weights split over "fsdp" on the
    # way back, and gradients come out wrong (JAX 0.10.2 and 0.12.0).
    return NamedSharding(mesh, PartitionSpec(("fsdp", "data")))


def shardings(tree: PyTree, mesh: Mesh, rules: Rules | None = None) -> PyTree:
    """Where each array of a model, or of a tree shaped like it, belongs.

    The first rule whose regex matches a leaf's whole path counts; no rule means a copy on every device. The layer axes
    of a stack are not split. A mesh axis that doesn't divide the array's axis is left out for it. Without `rules`,
    those of the model's family are used.
    """
    if rules is None:
        family = family_of(tree)
        rules = () if family is None else family.sharding

    def place(path, leaf):
        if not eqx.is_array(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct):
            return None
        name = re.sub(r"(\.layer)+\.", ".", path)  # LoRA and Int8 hold the layer they are around as their `layer`
        spec = next((spec for pattern, spec in rules if re.fullmatch(pattern, name)), PartitionSpec())
        layers = path.count("[*]")
        parts = [_dividing(part, size, mesh) for part, size in zip(spec, leaf.shape[layers:], strict=False)]
        return NamedSharding(mesh, PartitionSpec(*[None] * layers, *parts))

    return map_with_path(place, tree)


def _dividing(part: str | tuple[str, ...] | None, size: int, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes of `part` that an array axis of this size can be split over."""
    kept = ()
    for axis in (part,) if isinstance(part, str) else part or ():
        if size % (mesh.shape[axis] * int(np.prod([mesh.shape[name] for name in kept], dtype=int))) == 0:
            kept = (*kept, axis)
    return kept


def shard(tree: Tree, mesh: Mesh, rules: Rules | None = None) -> Tree:
    """Place a model's arrays on the mesh by `shardings`; what has no rules, such as a state, goes to every device."""
    if isinstance(tree, Frozen):
        parts = shard(tree.model, mesh, rules), shard(tree.state, mesh)
        return eqx.tree_at(lambda frozen: (frozen.model, frozen.state), tree, parts)
    arrays, static = eqx.partition(tree, eqx.is_array)
    return eqx.combine(jax.device_put(arrays, shardings(arrays, mesh, rules)), static)


def shard_batch(batch: Tree, mesh: Mesh) -> Tree:
    """Split the leading axis of each array over "data" and "fsdp".

    On many hosts, each passes its own part of the batch and gets the whole one back.
    """
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(batch_sharding(mesh), np.asarray(x)), batch)
