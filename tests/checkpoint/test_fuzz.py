"""Hostile and damaged checkpoints: whatever a file contains, opening it and reading all of it either gives arrays or
raises one `CheckpointError` (`FileNotFoundError` where an index names a shard that isn't there).

Proven for each case: no other exception; nothing is compiled, executed, imported, or opened outside the case's own
folder (Python's audit events tell); each array has the shape and dtype it was announced with and is no larger than the
files; Python and numpy never hold more than the files' size and 2 MB; no case takes a second of processor time. Memory
that only the system sees is bounded by running cases of every kind in a process of limited address space.

Cases are drawn from fixed seeds. EQZOO_FUZZ_CASES sets their number (24,000 by default).
"""

import collections
import copyreg
import io
import json
import os
import pickle
import pickletools
import random
import resource
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from eqzoo.checkpoint.errors import CheckpointError
from eqzoo.checkpoint.formats import open_checkpoint

CASES = int(os.environ.get("EQZOO_FUZZ_CASES", "24000"))
SEEDS = 4
SLACK = 2 * 2**20
NUMBERS = (0, 1, 2, 7, 8, 63, 64, 65, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40)
NUMBERS += (2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -8, -(2**31), -(2**63))

Files = dict[str, bytes]


# Valid files, written by hand so that every part of them can be a lie


def text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def integer(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def integers(values) -> bytes:
    return b"(" + b"".join(map(integer, values)) + b"t"


def view(storage=b"0", kind="Float", size=6, offset=0, shape=(2, 3), strides=(3, 1)) -> bytes:
    described = (
        text("storage") + f"ctorch\n{kind}Storage\n".encode() + text(storage.decode()) + text("cpu") + integer(size)
    )
    rest = integer(offset) + integers(shape) + integers(strides) + b"\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n((" + described + b"tQ" + rest + b"tR"


def state_dict(tensors: dict[str, bytes]) -> bytes:
    return b"}(" + b"".join(text(name) + value for name, value in tensors.items()) + b"u"


STATE = state_dict({"weight": view(), "bias": view(b"1", size=3, shape=(3,), strides=(1,)), "epoch": integer(3)})
STORAGES = {"0": np.arange(6, dtype="<f4").tobytes(), "1": np.ones(3, "<f4").tobytes()}
NPY = io.BytesIO()
np.save(NPY, np.arange(6.0).reshape(2, 3))


def npy(header: bytes, data: bytes = bytes(48), version: int = 1) -> bytes:
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + length + header + data


def torch_zip(content: bytes, storages: dict[str, bytes] = STORAGES) -> Files:
    entries = [Entry("archive/data.pkl", content), Entry("archive/byteorder", b"little")]
    return {"file": archive([*entries, *(Entry(f"archive/data/{key}", data) for key, data in storages.items())])}


def torch_legacy(content: bytes, storages: dict[str, bytes] = STORAGES) -> Files:
    head = [pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    blocks = [struct.pack("<q", len(data) // 4) + data for data in storages.values()]
    return {"file": b"".join([*head, content, pickle.dumps(list(storages), 2), *blocks])}


def safetensors(header: bytes, data: bytes = bytes(64), length: int | None = None) -> Files:
    return {"file": struct.pack("<Q", (len(header) if length is None else length) % 2**64) + header + data}


class Entry:
    """An entry of a zip archive, with what its local header (first) and its directory say of it."""

    def __init__(self, name, data, *, method=0, flags=0, sizes=None, offset=None, local_name=None, extra=b""):
        self.name = name.encode("utf-8", "surrogatepass") if isinstance(name, str) else name
        self.data, self.method, self.flags, self.extra = data, method, flags, extra
        self.sizes = sizes or (len(data), len(data))
        self.offset, self.local_name = offset, self.name if local_name is None else local_name


def archive(entries: list[Entry], *, count: int | None = None, shift: int = 0) -> bytes:
    body, directory = b"", b""
    for entry in entries:
        fields = struct.pack("<HHHHIII", entry.flags, entry.method, 0, 33, 0, *[size % 2**32 for size in entry.sizes])
        offset = len(body) if entry.offset is None else entry.offset
        body += b"PK\3\4\x14\0" + fields + struct.pack("<HH", len(entry.local_name), len(entry.extra))
        body += entry.local_name + entry.extra + entry.data
        lengths = struct.pack("<HHHHHII", len(entry.name), 0, 0, 0, 0, 0, offset % 2**32)
        directory += b"PK\1\2\x14\0\x14\0" + fields + lengths + entry.name
    number = (len(entries) if count is None else count) % 2**16
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, number, number, len(directory), (len(body) + shift) % 2**32, 0)
    return body + directory + end


def valid_safetensors() -> Files:
    weight = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    bias = {"dtype": "BF16", "shape": [3], "data_offsets": [24, 30]}
    header = {"__metadata__": {"format": "pt"}, "weight": weight, "bias": bias}
    return safetensors(json.dumps(header).encode(), bytes(range(30)))


def valid_npz() -> Files:
    return {"file": archive([Entry("a.npy", NPY.getvalue()), Entry("b.npy", NPY.getvalue())])}


def valid_shards() -> Files:
    shard = lambda name: safetensors(
        json.dumps({name: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode(), b"abcd"
    )
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    shards = {"one.safetensors": shard("a")["file"], "two.safetensors": shard("b")["file"]}
    return {"model.safetensors.index.json": json.dumps(index).encode(), **shards}


VALID = {
    "safetensors": valid_safetensors,
    "zip": lambda: torch_zip(b"\x80\x02" + STATE + b"."),
    "legacy": lambda: torch_legacy(b"\x80\x02" + STATE + b"."),
    "npz": valid_npz,
    "shards": valid_shards,
}


# Kinds of cases: each draws one


def mutated(make):
    """Bytes changed, numbers overwritten, pieces cut out, doubled or moved, and ends cut off, anywhere in a file."""

    def draw(rng: random.Random) -> Files:
        files = dict(make())
        name = rng.choice(list(files))
        content = bytearray(files[name])
        for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
            damage(rng, content)
        return {**files, name: bytes(content)}

    return draw


def damage(rng: random.Random, content: bytearray) -> None:
    at, length = rng.randrange(len(content) + 1), rng.choice((1, 2, 4, 8, rng.randrange(1, 64)))
    match rng.randrange(8):
        case 0:
            content[at : at + 1] = bytes([rng.randrange(256)])
        case 1:
            content[at : at + 1] = bytes([rng.choice((0, 1, 0x7F, 0x80, 0xFF, *b'"{}[].()'))])
        case 2:
            size = rng.choice((1, 2, 4, 8))
            content[at : at + size] = (rng.choice(NUMBERS) % 2 ** (8 * size)).to_bytes(
                size, rng.choice(("little", "big"))
            )
        case 3:
            del content[at : at + length]
        case 4:
            content[at:at] = content[at : at + length]
        case 5:
            other = rng.randrange(len(content) + 1)
            content[at:at] = content[other : other + length]
        case 6:
            del content[at:]
        case 7:
            digits = [i for i, byte in enumerate(content) if byte in b"0123456789"]
            if digits:
                place = rng.choice(digits)
                content[place : place + 1] = str(rng.choice(NUMBERS)).encode()


def json_value(rng: random.Random, depth: int = 0):
    simple = (None, True, 1.5, 1e308, "", "é\ud800", "F32", "x" * 300, [], {}, *NUMBERS[:4])
    if depth > 3 or rng.random() < 0.6:
        return rng.choice(simple)
    if rng.random() < 0.5:
        return [json_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {str(rng.choice(simple)): json_value(rng, depth + 1) for _ in range(rng.randrange(4))}


def safetensors_header(rng: random.Random) -> Files:
    """Headers that are JSON but lie: about dtypes, shapes, offsets, overlaps, gaps, repetition, nesting and length."""
    pairs, end = [], 0
    for number in range(rng.choice((1, 2, 2, 5))):
        shape = [rng.choice((0, 1, 2, 3)) for _ in range(rng.choice((0, 1, 2, 3)))]
        dtype, size = rng.choice(
            (("F32", 4), ("BF16", 2), ("U8", 1), ("F8_E5M2", 1), ("F4", 1), ("C64", 8), ("BOOL", 1))
        )
        begin, end = end, end + int(np.prod(shape)) * size
        said = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        if rng.random() < 0.4:
            said[rng.choice(list(said))] = json_value(rng)
        if rng.random() < 0.2:
            said["data_offsets"] = [rng.choice((*NUMBERS, begin)), rng.choice((*NUMBERS, end))]
        if rng.random() < 0.2:
            said["shape"] = [rng.choice(NUMBERS) for _ in range(rng.choice((1, 2, 3, 70)))]
        if rng.random() < 0.1:
            del said[rng.choice(list(said))]
        pairs.append((rng.choice((f"t{number}", f"t{number}", "same", "__metadata__", "../x", "\0", "")), said))
    header = "{" + ",".join(f"{json.dumps(name)}:{json.dumps(said)}" for name, said in pairs) + "}"
    if rng.random() < 0.1:
        header = rng.choice(
            (header * 2, '{"a":' * 5000, "{" + "[" * 100_000, json.dumps(json_value(rng)), "{}" + " " * 99)
        )
    length = rng.choice((None, None, None, None, None, len(header) + 1, *NUMBERS))
    return safetensors(header.encode("utf-8", "surrogatepass"), bytes(rng.choice((end, end, end, 0, 64))), length)


def zip_structure(rng: random.Random) -> Files:
    """Archives whose headers and directory disagree with each other, with the data, or with good sense."""
    names = ["archive/data.pkl", "archive/data/0", "archive/data/1", "archive/byteorder", "archive/version"]
    data = [b"\x80\x02" + STATE + b".", *STORAGES.values(), b"little", b"3\n"]
    if rng.random() < 0.3:
        names, data = ["a.npy", "b.npy", "c.npy"], [NPY.getvalue()] * 3
    entries = [Entry(name, content) for name, content in zip(names, data, strict=True)]
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        entry, other = rng.choice(entries), rng.choice(entries)
        match rng.randrange(10):
            case 0:
                entry.sizes = (rng.choice((*NUMBERS, len(entry.data))), rng.choice((*NUMBERS, len(entry.data))))
            case 1:
                entry.offset = rng.choice((*NUMBERS, 1, 30, 60))
            case 2:
                entry.method = rng.choice((8, 9, 12, 14, 93, 99, 65535))
            case 3:
                packed = zipfile.zlib.compressobj(9, wbits=-15)
                entry.data = packed.compress(bytes(2**20)) + packed.flush()  # a thousandth of what it unpacks to
                entry.method, entry.sizes = rng.choice((0, 8)), (len(entry.data), rng.choice((len(entry.data), 2**20)))
            case 4:
                hostile = (
                    "../../x",
                    "/etc/passwd",
                    "a\0.npy",
                    "archive/data/../data/0",
                    'archive/"data".pkl',
                    "é" * 99,
                    "",
                )
                entry.name = rng.choice(hostile).encode()
            case 5:
                entry.local_name = rng.choice((b"", other.name, b"x" * 999))
            case 6:
                entry.name = other.name
            case 7:
                entry.extra = rng.choice((b"\1\0\x10\0" + bytes(16), b"\1\0\xff\xff", bytes(99)))
            case 8:
                entry.flags = rng.choice((1, 8, 0x800, 0xFFFF))
            case 9:
                entry.data = archive([Entry("archive/data.pkl", b"."), other])
                entry.sizes = (len(entry.data), len(entry.data))
    if rng.random() < 0.1:
        entries[-1].offset = 0  # the last shares its bytes with the first
    count = rng.choice((None, None, None, *NUMBERS)) if rng.random() < 0.2 else None
    shift = rng.choice(NUMBERS) if rng.random() < 0.1 else 0
    return {"file": archive(entries, count=count, shift=shift) + bytes(rng.choice((0, 0, 0, 5, 70_000)))}


def npy_header(rng: random.Random) -> Files:
    """Headers of `.npy` arrays: dtypes of objects, text, records and other byte orders, huge shapes, deep nesting."""
    descr = rng.choice(
        ("'<f4'", "'<f8'", "'|O'", "'>f4'", "'<U9'", "[('a', '<f4')]", "'|V99999999'", "'f4,' * 9", "1", "'<f3'")
    )
    shape = tuple(rng.choice((0, 1, 2, 3, *NUMBERS)) for _ in range(rng.choice((0, 1, 2, 3, 70))))
    text = f"{{'descr': {descr}, 'fortran_order': {rng.choice(('True', 'False', '0', 'None'))}, 'shape': {shape}, }}"
    if rng.random() < 0.2:
        nests = (
            "(" * 9000,
            "-" * 9000 + "1",
            "[" * 90 + "]" * 90,
            "1" * 9000,
            "9" * 9000 + "L",
            "1+" * 4000 + "1j",
            "x.y",
        )
        text = rng.choice(("__import__('os').system('touch canary')", *nests))
    header = bytearray(text.encode() + b"\n")
    if rng.random() < 0.2:
        damage(rng, header)
    return {"file": archive([Entry("a.npy", npy(bytes(header), version=rng.choice((1, 1, 2, 3))))])}


def lying_view(rng: random.Random) -> Files:
    """Well-formed pickles of tensors that reach beyond their storage, or of storages that are not what they say."""
    if rng.random() < 0.1:  # expanded: many elements of few bytes
        shape, strides = rng.choices((1, 2**10, *NUMBERS), k=2), rng.choice(((0, 0), (0, 1), (1, 0)))
        return torch_zip(b"\x80\x02" + state_dict({"a": view(shape=shape, strides=strides)}) + b".")
    number = lambda usual: usual if rng.random() < 0.8 else rng.choice((*NUMBERS, 2**70, 2**1000))
    shape = tuple(number(2) for _ in range(rng.choice((0, 1, 2, 2, 65))))
    strides = tuple(number(1) for _ in range(rng.choice((len(shape), len(shape), len(shape), 1))))
    kind = rng.choice(
        ("Float", "Float", "Float", "Float", "Double", "BFloat16", "Byte", "Complex", "Bool", "Untyped", "Quantized")
    )
    said = {"size": number(6), "offset": number(0), "shape": shape, "strides": strides, "kind": kind}
    content = (
        b"\x80\x02"
        + state_dict(
            {"a": view(**said), "b": view(rng.choice((b"1", b"1", b"9", b"../0")), size=3, shape=(3,), strides=(1,))}
        )
        + b"."
    )
    return rng.choice((torch_zip, torch_legacy))(content)


class Calls:
    """What an attacker's object asks the unpickler to call."""

    def __init__(self, function, *arguments):
        self.called = function, arguments

    def __reduce__(self):
        return self.called


COMMAND = "touch canary"
PIECES = (
    *(b"cos\nsystem\n", b"cposix\nsystem\n", b"cbuiltins\nexec\n", b"cbuiltins\neval\n", b"cbuiltins\n__import__\n"),
    *(
        b"cbuiltins\ngetattr\n",
        b"csubprocess\nPopen\n",
        b"ctorch\nload\n",
        b"cnumpy\nload\n",
        b"ccopyreg\n_reconstructor\n",
    ),
    *(text("os") + text("system") + b"\x93", text("torch") + text("Size") + b"\x93", text(COMMAND), text("import os")),
    *(b"(" + text(COMMAND) + b"ios\nsystem\n", b"(cos\nsystem\n" + text(COMMAND) + b"o", b"P0\n", b"Q", b"\x82\xf0"),
    *(
        b"ccollections\nOrderedDict\n",
        b"ctorch\nSize\n",
        b"ctorch\nFloatStorage\n",
        b"ctorch\nfloat32\n",
        b")R",
        b"\x85R",
    ),
    *(
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ctorch._utils\n_rebuild_tensor_v3\n",
        b"ctorch._utils\n_rebuild_parameter\n",
    ),
    *(
        view(),
        view(b"1", size=3, shape=(3,), strides=(1,)),
        STATE,
        b"}",
        b"]",
        b")",
        b"(",
        b"N",
        b"\x88",
        b"0",
        b"2",
        b"1",
    ),
    *(
        b"a",
        b"e",
        b"s",
        b"u",
        b"t",
        b"b",
        b"R",
        b"\x81",
        b"\x92",
        b"\x85",
        b"\x86",
        b"\x87",
        b"o",
        b"l",
        b"d",
        b"\x8f",
        b"\x90",
    ),
    *(b"q\x00", b"h\x00", b"r\xff\xff\xff\xff", b"j\xff\xff\xff\xff", b"\x94", b"p0\n", b"g0\n", b"\x97", b"\x98"),
    *(
        b"\x8b\xff\xff\xff\x7f",
        b"\x8b\x00\x00\x00\x80",
        b"\x8b\x00\x10\x00\x00" + b"\x7f" * 4096,
        b"\x8a\xff" + b"\x7f" * 255,
    ),
    *(
        b"X\xff\xff\xff\xff",
        b"\x8d" + b"\xff" * 8,
        b"\x8e" + b"\xff" * 7 + b"\x7f",
        b"\x96" + b"\xff" * 7 + b"\x7f",
        b"T\xff\xff\xff\xff",
    ),
    *(
        b"I" + b"9" * 5000 + b"\n",
        b"L" + b"9" * 5000 + b"L\n",
        b"F1e999\n",
        b"V" + b"\\u0041" * 500 + b"\n",
        b"S'" + b"\\x41" * 500 + b"'\n",
    ),
    *(b"\x95" + b"\xff" * 8, b"\x80\x05", b"\x80\xff", b"(" * 3000, b"]" * 3000, b")" + b"\x85" * 3000, b"\xff", b"."),
)


def pickle_program(rng: random.Random) -> Files:
    """Opcodes of every family in any order, with calls, imports and demands for memory among them."""
    program = bytearray(b"\x80" + bytes([rng.randrange(6)]))
    for _ in range(rng.choice((1, 2, 4, 8, 16))):
        if rng.random() < 0.8:
            program += rng.choice(PIECES)
        else:
            program += rng.choice(pickletools.opcodes).code.encode("latin-1") + rng.randbytes(rng.choice((0, 1, 4, 9)))
    return rng.choice((torch_zip, torch_legacy))(bytes(program) + rng.choice((b".", b".", b"")))


def pickle_attack(rng: random.Random) -> Files:
    """Objects that run code when `pickle` loads them, of each protocol, whole and damaged, alone and in state dicts."""
    function, *arguments = rng.choice(
        ((os.system, COMMAND), (eval, "open('canary', 'w')"), (exec, "open('canary', 'w')"), (open, "canary", "w"))
    )
    content = Calls(function, *arguments)
    for _ in range(rng.randrange(3)):
        content = rng.choice(([content], {"state_dict": content}, {"x": 1, "y": content}, (content, content)))
    raw = bytearray(pickle.dumps(content, rng.randrange(6)))
    if rng.random() < 0.5:
        damage(rng, raw)
    if rng.random() < 0.3:
        return rng.choice((torch_zip, torch_legacy))(b"\x80\x02" + STATE[:-1] + text("z") + bytes(raw[2:-1]) + b"u.")
    return rng.choice((torch_zip, torch_legacy))(bytes(raw))


def index_of_shards(rng: random.Random) -> Files:
    """Indices that are JSON but name shards elsewhere, none, themselves, or other tensors than these hold."""
    hostile = (
        "../file",
        "/etc/passwd",
        "..",
        ".",
        "",
        "x" * 300,
        "é" * 200,
        "a\0b",
        "\ud800",
        "model.safetensors.index.json",
    )
    shards = "one.safetensors", "two.safetensors", "folder"
    pick = lambda: rng.choice((*shards, *shards, *hostile, json_value(rng)))
    content = {"weight_map": {rng.choice(("a", "b", "c", "")): pick() for _ in range(rng.choice((1, 2, 3)))}}
    if rng.random() < 0.1:
        content = rng.choice((json_value(rng), {"weight_map": json_value(rng)}))
    name = rng.choice(("model.safetensors.index.json", "pytorch_model.bin.index.json"))
    return {**{k: v for k, v in valid_shards().items() if "index" not in k}, name: json.dumps(content).encode()}


def any_bytes(rng: random.Random) -> Files:
    start = rng.choice((b"", b"PK\3\4", b"PK\5\6", bytes(8) + b"{", b"\x93NUMPY", torch_legacy(b"")["file"][:13]))
    return {"file": start + rng.randbytes(rng.choice((0, 1, 8, 22, 100, 3000)))}


KINDS = {
    **{f"mutated {name}": mutated(make) for name, make in VALID.items()},
    **{
        f.__name__: f
        for f in (safetensors_header, zip_structure, npy_header, lying_view, pickle_program, pickle_attack)
    },
    **{f.__name__: f for f in (index_of_shards, any_bytes)},
}


# What is demanded of each case


class Watch:
    """Python's audit events while a file is read, but for those that reading it takes."""

    def __init__(self):
        self.folder: Path | None = None
        self.events: list[str] = []
        sys.addaudithook(self.hook)

    def hook(self, event: str, args: tuple) -> None:
        if self.folder is None or event.startswith(("object.", "cpython.", "builtins.id", "mmap.", "os.listdir")):
            return
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            inside = Path(os.fsdecode(args[0])).parent == self.folder
            if inside and (args[1] in ("r", "rb") or args[1] is None):
                return
        self.events.append(f"{event} {args!r}"[:200])


@pytest.fixture(scope="module")
def watch():
    return Watch()


def write(folder: Path, files: Files) -> Path:
    (folder / "folder").mkdir(parents=True, exist_ok=True)
    for earlier in folder.iterdir():
        if earlier.is_file():
            earlier.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder / "file" if "file" in files else folder


def read_all(path: Path, size: int) -> str:
    """What became of it: "read", or which error."""
    try:
        tensors, metadata = open_checkpoint(path)
    except CheckpointError as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from error
        refusal = error
    except FileNotFoundError as error:
        if not path.is_dir() or "There is no checkpoint file" not in str(error):
            raise
        refusal = error
    else:
        for tensor in tensors.values():
            array = tensor.read()
            assert (array.shape, array.dtype) == (tensor.shape, tensor.dtype)
            assert array.nbytes <= size
        assert all(isinstance(text, str) for item in metadata.items() for text in item)
        return "read"
    assert len(str(refusal)) < 5000
    return type(refusal).__name__


def examine(path: Path, files: Files, watch: Watch) -> str:
    size = sum(map(len, files.values()))
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    start = time.process_time()
    watch.events.clear()
    watch.folder = path if path.is_dir() else path.parent
    try:
        outcome = read_all(path, size)
    finally:
        watch.folder = None
    seconds = time.process_time() - start
    _, peak = tracemalloc.get_traced_memory()
    assert peak - before <= size + SLACK, f"{peak - before} bytes for a file of {size}"
    assert seconds < 1
    assert not watch.events
    return outcome


@pytest.fixture
def folder(tmp_path, monkeypatch, watch):
    """Where cases are written, and the working directory, in which a canary would appear."""
    monkeypatch.chdir(tmp_path)
    for make in VALID.values():  # whatever is imported at the first use is imported now
        assert read_all(write(tmp_path / "case", make()), 10_000) == "read"
    copyreg.add_extension("os", "system", 240)
    tracemalloc.start()
    yield tmp_path / "case"
    tracemalloc.stop()
    copyreg.remove_extension("os", "system", 240)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("kind", KINDS)
def test_every_case_is_read_or_refused(kind, seed, folder, watch):
    outcomes = collections.Counter()
    for number in range(-(-CASES // (len(KINDS) * SEEDS))):
        files = KINDS[kind](random.Random(f"{kind} {seed} {number}"))
        try:
            outcomes[examine(write(folder, files), files, watch)] += 1
        except BaseException as error:
            error.add_note(f"This was case {number} of kind {kind!r} with seed {seed}.")
            raise
    refused = outcomes.total() - outcomes["read"]
    assert refused > outcomes.total() // 10
    if not kind.startswith(("pickle_", "any_bytes", "index")) and outcomes.total() > 100:
        assert outcomes["read"] > 0, "cases so broken that none is read reach only the first check"


# Files of some size, each made for one way to cost more than it has


WIDE = b"}(" + b"".join(text(f"k{i}") + b"K\1" for i in range(50_000)) + b"u"
STORAGE = view()[len(b"ctorch._utils\n_rebuild_tensor_v2\n(") :].partition(b"Q")[0] + b"Q"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n("


def many(count: int, make) -> bytes:
    return b"".join(make(number) for number in range(count))


def crowded_zip(count: int) -> bytes:
    """Each entry of the directory is the same array with a long header."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({'1, ' * 60}), }}".ljust(3900).encode()
    return archive([Entry(f"{i}.npy", npy(header) if i == 0 else b"", offset=0) for i in range(count)])


def crowded_json(entry: str, count: int) -> bytes:
    return ("{" + ",".join(f'"{i}":{entry}' for i in range(count)) + "}").encode()


BOMBS = {
    "a tuple of many numbers as shape": lambda: torch_zip(
        b"\x80\x02("
        + b"K\0" * 300_000
        + b"tq\0"
        + STORAGE
        + b"q\1"
        + many(9_000, lambda _: REBUILD + b"h\1K\0h\0h\0\x89NtR")
        + b"."
    ),
    "a dictionary under many keys": lambda: torch_zip(
        b"\x80\x02" + WIDE + b"q\0}(" + many(50_000, lambda i: text(f"e{i}") + b"h\0") + b"u."
    ),
    "a dictionary that holds itself": lambda: torch_zip(b"\x80\x02}q\0" + text("model") + b"h\0s."),
    "tuples doubled two hundred times": lambda: torch_zip(b"\x80\x02)" + many(200, lambda i: b"q\0h\0\x86") + b"."),
    "a list of itself extended": lambda: torch_zip(b"\x80\x02](K\1e" + b"q\0(h\0e" * 100_000 + b"."),
    "nested without end": lambda: torch_zip(b"\x80\x02" + b"(" * 400_000 + b"t" * 400_000 + b"."),
    "a million opcodes": lambda: torch_legacy(b"\x80\x02" + b"N" * 1_200_000 + b"."),
    "a megabyte of digits": lambda: torch_zip(b"\x80\x02I" + b"9" * 2**20 + b"\n."),
    "a long integer of a megabyte": lambda: torch_zip(
        b"\x80\x02\x8b" + struct.pack("<i", 2**20) + b"\x7f" * 2**20 + b"."
    ),
    "a megabyte of escapes": lambda: torch_zip(b"\x80\x02V" + b"\\u0041" * 2**17 + b"\n."),
    "a name of a megabyte": lambda: torch_zip(b"\x80\x02c" + b"x" * 2**20 + b"\ny\n."),
    "keys of a megabyte": lambda: torch_zip(b"\x80\x02" + state_dict({"x" * 2**20: view(), "y" * 2**20: b"]"}) + b"."),
    "one array under many names": lambda: {"file": crowded_zip(10_000)},
    "a header of many tensors": lambda: safetensors(
        crowded_json('{"dtype":"F32","shape":[0],"data_offsets":[0,0]}', 8_000), b""
    ),
    "an index of many missing shards": lambda: {
        "model.safetensors.index.json": b'{"weight_map":'
        + crowded_json('"x"', 50_000).replace(b':"x"', b':"x.safetensors"')
        + b"}"
    },
    "an index of many shards": lambda: {
        **valid_shards(),
        "model.safetensors.index.json": b'{"weight_map":' + crowded_json('"one.safetensors"', 20_000) + b"}",
    },
    "JSON nested without end": lambda: safetensors(b'{"a":' + b"[" * 2**20),
    "an archive with many entries": lambda: {"file": archive([Entry(f"{i}", b"") for i in range(10_000)])},
}


REASONS = {
    "a tuple of many numbers as shape": "tensor is not described by",
    "a million opcodes": "more than 1000000 opcodes",
    "a megabyte of digits": "uses INT,",
    "a long integer of a megabyte": "uses LONG4,",
    "a megabyte of escapes": "uses UNICODE,",
    "a name of a megabyte": "name in the pickle has no end",
    "one array under many names": "entries of the archive overlap",
    "a header of many tensors": "read",
    "an index of many missing shards": "There is no checkpoint file",
    "an index of many shards": "it lacks",
    "JSON nested without end": "recursion limit",
    "an archive with many entries": "neither torch nor numpy",
}
LIMIT = 2**28


def run_limited(folder: Path) -> None:
    """All bombs and some cases of every kind, with little address space beyond what importing everything took."""
    for make in VALID.values():
        read_all(write(folder, make()), 10_000)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for name, make in BOMBS.items():
        run_timed(name, folder, make())
    for kind, draw in KINDS.items():
        for number in range(100):
            run_timed(f"{kind} {number}", folder, draw(random.Random(f"limited {kind} {number}")))
    with pytest.raises(MemoryError):
        bytearray(LIMIT)  # so the limit held


def run_timed(name: str, folder: Path, files: Files) -> None:
    path = write(folder, files)
    start = time.process_time()
    read_all(path, sum(map(len, files.values())))
    seconds = time.process_time() - start
    assert seconds < 1, f"{name} took {seconds:.1f} s"


def test_neither_bombs_nor_cases_need_memory_or_time(tmp_path):
    """Also of memory that Python doesn't see, and in a process whose death would be seen."""
    code = (
        "import sys, pathlib; from tests.checkpoint import test_fuzz; test_fuzz.run_limited(pathlib.Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "case")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", BOMBS)
def test_every_bomb_reaches_what_it_is_made_for(name, tmp_path):
    """A mistake in its own bytes would be refused long before the harm, and prove nothing."""
    path = write(tmp_path / "case", BOMBS[name]())
    try:
        open_checkpoint(path)
        said = "read"
    except (CheckpointError, FileNotFoundError) as error:
        said = str(error)
    assert REASONS.get(name, "its keys are") in said
