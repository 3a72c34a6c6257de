"""What a training loop costs beyond its compiled step: data, copies to the device, metrics, progress and the log.

Rounds of the step alone, on one batch that is on the device already, and rounds of the whole loop take turns. Each
round of the loop is divided by the mean of the two around it; the median of these ratios counts, in time and in the
processor time of all threads. The model is one whose step takes about 50 ms on two cores of a CPU. For example:

python scripts/bench_loop.py
"""

import itertools
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import equinox as eqx
import jax
import numpy as np

import eqzoo
from eqzoo import data, sharding, train

MEAN = STD = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Options:
    rounds: int = 150
    steps: int = 20
    """In each round."""
    batch_size: int = 64
    width: int = 22
    """Of the ResNet's first stage: how long a step takes."""


def main(options: Options) -> None:
    mesh = sharding.make_mesh(data=jax.device_count())
    images, _ = data.load_images("digits")
    widths = tuple(options.width * factor for factor in (1, 2, 4, 8))
    model, state = eqzoo.create("resnet18", widths=widths, num_classes=10, key=jax.random.key(0))
    optimizer = train.OptimizerOptions().make(model, 10_000)
    train_state = train.TrainState.create(model, state, optimizer, key=jax.random.key(1))
    augment = data.Augment()

    def loss_fn(model, state, batch):
        forward = jax.vmap(eqzoo.apply, axis_name="batch", in_axes=(None, None, 0), out_axes=(0, None))
        logits, state = forward(model, state, batch["image"])
        losses = train.cross_entropy(logits, batch["target"])
        metrics = {
            "loss": train.Mean.of(losses, batch["weight"]),
            "accuracy": train.accuracy(logits, batch["label"], batch["weight"]),
        }
        return train.weighted_mean(losses, batch["weight"]), (state, metrics)

    @eqx.filter_jit
    def train_step(train_state, batch):
        key = jax.random.fold_in(train_state.key, train_state.step)
        batch = augment(batch, key, classes=10, mean=MEAN, std=STD)
        gradient = eqx.filter_value_and_grad(loss_fn, has_aux=True)
        (_, (state, metrics)), grads = gradient(train_state.model, train_state.state, batch)
        parameters = eqx.filter(train_state.model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, train_state.opt_state, parameters)
        model = eqx.apply_updates(train_state.model, updates)
        train_state = train_state.next(model, state, opt_state, grads)
        return train_state, metrics | {"skipped": train_state.skipped}

    def bare(train_state, batch):
        start = clocks()
        for _ in range(options.steps):
            train_state, _ = train_step(train_state, batch)
        jax.block_until_ready(train_state)
        return clocks() - start

    def whole(train_state, batches, progress, stop, run):
        start = clocks()
        for step, batch in enumerate(itertools.islice(batches, options.steps), start=1):
            train_state, metrics = train_step(train_state, batch)
            progress.update(step, metrics)
            if stop.requested(step):
                break
        run.log(options.steps, train=progress.means())
        jax.block_until_ready(train_state)
        return clocks() - start

    batches = data.on_device(data.batches(images, options.batch_size, seed=0), mesh)
    batch = next(batches)
    bare(train_state, batch)
    with (
        tempfile.TemporaryDirectory() as folder,
        train.Stop() as stop,
        train.Progress(options.steps, per_step=options.batch_size) as progress,
    ):
        run = train.Run(train.RunOptions(folder=Path(folder)), options)
        alone, together = [bare(train_state, batch)], []
        for _ in range(options.rounds):
            together.append(whole(train_state, batches, progress, stop, run))
            alone.append(bare(train_state, batch))
    neighbours = np.add(alone[:-1], alone[1:]) / 2
    step_time = np.median(neighbours[:, 0]) / options.steps
    print(f"step alone {1e3 * step_time:.1f} ms (median of {options.rounds} rounds)")
    for name, ratios in zip(("time", "processor time"), (together / neighbours).T, strict=True):
        low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
        print(f"the loop takes {middle - 1:+.1%} more {name} (half of the rounds: {low - 1:+.1%} to {high - 1:+.1%})")


def clocks() -> np.ndarray:
    """The time, and the processor time of all threads."""
    return np.array([time.perf_counter(), time.process_time()])


if __name__ == "__main__":
    main(train.parse(Options, __doc__))
