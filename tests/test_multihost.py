"""Two processes of JAX's own multi-host runtime, four devices each, compute what one process with eight does."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import numpy as np

import eqzoo

WORKER = """
import sys

import eqzoo  # starts no backend, or initialize() would fail
import jax

# One program after the other: two at a time may talk to the other process in another order there, and wait for ever.
jax.config.update("jax_cpu_enable_async_dispatch", False)
coordinator, processes, index, file = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if processes > 1:
    jax.distributed.initialize(coordinator, processes, index)

import equinox as eqx
import numpy as np
import optax
from eqzoo import sharding

mesh = sharding.make_mesh(data=2, fsdp=2, model=2)
config = eqzoo.ResNetConfig(block="basic", depths=(2,), widths=(8,), stem="deep", stem_width=4, num_classes=8)
model, state = eqx.nn.make_with_state(eqzoo.ResNet)(config, key=jax.random.key(0))
model, state = sharding.shard(model, mesh), sharding.shard(state, mesh)
loaded = eqzoo.load(file, trainable=True, sharding=mesh)  # the same numbers, each host placing its own
arrays = lambda pair: [leaf for leaf in jax.tree.leaves(pair) if eqx.is_array(leaf)]
for ours, given in zip(arrays((model, state)), arrays(loaded), strict=True):
    assert given.sharding.is_equivalent_to(ours.sharding, ours.ndim)
same = eqx.filter_jit(lambda *pairs: eqx.tree_equal(*pairs))(loaded, (model, state))
model, state = loaded
images, labels = np.random.default_rng(0).normal(size=(16, 16, 16, 3)).astype(np.float32), np.arange(16) % 8
part = slice(index * 16 // processes, (index + 1) * 16 // processes)
images, labels = sharding.shard_batch((images[part], labels[part]), mesh)


@eqx.filter_jit
@eqx.filter_value_and_grad(has_aux=True)
def step(model, state, images, labels):
    logits, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(images, state)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), state


(loss, state), gradients = step(model, state, images, labels)
norms = [optax.global_norm(leaf) for leaf in jax.tree.leaves((gradients, state))]
print("RESULT", jax.process_count(), *map(float, [same, loss, *norms]))
"""


def start(processes: int, index: int, coordinator: str, file: Path) -> subprocess.Popen:
    devices = f"--xla_force_host_platform_device_count={8 // processes}"
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, coordinator, str(processes), str(index), str(file)],
        env=os.environ | {"XLA_FLAGS": devices, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def results(processes: int, file: Path) -> list[list[float]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    workers = [start(processes, index, coordinator, file) for index in range(processes)]
    try:
        outputs = [worker.communicate(timeout=300)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * processes, "\n".join(outputs)
    return [[float(n) for n in out.split("RESULT", 1)[1].split("\n")[0].split()] for out in outputs]


def test_two_hosts_load_and_compute_what_one_does(tmp_path):
    config = eqzoo.ResNetConfig(block="basic", depths=(2,), widths=(8,), stem="deep", stem_width=4, num_classes=8)
    eqzoo.save(tmp_path / "model.safetensors", *eqx.nn.make_with_state(eqzoo.ResNet)(config, key=jax.random.key(0)))
    (alone,) = results(1, tmp_path / "model.safetensors")
    together = results(2, tmp_path / "model.safetensors")
    assert (alone[:2], together[0][:2], together[1][:2]) == ([1, 1], [2, 1], [2, 1])
    np.testing.assert_array_equal(together[0], together[1])
    np.testing.assert_allclose(together[0][1:], alone[1:], rtol=1e-5)
