"""Checkpoints opened without torch: `.safetensors`, torch's `.pth`/`.pt`/`.bin` (zip and legacy), `.npz`, folders.

A file's content, not its ending, says which it is. Everything it claims is checked against its size before anything is
allocated, and nothing it contains is executed.
"""

import difflib
import itertools
import json
import math
import mmap
import os
import re
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from ._atomic import written_atomically
from ._torch_pickle import DTYPES, MAX_DIMS, MAX_PICKLE, View, state_dict, unpickle
from .errors import CheckpointError, listing

_SAFETENSORS_DTYPES = (
    {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64", "BOOL": "bool"}
    | {"F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E8M0": "float8_e8m0fnu"}
    | {"F8_E5M2": "float8_e5m2", "F8_E5M2FNUZ": "float8_e5m2fnuz"}
    | {f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
)
ENDINGS = (".safetensors", ".pth", ".pt", ".bin", ".npz")
_PREFIXES = ("module.", "_orig_mod.")  # left by DataParallel and torch.compile
_LEGACY_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
_NPY_HEADER = re.compile(rb"{'descr': '?([^{}]*?)'?, 'fortran_order': (True|False), 'shape': \(([\d, ]*)\), }\s*")
_NPY_DTYPES = {dtype.str: dtype for dtype in DTYPES.values() if dtype.isbuiltin == 1}  # the others are stored as void
_MAX_NPY_HEADER = 4096
_MAX_JSON = 2**25  # a safetensors header or an index: parsed, JSON takes many times its size in memory
_MAX_NAME = 255  # what file systems allow, in bytes


@dataclass(frozen=True)
class Tensor:
    """A tensor still in its file.

    `view()` is the tensor where it lies: read-only, strided, and paid for only when its numbers are used. `release()`
    gives back the memory that these took; they can be used again.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    view: Callable[[], Shaped[np.ndarray, "..."]]
    release: Callable[[], None] = lambda: None

    def read(self) -> Shaped[np.ndarray, "..."]:
        """A new, contiguous, writable copy."""
        return np.array(self.view(), order="C")


def open_checkpoint(path: str | os.PathLike, entry: str | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a checkpoint file or folder by name, and its text metadata (empty unless it is a `.safetensors`).

    No tensor is read yet. In a torch file, scalars beside the tensors are ignored, a state dict under one of the usual
    keys ("state_dict", "model", "ema", ...) is unwrapped, and prefixes that wrappers gave to all names are removed.
    Where a torch file holds several state dicts, `entry` says under which key ("a.b" for "b" within "a").
    """
    path = Path(path)
    tensors, metadata = _open_folder(path, entry) if path.is_dir() else _open_file(path, entry)
    if all(name.startswith(("module.", "n_averaged")) for name in tensors):  # torch's AveragedModel, with its counter
        tensors.pop("n_averaged", None)
    while prefix := next((p for p in _PREFIXES if tensors and all(name.startswith(p) for name in tensors)), None):
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors, metadata


def write_safetensors(
    path: str | os.PathLike, tensors: Mapping[str, Shaped[np.ndarray, "..."]], metadata: Mapping[str, str]
) -> None:
    """Writes a `.safetensors` file that appears under its name only once it is complete and on disk."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    with written_atomically(path) as temporary:
        try:
            # safetensors writes the memory behind an array as it lies, whatever the strides.
            save_file({name: np.asarray(x, order="C") for name, x in tensors.items()}, temporary, dict(metadata))
        except SafetensorError as error:
            raise CheckpointError(f"{path} could not be written: {error}.") from error


def _open_folder(folder: Path, entry: str | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / name).exists():
            open_it = _open_shards if name.endswith(".json") else _open_file
            return open_it(folder / name, entry)
    if (folder / "pytorch_model.bin").exists():
        return _open_file(folder / "pytorch_model.bin", entry)
    names = sorted(entry.name for entry in folder.iterdir())
    checkpoints = [name for name in names if name.endswith(ENDINGS)]
    if len(checkpoints) != 1:
        raise CheckpointError(
            f"{folder} should hold model.safetensors, pytorch_model.bin, the index of either, or exactly one file "
            f"ending in {', '.join(ENDINGS)}; it holds {listing(names)}. Give the file's own path."
        )
    return _open_file(folder / checkpoints[0], entry)


def names_by_shard(index: Path) -> dict[str, list[str]]:
    """The files that an index names, each with its tensors. They come from a stranger: all lie beside the index."""
    if index.stat().st_size > _MAX_JSON:
        raise CheckpointError(f"{index} is refused: an index takes at most {_MAX_JSON} bytes; download it again.")
    names_of: dict[str, list[str]] = {}
    try:
        for name, shard in json.loads(index.read_text("utf-8"))["weight_map"].items():
            # A hub cache links its files to elsewhere, so it is the name, not where it leads, that must stay here.
            is_plain = Path(shard).name == shard and "\\" not in shard and shard not in ("", "..")
            if not is_plain or len(os.fsencode(shard)) > _MAX_NAME:
                raise CheckpointError(
                    f"{index} is refused: it names a shard outside its own folder; download it again."
                )
            names_of.setdefault(shard, []).append(name)
    except CheckpointError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise _corrupt(index, 'a "weight_map" from tensor names to file names was expected', error) from error
    return names_of


def _open_shards(index: Path, entry: str | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    tensors, metadata = {}, {}
    for shard, names in sorted(names_by_shard(index).items()):
        shard_tensors, shard_metadata = _open_file(index.parent / shard, entry)
        missing = [name for name in names if name not in shard_tensors]
        repeated = [name for name in shard_tensors if name in tensors]
        if missing or repeated:
            raise CheckpointError(
                f"{index.parent / shard} does not fit {index.name}: it lacks {listing(missing)} and repeats "
                f"{listing(repeated)}; download the folder again."
            )
        tensors |= shard_tensors
        metadata |= shard_metadata
    return tensors, metadata


def _open_file(path: Path, entry: str | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not path.is_file():
        near = difflib.get_close_matches(path.name, os.listdir(path.parent) if path.parent.is_dir() else [], cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "check the path."
        raise FileNotFoundError(f"There is no checkpoint file {path}; {hint}")
    with open(path, "rb") as opened:
        start = opened.read(len(_LEGACY_MAGIC))
        file = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) if start else None
    if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        reader = _read_zip
    elif start == _LEGACY_MAGIC:
        reader = _read_legacy
    elif start[8:9] == b"{":
        reader = _read_safetensors
    else:
        reader = None
    if file is None or reader is None:
        raise CheckpointError(
            f"{path} starts with {start!r}; a .safetensors, .npz or torch file was expected: "
            "download it again, or save it in one of these formats."
        )
    try:
        return reader(file, path, entry)
    except CheckpointError as error:
        raise CheckpointError(f"{path} {error}") from error
    except Exception as error:  # whatever a parser trips over in bytes that were never meant for it
        raise _corrupt(path, f"{reader.__doc__} was expected", error) from error


def _read_safetensors(file: mmap.mmap, path: Path, entry: str | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """a complete .safetensors file"""
    from safetensors import safe_open

    _expect_no_entry(entry)
    (header_size,) = struct.unpack("<Q", file[:8])
    if header_size > _MAX_JSON:
        raise CheckpointError(f"is refused: its header takes {header_size} bytes, of at most {_MAX_JSON}.")
    # The library checks the header strictly, but its numpy side knows neither bfloat16 nor float8.
    with safe_open(path, framework="numpy"):
        pass
    header = json.loads(file[8 : 8 + header_size].decode())
    metadata = header.pop("__metadata__", None) or {}
    tensors = {}
    for name, said in header.items():
        if said["dtype"] not in _SAFETENSORS_DTYPES:
            raise CheckpointError(f"stores {name!r} as {said['dtype']}, which numpy cannot hold; convert it first.")
        begin, end = said["data_offsets"]
        dtype, shape = DTYPES[_SAFETENSORS_DTYPES[said["dtype"]]], tuple(said["shape"])
        tensors[name] = _tensor(file, 8 + header_size + begin, end - begin, dtype, shape, _contiguous(shape))
    return tensors, metadata


def _read_zip(file: mmap.mmap, path: Path, entry: str | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """a complete zip archive written by torch.save or numpy.savez"""
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: info for info in archive.infolist()}
        if len(entries) < len(archive.infolist()):
            raise CheckpointError("is a zip archive with two entries of one name; save it with torch or numpy.")
    pickles = [name for name in entries if name.split("/")[1:] == ["data.pkl"]]
    is_npz = not pickles and entries and all(name.endswith(".npy") for name in entries)
    if len(pickles) != 1 and not is_npz:
        raise CheckpointError(f"is a zip archive of neither torch nor numpy: it holds {listing(list(entries))}.")
    root = pickles[0].removesuffix("data.pkl") if pickles else ""
    if root + "constants.pkl" in entries:
        raise CheckpointError("is a TorchScript program, not a checkpoint; save the state_dict of its model instead.")
    spans = _zip_spans(file, entries)
    if is_npz:
        _expect_no_entry(entry)
        return {name.removesuffix(".npy"): _npy_tensor(file, name, *spans[name]) for name in entries}, {}
    if root + "byteorder" in entries and _bytes(file, *spans[root + "byteorder"]) != b"little":
        raise CheckpointError("was saved by a big-endian machine; save it on a little-endian one.")
    begin, nbytes = spans[pickles[0]]
    if nbytes > MAX_PICKLE:
        raise CheckpointError(f"is refused: its pickle takes {nbytes} bytes, of at most {MAX_PICKLE}.")
    content, _, _ = unpickle(file[begin : begin + nbytes])
    views = state_dict(content, entry)
    return {
        name: _torch_tensor(file, view, *spans[f"{root}data/{view.storage.key}"]) for name, view in views.items()
    }, {}


def _read_legacy(file: mmap.mmap, path: Path, entry: str | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """a complete torch file in the layout of torch before 1.6"""
    position, pickles = 0, []
    for _ in range(5):
        content, storages, size = unpickle(file[position : position + MAX_PICKLE])
        pickles.append((content, storages))
        position += size
    _magic, _version, (system, _), (content, storages), (keys, _) = pickles
    if not system["little_endian"]:
        raise CheckpointError("was saved by a big-endian machine; save it on a little-endian one.")
    spans = {}
    for key in keys:
        if type(key) is not str:  # hashing anything else may recurse without end
            raise TypeError("a storage's key is not a string")
        (size,) = struct.unpack("<q", file[position : position + 8])
        if size < 0:
            raise ValueError("a storage has a negative size")
        spans[key] = position + 8, size * storages[key].dtype.itemsize
        position = sum(spans[key])
    views = state_dict(content, entry)
    return {name: _torch_tensor(file, view, *spans[view.storage.key]) for name, view in views.items()}, {}


def _expect_no_entry(entry: str | None) -> None:
    if entry is not None:
        raise CheckpointError(f"is no torch file, and only those have entries; leave out entry={entry!r}.")


def _torch_tensor(file: mmap.mmap, view: View, begin: int, nbytes: int) -> Tensor:
    if view.storage.size * view.storage.dtype.itemsize != nbytes:
        raise ValueError("a storage's size differs from the one its tensors state")
    return _tensor(file, begin, nbytes, view.dtype, view.shape, view.strides, view.offset)


def _tensor(
    file: mmap.mmap,
    begin: int,
    nbytes: int,
    dtype: np.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int = 0,
) -> Tensor:
    """A tensor within `file[begin : begin + nbytes]`; strides and offset count elements."""
    if len(shape) > MAX_DIMS or min((offset, *shape, *strides)) < 0:
        raise ValueError("a tensor's shape and strides are not possible")
    if not 0 <= begin <= begin + nbytes <= len(file):
        raise ValueError("a tensor's storage reaches beyond the end of the file")
    size = math.prod(shape)
    last = offset + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    if size and (last + 1) * dtype.itemsize > nbytes:
        raise ValueError("a tensor reaches beyond its storage")
    if size * dtype.itemsize > len(file):
        raise CheckpointError(f"holds a tensor of shape {shape}, larger than the file; save it without expanding it.")
    if not size:
        empty = np.empty(shape, dtype)
        return Tensor(shape, dtype, lambda: empty)
    byte_strides = tuple(stride * dtype.itemsize for stride in strides)
    view = np.ndarray(shape, dtype, file, begin + offset * dtype.itemsize, byte_strides)
    return Tensor(shape, dtype, lambda: view, partial(_release, file, begin, nbytes))


def _release(file: mmap.mmap, begin: int, nbytes: int) -> None:
    if sys.platform == "linux":
        start = begin - begin % mmap.PAGESIZE
        file.madvise(mmap.MADV_DONTNEED, start, begin + nbytes - start)


def _npy_tensor(file: mmap.mmap, name: str, begin: int, nbytes: int) -> Tensor:
    content = file[begin : begin + min(nbytes, _MAX_NPY_HEADER)]
    # numpy's own reader parses the header as Python, which can take hundreds of times its size in memory.
    layout = {b"\x93NUMPY\1\0": "<H", b"\x93NUMPY\2\0": "<I"}[content[:8]]
    (header_size,) = struct.unpack_from(layout, content, 8)
    size = 8 + struct.calcsize(layout) + header_size
    header = _NPY_HEADER.fullmatch(content[:size], size - header_size)
    if header is None:
        raise ValueError("an array's header is not of the form that numpy writes")
    descr, order, lengths = (group.decode("latin-1") for group in header.groups())
    if descr not in _NPY_DTYPES:
        raise CheckpointError(f"stores {name!r} as {descr[:100]}, which is no number of this machine; convert it.")
    shape = tuple(int(length) for length in lengths.split(",") if length.strip())
    strides = _contiguous(shape[::-1])[::-1] if order == "True" else _contiguous(shape)
    return _tensor(file, begin + size, nbytes - size, _NPY_DTYPES[descr], shape, strides)


def _zip_spans(file: mmap.mmap, entries: Mapping[str, zipfile.ZipInfo]) -> dict[str, tuple[int, int]]:
    """Where each entry of an archive begins and how many bytes it has; no byte may belong to two."""
    spans = {}
    for name, info in entries.items():
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise CheckpointError("is compressed or encrypted; save it with torch.save or numpy.savez.")
        signature, name_size, extra_size = struct.unpack("<4s22xHH", file[info.header_offset : info.header_offset + 30])
        if signature != b"PK\x03\x04" or info.file_size != info.compress_size:
            raise ValueError("an entry of the archive is not where its directory says")
        spans[name] = info.header_offset + 30 + name_size + extra_size, info.file_size
    in_order = sorted(entries, key=lambda name: entries[name].header_offset)
    for name, following in itertools.pairwise(in_order):
        if sum(spans[name]) > entries[following].header_offset:
            raise ValueError("two entries of the archive overlap")
    return spans


def _bytes(file: mmap.mmap, begin: int, nbytes: int) -> bytes:
    return file[begin : begin + nbytes]


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _corrupt(path: Path, expected: str, error: Exception) -> CheckpointError:
    reason = f"{type(error).__name__}: {error}"[:300]
    return CheckpointError(f"{path} is truncated or corrupt: {expected} ({reason}); download it again.")
