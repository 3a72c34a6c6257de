"""Images of digits and of folders: sizes, colours, orientation, damaged files, and which of them are for testing."""

import random
import shutil
import struct
import sys
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from eqzoo.data import Photos, batches, load_image_folder, load_images


def picture(seed: int, height: int = 32, width: int = 32) -> np.ndarray:
    """Colours that change slowly, so that a photograph's compression keeps them."""
    corners = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), np.uint8)
    return np.asarray(Image.fromarray(corners).resize((width, height), Image.Resampling.BILINEAR))


def save(pixels: np.ndarray, file: Path, **options) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file, **options)
    return file


def one(folder: Path, size: int = 16) -> np.ndarray:
    """The only image of a folder, as it is read."""
    batch = load_image_folder(folder, image_size=size).read(np.arange(1))
    assert batch["weight"].tolist() == [1]
    return batch["image"][0]


def near(image: np.ndarray, expected: np.ndarray, tolerance: int) -> None:
    assert image.shape == expected.shape
    assert np.abs(image.astype(int) - expected).max() <= tolerance


# Digits, and images in memory


def test_the_digits_are_scikit_learns():
    train, test = load_images("digits", image_size=8)
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(1797)
    assert (len(train), len(test), train.classes) == (1437, 360, tuple("0123456789"))
    for images, rows in ((test, order[:360]), (train, order[360:])):
        batch = images.read(np.arange(len(images)))
        np.testing.assert_array_equal(batch["label"], labels[rows])
        expected = np.round(pixels[rows].reshape(-1, 8, 8, 1) / 16 * 255)
        np.testing.assert_array_equal(batch["image"], np.broadcast_to(expected, (len(rows), 8, 8, 3)))


@pytest.mark.parametrize("size", [None, 4, 11, 64, 128])  # 128 is too large to keep
def test_images_in_memory_are_resized_as_jax_does(size):
    """Linearly between the pixels' centres; over all the pixels that a smaller one covers."""
    (small, _), (resized, _) = load_images("digits", image_size=8), load_images("digits", image_size=size)
    rows = np.asarray([5, 1400, 5])
    assert resized.image_size == (size or 32)
    expected = jax.image.resize(
        small.read(rows)["image"].astype(np.float32), (3, resized.image_size, resized.image_size, 3), "linear"
    )
    near(resized.read(rows)["image"], np.asarray(expected.round(), int), 1)


def test_digits_come_in_batches():
    train, _ = load_images("digits", image_size=8)
    (batch,) = batches(train, 4, seed=0, steps=1)
    assert {name: (array.shape, array.dtype.name) for name, array in batch.items()} == {
        "image": ((4, 8, 8, 3), "uint8"),
        "label": ((4,), "int32"),
        "weight": ((4,), "float32"),
        "index": ((4,), "int32"),
    }
    np.testing.assert_array_equal(batch["label"], train.labels[batch["index"]])
    assert train.name(7) == "image 7 of the training digits"


def test_some_of_many_images_to_look_at():
    _, test = load_images("digits", image_size=8)
    photos = Photos(test, np.asarray([7, 3]))
    assert len(photos) == 2
    np.testing.assert_array_equal(list(photos), test.read(np.asarray([7, 3]))["image"])


def test_missing_packages_are_said_with_their_remedy(monkeypatch, tmp_path):
    save(picture(0), tmp_path / "cat" / "1.png")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ModuleNotFoundError, match=r"reading images needs PIL: pip install 'eqzoo\[vision\]'"):
        load_image_folder(tmp_path)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"loading the digits needs sklearn\S*: pip install 'eqzoo\[train\]'"):
        load_images("digits")


@pytest.mark.parametrize("load", [load_images, load_image_folder])
def test_a_size_must_be_positive(load):
    with pytest.raises(ValueError, match="image_size=0, expected a positive number of pixels"):
        load("digits", image_size=0)


# Folders


def write_folders(root: Path, parts: dict[str, dict[str, int]]) -> dict[str, np.ndarray]:
    """`parts` says how many images each class of each part has; one of them lies a folder deeper."""
    written = {}
    for part, classes in parts.items():
        for name, count in classes.items():
            for number in range(count):
                file = root / part / name / ("deeper" if number == 1 else "") / f"{number}.png"
                written[str(file)] = picture(len(written))
                save(written[str(file)], file)
    return written


def check(images, written, expected_names) -> None:
    assert [images.name(row) for row in range(len(images))] == sorted(expected_names, key=lambda name: Path(name).parts)
    batch = images.read(np.arange(len(images)))
    for row, (pixels, label) in enumerate(zip(batch["image"], batch["label"], strict=True)):
        np.testing.assert_array_equal(pixels, written[images.name(row)])
        assert images.classes[label] in Path(images.name(row)).parts
    assert batch["weight"].all()


@pytest.mark.parametrize("test_part", ["test", "val", "validation", "valid"])
def test_folders_of_classes_within_folders_of_parts(tmp_path, test_part):
    parts = {"train": {"dog": 2, "ant": 1, "cat": 3}, test_part: {"cat": 2, "ant": 1}, "other": {"cow": 1}}
    written = write_folders(tmp_path, parts)
    train, test = load_images(tmp_path)
    assert train.classes == test.classes == ("ant", "cat", "dog")
    assert train.image_size == 32
    check(train, written, [name for name in written if "train" in Path(name).parts])
    check(test, written, [name for name in written if test_part in Path(name).parts])


def test_what_is_called_test_is_left_for_the_end_if_there_is_validation(tmp_path):
    write_folders(tmp_path, {"train": {"a": 2}, "val": {"a": 1}, "test": {"a": 3}})
    assert len(load_images(tmp_path)[1]) == 1


@pytest.mark.parametrize("part", ["", "train"])
def test_without_a_test_part_a_tenth_is_held_out_by_name(tmp_path, capsys, part):
    """The same images wherever the folder is and whatever else is in it."""
    written = write_folders(tmp_path / "here", {part: {"ant": 60, "bee": 60}})
    train, test = load_images(tmp_path / "here")
    assert f"{len(test)} of the 120 images are held out" in capsys.readouterr().err
    assert 4 <= len(test) <= 22
    held_out = {test.name(row) for row in range(len(test))}
    check(test, written, held_out)
    check(train, written, set(written) - held_out)

    shutil.copytree(tmp_path / "here", tmp_path / "there")
    for name in random.Random(0).sample(sorted(set(written) - held_out), 20):
        Path(name.replace("here", "there", 1)).unlink()
    _, test = load_images(tmp_path / "there")
    assert {test.name(row).replace("there", "here", 1) for row in range(len(test))} == held_out


def test_a_folder_too_small_to_be_split(tmp_path):
    write_folders(tmp_path, {"": {"ant": 1}})
    with pytest.raises(ValueError, match="of 1 images none is left for a part; put some into a folder val/CLASS"):
        load_images(tmp_path)


def test_one_folder_of_classes(tmp_path):
    written = write_folders(tmp_path, {"": {"ant": 2, "bee": 1}})
    check(load_image_folder(tmp_path), written, written)
    with pytest.raises(FileNotFoundError, match="nowhere is no folder; expected one that has a folder of images"):
        load_image_folder(tmp_path / "nowhere")


def test_folders_that_do_not_fit_are_said(tmp_path, capsys):
    write_folders(tmp_path, {"train": {"ant": 1, "bee": 1}, "val": {"ant": 1, "cow": 1}})
    with pytest.raises(ValueError, match="val: cow is none of the 2 classes there are for training"):
        load_images(tmp_path)
    shutil.rmtree(tmp_path / "val" / "cow")
    (tmp_path / "train" / "bee" / "notes.txt").write_text("hello")
    (tmp_path / "train" / ".hidden").mkdir()
    assert len(load_images(tmp_path)[0]) == 2
    assert "train: 1 files are left out that aren't named as images" in capsys.readouterr().err
    (tmp_path / "train" / "bee" / "0.png").unlink()
    with pytest.raises(ValueError, match="bee: there is no image"):
        load_images(tmp_path)


# Decoding


@pytest.mark.parametrize(("height", "width"), [(40, 40), (40, 80), (90, 30)])
def test_an_image_is_resized_to_cover_the_square_and_cropped_around_its_centre(tmp_path, height, width):
    pixels = picture(0, height, width)
    save(pixels, tmp_path / "a" / "1.png")
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = Image.fromarray(pixels[top : top + side, left : left + side])
    expected = np.asarray(square.resize((16, 16), Image.Resampling.BILINEAR))
    near(one(tmp_path)[1:-1, 1:-1], expected[1:-1, 1:-1], 1)  # Pillow's outermost ones see a little beyond the square


@pytest.mark.parametrize("suffix", ["jpg", "JPEG", "png", "webp", "bmp", "gif", "tif", "ppm"])
def test_formats_of_files(tmp_path, suffix):
    pixels = picture(0)
    lossy = {"jpg": {"quality": 95}, "JPEG": {"quality": 95}, "webp": {"quality": 95}, "gif": {}}
    save(pixels, tmp_path / "a" / f"1.{suffix}", **lossy.get(suffix, {}))
    near(one(tmp_path, 32), pixels, 24 if suffix in lossy else 0)


@pytest.mark.parametrize("size", [20, 64])
def test_a_large_photograph_is_decoded_at_a_fraction_that_covers_the_size(tmp_path, size):
    pixels = picture(0, 500, 400)
    save(pixels, tmp_path / "a" / "1.jpg", quality=95)
    square = Image.fromarray(pixels[50:450]).resize((size, size), Image.Resampling.BILINEAR)
    near(one(tmp_path, size), np.asarray(square), 6)


@pytest.mark.parametrize(("orientation", "turn"), [(1, 0), (3, 2), (6, 3), (8, 1)])
def test_photographs_are_put_upright(tmp_path, orientation, turn):
    pixels = picture(0)
    exif = Image.Exif()
    exif[0x0112] = orientation
    save(pixels, tmp_path / "a" / "1.png", exif=exif)
    np.testing.assert_array_equal(one(tmp_path, 32), np.rot90(pixels, turn))


def grey16(pixels, file):
    save((pixels[..., 0].astype(np.uint16) << 8) + 77, file)
    return np.repeat(pixels[..., :1], 3, axis=-1)


def grey(pixels, file):
    save(pixels[..., 0], file)
    return np.repeat(pixels[..., :1], 3, axis=-1)


def transparent(pixels, file):
    save(np.concatenate([pixels, np.full_like(pixels[..., :1], 9)], axis=-1), file)
    return pixels


def palette(pixels, file):
    reduced = Image.fromarray(pixels).quantize(16)
    reduced.save(file)
    return np.asarray(reduced.convert("RGB"))


def transparent_palette(pixels, file):
    """Pillow warns when such a one is made RGB directly."""
    reduced = Image.fromarray(pixels).quantize(16)
    reduced.save(file, transparency=bytes([0, 99, 255]))
    return np.asarray(reduced.convert("RGB"))


def black_and_white(pixels, file):
    bits = pixels[..., 0] > 128
    Image.fromarray(bits).save(file)
    return np.repeat(bits[..., None], 3, axis=-1).astype(np.uint8) * 255


@pytest.mark.parametrize("write", [grey16, grey, transparent, palette, transparent_palette, black_and_white])
def test_colours_of_all_kinds(tmp_path, write):
    (tmp_path / "a").mkdir()
    expected = write(picture(0), tmp_path / "a" / "1.png")
    np.testing.assert_array_equal(one(tmp_path, 32), expected)


def test_damaged_files_are_examples_that_cannot_be_read(tmp_path, capsys):
    for number in range(6):
        save(picture(number, 64, 64), tmp_path / "a" / f"{number}.jpg", quality=95)
    content = (tmp_path / "a" / "1.jpg").read_bytes()
    (tmp_path / "a" / "1.jpg").write_bytes(content[: len(content) // 2])
    (tmp_path / "a" / "2.jpg").write_bytes(b"")
    (tmp_path / "a" / "3.jpg").write_text("no image")
    images = load_image_folder(tmp_path, image_size=16)
    (tmp_path / "a" / "4.jpg").unlink()
    (batch,) = batches(images, 6, seed=None)
    assert batch["weight"].tolist() == [1, 0, 0, 0, 0, 1]
    assert not batch["image"][1:5].any()
    assert batch["image"][5].any()
    said = capsys.readouterr().err.splitlines()
    assert [Path(line.split()[-1]).name for line in said] == ["1.jpg", "2.jpg", "3.jpg", "4.jpg"]
    list(batches(images, 6, seed=None))
    list(batches(images.prepared(lambda picture: np.zeros((4, 4, 3), np.float32)), 6, seed=None))
    assert capsys.readouterr().err == ""


def test_an_image_that_claims_to_be_gigantic_is_not_decoded(tmp_path):
    """Pillow's error for that is of another kind than for damaged files."""
    save(picture(0), tmp_path / "a" / "1.png")
    content = b"\x89PNG\r\n\x1a\n"
    for chunk in (b"IHDR" + struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0), b"IDAT" + zlib.compress(b"")):
        content += struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    (tmp_path / "a" / "2.png").write_bytes(content)
    images = load_image_folder(tmp_path)
    assert images.image_size == 32
    assert images.read(np.arange(2))["weight"].tolist() == [1, 0]


def test_images_of_different_sizes_get_the_usual_one(tmp_path):
    """Of equal squares the size is kept if it is not large; damaged files don't count."""
    for number in range(3):
        save(picture(number, 48, 48), tmp_path / "a" / f"{number}.png")
    (tmp_path / "a" / "0.png").write_bytes(b"")
    assert load_image_folder(tmp_path).image_size == 48
    save(picture(9, 48, 60), tmp_path / "a" / "9.png")
    assert load_image_folder(tmp_path).image_size == 224
    save(picture(0, 300, 300), tmp_path / "b" / "b" / "1.png")
    assert load_image_folder(tmp_path / "b").image_size == 224


def test_no_images_can_be_read(tmp_path):
    """As the last part of a batch that is all padding for a process."""
    save(picture(0), tmp_path / "a" / "1.png")
    for images in (load_image_folder(tmp_path, image_size=16), load_images("digits", image_size=16)[0]):
        batch = images.read(np.arange(0))
        assert [array.shape for array in batch.values()] == [(0, 16, 16, 3), (0,), (0,)]


def test_folders_are_read_in_worker_processes_too(tmp_path):
    written = write_folders(tmp_path, {"": {"ant": 3, "bee": 2}})
    images = load_image_folder(tmp_path)
    for batch in batches(images, 5, seed=0, steps=1, workers=1):
        for row, index in enumerate(batch["index"]):
            np.testing.assert_array_equal(batch["image"][row], written[images.name(index)])
