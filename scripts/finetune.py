"""Train a pretrained classifier further on images of your own: all of it, its head alone, or adapters. For example:

python scripts/finetune.py --model timm/resnet18.a1_in1k --data ~/photos

python scripts/finetune.py --model timm/vit_small_patch16_224.augreg_in21k --data ~/photos --how lora --lora-rank 4

python scripts/finetune.py --model runs/resnet18-1 --data ~/fashion-mnist --how probe --learning-rate 1e-2

python scripts/finetune.py --resume runs/resnet18.a1_in1k-1
"""

import functools
import sys
from dataclasses import dataclass, replace
from typing import Any, Literal

import equinox as eqx
import jax

import eqzoo
from eqzoo import data, host, nn, sharding, train, tree
from eqzoo.data import Augment

HEAD = "*head"  # where the models of the zoo have theirs


@dataclass(frozen=True)
class Options:
    model: str
    """The folder of a finished run, or what eqzoo.load takes: timm/resnet18.a1_in1k, a folder with upstream's files."""
    how: Literal["full", "probe", "lora"] = "full"
    """What learns: everything, the new head alone, or the head and low-rank adapters on all layers before it."""
    lora_rank: int = 8
    data: str = "digits"
    """`digits`, or a path: MNIST's or CIFAR's files, parquet, or a folder of images for each class."""
    image_size: int | None = None
    """What images are resized to; by default what the model was trained with."""
    epochs: int = 5
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
    optimizer: train.OptimizerOptions = train.OptimizerOptions(learning_rate=5e-4, weight_decay=0.05, layer_decay=0.75)
    run: train.RunOptions = train.RunOptions()
    devices: sharding.Devices = sharding.Devices()


def main(options: Options) -> None:
    mesh = options.devices.start()
    like_before = train.Preparation.of(options.model, image_size=options.image_size)
    size, mean, std = like_before.image_size, like_before.mean, like_before.std
    train_data, test_data = data.load_images(options.data, image_size=size)
    classes = train_data.classes
    steps_per_epoch = max(1, len(train_data) // options.batch_size)
    steps = options.epochs * steps_per_epoch
    eval_every = options.eval_every or steps_per_epoch
    save_every = options.save_every or eval_every

    key_adapters, key = jax.random.split(jax.random.key(options.seed))
    model, state = train.load_pretrained(options.model, num_classes=len(classes), image_size=size)
    model = nn.scan_options(model, remat=options.remat)
    learning, frozen = divide(model, options.how, rank=options.lora_rank, key=key_adapters)
    policy = train.Policy(options.compute)
    # A head alone has no layers whose rates could differ.
    layer_decay = 1.0 if options.how == "probe" else options.optimizer.layer_decay
    optimizer = replace(options.optimizer, layer_decay=layer_decay).make(learning, steps)
    train_state = train.TrainState.create(learning, state, optimizer, key=key, ema=options.ema > 0)
    train_state, frozen = sharding.shard(train_state, mesh), sharding.shard(frozen, mesh)

    run = train.Run(options.run, options)
    facts = {"data": options.data, "examples": len(train_data), "batch_size": options.batch_size, "seed": options.seed}
    checkpoints = train.Checkpoints(run.folder / "checkpoints", keep=options.run.keep, best="accuracy", facts=facts)
    train_state = checkpoints.restore(train_state)
    start = int(train_state.step)
    run.truncate(start)
    progress = train.Progress(
        steps, start=start, unit="images", per_step=options.batch_size, paths=tree.paths(learning)
    )
    progress.say(
        f"{options.model}: {tree.count(learning):,} of {tree.count((learning, frozen)):,} parameters learn; "
        f"{len(train_data):,} training and {len(test_data):,} test images of {len(classes)} classes; "
        f"devices: {mesh.size}"
    )

    def loss_fn(frozen, learning, state, batch):
        model, images = policy.to_compute((eqx.combine(learning, frozen), batch["image"]))
        forward = functools.partial(eqzoo.apply, model, state)
        logits, state = jax.vmap(forward, axis_name="batch", out_axes=(0, None))(images, key=batch["key"])
        losses = train.cross_entropy(logits, batch["target"], smoothing=options.smoothing)
        metrics = {
            "loss": train.Mean.of(losses, batch["weight"]),
            "accuracy": train.accuracy(logits, batch["label"], batch["weight"]),
        }
        return train.weighted_mean(losses, batch["weight"]), (state, metrics)

    @eqx.filter_jit(donate="all-except-first")
    @progress.count
    def train_step(frozen, train_state, batch):
        key_augment, key_model = jax.random.split(jax.random.fold_in(train_state.key, train_state.step))
        batch = options.augment(batch, key_augment, classes=len(classes), mean=mean, std=std)
        batch["key"] = jax.random.split(key_model, options.batch_size)
        gradient = eqx.filter_value_and_grad(functools.partial(loss_fn, frozen), has_aux=True)
        gradient = train.accumulate(gradient, options.accumulate)
        (_, (state, metrics)), grads = gradient(train_state.model, train_state.state, batch)
        updates, opt_state = optimizer.update(grads, train_state.opt_state, train_state.model)
        learning = eqx.apply_updates(train_state.model, updates)
        train_state = train_state.next(learning, state, opt_state, grads, ema_decay=options.ema)
        return sharding.shard(train_state, mesh), metrics | {"skipped": train_state.skipped}

    @eqx.filter_jit
    def test_step(frozen, learning, state, batch):
        batch = data.prepare(batch, mean=mean, std=std)
        model, images = policy.to_compute((eqx.combine(learning, frozen), batch["image"]))
        logits, label, weight = jax.vmap(eqzoo.freeze(model, state))(images), batch["label"], batch["weight"]
        losses = train.cross_entropy(logits, label)
        return {"loss": train.Mean.of(losses, weight), "accuracy": train.accuracy(logits, label, weight)}

    def evaluate(train_state):
        learning, state = train_state.averaged
        batches = data.on_device(data.batches(test_data, options.batch_size, seed=None), mesh)
        totals = train.add_up(test_step(frozen, learning, state, batch) for batch in batches)
        return {name: float(mean.value) for name, mean in totals.items()}

    batches = data.batches(
        train_data, options.batch_size, seed=options.seed, start=start, steps=steps, workers=options.workers
    )
    step = start
    with checkpoints, train.Stop() as stop, progress:
        for step, batch in enumerate(data.on_device(batches, mesh), start=start + 1):
            train_state, metrics = train_step(frozen, train_state, batch)
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

    learning, state = train_state.averaged
    model = eqx.combine(learning, frozen)
    if options.how == "lora":
        model = tree.merge_lora(model)
    model, state = sharding.gather((model, state), mesh)
    described = {"classes": classes, "image_size": size, "mean": mean, "std": std}
    train.save_classifier(run.folder, model, state, name=options.model, options={}, **described)
    if jax.process_index() == 0:
        run.finish()
        accuracies = [record["test"]["accuracy"] for record in run.records if record.get("test")]
        print(f"test accuracy {accuracies[-1]:.2%}, at best {max(accuracies):.2%} (the model that was kept)")
        print(
            f"model.safetensors and curves.png are in {run.folder}; scripts/evaluate.py --model {run.folder} says more"
        )


def divide(model: Any, how: str, *, rank: int, key: jax.Array) -> tuple[Any, Any]:
    """The part of a model that learns, and the rest of it; `eqx.combine` makes one of them again."""
    if how == "full":
        return eqx.partition(model, eqx.is_inexact_array)
    model = eqx.nn.inference_mode(model)  # a frozen body stays what it was, the statistics of its batch norms too
    if how == "probe":
        return tree.trainable(model, HEAD)
    adapters, rest = tree.lora_only(tree.lora(model, adaptable(model), rank=rank, key=key))
    head, frozen = tree.trainable(rest, HEAD)
    return eqx.combine(adapters, head), frozen


def adaptable(model: Any) -> tuple[str, ...]:
    """The weights of all layers before the head that can have adapters: not those of convolutions in groups."""
    layers = nn.Linear | nn.Conv2d | eqx.nn.Linear
    return tuple(
        f"{path}.weight"
        for path, layer in tree.leaves_with_paths(model, is_leaf=lambda node: isinstance(node, layers))
        if isinstance(layer, layers) and getattr(layer, "groups", 1) == 1 and "head" not in path
    )


if __name__ == "__main__":
    options = train.parse(Options, __doc__)
    host.tune()
    main(options)
