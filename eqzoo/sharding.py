"""Meshes and partition rules: where a model's numbers live. Models never mention a mesh.

A mesh has three axes. "data" splits the batch; "fsdp" splits the batch and the weights; "model" splits the weights so
that each device computes a part of every layer (tensor parallelism). Any of them may be 1.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from eqzoo._model import Frozen
from eqzoo._registry import family_of
from eqzoo.nn._init import is_traced
from eqzoo.train.options import NOT_SAVED
from eqzoo.train.state import TrainState
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


@dataclass(frozen=True)
class Devices:
    """The devices a script runs on, of this machine or of all machines of a job, as options of its command line."""

    mesh: str | None = None
    """How the devices share the work, as in `data=4,fsdp=2`; they all split the batch unless it is given."""
    distributed: bool = field(default=False, metadata=NOT_SAVED)
    """Join the other processes of this job. SLURM, Kubernetes, MPI and TPUs say by themselves which those are."""
    coordinator: str | None = field(default=None, metadata=NOT_SAVED)
    """If nothing says so by itself: host:port of process 0."""
    processes: int | None = field(default=None, metadata=NOT_SAVED)
    """If nothing says so by itself: how many processes there are."""
    process: int | None = field(default=None, metadata=NOT_SAVED)
    """If nothing says so by itself: which of them this is, from 0."""

    def start(self) -> Mesh:
        """Join the other processes if there are any, and lay out the devices of all; the first thing that a script does
        with JAX.
        """
        if self.distributed:
            if self.coordinator is not None and not re.fullmatch(r".+:\d+", self.coordinator):
                raise ValueError(f"--coordinator {self.coordinator}: expected HOST:PORT, as in 10.0.0.1:1234")
            # Two programs at a time on a CPU may talk to the other processes in another order there, and wait for ever.
            jax.config.update("jax_cpu_enable_async_dispatch", False)
            try:
                jax.distributed.initialize(self.coordinator, self.processes, self.process)
            except ValueError as error:
                raise ValueError(
                    f"--distributed: no cluster says which processes there are ({error}); "
                    f"give each process --coordinator HOST:PORT --processes N --process I"
                ) from error
        elif (self.coordinator, self.processes, self.process) != (None, None, None):
            raise ValueError("--coordinator, --processes and --process need --distributed; add it, or leave them out")
        if self.mesh is None:
            return make_mesh(data=jax.device_count())
        return make_mesh(**_sizes(self.mesh))


def _sizes(mesh: str) -> dict[str, int]:
    sizes = dict(re.findall(r"(data|fsdp|model)=([1-9]\d*)", mesh))
    if mesh != ",".join(f"{axis}={size}" for axis, size in sizes.items()):
        raise ValueError(f"--mesh {mesh}: expected sizes of data, fsdp and model, as in data=4,fsdp=2")
    return {axis: int(size) for axis, size in sizes.items()}


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """For arrays whose first axis is the batch."""
    # In this order: with ("data", "fsdp"), XLA's partitioner mixes up the examples of weights split over "fsdp" on the
    # way back, and gradients come out wrong (JAX 0.10.2 and 0.12.0).
    return NamedSharding(mesh, PartitionSpec(("fsdp", "data")))


def shardings(tree: PyTree, mesh: Mesh, rules: Rules | None = None) -> PyTree:
    """Where each array of a model, or of a tree shaped like it, belongs.

    The first rule whose regex matches a leaf's whole path counts; no rule means a copy on every device. The layer axes
    of a stack are not split. A mesh axis that doesn't divide the array's axis is left out for it. Without `rules`,
    those of the model's family are used; in a `TrainState` they hold for the optimizer's moments and the average too.
    """
    if rules is None:
        rules = _own_rules(tree)

    def place(path, leaf):
        if not eqx.is_array(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct):
            return None
        name = re.sub(r"(\.layer)+\.", ".", path)  # LoRA and Int8 hold the layer they are around as their `layer`
        spec = next((spec for pattern, spec in rules if re.fullmatch(pattern, name)), PartitionSpec())
        layers = path.count("[*]")
        parts = [_dividing(part, size, mesh) for part, size in zip(spec, leaf.shape[layers:], strict=False)]
        return NamedSharding(mesh, PartitionSpec(*[None] * layers, *parts))

    return map_with_path(place, tree)


def _own_rules(tree: PyTree) -> Rules:
    family = family_of(tree.model if isinstance(tree, TrainState) else tree)
    if family is None:
        return ()
    if isinstance(tree, TrainState):  # what belongs to a weight has the weight's path at the end of its own
        return [(rf"(?:.*\.)?(?:{pattern})", spec) for pattern, spec in family.sharding]
    return family.sharding


def _dividing(part: str | tuple[str, ...] | None, size: int, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes of `part` that an array axis of this size can be split over."""
    kept = ()
    for axis in (part,) if isinstance(part, str) else part or ():
        if size % (mesh.shape[axis] * int(np.prod([mesh.shape[name] for name in kept], dtype=int))) == 0:
            kept = (*kept, axis)
    return kept


def shard(tree: Tree, mesh: Mesh, rules: Rules | None = None) -> Tree:
    """Place a model's arrays on the mesh by `shardings`; what has no rules, such as a state, goes to every device.

    At the end of a jitted step, it keeps the new arrays where the old ones were.
    """
    if isinstance(tree, Frozen):
        parts = shard(tree.model, mesh, rules), shard(tree.state, mesh)
        return eqx.tree_at(lambda frozen: (frozen.model, frozen.state), tree, parts)
    arrays, static = eqx.partition(tree, eqx.is_array)
    return eqx.combine(_placed(arrays, shardings(arrays, mesh, rules)), static)


def _placed(arrays: PyTree, places: PyTree) -> PyTree:
    if any(map(is_traced, jax.tree.leaves(arrays))):
        return jax.lax.with_sharding_constraint(arrays, places)
    # With several hosts, device_put takes no keys.
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    data = jax.tree.map(lambda leaf: jax.random.key_data(leaf) if is_key(leaf) else leaf, arrays)
    as_before = lambda leaf, old: jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(old)) if is_key(old) else leaf
    return jax.tree.map(as_before, jax.device_put(data, places), arrays)


def shard_batch(batch: Tree, mesh: Mesh) -> Tree:
    """Split the leading axis of each array over "data" and "fsdp".

    On many hosts, each passes its own part of the batch, in the order of the processes, and gets the whole one back.
    """
    hosts, parts = jax.process_count(), mesh.shape["data"] * mesh.shape["fsdp"]
    for x in jax.tree.leaves(batch):
        if len(x) * hosts % parts:
            raise ValueError(
                f"a batch of {len(x) * hosts} examples has no {parts} parts of one size, "
                f"for data={mesh.shape['data']} x fsdp={mesh.shape['fsdp']} devices; "
                f"choose a batch size that is a multiple of {parts}"
            )
    places = batch_sharding(mesh)
    if hosts == 1:
        return jax.device_put(batch, places)
    if _rows_are_local(mesh):
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(places, np.asarray(x)), batch)
    # The devices of a host need rows that another host has read: those are sent from there.
    by_host = np.array(sorted(mesh.devices.flat, key=lambda device: device.process_index)).reshape(hosts, -1)
    read = NamedSharding(Mesh(by_host, ("host", "device")), PartitionSpec("host"))
    rows = jax.tree.map(lambda x: jax.make_array_from_process_local_data(read, np.asarray(x)), batch)
    return jax.device_put(rows, places)


def _rows_are_local(mesh: Mesh) -> bool:
    """Whether the batch in the order of the processes is also in the order of the devices."""
    hosts, size = jax.process_count(), mesh.size
    host_of = lambda row: row * hosts // size
    for device, (rows,) in batch_sharding(mesh).devices_indices_map((size,)).items():
        start, stop, _ = rows.indices(size)
        if not host_of(start) == host_of(stop - 1) == device.process_index:
            return False
    return True


def gather(tree: Tree, mesh: Mesh) -> Tree:
    """A whole copy of each array on every device: what one host needs to write or to read all of it."""
    arrays, static = eqx.partition(tree, eqx.is_array)
    return eqx.combine(_placed(arrays, NamedSharding(mesh, PartitionSpec())), static)
