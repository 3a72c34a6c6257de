"""Each form of labelled images, written as its publisher writes it, is read back; damaged ones say what's wrong."""

import gzip
import io
import json
import pickle
import shutil
import struct
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from eqzoo.data import Images, load_images

CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def random_images(seed: int, count: int, size: int = 32, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, channels), np.uint8)


def everything(images: Images) -> tuple[np.ndarray, list[int]]:
    batch = images.read(np.arange(len(images)))
    assert (batch["image"].dtype, batch["label"].dtype) == (np.uint8, np.int32)
    assert batch["weight"].tolist() == [1] * len(images)
    return batch["image"], batch["label"].tolist()


def check(data: Path, pixels, labels, classes) -> None:
    """Training and test images are these."""
    loaded, classes = load_images(data), tuple(classes)
    for images, expected_pixels, expected_labels in zip(loaded, pixels, labels, strict=True):
        image, label = everything(images)
        assert images.classes == classes
        assert images.image_size == expected_pixels.shape[1]
        assert label == list(expected_labels) == images.labels.tolist()
        np.testing.assert_array_equal(image, np.broadcast_to(expected_pixels, image.shape))


# MNIST


def write_idx(file: Path, array: np.ndarray) -> None:
    content = struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)


def write_mnist(folder: Path, *, prefix="", test="t10k", dot="-", suffix="", classes=10):
    folder.mkdir(parents=True, exist_ok=True)
    pixels, labels = [], []
    for part, count in (("train", 30), (test, 10)):
        pixels.append(random_images(count, count, 28, 1))
        labels.append(np.arange(count, dtype=np.uint8) % classes)
        write_idx(folder / f"{prefix}{part}-images{dot}idx3-ubyte{suffix}", pixels[-1][..., 0])
        write_idx(folder / f"{prefix}{part}-labels{dot}idx1-ubyte{suffix}", labels[-1])
    return pixels, labels


@pytest.mark.parametrize(
    "form", [{}, {"suffix": ".gz"}, {"dot": "."}, {"prefix": "emnist-letters-", "test": "test", "classes": 27}]
)
def test_mnist(tmp_path, form):
    pixels, labels = write_mnist(tmp_path, **form)
    check(tmp_path, pixels, labels, [str(number) for number in range(form.get("classes", 10))])


def test_mnist_packed_and_unpacked_side_by_side(tmp_path):
    write_mnist(tmp_path, suffix=".gz")
    for file in tmp_path.iterdir():
        file.write_bytes(b"")
    check(tmp_path, *write_mnist(tmp_path), map(str, range(10)))


def test_fashion_mnist_has_names(tmp_path):
    write_mnist(tmp_path / "fashion-mnist")
    assert load_images(tmp_path / "fashion-mnist")[0].classes[::9] == ("T-shirt/top", "Ankle boot")


def test_mnist_with_a_file_missing_or_two_sets_in_one_folder(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(ValueError, match="there is no t10k-labels-idx1-ubyte; download it too"):
        load_images(tmp_path)
    write_mnist(tmp_path, prefix="emnist-digits-")
    with pytest.raises(ValueError, match=r"2 data sets, \['', 'emnist-digits-'\]"):
        load_images(tmp_path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-9],
        lambda content: content + b"more",
        lambda content: b"",
        lambda content: b"<html>" * 9,
    ],
)
def test_damaged_mnist(tmp_path, suffix, damage):
    write_mnist(tmp_path, suffix=suffix)
    file = tmp_path / f"train-images-idx3-ubyte{suffix}"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=f"train-images-idx3-ubyte{suffix} (is damaged|can't be read): "):
        load_images(tmp_path)


def test_labels_that_do_not_fit_the_images(tmp_path):
    write_mnist(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(29, np.uint8))
    with pytest.raises(ValueError, match="there are 30 images but 29 labels"):
        load_images(tmp_path)
    for part in ("train", "t10k"):
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte", np.zeros(0, np.uint8))
        write_idx(tmp_path / f"{part}-images-idx3-ubyte", np.zeros((0, 28, 28), np.uint8))
    with pytest.raises(ValueError, match="there are no images"):
        load_images(tmp_path)


def test_images_that_are_no_squares(tmp_path):
    write_mnist(tmp_path)
    write_idx(tmp_path / "train-images-idx3-ubyte", np.zeros((30, 28, 20), np.uint8))
    with pytest.raises(ValueError, match="28x20 pixels, expected squares"):
        load_images(tmp_path)


# CIFAR. Five training files of two images each, and one test file of three.


def cifar(classes: int):
    pixels, labels = [random_images(0, 10), random_images(1, 3)], [np.arange(10) * 7 % classes, np.arange(3)]
    rows = [array.transpose(0, 3, 1, 2).reshape(len(array), -1) for array in pixels]
    return pixels, labels, rows


def write_cifar10_binary(folder: Path):
    pixels, labels, rows = cifar(10)
    records = [
        np.concatenate([label[:, None], row], 1).astype(np.uint8) for label, row in zip(labels, rows, strict=True)
    ]
    for number in range(5):
        (folder / f"data_batch_{number + 1}.bin").write_bytes(records[0][2 * number : 2 * number + 2].tobytes())
    (folder / "test_batch.bin").write_bytes(records[1].tobytes())
    (folder / "batches.meta.txt").write_text("\n".join(CIFAR10) + "\n\n")
    return pixels, labels


def test_cifar10_binary(tmp_path):
    check(tmp_path, *write_cifar10_binary(tmp_path), CIFAR10)


def test_cifar100_binary(tmp_path):
    pixels, labels, rows = cifar(100)
    for part, label, row in zip(("train", "test"), labels, rows, strict=True):
        records = np.concatenate([label[:, None] // 5, label[:, None], row], axis=1)
        (tmp_path / f"{part}.bin").write_bytes(records.astype(np.uint8).tobytes())
    names = [f"class{number}" for number in range(100)]
    (tmp_path / "fine_label_names.txt").write_text("\n".join(names))
    check(tmp_path, pixels, labels, names)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("data_batch_3.bin", None, "data_batch_3.bin can't be read"),
        ("test_batch.bin", None, "test_batch.bin can't be read"),
        ("data_batch_2.bin", b"x" * 5000, "data_batch_2.bin is damaged: 5000 bytes are no multiple of 3073"),
        ("batches.meta.txt", b"cat\ndog\n", r"there is a label 7, expected 0 to 1"),
    ],
)
def test_damaged_cifar(tmp_path, file, content, message):
    write_cifar10_binary(tmp_path)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_images(tmp_path)


class Python2Pickler(pickle._Pickler):  # pyright: ignore
    """Strings as Python 2 wrote them, which CIFAR's authors used: bytes without an encoding."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)  # pyright: ignore

    def save_string(self, text):
        content = text if isinstance(text, bytes) else text.encode("latin1")
        self.write(pickle.BINSTRING + struct.pack("<i", len(content)) + content)
        self.memoize(text)

    dispatch[str] = dispatch[bytes] = save_string


def dump(content, old: bool) -> bytes:
    if not old:
        return pickle.dumps(content, protocol=4)
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(content)
    return file.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def write_cifar10_python(folder: Path, old: bool):
    pixels, labels, rows = cifar(10)
    for number in range(5):
        part = slice(2 * number, 2 * number + 2)
        batch = {"batch_label": "training", "labels": labels[0][part].tolist(), "data": rows[0][part]}
        (folder / f"data_batch_{number + 1}").write_bytes(dump(batch, old))
    (folder / "test_batch").write_bytes(dump({"labels": labels[1].tolist(), "data": rows[1]}, old))
    (folder / "batches.meta").write_bytes(dump({"label_names": CIFAR10, "num_vis": 3072}, old))
    return pixels, labels


@pytest.mark.parametrize("old", [True, False])
def test_cifar10_python(tmp_path, old):
    check(tmp_path, *write_cifar10_python(tmp_path, old), CIFAR10)


def test_cifar100_python(tmp_path):
    pixels, labels, rows = cifar(100)
    for part, label, row in zip(("train", "test"), labels, rows, strict=True):
        content = {
            "coarse_labels": (label // 5).tolist(),
            "fine_labels": label.tolist(),
            "data": np.asfortranarray(row),
        }
        (tmp_path / part).write_bytes(dump(content, old=True))
    names = [f"class{number}" for number in range(100)]
    (tmp_path / "meta").write_bytes(dump({"fine_label_names": names, "coarse_label_names": ["x"] * 20}, old=True))
    check(tmp_path, pixels, labels, names)


class Attack:
    def __reduce__(self):
        return Path.touch, (Path("was-here"),)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            pickle.dumps({"data": Attack(), "labels": []}),
            r"it names pathlib\S* \S*touch|it names \S*, which is no part",
        ),
        (pickle.dumps({"data": np.array([print]), "labels": []}, protocol=4), "an array of O8, expected whole numbers"),
        (pickle.dumps({"data": np.array(["a"]), "labels": []}, protocol=4), "an array of U1, expected whole numbers"),
        (pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": []}, protocol=4)[:-900], "data_batch_1 can't"),
        (pickle.dumps({"data": np.zeros(2), "labels": []}, protocol=4), "an array of f8, expected whole numbers"),
        (pickle.dumps({"data": 1}), "can't be read as a pickle of CIFAR's data and labels: 'labels'"),
        (pickle.dumps([1, 2]), "can't be read as a pickle"),
        (pickle.dumps({"data": np.zeros((2, 9), np.uint8), "labels": [1, 2]}, protocol=4), "doesn't hold 3072 bytes"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, protocol=4), "doesn't hold 3072 bytes"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.int8), "labels": [1, 2]}, protocol=4), "doesn't hold 3072 bytes"),
        (pickle.dumps({"data": [1, 2], "labels": [1, 2]}, protocol=4), "doesn't hold 3072 bytes"),
        (b"", "can't be read as a pickle"),
    ],
)
def test_pickles_hold_arrays_and_nothing_else(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    write_cifar10_python(tmp_path, old=True)
    (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_images(tmp_path)
    assert not (tmp_path / "was-here").exists()


@pytest.mark.parametrize("spelling", ["labels", "lables"])
def test_cifar_sheets(tmp_path, spelling):
    pixels, labels, _ = cifar(10)
    sheets = [array.reshape(len(array), 1024, 3) for array in pixels]
    for number in range(5):
        Image.fromarray(sheets[0][2 * number : 2 * number + 2]).save(tmp_path / f"data_batch_{number + 1}.png")
    Image.fromarray(sheets[1]).save(tmp_path / "test_batch.png")
    for part, label in zip(("train", "test"), labels, strict=True):
        (tmp_path / f"{part}_{spelling}.json").write_text(json.dumps(label.tolist()))
    check(tmp_path, pixels, labels, CIFAR10)

    (tmp_path / f"test_{spelling}.json").write_text("[0, 1, 'cat']")
    with pytest.raises(ValueError, match=f"test_{spelling}.json is damaged"):
        load_images(tmp_path)
    (tmp_path / f"test_{spelling}.json").write_text('[0, 1, "cat"]')
    with pytest.raises(ValueError, match="there is a label 'cat', expected 0 to 9"):
        load_images(tmp_path)
    (tmp_path / f"test_{spelling}.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a dict, expected a list of labels"):
        load_images(tmp_path)
    (tmp_path / f"test_{spelling}.json").write_text("[1, 1, 1]")
    Image.fromarray(pixels[0][0]).save(tmp_path / "test_batch.png")
    with pytest.raises(ValueError, match="test_batch.png is 32 pixels wide, expected 1024"):
        load_images(tmp_path)
    (tmp_path / "test_batch.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="test_batch.png can't be read as an image"):
        load_images(tmp_path)


# Parquet


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def write_parquet(file: Path, pixels, labels, *, names=None, image="image", label="label", more=None) -> None:
    """As the `datasets` library does, with the features in the schema's metadata."""
    pictures = [None if one is None else {"bytes": png(one), "path": None} for one in pixels]
    features = {image: {"_type": "Image"}, label: {"_type": "Value"}}
    if names:
        features[label] = {"names": list(names), "_type": "ClassLabel"}
    columns = {**(more or {}), label: pyarrow.array(labels, pyarrow.int64())}
    columns[image] = pyarrow.array(pictures, pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()}))
    table = pyarrow.table(columns)
    metadata = {"huggingface": json.dumps({"info": {"features": features}})} if names else None
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), file)


def test_parquet(tmp_path, capsys):
    """Names of columns vary, a table is in several files, and files of other parts are left alone."""
    pixels, labels, names = random_images(0, 9, 20), [2, 1, 0, 2, 1, 0, 1, 1, 2], ["ant", "bee", "cow"]
    form = {"names": names, "image": "img", "label": "fine_label", "more": {"coarse_label": [0] * 3}}
    for number, part in enumerate(("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001")):
        rows = slice(3 * number, 3 * number + 3)
        write_parquet(tmp_path / "data" / f"{part}.parquet", pixels[rows], labels[rows], **form)
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", pixels[:3], [-1] * 3, **form)
    check(tmp_path, [pixels[:6], pixels[6:]], [labels[:6], labels[6:]], names)
    train, _ = load_images(tmp_path)
    assert train.name(4).endswith("train-00001-of-00002.parquet, row 1")

    write_parquet(tmp_path / "data" / "extra-00000-of-00001.parquet", pixels[:3], labels[:3], **form)
    assert len(load_images(tmp_path)[0]) == 6
    assert "extra-00000-of-00001.parquet and all that names no part is left out" in capsys.readouterr().err


def test_parquet_in_folders_without_names_of_classes(tmp_path):
    pixels = random_images(0, 4, 8)
    write_parquet(tmp_path / "default" / "train" / "0000.parquet", pixels, [0, 1, 2, 3])
    write_parquet(tmp_path / "default" / "test" / "0000.parquet", pixels[:2], [1, 0])
    check(tmp_path, [pixels, pixels[:2]], [[0, 1, 2, 3], [1, 0]], "0123")


@pytest.mark.parametrize("data", [".", "latest.parquet"])
def test_parquet_without_parts_is_split(tmp_path, capsys, data):
    pixels = random_images(0, 60, 8)
    write_parquet(tmp_path / "latest.parquet", pixels, [0, 1] * 30)
    train, test = load_images(tmp_path / data)
    assert len(train) + len(test) == 60
    assert 0 < len(test) < 20
    images = np.concatenate([everything(train)[0], everything(test)[0]])
    assert {image.tobytes() for image in images} == {image.tobytes() for image in pixels}
    assert f"{len(test)} of the 60 images are held out" in capsys.readouterr().err


def test_a_parquet_row_without_a_picture_is_an_example_that_cannot_be_read(tmp_path):
    pixels = random_images(0, 3, 8)
    write_parquet(tmp_path / "train.parquet", [pixels[0], None, pixels[2]], [0, 1, 0])
    write_parquet(tmp_path / "test.parquet", pixels, [0, 1, 0])
    train, _ = load_images(tmp_path)
    batch = train.read(np.arange(3))
    assert batch["weight"].tolist() == [1, 0, 1]
    assert not batch["image"][1].any()
    assert train.name(1).endswith("train.parquet, row 1")


def test_parquet_that_cannot_be_used(tmp_path, monkeypatch):
    pixels, file = random_images(0, 3, 8), tmp_path / "train.parquet"
    write_parquet(file, pixels, [0, 1, -1], names=["a", "b"])
    with pytest.raises(ValueError, match="train.parquet: there is a label -1, expected 0 to 1"):
        load_images(tmp_path)
    write_parquet(file, pixels, [0, None, 1], names=["a", "b"])
    with pytest.raises(ValueError, match="train.parquet: there is a label None, expected 0 to 1"):
        load_images(tmp_path)
    write_parquet(file, pixels, [0, 1, 0], names=["a", "b"])
    write_parquet(tmp_path / "test.parquet", pixels, [0, 1, 0], names=["b", "a"])
    with pytest.raises(
        ValueError, match=r"test.parquet: its classes are \('b', 'a'\), those of other files \('a', 'b'\)"
    ):
        load_images(tmp_path)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"], "label": [0]}), file)
    with pytest.raises(ValueError, match=r"its columns are \['text', 'label'\], expected an image"):
        load_images(tmp_path)
    file.write_bytes(b"PAR1 and so on")
    with pytest.raises(ValueError, match="train.parquet can't be read"):
        load_images(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match="no Parquet file has train in its name; call"):
        load_images(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"reading Parquet files needs pyarrow: pip install 'eqzoo\[parquet\]'"
    ):
        load_images(tmp_path / "test.parquet")


# What is none of these


def test_what_is_not_understood(tmp_path):
    with pytest.raises(FileNotFoundError, match='nowhere doesn\'t exist; data can be "digits"; a folder with MNIST'):
        load_images(tmp_path / "nowhere")
    with pytest.raises(ValueError, match='holds no images in a form that is understood; data can be "digits"'):
        load_images(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    for data in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ValueError, match="holds no images in a form that is understood"):
            load_images(data)


def test_files_that_hold_images_are_left_as_they_are(tmp_path):
    """Reading writes nothing beside the data."""
    write_mnist(tmp_path / "data")
    shutil.copytree(tmp_path / "data", tmp_path / "before")
    load_images(tmp_path / "data")
    files = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("data", "before")]
    assert files[0] == files[1]
