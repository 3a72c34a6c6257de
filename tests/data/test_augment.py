"""Each augmentation is what PIL, torchvision or timm do, drawn from the same distribution, one draw an example."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import timm.data.auto_augment as timm_operations
import torch
import tyro
from jax.sharding import NamedSharding, PartitionSpec
from PIL import Image
from scipy.stats import beta, ks_2samp, kstest
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms import functional as torchvision

from eqzoo.data import augment
from eqzoo.data.augment import Augment, prepare
from eqzoo.sharding import make_mesh, shard_batch

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
OFF = Augment(shift=0.0)


def picture(height: int = 37, width: int = 50, seed: int = 0) -> np.ndarray:
    """A dull uint8 photograph: smooth, with some noise, another range of levels in each channel."""
    draw = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(y / 5 + x / 9), np.cos(x / 4), np.sin((x + y) / 7)], axis=-1)
    image = [120, 110, 140] + [60, 40, 80] * waves + draw.normal(0, 8, waves.shape)
    return np.clip(image, 5, 250).astype(np.uint8)


IMAGE = jnp.asarray(picture(), jnp.float32) / 255


def many(function, count: int, seed: int = 0) -> np.ndarray:
    """Results of `count` keys."""
    return jax.jit(jax.vmap(function))(jax.random.split(jax.random.key(seed), count))


def batch_of(images, **changes) -> dict:
    count = len(images)
    batch = {"image": images, "label": np.arange(count) % 5, "weight": np.ones(count), "index": np.arange(count)}
    return {name: jnp.asarray(value) for name, value in (batch | changes).items()}


@functools.partial(jax.jit, static_argnums=0)
def run(options: Augment, batch, key):
    return options(batch, key, classes=5, mean=MEAN, std=STD)


def test_flip_mirrors_every_second_image():
    flipped = np.asarray(many(lambda key: augment.flip(IMAGE, key), 400))
    mirrored = np.all(flipped == IMAGE[:, ::-1], axis=(1, 2, 3))
    assert np.all(mirrored | np.all(flipped == IMAGE, axis=(1, 2, 3)))
    assert 0.4 < mirrored.mean() < 0.6


def test_shift_gives_all_crops_of_the_image_padded_by_its_edge():
    height, width, down, right = 20, 33, 2, 4
    image = picture(height, width)
    padded = np.pad(image, ((down, down), (right, right), (0, 0)), mode="edge")
    crops = {
        padded[top : top + height, left : left + width].tobytes()
        for top in range(2 * down + 1)
        for left in range(2 * right + 1)
    }
    shifted = np.asarray(many(lambda key: augment.shift(jnp.asarray(image / 255, jnp.float32), key, 1 / 8), 600))
    assert {np.round(255 * one).astype(np.uint8).tobytes() for one in shifted} == crops


def test_resized_crop_is_torchvisions_of_the_same_rectangle():
    image = Image.fromarray(picture())
    size = [37, 50]
    crop = jax.jit(functools.partial(augment.resized_crop, IMAGE))
    for key in jax.random.split(jax.random.key(0), 8):
        top, left, height, width = map(int, augment._rectangle(key, (37, 50, 3), (0.08, 1.0), (3 / 4, 4 / 3)))
        expected = torchvision.resized_crop(image, top, left, height, width, size, InterpolationMode.BILINEAR)
        cropped = 255 * crop(key)
        np.testing.assert_allclose(cropped, np.asarray(expected), atol=1)  # PIL rounds after each of its two passes


def test_resized_crop_of_everything_is_the_image_itself():
    image = IMAGE[:37, :37]
    cropped = augment.resized_crop(image, jax.random.key(0), scale=(1.0, 1.0), ratio=(1.0, 1.0))
    np.testing.assert_allclose(cropped, image, atol=1e-6)


@pytest.mark.parametrize("shape", [(64, 64, 3), (40, 90, 3)])
def test_rectangles_are_distributed_as_torchvisions(shape):
    scale, ratio = (0.08, 1.0), (3 / 4, 4 / 3)
    rectangles = np.stack(many(lambda key: augment._rectangle(key, shape, scale, ratio), 2000), axis=1)
    image = torch.zeros(3, *shape[:2])
    expected = np.array([RandomResizedCrop.get_params(image, list(scale), list(ratio)) for _ in range(2000)])
    for ours, theirs in zip(rectangles.T, expected.T, strict=True):
        assert ks_2samp(ours, theirs).pvalue > 1e-3
    assert np.all(rectangles[:, :2] >= 0)
    assert np.all(rectangles[:, :2] + rectangles[:, 2:] <= shape[:2])


def test_a_rectangle_that_never_fits_is_cut_to_fit():
    top, left, height, width = augment._rectangle(jax.random.key(0), (2, 200, 3), (0.9, 1.0), (1.0, 1.1))
    assert (top, height) == (0, 2)
    assert 0 <= left <= 200 - width


def test_erase_puts_noise_into_rectangles_distributed_as_timms():
    count, size = 1000, 24
    gray = jnp.full((size, size, 3), 2.0)  # noise is at most 1
    erased = np.asarray(many(lambda key: augment.erase(gray, key, 0.4), count))
    inside = np.any(erased != 2, axis=-1)
    assert np.all(inside == np.all(erased != 2, axis=-1))
    assert np.all(inside == inside.any(axis=1, keepdims=True) & inside.any(axis=2, keepdims=True))  # a rectangle
    shares = inside.mean(axis=(1, 2))
    assert 0.35 < np.mean(shares > 0) < 0.45

    random.seed(0)
    timm = RandomErasing(probability=1, device="cpu")
    expected = np.array([(timm(torch.ones(3, size, size)) == 0).float().mean() for _ in range(count)])
    assert ks_2samp(shares[shares > 0], expected).pvalue > 1e-3
    heights, widths = inside.any(axis=2).sum(axis=1), inside.any(axis=1).sum(axis=1)
    assert heights.max() > 1.5 * np.sqrt(size * size / 3)
    assert widths.max() > 1.5 * np.sqrt(size * size / 3)

    noise = erased[inside]
    assert kstest(noise.reshape(-1)[:5000], "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(noise.T) - np.eye(3)).max() < 0.02


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_erase_never_and_always(probability):
    erased = many(lambda key: jnp.any(augment.erase(IMAGE, key, probability) != IMAGE), 50)
    assert np.all(erased == bool(probability))


TIMM_NAMES = {
    "auto_contrast": "AutoContrast",
    "equalize": "Equalize",
    "invert": "Invert",
    "rotate": "Rotate",
    "posterize": "PosterizeIncreasing",
    "solarize": "SolarizeIncreasing",
    "color": "ColorIncreasing",
    "contrast": "ContrastIncreasing",
    "brightness": "BrightnessIncreasing",
    "sharpness": "SharpnessIncreasing",
    "shear_x": "ShearX",
    "shear_y": "ShearY",
    "translate_x": "TranslateXRel",
    "translate_y": "TranslateYRel",
}


@jax.jit
def operate(pixels, which, amount):
    return augment.operate(pixels, which, amount)


def all_operations(pixels: np.ndarray, amount: float) -> dict[str, np.ndarray]:
    names = [operation.__name__ for operation in augment.OPERATIONS]
    return {name: np.asarray(operate(jnp.asarray(pixels), i, amount)) for i, name in enumerate(names)}


def timms(name: str, pixels: np.ndarray, magnitude: float, sign: int, monkeypatch) -> np.ndarray:
    monkeypatch.setattr(random, "random", lambda: {1: 0.0, -1: 1.0}[sign])
    hparams = {"interpolation": Image.Resampling.NEAREST, "img_mean": (128, 128, 128)}
    operation = timm_operations.AugmentOp(TIMM_NAMES[name], prob=1, magnitude=magnitude, hparams=hparams)
    return np.asarray(operation(Image.fromarray(pixels)))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("magnitude", [9, 3.5, 0.0])
def test_operations_are_pils_in_timms_ranges(magnitude, sign, monkeypatch):
    pixels = picture()
    results = all_operations(pixels, sign * magnitude / 10)
    assert set(results) == set(TIMM_NAMES)
    for name, result in results.items():
        difference = np.abs(result.astype(int) - timms(name, pixels, magnitude, sign, monkeypatch))
        if name in {"rotate", "shear_x", "shear_y", "translate_x", "translate_y"}:
            # PIL counts in 65536ths of a pixel, so that a few land in the next one.
            assert np.mean(difference > 0) < 2e-3, name
        else:
            assert difference.max() <= (name == "auto_contrast"), name  # PIL's own rounding


@pytest.mark.parametrize(
    "pixels",
    [
        np.full((20, 20, 3), 77, np.uint8),
        picture(12, 12),  # too few pixels for all levels
        np.random.default_rng(0).choice(np.uint8([3, 9, 200]), (40, 40, 3), p=[0.1, 0.6, 0.3]),
        np.random.default_rng(0).integers(0, 256, (21, 28, 3), np.uint8),
        np.tile(np.arange(256, dtype=np.uint8)[:, None, None], (1, 2, 3)),
    ],
    ids=["one level", "few pixels", "three levels", "noise", "all levels"],
)
def test_tables_are_pils_on_odd_histograms(pixels, monkeypatch):
    for name, result in all_operations(pixels, 0.9).items():
        if name in {"auto_contrast", "equalize", "contrast"}:
            difference = np.abs(result.astype(int) - timms(name, pixels, 9, 1, monkeypatch))
            assert difference.max() <= (name == "auto_contrast"), name


def test_posterize_keeps_a_bit_at_the_highest_magnitude():
    assert set(np.unique(all_operations(picture(), 1.0)["posterize"])) == {0, 128}


def test_rand_augment_applies_operations_one_after_the_other():
    pixels = jnp.asarray(picture(20, 20, seed=1))
    sign, which = (axis.ravel() for axis in jnp.meshgrid(jnp.array([-0.5, 0.5]), jnp.arange(14)))

    @jax.jit
    def none_or_one(pixels):
        changed = jax.vmap(augment.operate, in_axes=(None, 0, 0))(pixels, which, sign)
        return jnp.concatenate([pixels[None], changed])

    once = np.asarray(none_or_one(pixels))
    twice = np.concatenate([none_or_one(image) for image in once])

    def drawn(layers, possible, count):
        """Which of the possible results come out; compiled otherwise, a pixel may be rounded otherwise."""
        augmented = 255 * many(lambda key: augment.rand_augment(pixels / 255, key, layers, 5.0), count)
        distances = np.stack([np.abs(possible - image).mean(axis=(1, 2, 3)) for image in augmented])
        assert np.all(distances.min(axis=1) < 0.5)
        return distances.argmin(axis=1)

    ones = drawn(1, once, 1000)
    tables = [augment.OPERATIONS.index(operation) for operation in augment.TABLES[:5]]  # the sign means nothing to them
    assert set(ones) == set(range(29)) - {2 + 2 * i for i in tables}
    assert 0.45 < np.mean(ones == 0) < 0.55
    first, second = np.divmod(drawn(2, twice, 300), 29)
    assert 0.15 < np.mean((first > 0) & (second > 0)) < 0.35


def test_rand_augment_with_magnitude_zero_moves_nothing():
    augmented = many(lambda key: augment.rand_augment(jnp.full((8, 8, 3), 0.2), key, 1, 0.0), 300)
    assert set(np.unique(np.round(255 * np.asarray(augmented)))) == {48, 51, 204}  # posterized, the same, inverted


IMAGES = jnp.stack([jnp.asarray(picture(9, 14, seed), jnp.float32) / 255 for seed in range(5)])
TARGETS = jnp.eye(5)


def timms_mixed(mixer: Mixup) -> tuple[np.ndarray, np.ndarray]:
    # timm wants an even number of images, but only says so at the entrance.
    images = torch.tensor(np.moveaxis(np.asarray(IMAGES), -1, 1))
    share = mixer._mix_batch(images)
    targets = torch.eye(5) * share + torch.eye(5).flip(0) * (1 - share)
    return np.moveaxis(images.numpy(), 1, -1), targets.numpy()


@pytest.mark.parametrize("share", [0.1, 0.75])
def test_mixup_is_timms_of_the_same_share(share, monkeypatch):
    monkeypatch.setattr(np.random, "beta", lambda a, b: share)
    monkeypatch.setattr(jax.random, "beta", lambda key, a, b: jnp.asarray(share))
    expected = timms_mixed(Mixup(mixup_alpha=1))
    for ours, theirs in zip(augment.mixup(IMAGES, TARGETS, jax.random.key(0), 1.0), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("share", [0.1, 0.75, 0.999])
@pytest.mark.parametrize(("y", "x"), [(0, 0), (4, 6), (8, 13), (3, 1)])
def test_cutmix_is_timms_of_the_same_share_and_place(share, y, x, monkeypatch):
    places = iter([y, x])
    monkeypatch.setattr(np.random, "beta", lambda a, b: share)
    monkeypatch.setattr(np.random, "randint", lambda low, high, size: next(places))
    monkeypatch.setattr(jax.random, "beta", lambda key, a, b: jnp.asarray(share))
    monkeypatch.setattr(jax.random, "randint", lambda *_: jnp.array([y, x]))
    expected = timms_mixed(Mixup(mixup_alpha=0, cutmix_alpha=1))
    for ours, theirs in zip(augment.cutmix(IMAGES, TARGETS, jax.random.key(0), 1.0), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.2, 2.0])
def test_shares_are_drawn_from_beta_and_places_from_everywhere(alpha):
    shares = many(lambda key: augment.mixup(IMAGES, TARGETS, key, alpha)[1][0, 0], 500)
    assert kstest(shares, beta(alpha, alpha).cdf).pvalue > 1e-3

    size, count = 40, 500
    images = jnp.zeros((2, size, size, 3)).at[1].set(1)
    mixed, targets = many(lambda key: augment.cutmix(images, jnp.eye(2), key, alpha), count)
    np.testing.assert_allclose(targets[:, 0, 1], mixed[:, 0].mean(axis=(1, 2, 3)), atol=1e-6)
    np.random.seed(0)  # noqa: NPY002  timm draws from it
    mixer = Mixup(mixup_alpha=0, cutmix_alpha=alpha)
    expected = [mixer._mix_batch(torch.zeros(2, 3, size, size)) for _ in range(count)]
    assert ks_2samp(targets[:, 0, 0], expected).pvalue > 1e-3
    rows, columns = mixed[:, 0, :, :, 0].mean(axis=(0, 2)), mixed[:, 0, :, :, 0].mean(axis=(0, 1))
    for along in (rows, columns):
        assert along.max() < 2.5 * along.min()
        assert abs(along[: size // 2].mean() / along[size // 2 :].mean() - 1) < 0.2


PICTURES = np.stack([picture(16, 24, seed) for seed in range(8)])


def test_prepare_normalises_as_torchvision():
    batch = batch_of(PICTURES)
    prepared = prepare(batch, mean=MEAN, std=STD)
    tensor = torch.tensor(np.moveaxis(PICTURES, -1, 1)) / 255
    expected = torchvision.normalize(tensor, MEAN, STD)
    np.testing.assert_allclose(prepared["image"], np.moveaxis(expected.numpy(), 1, -1), atol=1e-5)
    assert np.array_equal(prepared["target"], batch["label"])
    assert set(prepared) == {"image", "label", "weight", "index", "target"}


def test_without_options_a_batch_is_only_prepared():
    batch = batch_of(PICTURES)
    prepared, augmented = prepare(batch, mean=MEAN, std=STD), run(OFF, batch, jax.random.key(0))
    assert set(augmented) == set(prepared)
    for name, value in augmented.items():
        np.testing.assert_allclose(value, prepared[name], atol=1e-5)
        assert value.dtype == prepared[name].dtype


@pytest.mark.parametrize(
    "options", [{"flip": True}, {"shift": 0.2}, {"crop": 0.3}, {"erase": 0.5}, {"rand_augment": 9.0}], ids=str
)
def test_each_example_has_its_own_draw_and_stays_between_black_and_white(options):
    speckled = np.random.default_rng(0).choice(np.uint8([0, 255]), (12, 12, 3))
    batch, options = batch_of(np.stack([speckled] * 16)), Augment(**({"shift": 0.0} | options))
    images = np.asarray(run(options, batch, jax.random.key(0))["image"])
    assert len({image.tobytes() for image in images}) > 1
    assert np.array_equal(images, run(options, batch, jax.random.key(0))["image"])
    assert not np.array_equal(images, run(options, batch, jax.random.key(1))["image"])
    values = images * np.array(STD) + np.array(MEAN)
    assert values.min() > -1e-5
    assert values.max() < 1 + 1e-5


@pytest.mark.parametrize("options", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0}], ids=str)
def test_an_unreadable_example_shows_in_no_other(options):
    weight = np.array([1, 1, 0, 1, 1, 1, 1, 1])
    garbage = np.array(PICTURES)
    garbage[2] = 255
    for seed in range(4):
        clean = run(Augment(**options), batch_of(PICTURES, weight=weight), jax.random.key(seed))
        other = run(
            Augment(**options),
            batch_of(garbage, weight=weight, label=np.array([0, 1, 4, 3, 4, 0, 1, 2])),
            jax.random.key(seed),
        )
        for name in ("image", "target"):
            assert np.array_equal(clean[name][weight > 0], other[name][weight > 0])
        assert np.array_equal(clean["target"][5], np.eye(5)[0])
        assert clean["target"].shape == (8, 5)
        np.testing.assert_allclose(clean["target"].sum(axis=1), 1, atol=1e-6)


def test_with_mixup_and_cutmix_each_batch_gets_one_of_them():
    shades = np.arange(0, 80, 10, dtype=np.uint8)
    batch = batch_of(np.broadcast_to(shades[:, None, None, None], (8, 10, 10, 3)), label=np.array([0, 1, 2, 3] * 2))
    options = Augment(shift=0.0, mixup=1.0, cutmix=1.0)
    shades_of_one = []
    for key in jax.random.split(jax.random.key(0), 40):
        mixed = run(options, batch, key)
        shades_of_one.append(len(np.unique(np.asarray(mixed["image"][0, :, :, 0]))))
        # The share of the other image and of its class is the same.
        value = mixed["image"][0, :, :, 0] * STD[0] + MEAN[0]
        np.testing.assert_allclose(np.mean(value) / (70 / 255), mixed["target"][0, 3], atol=1e-5)
    assert 10 < np.sum(np.array(shades_of_one) == 2) < 30


@pytest.mark.parametrize(
    "options",
    [
        Augment(flip=True, rand_augment=9.0, erase=0.5, mixup=0.4, cutmix=1.0),
        Augment(flip=True, rand_augment=9.0, erase=0.5),
        Augment(crop=0.2),
    ],
    ids=["mixed", "unmixed", "cropped"],
)
def test_sharded_over_eight_devices_is_the_same(options):
    batch, key = batch_of(PICTURES), jax.random.key(5)
    expected = run(options, batch, key)
    mesh = make_mesh(data=4, fsdp=2)
    sharded, everywhere = shard_batch(batch, mesh), jax.device_put(key, NamedSharding(mesh, PartitionSpec()))
    result = run(options, sharded, everywhere)
    for name, value in result.items():
        np.testing.assert_allclose(value, expected[name], atol=1e-6)
    assert len(result["image"].sharding.device_set) == 8
    assert result["image"].addressable_shards[0].data.shape[0] == 1
    if not options.mixup:  # each device works on its own images
        assert "all-gather" not in run.lower(options, sharded, everywhere).compile().as_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop": 1.5}, "crop=1.5 is out of range; choose a number from 0 to 1"),
        ({"rand_augment": 11.0}, "rand_augment=11.0 is out of range; choose a number from 0 to 10"),
        ({"mixup": -0.1}, "mixup=-0.1 is out of range"),
        ({"erase": float("nan")}, "erase=nan is out of range"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        Augment(**options)


@pytest.mark.parametrize("function", [prepare, functools.partial(OFF, key=jax.random.key(0), classes=5)])
def test_images_that_are_not_bytes(function):
    with pytest.raises(ValueError, match=r"the images have dtype float32, expected uint8 from 0 to 255; from values"):
        function(batch_of(PICTURES / 255), mean=MEAN, std=STD)


def test_options_on_a_command_line():
    assert tyro.cli(Augment, args=[]) == Augment(shift=1 / 16)
    assert tyro.cli(Augment, args=["--flip", "--crop", "0.08", "--mixup", "0.2"]) == Augment(
        flip=True, crop=0.08, mixup=0.2
    )
