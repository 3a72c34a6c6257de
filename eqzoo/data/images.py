"""Labelled images, as a source of batches."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int32, UInt8

from eqzoo.data import formats
from eqzoo.data.loader import Batch
from eqzoo.data.pictures import Pictures, Prepare


@dataclass(frozen=True, eq=False)
class Images:
    """Labelled images: a source of `image` (uint8 RGB, "batch height width 3"), `label` and `weight`."""

    pictures: Pictures
    labels: Int32[np.ndarray, " images"]
    classes: tuple[str, ...]
    image_size: int
    unreadable: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, indices: Int[np.ndarray, " some"]) -> Batch:
        image, readable = self.pictures.read(indices, self.image_size)
        return {"image": image, "label": self.labels[indices], "weight": readable.astype(np.float32)}

    def name(self, index: int | np.integer) -> str:
        return self.pictures.name(index)

    def prepared(self, prepare: Prepare) -> "PreparedImages":
        """The same images, but each as `prepare` makes it of the picture (Pillow's, or a uint8 array), in float32."""
        blank = prepare(np.zeros((self.image_size, self.image_size, 3), np.uint8))
        return PreparedImages(self, prepare, blank.shape)


@dataclass(frozen=True, eq=False)
class PreparedImages:
    """Labelled images as a model of somebody else's takes them; `Images.prepared` makes them."""

    images: Images
    prepare: Prepare
    shape: tuple[int, ...]

    @property
    def unreadable(self) -> set[int]:
        return self.images.unreadable

    def __len__(self) -> int:
        return len(self.images)

    def read(self, indices: Int[np.ndarray, " some"]) -> Batch:
        image, readable = self.images.pictures.prepared(indices, self.prepare, self.shape)
        return {"image": image, "label": self.images.labels[indices], "weight": readable.astype(np.float32)}

    def name(self, index: int | np.integer) -> str:
        return self.images.name(index)


@dataclass(frozen=True, eq=False)
class Photos:
    """Some of the images as a sequence of pixels, each read when it is looked at: for pictures of a few among many."""

    images: Images
    indices: Int[np.ndarray, " some"]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, row: int) -> UInt8[np.ndarray, "height width 3"]:
        return self.images.read(self.indices[row : row + 1])["image"][0]


def load_images(data: str | os.PathLike, *, image_size: int | None = None) -> tuple[Images, Images]:
    """The training and the test images of "digits" (scikit-learn's) or of a file or folder, in whatever form it has:

    - MNIST's files: train-images-idx3-ubyte and so on, with .gz or without;
    - CIFAR-10's or CIFAR-100's, of its binary or its Python version, or sheets (data_batch_1.png) with JSON labels;
    - folders of images: train/CLASS/…, and val/CLASS/… or test/CLASS/… (val is taken if there are both). Where there is
      no such part, as in CLASS/…, a tenth of the images is taken for testing, by a hash of their paths;
    - Parquet files of Hugging Face's datasets with an image and a label, in parts as folders have them.

    Images come out as squares of `image_size`: resized to cover it, and cropped around the centre. If it is None they
    keep their size where that is one for all and at most 224, which it is otherwise (digits come out as 32).
    """
    if image_size is not None and image_size < 1:
        raise ValueError(f"image_size={image_size}, expected a positive number of pixels")
    found = formats.find(data)
    size = image_size or (32 if data == "digits" else found.train.pictures.own_size)
    train, test = (Images(part.pictures, part.labels, found.classes, size) for part in (found.train, found.test))
    return train, test


def load_image_folder(folder: str | os.PathLike, *, image_size: int | None = None) -> Images:
    """All images of a folder that has one folder for each class, at sizes as those of `load_images`."""
    if image_size is not None and image_size < 1:
        raise ValueError(f"image_size={image_size}, expected a positive number of pixels")
    part, classes = formats.class_folders(Path(folder))
    return Images(part.pictures, part.labels, classes, image_size or part.pictures.own_size)
