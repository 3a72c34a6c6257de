"""Pictures as their files hold them, made into RGB images of one size when they are read."""

import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int, Shaped, UInt8

from eqzoo._optional import needed_for

_USUAL_SIZE = 224
_LARGE = 2**24  # bytes of pictures that are not kept at another size than their own

Prepare = Callable[[Any], Float32[np.ndarray, "height width channels"]]


@dataclass(frozen=True, eq=False)
class Pixels:
    """Pictures that are in memory, all equally large, with one channel or three."""

    pixels: UInt8[np.ndarray, "pictures side side channels"]
    origin: str
    _resized: dict[int, UInt8[np.ndarray, "pictures size size channels"]] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def own_size(self) -> int:
        return self.pixels.shape[1]

    def name(self, index: int | np.integer) -> str:
        return f"image {index} of {self.origin}"

    def read(
        self, indices: Int[np.ndarray, " some"], size: int
    ) -> tuple[UInt8[np.ndarray, "some {size} {size} 3"], Bool[np.ndarray, " some"]]:
        if size == self.own_size:
            pixels = self.pixels[indices]
        elif self.pixels.size * (size / self.own_size) ** 2 > _LARGE:
            pixels = _resize(self.pixels[indices], size)
        else:  # a training reads them many times
            if size not in self._resized:
                self._resized[size] = _resize(self.pixels, size)
            pixels = self._resized[size][indices]
        if pixels.shape[-1] == 1:
            pixels = np.repeat(pixels, 3, axis=-1)
        return pixels, np.ones(len(indices), bool)

    def prepared(
        self, indices: Int[np.ndarray, " some"], prepare: Prepare, shape: tuple[int, ...]
    ) -> tuple[Float32[np.ndarray, "some height width channels"], Bool[np.ndarray, " some"]]:
        images = np.zeros((len(indices), *shape), np.float32)
        for row, index in enumerate(indices):
            images[row] = prepare(self.pixels[index])
        return images, np.ones(len(indices), bool)


@dataclass(frozen=True, eq=False)
class Encoded:
    """Pictures as JPEG, PNG and so on, which Pillow decodes as they are read: paths of files, or what files hold."""

    contents: Sequence[str | bytes]
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.contents)

    @property
    def own_size(self) -> int:
        """That of the pictures if the first 16 are equally large squares, and not large; otherwise 224."""
        sizes = {size for content in self.contents[:16] if (size := _size(content)) is not None}
        sides = {side for size in sizes for side in size}
        return min(*sides, _USUAL_SIZE) if len(sides) == 1 else _USUAL_SIZE

    def name(self, index: int | np.integer) -> str:
        return self.names[int(index)]

    def read(
        self, indices: Int[np.ndarray, " some"], size: int
    ) -> tuple[UInt8[np.ndarray, "some {size} {size} 3"], Bool[np.ndarray, " some"]]:
        images = np.zeros((len(indices), size, size, 3), np.uint8)
        return images, self._fill(images, indices, lambda picture: fit(picture, size))

    def prepared(
        self, indices: Int[np.ndarray, " some"], prepare: Prepare, shape: tuple[int, ...]
    ) -> tuple[Float32[np.ndarray, "some height width channels"], Bool[np.ndarray, " some"]]:
        images = np.zeros((len(indices), *shape), np.float32)
        return images, self._fill(images, indices, prepare)

    def _fill(
        self,
        images: Shaped[np.ndarray, "some height width channels"],
        indices: Int[np.ndarray, " some"],
        prepare: Callable[[Any], np.ndarray],
    ) -> Bool[np.ndarray, " some"]:
        """Write into `images` what is made of each picture; which of them could be read."""
        readable = np.zeros(len(indices), bool)

        def decode(row, index):
            image = _decode(self.contents[index], prepare)
            if image is not None:
                images[row], readable[row] = image, True

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(decode, range(len(indices)), indices.tolist()))
        return readable


Pictures = Pixels | Encoded


def fit(picture: Any, size: int) -> UInt8[np.ndarray, "{size} {size} 3"]:
    """The square image that is read of a picture: of Pillow's, before it is loaded, or of pixels."""
    image, operations = pil()
    if isinstance(picture, np.ndarray):
        pixels = picture.reshape(*picture.shape[:2], -1)
        if pixels.shape[0] == pixels.shape[1] and pixels.shape[2] in (1, 3):
            return Pixels(pixels[None], "").read(np.zeros(1, int), size)[0][0]
        picture = image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels)
    picture.draft(None, (size, size))  # a JPEG larger than needed is decoded at a half, quarter or eighth
    picture = upright(picture)
    if "transparency" in picture.info:
        picture = picture.convert("RGBA")
    return np.asarray(operations.fit(picture.convert("RGB"), (size, size), image.Resampling.BILINEAR))


def upright(picture: Any) -> Any:
    """A picture of Pillow's as its camera was held, with 8 bits a channel."""
    image, operations = pil()
    picture = operations.exif_transpose(picture)
    if picture.mode.startswith("I"):  # 16 bits a pixel, which Pillow would cut off at 255
        return image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    return picture


def _decode(content: str | bytes, prepare: Callable[[Any], np.ndarray]) -> Shaped[np.ndarray, "..."] | None:
    image, _ = pil()
    try:
        with image.open(_file(content)) as picture:
            return prepare(picture)
    except Exception:  # Pillow raises errors of all kinds for damaged files
        return None


def _size(content: str | bytes) -> tuple[int, int] | None:
    image, _ = pil()
    try:
        with image.open(_file(content)) as picture:
            return picture.size
    except Exception:  # as above
        return None


def _file(content: str | bytes) -> str | io.BytesIO:
    return io.BytesIO(content) if isinstance(content, bytes) else content


def _resize(
    pixels: UInt8[np.ndarray, "n old old channels"], size: int
) -> UInt8[np.ndarray, "n {size} {size} channels"]:
    weights = _resize_weights(pixels.shape[1], size)
    return np.rint(_weighted(_weighted(pixels, weights, axis=1), weights, axis=2)).astype(np.uint8)


def _resize_weights(old: int, new: int) -> Float32[np.ndarray, "{new} {old}"]:
    """Linear interpolation, over more pixels where the image shrinks, as Pillow's."""
    centers = (np.arange(new) + 0.5) * old / new - 0.5
    distance = np.abs(np.arange(old) - centers[:, None]) / max(old / new, 1)
    weights = np.maximum(1 - distance, 0)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def _weighted(
    x: Shaped[np.ndarray, "..."], weights: Float32[np.ndarray, "new old"], axis: int
) -> Float32[np.ndarray, "..."]:
    """`weights @ x` along an axis. Most weights are zero, and BLAS would start threads that hinder the training."""
    new, old = weights.shape
    first = np.argmax(weights > 0, axis=1)
    total = np.zeros((), np.float32)
    for offset in range(np.max(np.sum(weights > 0, axis=1))):
        place = np.minimum(first + offset, old - 1)
        weight = np.where(first + offset < old, weights[np.arange(new), place], np.float32(0))
        total = x.take(place, axis) * np.expand_dims(weight, list(range(1, x.ndim - axis))) + total
    return total


def pil() -> tuple[Any, Any]:
    """Pillow's modules Image and ImageOps."""
    with needed_for("reading images", "vision"):
        from PIL import Image, ImageOps
    return Image, ImageOps
