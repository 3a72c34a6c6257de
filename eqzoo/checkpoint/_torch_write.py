"""A state dict written as torch writes it, without torch: a zip archive of one pickle and the tensors' bytes."""

import math
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from .errors import CheckpointError

_STORAGES = {
    "float64": "Double",
    "float32": "Float",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
    "bool": "Bool",
}
_EMPTY_ORDERED_DICT = b"ccollections\nOrderedDict\n)R"


def write_state_dict(path: Path, tensors: Mapping[str, Shaped[np.ndarray, "..."]], version: int = 1) -> None:
    """Write an archive that `torch.load(weights_only=True)` reads as an `OrderedDict` of tensors, with the `version` of
    the module that they are of."""
    pickled = [b"\x80\x02", _EMPTY_ORDERED_DICT, b"("]
    for number, (name, array) in enumerate(tensors.items()):
        pickled += [_text(name), _tensor(str(number), name, array)]
    root = b"}" + _text("version") + _integer(version) + b"s"
    metadata = b"}" + _text("") + root + b"s"
    pickled.append(b"u}" + _text("_metadata") + metadata + b"sb.")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"".join(pickled))
        archive.writestr("archive/byteorder", "little")
        for number, array in enumerate(tensors.values()):
            with archive.open(f"archive/data/{number}", "w", force_zip64=True) as entry:
                entry.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        archive.writestr("archive/version", "3\n")


def _tensor(key: str, name: str, array: Shaped[np.ndarray, "..."]) -> bytes:
    """`_rebuild_tensor_v2(storage, offset, shape, strides, requires_grad, hooks)`."""
    if array.dtype.name not in _STORAGES:
        raise CheckpointError(f"torch has no storage of {array.dtype} for {name!r}; write a .safetensors file instead")
    kind = f"ctorch\n{_STORAGES[array.dtype.name]}Storage\n".encode()
    storage = b"(" + _text("storage") + kind + _text(key) + _text("cpu") + _integer(array.size) + b"tQ"
    strides = [math.prod(array.shape[axis + 1 :]) for axis in range(array.ndim)]
    arguments = storage + _integer(0) + _integers(array.shape) + _integers(strides) + b"\x89" + _EMPTY_ORDERED_DICT
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"tR"


def _text(text: str) -> bytes:
    encoded = text.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _integer(number: int) -> bytes:
    if number < 2**31:
        return b"J" + struct.pack("<i", number)
    return b"\x8a\x08" + struct.pack("<q", number)


def _integers(numbers: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_integer, numbers)) + b"t"
