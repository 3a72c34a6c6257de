"""Augmentation on the device, inside the training step: functions of one image and a key, mapped over the batch.

Images are floats from 0 to 1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped, UInt8

Image = Float[Array, "height width 3"]
Images = Float[Array, "batch height width 3"]
Targets = Float[Array, "batch classes"]
Scalar = Float[Array, ""]


def flip(image: Image, key: PRNGKeyArray) -> Image:
    """The image, or with probability one half its mirror image, left and right exchanged."""
    return jnp.where(jax.random.bernoulli(key), image[:, ::-1], image)


def shift(image: Image, key: PRNGKeyArray, reach: float) -> Image:
    """The image moved by whole pixels, up to `reach` of its height and width; the pixels at its edge fill the gap."""
    height, width, _ = image.shape
    limits = jnp.array([int(reach * height), int(reach * width)])
    down, right = jax.random.randint(key, (2,), -limits, limits + 1)
    rows = jnp.clip(jnp.arange(height) + down, 0, height - 1)
    columns = jnp.clip(jnp.arange(width) + right, 0, width - 1)
    return image[rows][:, columns]


def resized_crop(
    image: Image,
    key: PRNGKeyArray,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Image:
    """A random rectangle of the image, enlarged to the image's size, as torchvision's `RandomResizedCrop` makes it.

    `scale` is the range of the rectangle's share of the area, `ratio` that of its width to its height.
    """
    top, left, height, width = _rectangle(key, image.shape, scale, ratio)
    rows = _enlarging(top, height, image.shape[0])
    columns = _enlarging(left, width, image.shape[1])
    return jnp.einsum("ih,hwc,jw->ijc", rows, image, columns, precision="highest")


def _enlarging(start: Int[Array, ""], length: Int[Array, ""], size: int) -> Float[Array, "size size"]:
    """The matrix that stretches `length` pixels from `start` on to `size`, linearly between their centres."""
    centres = (jnp.arange(size) + 0.5) * (length / size) - 0.5
    centres = start + jnp.clip(centres, 0, length - 1)
    return jax.nn.relu(1 - jnp.abs(centres[:, None] - jnp.arange(size)))


def erase(image: Image, key: PRNGKeyArray, probability: float) -> Image:
    """With this probability, noise in a random rectangle of 2 to 33 % of the image (random erasing,
    arXiv 1708.04896).
    """
    key_whether, key_where, key_noise = jax.random.split(key, 3)
    top, left, height, width = _rectangle(key_where, image.shape, (0.02, 1 / 3), (0.3, 1 / 0.3))
    row, column = jnp.arange(image.shape[0])[:, None], jnp.arange(image.shape[1])
    inside = (row >= top) & (row < top + height) & (column >= left) & (column < left + width)
    inside &= jax.random.bernoulli(key_whether, probability)
    # One draw serves all three channels: drawing is what takes the time here.
    bits = jax.random.bits(key_noise, image.shape[:2], jnp.uint32)
    noise = ((bits[..., None] >> jnp.array([0, 8, 16], jnp.uint32)) % 256).astype(image.dtype) / 255
    return jnp.where(inside[..., None], noise, image)


def _rectangle(
    key: PRNGKeyArray, shape: tuple[int, ...], share: tuple[float, float], ratio: tuple[float, float]
) -> tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
    """Top, left, height and width of a rectangle in an image: the first of ten draws that fits, or one cut to fit."""
    key_area, key_ratio, key_place = jax.random.split(key, 3)
    areas = shape[0] * shape[1] * jax.random.uniform(key_area, (10,), minval=share[0], maxval=share[1])
    ratios = jnp.exp(jax.random.uniform(key_ratio, (10,), minval=math.log(ratio[0]), maxval=math.log(ratio[1])))
    sizes = jnp.round(jnp.sqrt(jnp.stack([areas / ratios, areas * ratios]))).astype(jnp.int32)
    image_size = jnp.array(shape[:2])
    first = jnp.argmax(jnp.all(sizes <= image_size[:, None], axis=0))
    size = jnp.clip(sizes[:, first], 1, image_size)
    top, left = jax.random.randint(key_place, (2,), 0, image_size - size + 1)
    return top, left, size[0], size[1]


# RandAugment. Each image of a batch gets another operation, and what differs between the examples of a `vmap` costs the
# sum of all branches. So an operation is no function of the image: it is where the pixels come from, a table of new
# values, or a plain image to blend with, and each of the three is done once. Pixels are from 0 to 255 as in PIL,
# `amount` is from -1 to 1.

Pixels = UInt8[Array, "height width 3"]
Levels = Float[Array, "height width 3"]
Matrix = Float[Array, "2 3"]
Histogram = Int[Array, "256 3"]
Table = Float[Array, "256 3"]
Size = tuple[int, int]


def rotate(size: Size, amount: Scalar) -> Matrix:
    y, x = size[0] / 2, size[1] / 2
    cos, sin = jnp.cos(math.radians(30) * amount), jnp.sin(math.radians(30) * amount)
    return jnp.array([[cos, -sin, x - cos * x + sin * y], [sin, cos, y - sin * x - cos * y]])


def shear_x(size: Size, amount: Scalar) -> Matrix:
    return jnp.array([[1.0, 0.3 * amount, 0.0], [0.0, 1.0, 0.0]])


def shear_y(size: Size, amount: Scalar) -> Matrix:
    return jnp.array([[1.0, 0.0, 0.0], [0.3 * amount, 1.0, 0.0]])


def translate_x(size: Size, amount: Scalar) -> Matrix:
    return jnp.array([[1.0, 0.0, 0.45 * size[1] * amount], [0.0, 1.0, 0.0]])


def translate_y(size: Size, amount: Scalar) -> Matrix:
    return jnp.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.45 * size[0] * amount]])


def auto_contrast(levels: Table, histogram: Histogram, amount: Scalar) -> Table:
    darkest, brightest = _range(histogram)
    stretched = jnp.floor(255 * (levels - darkest) / jnp.maximum(brightest - darkest, 1))
    return jnp.where(brightest > darkest, stretched, levels)


def equalize(levels: Table, histogram: Histogram, amount: Scalar) -> Table:
    below = jnp.cumsum(histogram, axis=0) - histogram
    _, brightest = _range(histogram)
    step = below[brightest, jnp.arange(3)] // 255
    return jnp.where(step > 0, (step // 2 + below) // jnp.maximum(step, 1), levels)


def _range(histogram: Histogram) -> tuple[Int[Array, "3"], Int[Array, "3"]]:
    """The darkest and the brightest level of each channel."""
    return jnp.argmax(histogram > 0, axis=0), 255 - jnp.argmax(histogram[::-1] > 0, axis=0)


def invert(levels: Table, histogram: Histogram, amount: Scalar) -> Table:
    return 255 - levels


def solarize(levels: Table, histogram: Histogram, amount: Scalar) -> Table:
    return jnp.where(levels < 256 - jnp.floor(256 * jnp.abs(amount)), levels, 255 - levels)


def posterize(levels: Table, histogram: Histogram, amount: Scalar) -> Table:
    bits = jnp.maximum(4 - jnp.floor(4 * jnp.abs(amount)), 1)
    step = 2 ** (8 - bits)
    return jnp.floor(levels / step) * step


def brightness(levels: Table, histogram: Histogram, amount: Scalar) -> Table:
    return _away_from(jnp.zeros_like(levels), levels, amount)


def contrast(levels: Table, histogram: Histogram, amount: Scalar) -> Table:
    mean = jnp.sum(_gray(histogram * levels)) / jnp.sum(histogram[:, 0])
    return _away_from(jnp.floor(mean + 0.5), levels, amount)


def color(levels: Levels) -> Levels:
    return jnp.broadcast_to(jnp.floor(_gray(levels) + 0.5), levels.shape)


def sharpness(levels: Levels) -> Levels:
    height, width, _ = levels.shape
    padded = jnp.pad(levels, ((1, 1), (1, 1), (0, 0)))
    rows = padded[:-2] + padded[1:-1] + padded[2:]
    neighbourhood = rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:] + 4 * levels
    row, column = jnp.arange(height)[:, None, None], jnp.arange(width)[:, None]
    inner = (row > 0) & (row < height - 1) & (column > 0) & (column < width - 1)
    return jnp.where(inner, jnp.floor(neighbourhood / 13 + 0.5), levels)


def _gray(levels: Float[Array, "*axes 3"]) -> Float[Array, "*axes 1"]:
    red, green, blue = (levels[..., i : i + 1] for i in range(3))
    return (19595 * red + 38470 * green + 7471 * blue) / 65536


def _away_from(plain: Float[Array, "..."], levels: Float[Array, "*axes 3"], amount: Scalar) -> Float[Array, "*axes 3"]:
    factor = jnp.maximum(1 + 0.9 * amount, 0.1)
    return jnp.floor(jnp.clip(plain + factor * (levels - plain), 0, 255))


MOVES = (rotate, shear_x, shear_y, translate_x, translate_y)
TABLES = (auto_contrast, equalize, invert, solarize, posterize, brightness, contrast)
PLAIN = (color, sharpness)
OPERATIONS = (*MOVES, *TABLES, *PLAIN)


def operate(pixels: Pixels, which: Int[Array, ""], amount: Scalar) -> Pixels:
    """The operation with this number in `OPERATIONS`."""
    height, width, _ = pixels.shape
    to_x, to_y = jax.lax.switch(which, [partial(move, (height, width)) for move in MOVES], amount)
    x, y = jnp.arange(width) + 0.5, jnp.arange(height)[:, None] + 0.5
    column, row = (jnp.floor(a * x + b * y + c).astype(jnp.int32) for a, b, c in (to_x, to_y))
    moved = pixels.at[row, column].get(mode="fill", fill_value=128, wrap_negative_indices=False)

    in_table = 3 * pixels.astype(jnp.int32) + jnp.arange(3)  # one index is faster than two
    histogram = jnp.zeros(256 * 3, jnp.int32).at[in_table].add(1).reshape(256, 3)
    unchanged = jnp.broadcast_to(jnp.arange(256.0)[:, None], (256, 3))
    table = jax.lax.switch(which - len(MOVES), TABLES, unchanged, histogram, amount)
    table = jnp.clip(table, 0, 255).astype(jnp.uint8)
    replaced = table.reshape(-1)[in_table]

    levels = pixels.astype(jnp.float32)
    plain = jax.lax.switch(which - len(MOVES) - len(TABLES), PLAIN, levels)
    blended = _away_from(plain, levels, amount).astype(jnp.uint8)

    is_move, is_table = which < len(MOVES), which < len(MOVES) + len(TABLES)
    return jnp.where(is_move, moved, jnp.where(is_table, replaced, blended))


def rand_augment(image: Image, key: PRNGKeyArray, layers: int, magnitude: float) -> Image:
    """As many random operations as `layers` one after the other, each left out half of the time (RandAugment,
    arXiv 1909.13719).

    The operations are PIL's, with the nearest pixel where they move the image and gray beyond its edge. Their ranges
    are those of timm's RandAugment that increases with `magnitude`, from 0 to 10.
    """

    def layer(pixels, key):
        key_whether, key_which, key_sign = jax.random.split(key, 3)
        which = jax.random.randint(key_which, (), 0, len(OPERATIONS))
        amount = jax.random.rademacher(key_sign, (), jnp.float32) * magnitude / 10
        changed = operate(pixels, which, amount)
        return jnp.where(jax.random.bernoulli(key_whether), changed, pixels), None

    pixels = jnp.round(255 * jnp.clip(image, 0, 1)).astype(jnp.uint8)
    # A scan, because without it XLA computes the first operation anew for each of the second one's nine neighbours.
    pixels, _ = jax.lax.scan(layer, pixels, jax.random.split(key, layers))
    return pixels.astype(image.dtype) / 255


def mixup(images: Images, targets: Targets, key: PRNGKeyArray, alpha: float) -> tuple[Images, Targets]:
    """Each image blended with its counterpart from the other end of the batch, and the targets alike (mixup,
    arXiv 1710.09412). The batch's one share is drawn from Beta(alpha, alpha).
    """
    share = jax.random.beta(key, alpha, alpha)
    return share * images + (1 - share) * images[::-1], share * targets + (1 - share) * targets[::-1]


def cutmix(images: Images, targets: Targets, key: PRNGKeyArray, alpha: float) -> tuple[Images, Targets]:
    """Each image with a rectangle from its counterpart at the other end of the batch, and targets by the share of the
    area (CutMix, arXiv 1905.04899). The batch's one rectangle leaves a share drawn from Beta(alpha, alpha), or more
    where it reaches over the edge.
    """
    key_share, key_place = jax.random.split(key)
    _, height, width, _ = images.shape
    side = jnp.sqrt(1 - jax.random.beta(key_share, alpha, alpha))
    y, x = jax.random.randint(key_place, (2,), 0, jnp.array([height, width]))
    in_rows, in_columns = _around(y, side, height), _around(x, side, width)
    inside = in_rows[:, None] & in_columns
    share = 1 - jnp.sum(in_rows) * jnp.sum(in_columns) / (height * width)
    mixed = jnp.where(inside[..., None], images[::-1], images)
    return mixed, share * targets + (1 - share) * targets[::-1]


def _around(centre: Int[Array, ""], side: Scalar, size: int) -> Array:
    """Which pixels lie in a stretch of `side` times `size` around the centre."""
    length = (size * side).astype(jnp.int32)
    position = jnp.arange(size)
    return (position >= centre - length // 2) & (position < centre + (length + 1) // 2)


@dataclass(frozen=True)
class Augment:
    """What happens to the images of a batch in training, as options of a script. It is called inside the step."""

    flip: bool = False
    """Mirror every second image, left and right exchanged."""
    shift: float = 1 / 16
    """Move by up to this share of the image's size."""
    crop: float = 0.0
    """Enlarge a random rectangle of at least this share of the area (ImageNet: 0.08); 0: none."""
    erase: float = 0.0
    """Probability of noise in a random rectangle."""
    rand_augment: float = 0.0
    """Magnitude of RandAugment with two operations, up to 10; 0: none."""
    mixup: float = 0.0
    """Blend pairs of images; alpha of the Beta distribution; 0: none. With cutmix too, each batch gets one of them."""
    cutmix: float = 0.0
    """Exchange a rectangle between pairs of images; alpha of the Beta distribution; 0: none."""

    def __post_init__(self):
        for name, limit in {"shift": 1, "crop": 1, "erase": 1, "rand_augment": 10, "mixup": 100, "cutmix": 100}.items():
            if not 0 <= getattr(self, name) <= limit:
                raise ValueError(f"{name}={getattr(self, name)} is out of range; choose a number from 0 to {limit}")

    def __call__(
        self,
        batch: Mapping[str, Array],
        key: PRNGKeyArray,
        *,
        classes: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
    ) -> dict[str, Array]:
        """The batch with its images augmented and normalised, and `target`: the label, or with mixup or cutmix a
        probability for each class.
        """
        key_images, key_mix = jax.random.split(key)
        images = _to_float(batch["image"])
        images = jax.vmap(self._augment)(images, jax.random.split(key_images, len(images)))
        target = batch["label"]
        if self.mixup or self.cutmix:
            target = jax.nn.one_hot(target, classes)
            mixed, mixed_target = self._mix(images, target, key_mix)
            # An unreadable example must not show in its counterpart.
            readable = batch["weight"][::-1] > 0
            images = jnp.where(readable[:, None, None, None], mixed, images)
            target = jnp.where(readable[:, None], mixed_target, target)
        return {**batch, "image": _normalise(images, mean, std), "target": target}

    def _augment(self, image: Image, key: PRNGKeyArray) -> Image:
        key_flip, key_shift, key_crop, key_rand_augment, key_erase = jax.random.split(key, 5)
        if self.crop:
            image = resized_crop(image, key_crop, scale=(self.crop, 1.0))
        if self.flip:
            image = flip(image, key_flip)
        if self.shift:
            image = shift(image, key_shift, self.shift)
        if self.rand_augment:
            image = rand_augment(image, key_rand_augment, layers=2, magnitude=self.rand_augment)
        if self.erase:
            image = erase(image, key_erase, self.erase)
        return image

    def _mix(self, images: Images, targets: Targets, key: PRNGKeyArray) -> tuple[Images, Targets]:
        if not self.cutmix:
            return mixup(images, targets, key, self.mixup)
        if not self.mixup:
            return cutmix(images, targets, key, self.cutmix)
        key_which, key = jax.random.split(key)
        return jax.lax.cond(
            jax.random.bernoulli(key_which),
            lambda: mixup(images, targets, key, self.mixup),
            lambda: cutmix(images, targets, key, self.cutmix),
        )


def prepare(batch: Mapping[str, Array], *, mean: tuple[float, ...], std: tuple[float, ...]) -> dict[str, Array]:
    """The batch as `Augment` returns it, without any augmentation: for evaluation."""
    images = _normalise(_to_float(batch["image"]), mean, std)
    return {**batch, "image": images, "target": batch["label"]}


def _to_float(images: Shaped[Array, "batch height width 3"]) -> Images:
    if images.dtype != jnp.uint8:
        raise ValueError(
            f"the images have dtype {images.dtype}, expected uint8 from 0 to 255; "
            f"from values between 0 and 1: `jnp.round(255 * images).astype(jnp.uint8)`"
        )
    return images.astype(jnp.float32) / 255


def _normalise(images: Images, mean: tuple[float, ...], std: tuple[float, ...]) -> Images:
    return (images - jnp.array(mean)) / jnp.array(std)
