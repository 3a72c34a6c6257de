"""Classifiers as they are used: from pictures to the names of classes. Training writes one, other scripts read it."""

import ast
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float32

import eqzoo
from eqzoo._facts import imagenet_classes
from eqzoo._preprocessing import Preprocessing, preprocessing
from eqzoo.checkpoint._atomic import written_atomically
from eqzoo.train.options import from_json, to_json

_WEIGHTS, _DESCRIPTION = "model.safetensors", "classifier.json"
_HALVES = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Preparation:
    """How a training script prepares images: squares of `image_size` pixels as `eqzoo.data` reads them, and normalised.
    `mean` and `std` are for values from 0 to 1.

    ```python
    import numpy as np

    prepare = Preparation(image_size=4, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    prepare(np.full((8, 8, 3), 255, np.uint8)).shape  # (4, 4, 3)
    ```
    """

    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, source: str | os.PathLike, *, image_size: int | None = None) -> "Preparation":
        """With the size, mean and standard deviation that a source was trained with, or another size. Of a bare file,
        which doesn't say, pixels go from -1 to 1.
        """
        if description := _description(source):
            return cls(image_size or description.image_size, description.mean, description.std)
        if Path(source).is_file():
            if image_size is None:
                raise ValueError(
                    f"{source} is a bare file, which doesn't say the size of its images; give an image_size"
                )
            return cls(image_size, _HALVES, _HALVES)
        upstream = preprocessing(source, image_size=image_size)
        if upstream.crop is None:
            raise ValueError(f"{source} takes whole images, for it labels pixels; give a classifier")
        if len(set(upstream.crop)) > 1 or len(upstream.mean) != 3:
            raise ValueError(
                f"{source} takes images of {upstream.crop[0]} x {upstream.crop[1]} pixels and {len(upstream.mean)} "
                f"channels, expected squares in colour; give an image_size, or another source"
            )
        return cls(upstream.crop[0], upstream.mean, upstream.std)

    def __call__(self, picture: Any) -> Float32[np.ndarray, "height width 3"]:
        """`picture` is Pillow's, or a uint8 array."""
        from eqzoo.data.pictures import fit  # eqzoo.data needs eqzoo.sharding, which needs this package

        pixels = fit(picture, self.image_size).astype(np.float32) / np.float32(255)
        return (pixels - np.asarray(self.mean, np.float32)) / np.asarray(self.std, np.float32)


@dataclass(frozen=True)
class Classifier:
    """A trained classifier. `model` is a function of one image, `prepare` makes that of a picture (Pillow's, or a uint8
    array), and the logits that come out are those of `classes`.

    ```python
    prepare = Preparation(image_size=4, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    classifier = Classifier(lambda image: jnp.mean(image, (0, 1))[:2], ("red", "green"), prepare)
    ```
    """

    model: Any
    classes: tuple[str, ...]
    prepare: Callable[[Any], Float32[np.ndarray, "height width channels"]]


def save_classifier(
    folder: str | os.PathLike,
    model: Any,
    state: eqx.nn.State,
    *,
    name: str,
    options: Mapping[str, Any],
    classes: Sequence[str],
    image_size: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> None:
    """Write a trained model into a folder, with all that is needed to use it on pictures.

    `name` and `options` are what `eqzoo.create` made the model of, or `name` is the source that it was loaded from. Of
    several processes, the first writes.

    ```python
    import tempfile

    options = {"hidden": (8,), "image_size": 4, "in_channels": 3, "num_classes": 2}
    model, state = eqzoo.create("mlp", key=jax.random.key(0), **options)
    inputs = {"image_size": 4, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    with tempfile.TemporaryDirectory() as folder:
        save_classifier(folder, model, state, name="mlp", options=options, classes=("cat", "dog"), **inputs)
        classifier = load_classifier(folder)
    classifier.classes  # ('cat', 'dog')
    ```
    """
    if jax.process_index() > 0:
        return
    texts = {option: _text(name, option, value) for option, value in options.items()}
    description = _Description(name, texts, tuple(classes), image_size, tuple(mean), tuple(std))
    eqzoo.save(Path(folder) / _WEIGHTS, model, state)
    with written_atomically(Path(folder) / _DESCRIPTION) as path:
        path.write_text(json.dumps(to_json(description), indent=2) + "\n", encoding="utf-8")


def load_classifier(source: str | os.PathLike, *, labels: str | os.PathLike | None = None) -> Classifier:
    """A run's folder, or anything that `eqzoo.load` takes and that says how its images are prepared, as a `Classifier`.

    The names of the classes are the lines of the file `labels`, or those of the run, or ImageNet's where there are 1000
    classes, or "class 0" and so on.

    ```python
    import tempfile
    import numpy as np

    model, state = eqzoo.create("mlp", key=jax.random.key(0), in_channels=3, num_classes=2)
    inputs = {"image_size": 28, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    with tempfile.TemporaryDirectory() as folder:
        save_classifier(folder, model, state, name="mlp", options={}, classes=("cat", "dog"), **inputs)
        classifier = load_classifier(folder)
    image = classifier.prepare(np.zeros((100, 80, 3), np.uint8))
    classifier.model(jnp.asarray(image)).shape  # (2,)
    ```
    """
    description = _description(source)
    if description is not None:
        model = eqzoo.freeze(*_load_run(Path(source), description))
        prepare, known = description.preparation, description.classes
    else:
        prepare = _Upright(preprocessing(source))
        model = eqzoo.load(source)
        count = getattr(getattr(model, "config", None), "num_classes", 0)
        if not count:
            raise ValueError(f"{source} has no head that tells classes apart; choose a model that has, or finetune it")
        known = imagenet_classes() if count == 1000 else tuple(f"class {index}" for index in range(count))
    return Classifier(model, known if labels is None else _names(Path(labels), len(known)), prepare)


def load_pretrained(source: str | os.PathLike, *, num_classes: int, image_size: int) -> tuple[Any, eqx.nn.State]:
    """A model of the zoo to be trained further, from a run's folder or anything that `eqzoo.load` takes: the pair of
    model and state, with a head of zeros for other classes, and for images of another size.

    ```python
    import tempfile

    model, state = eqzoo.create("mlp", key=jax.random.key(0), in_channels=3)
    inputs = {"image_size": 28, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    with tempfile.TemporaryDirectory() as folder:
        save_classifier(folder, model, state, name="mlp", options={}, classes="0123456789", **inputs)
        model, state = load_pretrained(folder, num_classes=3, image_size=28)
    model.head.weight.shape  # (3, 512)
    ```
    """
    if description := _description(source):
        if _is_own(description.name):
            raise ValueError(
                f"{source} is a {description.name}: a new head is known for models of the zoo only; load it with "
                f"`eqzoo.load({_WEIGHTS!r}, like=...)` and put a head of your own in its place"
            )
        source = Path(source) / _WEIGHTS
    model, state = eqzoo.load(source, num_classes=num_classes, trainable=True)
    if getattr(model.config, "image_size", image_size) == image_size:
        return model, state
    return eqzoo.load(source, num_classes=num_classes, image_size=image_size, trainable=True)


@dataclass(frozen=True)
class _Description:
    """What classifier.json holds. Options are written as on a command line."""

    name: str
    options: dict[str, str]
    classes: tuple[str, ...]
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def preparation(self) -> Preparation:
        return Preparation(self.image_size, self.mean, self.std)


@dataclass(frozen=True)
class _Upright:
    """Upstream's preprocessing, of a photograph as a camera means it to be seen."""

    preprocessing: Preprocessing

    def __call__(self, picture: Any) -> Float32[np.ndarray, "height width channels"]:
        from eqzoo.data.pictures import upright  # as above

        return self.preprocessing(picture if isinstance(picture, np.ndarray) else upright(picture))


def _description(source: str | os.PathLike) -> _Description | None:
    """What a run says about its classifier; None for what is no run."""
    file = Path(source) / _DESCRIPTION
    if not file.is_file():
        if (Path(source) / "metrics.jsonl").is_file():
            raise ValueError(
                f"{source} is a run that has no trained model yet (no {_DESCRIPTION}); finish it by --resume {source}"
            )
        return None
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}; train again, or restore the file") from error
    return from_json(_Description, document, str(file))


def _load_run(folder: Path, description: _Description) -> tuple[Any, eqx.nn.State]:
    weights, like = folder / _WEIGHTS, None
    if _is_own(description.name):
        options = {option: ast.literal_eval(text) for option, text in description.options.items()}
        make = lambda: eqzoo.create(description.name, key=jax.random.key(0), **options)
        like = eqx.filter_eval_shape(make)
    return eqzoo.load(weights, like=like, trainable=True)


def _is_own(name: str) -> bool:
    """Whether it is a class of the user's, `package.module:Class`."""
    return re.fullmatch(r"[\w.]+:\w+", name) is not None


def _text(name: str, option: str, value: Any) -> str:
    text = repr(value)
    try:
        if ast.literal_eval(text) == value:
            return text
    except (ValueError, SyntaxError):
        pass
    raise ValueError(
        f"save_classifier: option {option}={text} of {name} can't be written; options are made of numbers, text, None, "
        f"tuples, lists and dicts"
    )


def _names(file: Path, count: int) -> tuple[str, ...]:
    names = tuple(line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
    if len(names) != count:
        raise ValueError(f"{file} names {len(names)} classes, but the model has {count}; write one name a line")
    return names
