"""Train any image classifier, with the whole loop in sight. For example:

python scripts/train_classifier.py

python scripts/train_classifier.py --model vit_tiny_patch16_224 --options patch_size 4 --image-size 16 --optimizer muon

python scripts/train_classifier.py --data ~/fashion-mnist --options widths "(32, 64, 128, 256)" --batch-size 128 --flip

python scripts/train_classifier.py --data ~/photos --model my_package.my_module:MyNet

python scripts/train_classifier.py --resume runs/resnet18-1
"""

import functools
import sys
from dataclasses import dataclass, field
from typing import Literal

import equinox as eqx
import jax

import eqzoo
from eqzoo import data, host, nn, sharding, train, tree
from eqzoo.data import Augment
from eqzoo.train import plots

MEAN = STD = (0.5, 0.5, 0.5)  # pixels from -1 to 1


@dataclass(frozen=True)
class Options:
    model: str = "resnet18"
    """A name from eqzoo.list_models(), or package.module:Class for your own."""
    options: dict[str, str] = field(default_factory=dict)
    """Changes to the model's config, as in `--options patch_size 4 depth 6`."""
    data: str = "digits"
    """`digits`, or a path: MNIST's or CIFAR's files, parquet, or a folder of images for each class."""
    image_size: int | None = None
    """What images are resized to; by default digits are 32 pixels, photographs 224, and the others as they are."""
    epochs: int = 8
    batch_size: int = 64
    """Of all devices together."""
    accumulate: int = 1
    """Compute a batch in this many parts, one after the other, to save memory."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """What the model computes in; its parameters stay float32."""
    remat: bool = False
    """Compute activations again on the way back instead of keeping them, to save memory."""
    smoothing: float = 0.1
    """Label smoothing."""
    gradient_noise: float = 0.0
    """Standard deviation of noise added to each gradient."""
    ema: float = 0.0
    """Decay of an average of the weights, such as 0.999, to be evaluated in their place; 0: none."""
    eval_every: int | None = None
    """Steps from one evaluation, with a checkpoint, to the next; by default an epoch."""
    save_every: int | None = None
    """Steps from one checkpoint to the next, where evaluations are too rare for that."""
    workers: int = 0
    """Processes that read and decode images; 0: threads of this one."""
    seed: int = 0
    augment: Augment = Augment()
    optimizer: train.OptimizerOptions = train.OptimizerOptions(learning_rate=2e-3, weight_decay=0.05)
    run: train.RunOptions = train.RunOptions()
    devices: sharding.Devices = sharding.Devices()


def main(options: Options) -> None:
    mesh = options.devices.start()
    train_data, test_data = data.load_images(options.data, image_size=options.image_size)
    classes, size = train_data.classes, train_data.image_size
    steps_per_epoch = max(1, len(train_data) // options.batch_size)
    steps = options.epochs * steps_per_epoch
    eval_every = options.eval_every or steps_per_epoch
    save_every = options.save_every or eval_every

    key_model, key = jax.random.split(jax.random.key(options.seed))
    fitting = {"num_classes": len(classes), "image_size": size, "in_channels": 3}
    fitting = train.model_options(options.model, options.options, **fitting)
    model, state = eqzoo.create(options.model, key=key_model, **fitting)
    model = nn.scan_options(model, remat=options.remat)
    policy = train.Policy(options.compute)
    optimizer = options.optimizer.make(model, steps)
    train_state = train.TrainState.create(model, state, optimizer, key=key, ema=options.ema > 0)
    train_state = sharding.shard(train_state, mesh)

    run = train.Run(options.run, options)
    facts = {"data": options.data, "examples": len(train_data), "batch_size": options.batch_size, "seed": options.seed}
    checkpoints = train.Checkpoints(run.folder / "checkpoints", keep=options.run.keep, best="accuracy", facts=facts)
    train_state = checkpoints.restore(train_state)
    start = int(train_state.step)
    run.truncate(start)
    parameters = eqx.filter(model, eqx.is_inexact_array)
    progress = train.Progress(
        steps, start=start, unit="images", per_step=options.batch_size, paths=tree.paths(parameters)
    )
    progress.say(
        f"{options.model}: {tree.count(parameters):,} parameters; {len(train_data):,} training and {len(test_data):,} "
        f"test images of {len(classes)} classes; devices: {mesh.size}"
    )

    def loss_fn(model, state, batch):
        model, images = policy.to_compute((model, batch["image"]))
        forward = functools.partial(eqzoo.apply, model, state)
        logits, state = jax.vmap(forward, axis_name="batch", out_axes=(0, None))(images, key=batch["key"])
        losses = train.cross_entropy(logits, batch["target"], smoothing=options.smoothing)
        metrics = {
            "loss": train.Mean.of(losses, batch["weight"]),
            "accuracy": train.accuracy(logits, batch["label"], batch["weight"]),
        }
        return train.weighted_mean(losses, batch["weight"]), (state, metrics)

    @eqx.filter_jit(donate="all")
    @progress.count
    def train_step(train_state, batch):
        key = jax.random.fold_in(train_state.key, train_state.step)
        key_augment, key_model, key_noise = jax.random.split(key, 3)
        batch = options.augment(batch, key_augment, classes=len(classes), mean=MEAN, std=STD)
        batch["key"] = jax.random.split(key_model, options.batch_size)
        gradient = train.accumulate(eqx.filter_value_and_grad(loss_fn, has_aux=True), options.accumulate)
        (_, (state, metrics)), grads = gradient(train_state.model, train_state.state, batch)
        if options.gradient_noise:
            grads = tree.add_noise(grads, key_noise, options.gradient_noise)
        parameters = eqx.filter(train_state.model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, train_state.opt_state, parameters)
        model = eqx.apply_updates(train_state.model, updates)
        train_state = train_state.next(model, state, opt_state, grads, ema_decay=options.ema)
        return sharding.shard(train_state, mesh), metrics | {"skipped": train_state.skipped}

    @eqx.filter_jit
    def test_step(model, state, batch):
        batch = data.prepare(batch, mean=MEAN, std=STD)
        model, images = policy.to_compute((model, batch["image"]))
        logits, label, weight = jax.vmap(eqzoo.freeze(model, state))(images), batch["label"], batch["weight"]
        losses = train.cross_entropy(logits, label)
        totals = {"loss": train.Mean.of(losses, weight), "accuracy": train.accuracy(logits, label, weight)}
        confidence, predicted = jax.lax.top_k(jax.nn.softmax(logits), 1)
        row = {"predicted": predicted[:, 0], "confidence": confidence[:, 0], "weight": weight}
        row |= {name: batch[name] for name in ("index", "label")}
        return totals, sharding.gather(row, mesh)

    def test(train_state):
        model, state = train_state.averaged
        batches = data.on_device(data.batches(test_data, options.batch_size, seed=None), mesh)
        return (test_step(model, state, batch) for batch in batches)

    def evaluate(train_state):
        totals = train.add_up(totals for totals, _ in test(train_state))
        return {name: float(mean.value) for name, mean in totals.items()}

    batches = data.batches(
        train_data, options.batch_size, seed=options.seed, start=start, steps=steps, workers=options.workers
    )
    step = start
    with checkpoints, train.Stop() as stop, progress:
        for step, batch in enumerate(data.on_device(batches, mesh), start=start + 1):
            train_state, metrics = train_step(train_state, batch)
            progress.update(step, metrics)
            stopping, evaluating = stop.requested(step), step % eval_every == 0 or step == steps
            if evaluating or stopping or step % save_every == 0:
                scores = evaluate(train_state) if evaluating else {}
                progress.say(run.log(step, train=progress.means(), test=scores))
                checkpoints.save(train_state, scores)
            if stopping:
                break
        if step == steps:
            train_state = checkpoints.restore(train_state, checkpoints.best)
    if step < steps:
        run.pause()
        progress.say(f"stopped; to go on: python {sys.argv[0]} --resume {run.folder}")
        return

    model, state = sharding.gather(train_state.averaged, mesh)
    described = {"classes": classes, "image_size": size, "mean": MEAN, "std": STD}
    train.save_classifier(run.folder, model, state, name=options.model, options=fitting, **described)
    rows = train.collect(row for _, row in test(train_state))
    if jax.process_index() == 0:
        photos = data.Photos(test_data, rows["index"])
        label, predicted, confidence = rows["label"], rows["predicted"], rows["confidence"]
        plots.mistakes(photos, label, predicted, confidence, classes, run.folder / "samples.png")
        run.finish()
        accuracies = [record["test"]["accuracy"] for record in run.records if record.get("test")]
        print(f"model.safetensors, curves.png and samples.png are in {run.folder}")
        print(f"test accuracy {accuracies[-1]:.2%}, at best {max(accuracies):.2%} (the model that was kept)")


if __name__ == "__main__":
    options = train.parse(Options, __doc__)
    host.tune()
    main(options)
