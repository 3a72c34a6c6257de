"""What a trained classifier sees in photographs: the likeliest classes, in the terminal and beside the pictures. For
example:

python scripts/predict.py --model timm/resnet50.a1_in1k cat.jpg dog.jpg

python scripts/predict.py --model runs/resnet18-1 --output digits.png photos/*.jpg
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import equinox as eqx
import jax
import numpy as np
import tyro
from PIL import Image, ImageOps

from eqzoo import train
from eqzoo.train import plots


@dataclass(frozen=True)
class Options:
    photos: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PHOTO ...", help_behavior_hint="")]
    """Files of images."""
    model: str
    """The folder of a finished run, or what eqzoo.load takes: timm/resnet18.a1_in1k, a folder with upstream's files."""
    labels: Path | None = None
    """A file with the names of the model's classes, a line each, if the model's own won't do."""
    top: int = 5
    """How many classes to show."""
    output: Path = Path("predictions.png")
    """The picture to write: the photographs, and beside each its classes."""


def main(options: Options) -> None:
    if not options.photos:
        raise ValueError("there is no photo to look at; give the names of some files")
    classifier = train.load_classifier(options.model, labels=options.labels)

    @eqx.filter_jit
    def predict(model, image):
        return jax.lax.top_k(jax.nn.softmax(model(image)), min(options.top, len(classifier.classes)))

    shown, answers = [], []
    for path in options.photos:
        photo, image = read(path, classifier.prepare)
        probabilities, indices = predict(classifier.model, image)
        answer = [(classifier.classes[i], float(p)) for i, p in zip(indices, probabilities, strict=True)]
        print(path)
        for name, probability in answer:
            print(f"  {probability:6.1%}  {name}")
        shown.append(photo)
        answers.append(answer)
    plots.predictions(shown, answers, options.output)
    print(f"drawn in {options.output}")


def read(path: Path, prepare: Callable[[Any], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """A photograph as it is to be shown, and as the model takes it."""
    try:
        with Image.open(path) as file:
            image = prepare(file)
        with Image.open(path) as file:
            photo = ImageOps.exif_transpose(file).convert("RGB")
    except Exception as error:  # Pillow raises errors of all kinds for damaged files
        raise ValueError(f"{path} can't be read as an image: {error}") from error
    photo.thumbnail((400, 400))
    return np.asarray(photo), image


if __name__ == "__main__":
    main(train.parse(Options, __doc__))
