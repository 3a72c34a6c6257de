"""Stop: signals end the loop after a step; all processes of a run stop after the same one."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from eqzoo import sharding
from eqzoo.train.checkpoints import Checkpoints
from eqzoo.train.stop import Stop

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def send(number: int) -> None:
    """To this process; it has been handled when this returns."""
    signal.raise_signal(number)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_is_a_request_to_stop(number, capfd):
    with Stop() as stop:
        assert not stop.requested(1)
        send(number)
        assert stop.requested(2)
        assert stop.requested(3)
    assert f"{number.name}: finishing this step, saving" in capfd.readouterr().err


def test_signals_are_handled_as_before_afterwards():
    handlers = [signal.getsignal(number) for number in SIGNALS]
    with Stop():
        assert all(signal.getsignal(number) != handler for number, handler in zip(SIGNALS, handlers, strict=True))
        send(signal.SIGINT)
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    with pytest.raises(RuntimeError, match="mine"), Stop():
        raise RuntimeError("mine")
    assert [signal.getsignal(number) for number in SIGNALS] == handlers


@pytest.mark.parametrize("first", SIGNALS, ids=lambda number: number.name)
def test_a_second_interrupt_is_none_to_wait_for(first, capfd):
    with Stop() as stop:
        send(first)
        send(signal.SIGTERM)  # asks again, and is no interrupt
        assert stop.requested(1)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert capfd.readouterr().err.count("finishing") == 1


def test_a_new_stop_has_not_been_asked():
    with Stop():
        send(signal.SIGTERM)
    with Stop() as stop:
        assert not stop.requested(1)


WORKER = """
import sys
import time

import jax

jax.config.update("jax_cpu_enable_async_dispatch", False)
coordinator, index, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(coordinator, 2, index)

import equinox as eqx
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from eqzoo import sharding
from eqzoo.train.checkpoints import Checkpoints
from eqzoo.train.stop import Stop

mesh = sharding.make_mesh(fsdp=4)
place = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))


class Training(eqx.Module):
    weight: jax.Array
    key: jax.Array
    step: jax.Array


@eqx.filter_jit(donate="all")
def train_step(it):
    return Training(it.weight + jnp.arange(8.0), it.key, it.step + 1)


key = jax.random.wrap_key_data(place(jax.random.key_data(jax.random.key(7))))
it = Training(place(jnp.zeros(8), "fsdp"), key, place(jnp.zeros((), jnp.int32)))
with Checkpoints(folder) as checkpoints:
    it = checkpoints.restore(it)
    start = int(it.step)
    with Stop() as stop:
        for step in range(start + 1, 10_000):
            it = train_step(it)
            if step % 20 == 0:
                checkpoints.save(it)
            if step == start + 5:
                print("READY", flush=True)
            if stop.requested(step):
                checkpoints.save(it)
                break
            time.sleep(0.01)
print("STOPPED", start, step)
"""


def run_until(signalled: int, number: int, folder: Path) -> tuple[list[tuple[int, int]], list[str]]:
    """Two processes, one of which gets a signal: the steps between which each ran, and what each wrote to stderr."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, coordinator, str(index), str(folder)],
            env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        for worker in workers:
            assert "READY\n" in worker.stdout, worker.stderr.read()  # reads up to this line
        workers[signalled].send_signal(number)
        outputs, errors = zip(*[worker.communicate(timeout=120) for worker in workers], strict=True)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(errors)
    return [tuple(map(int, output.split()[-2:])) for output in outputs], list(errors)


def test_two_processes_stop_after_the_same_step_and_go_on_from_there(tmp_path):
    first, errors = run_until(1, signal.SIGTERM, tmp_path)
    assert first[0] == first[1]
    start, stopped = first[0]
    assert start == 0
    assert stopped >= 5
    assert all(f"step {stopped} was the last one" in error for error in errors)
    second, errors = run_until(0, signal.SIGINT, tmp_path)
    assert second[0] == second[1]
    assert second[0][0] == stopped
    assert "SIGINT: finishing this step, saving" in errors[0]

    # One process with eight devices reads what two with two each have written.
    step = second[0][1]
    mesh = sharding.make_mesh(data=4, fsdp=2)
    weight = jax.device_put(jnp.zeros(8), NamedSharding(mesh, PartitionSpec("fsdp")))
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest == step
        restored = checkpoints.restore({"weight": weight, "key": jax.random.key(0), "step": jnp.zeros((), jnp.int32)})
    assert restored["weight"].sharding == weight.sharding
    np.testing.assert_array_equal(restored["weight"], step * np.arange(8.0))
    assert restored["step"] == step
    assert jnp.all(jax.random.key_data(restored["key"]) == jax.random.key_data(jax.random.key(7)))
