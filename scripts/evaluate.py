"""How good a trained classifier is on labelled images: scores, its worst classes, and pictures of both. For example:

python scripts/evaluate.py --model runs/resnet18-1

python scripts/evaluate.py --model timm/resnet50.a1_in1k --data ~/imagenet/val --all

python scripts/evaluate.py --model runs/resnet18-1 --data ~/photos --output somewhere
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import equinox as eqx
import jax
import numpy as np

from eqzoo import data, sharding, train
from eqzoo.train import plots


@dataclass(frozen=True)
class Options:
    model: str
    """The folder of a finished run, or what eqzoo.load takes: timm/resnet18.a1_in1k, a folder with upstream's files."""
    data: str = "digits"
    """`digits`, or a path: MNIST's or CIFAR's files, parquet, or a folder of images for each class."""
    all: bool = False
    """Take all images of a folder that has a folder for each class, and not only its part for testing."""
    labels: Path | None = None
    """A file with the names of the model's classes, a line each, if the model's own won't do."""
    batch_size: int = 64
    """Of all devices together."""
    workers: int = 0
    """Processes that read and decode images; 0: threads of this one."""
    output: Path | None = None
    """A folder for scores and pictures; by default one named evaluation, in the run's folder or else here."""
    devices: sharding.Devices = sharding.Devices()


def main(options: Options) -> None:
    mesh = options.devices.start()
    classifier = train.load_classifier(options.model, labels=options.labels)
    images = data.load_image_folder(options.data) if options.all else data.load_images(options.data)[1]
    in_model, remark = matched(images.classes, classifier.classes)
    images = dataclasses.replace(images, labels=in_model[images.labels], classes=classifier.classes)
    model = sharding.shard(classifier.model, mesh)

    @eqx.filter_jit
    def test_step(model, batch):
        logits, label, weight = jax.vmap(model)(batch["image"]), batch["label"], batch["weight"]
        totals = {
            "accuracy": train.accuracy(logits, label, weight),
            "loss": train.Mean.of(train.cross_entropy(logits, label), weight),
            "calibration": train.calibration(logits, label, weight),
            "confusion": train.confusion(logits, label, weight),
        }
        if len(classifier.classes) > 5:
            totals["top-5 accuracy"] = train.accuracy(logits, label, weight, k=5)
        confidence, predicted = jax.lax.top_k(jax.nn.softmax(logits), 1)
        row = {"predicted": predicted[:, 0], "confidence": confidence[:, 0], "weight": weight}
        row |= {name: batch[name] for name in ("index", "label")}
        return totals, sharding.gather(row, mesh)

    source, each = images.prepared(classifier.prepare), []

    def steps():
        for batch in data.on_device(data.batches(source, options.batch_size, seed=None, workers=options.workers), mesh):
            totals, row = test_step(model, batch)
            each.append(row)
            yield totals

    totals = train.add_up(steps())
    rows = train.collect(each)
    if jax.process_index() > 0:
        return
    scores = {name: float(total.value) for name, total in totals.items() if isinstance(total, train.Mean)}
    scores["calibration error"] = float(totals["calibration"].error)
    print(f"{options.model} on {options.data}: {len(rows['index']):,} images of {len(in_model)} classes{remark}")
    for name, score in scores.items():
        print(f"{name:>18}  {score:.4f}" if name == "loss" else f"{name:>18}  {score:.2%}")
    print(worst_classes(totals["confusion"], classifier.classes))

    folder = options.output or output_folder(options.model)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scores.json").write_text(json.dumps(scores, indent=2) + "\n")
    occurring = np.flatnonzero(totals["confusion"].sum(axis=0) + totals["confusion"].sum(axis=1))
    names = [classifier.classes[index] for index in occurring]
    plots.confusion(totals["confusion"][np.ix_(occurring, occurring)], names, folder / "confusion.png")
    plots.reliability(totals["calibration"], folder / "reliability.png")
    photos = data.Photos(images, rows["index"])
    label, predicted, confidence = (rows[name] for name in ("label", "predicted", "confidence"))
    plots.mistakes(photos, label, predicted, confidence, classifier.classes, folder / "samples.png")
    print(f"scores.json, confusion.png, reliability.png and samples.png are in {folder}")


def matched(in_data: Sequence[str], in_model: Sequence[str]) -> tuple[np.ndarray, str]:
    """Which of the model's classes each of the data's is, and a remark if that was not said by their names."""
    if set(in_data) <= set(in_model):
        return np.array([in_model.index(name) for name in in_data], np.int32), ""
    if len(in_data) == len(in_model):
        return np.arange(len(in_model), dtype=np.int32), f", by their order: {in_data[0]} is {in_model[0]}, and so on"
    unknown = next(name for name in in_data if name not in in_model)
    raise ValueError(
        f"the data's {len(in_data)} classes are not the model's {len(in_model)}, such as {in_model[0]}: there is no "
        f"{unknown} among those; name the folders as the model names its classes, or give it other names by --labels"
    )


def worst_classes(confusion: np.ndarray, classes: Sequence[str], most: int = 10) -> str:
    """A table of the classes that are most often taken for others."""
    images, correct = confusion.sum(axis=1), np.diag(confusion)
    accuracy = correct / np.maximum(images, 1)
    others = confusion - np.diag(correct)
    worst = [index for index in np.argsort(accuracy, kind="stable").tolist() if correct[index] < images[index]][:most]
    width = max([5, *(len(classes[index]) for index in worst)])
    lines = [f"{'class':<{width}}  images  correct  most often taken for"]
    for index in worst:
        name, taken_for = classes[index], classes[int(others[index].argmax())]
        lines.append(f"{name:<{width}}  {images[index]:6.0f}  {accuracy[index]:7.1%}  {taken_for}")
    return "\n".join(lines) if worst else "no image was taken for another class"


def output_folder(model: str) -> Path:
    if (Path(model) / "classifier.json").exists():
        return Path(model) / "evaluation"
    return Path("evaluation-" + re.sub(r"[^\w.-]+", "-", model).strip("-"))


if __name__ == "__main__":
    main(train.parse(Options, __doc__))
