"""The pickles inside torch's files, interpreted without importing, calling or allocating anything they ask for.

`pickle.Unpickler` is not used: even with a restricted `find_class` it allocates what a few corrupt bytes demand
(`LONG_BINPUT` with a large index takes tens of gigabytes) and builds whatever the remaining opcodes describe.
"""

import difflib
import io
import pickletools
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from .errors import CheckpointError, listing

# A tensor takes about thirty opcodes and 400 bytes. The limits bound the time and memory a hostile pickle can cost.
MAX_OPCODES = 1_000_000
MAX_PICKLE = 2**25
MAX_DIMS = 64  # numpy's own limit
_MAX_LINE = 1000

_USUAL_ENTRIES = (
    *("state_dict", "model", "model_state_dict", "module", "params"),
    *("state_dict_ema", "model_ema", "model_state_dict_ema", "params_ema"),
    *("ema", "ema_state_dict", "ema_model", "ema_model_state_dict"),
)

DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    )
}


_NAMES = {opcode.code.encode("latin-1"): opcode.name for opcode in pickletools.opcodes}


def _number(layout: str) -> Callable[[io.BytesIO], Any]:
    number = struct.Struct(layout)
    return lambda file: number.unpack(file.read(number.size))[0]


def _text(length: str, encoding: str) -> Callable[[io.BytesIO], str]:
    size = _number(length)
    return lambda file: _take(file, size(file)).decode(encoding, "surrogatepass")


def _integer(file: io.BytesIO) -> int:
    (size,) = file.read(1)
    return int.from_bytes(_take(file, size), "little", signed=True)


def _line(file: io.BytesIO) -> str:
    line = file.readline(_MAX_LINE)
    if not line.endswith(b"\n"):
        raise ValueError("a name in the pickle has no end")
    return line[:-1].decode("ascii")


def _take(file: io.BytesIO, size: int) -> bytes:
    taken = file.read(max(size, 0))  # a negative size would read to the end
    if len(taken) != size:
        raise EOFError("the pickle ends within an argument")
    return taken


_LITERALS: Mapping[str, Callable[[io.BytesIO], Any]] = {
    "BININT": _number("<i"),
    "BININT1": _number("<B"),
    "BININT2": _number("<H"),
    "LONG1": _integer,
    "BINFLOAT": _number(">d"),
    "BINUNICODE": _text("<I", "utf-8"),
    "SHORT_BINUNICODE": _text("<B", "utf-8"),
    "BINSTRING": _text("<i", "latin-1"),
    "SHORT_BINSTRING": _text("<B", "latin-1"),
}

_ARGUMENTS: Mapping[str, Callable[[io.BytesIO], Any]] = {
    **_LITERALS,
    "BINPUT": _number("<B"),
    "LONG_BINPUT": _number("<I"),
    "BINGET": _number("<B"),
    "LONG_BINGET": _number("<I"),
    "PROTO": _number("<B"),
    "FRAME": _number("<Q"),
    "GLOBAL": lambda file: f"{_line(file)}.{_line(file)}",
    "INST": lambda file: f"{_line(file)}.{_line(file)}",
    "PERSID": _line,
}


@dataclass(frozen=True)
class Storage:
    key: str
    dtype: np.dtype
    size: int


@dataclass(frozen=True)
class View:
    """A tensor as torch pickles it: a strided view, counted in elements, of a storage kept elsewhere in the file."""

    storage: Storage
    dtype: np.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any) -> View:
    return _tensor_v3(storage, offset, shape, strides, None, None, None)


def _tensor_v2(storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, flags: Any = None) -> View:
    return _tensor_v3(storage, offset, shape, strides, grad, hooks, None, flags)


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, flags: Any = None
) -> View:
    if flags:
        raise CheckpointError(
            "holds a tensor whose conjugation or negation is pending; call .resolve_conj().resolve_neg() before saving."
        )
    if not (
        isinstance(storage, Storage)
        and isinstance(dtype, np.dtype | None)
        and type(shape) is type(strides) is tuple
        and max(len(shape), len(strides)) <= MAX_DIMS  # a pickle can name one long tuple many times
        and all(type(number) is int for number in (offset, *shape, *strides))
    ):
        raise TypeError("a tensor is not described by a storage, an offset, a shape and strides")
    return View(storage, dtype or storage.dtype, offset, shape, strides)


def _parameter(data: Any, grad: Any = None, hooks: Any = None, state: Any = None) -> View:
    if not isinstance(data, View):
        raise TypeError("a parameter is not made of a tensor")
    return data


def _size(shape: Any) -> tuple:
    if type(shape) is not tuple:
        raise TypeError("a torch.Size is not made of a tuple")
    return shape


def _ordered_dict(items: Any = None) -> dict:
    result: dict = {}
    if items is not None:  # how Python 2 pickled it
        for key, value in items:
            _set_item(result, key, value)
        items.clear()  # a hostile pickle could otherwise have the same list copied at every opcode
    return result


_GLOBALS: Mapping[str, Any] = {
    "collections.OrderedDict": _ordered_dict,
    "torch.Size": _size,
    "torch.nn.parameter.Parameter": _parameter,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch.DoubleStorage": DTYPES["float64"],
    "torch.FloatStorage": DTYPES["float32"],
    "torch.HalfStorage": DTYPES["float16"],
    "torch.BFloat16Storage": DTYPES["bfloat16"],
    "torch.LongStorage": DTYPES["int64"],
    "torch.IntStorage": DTYPES["int32"],
    "torch.ShortStorage": DTYPES["int16"],
    "torch.CharStorage": DTYPES["int8"],
    "torch.ByteStorage": DTYPES["uint8"],
    "torch.BoolStorage": DTYPES["bool"],
    "torch.ComplexFloatStorage": DTYPES["complex64"],
    "torch.ComplexDoubleStorage": DTYPES["complex128"],
    "torch.storage.UntypedStorage": DTYPES["uint8"],
    **{f"torch.{name}": dtype for name, dtype in DTYPES.items()},
}


def _find_global(name: str) -> Any:
    if name not in _GLOBALS:
        raise CheckpointError(
            f"is refused: its pickle names {name[:200]!r}, which is no part of a tensor and could run code; "
            "save only the state_dict, for example as .safetensors."
        )
    return _GLOBALS[name]


def _storage(persistent_id: Any) -> Storage:
    tag, dtype, key, _location, size, *view = persistent_id
    if (
        tag != "storage"
        or not (isinstance(dtype, np.dtype) and type(key) is str and type(size) is int)
        or view not in ([], [None])
    ):
        raise TypeError("a storage is not described by a type, a key and a size")
    return Storage(key, dtype, size)


def _set_item(target: Any, key: Any, value: Any) -> None:
    # Only keys whose hash costs nothing: a nested tuple would recurse, and large integers can be made to collide.
    if type(target) is not dict or not (type(key) is str or (type(key) is int and abs(key) < 2**31)):
        raise TypeError("something other than a dictionary keyed by strings or small integers is filled")
    target[key] = value


def unpickle(content: bytes) -> tuple[Any, dict[str, Storage], int]:
    """What one pickle holds, tensors as `View`s; the storages it names; and its size (more bytes may follow it)."""
    file = io.BytesIO(content)
    storages: dict[str, Storage] = {}
    memo: dict[int, Any] = {}
    stack: list[Any] = []
    outer_stacks: list[list[Any]] = []  # MARK starts a new stack; the opcode that consumes it returns to the outer one
    for count, (opcode, arg) in enumerate(_opcodes(file)):
        if count == MAX_OPCODES:
            raise CheckpointError(f"is refused: its pickle has more than {MAX_OPCODES} opcodes; save fewer objects.")
        match opcode:
            case "BINPUT" | "LONG_BINPUT":
                memo[arg] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[arg])
            case name if name in _LITERALS:
                stack.append(arg)
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(opcode == "NEWTRUE")
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                length = int(opcode[-1])
                stack[-length:] = [tuple(stack[-length:])]
            case "MARK":
                outer_stacks.append(stack)
                stack = []
            case "TUPLE":
                items, stack = stack, outer_stacks.pop()
                stack.append(tuple(items))
            case "APPEND":
                item = stack.pop()
                stack[-1].append(item)
            case "APPENDS":
                items, stack = stack, outer_stacks.pop()
                stack[-1].extend(items)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                _set_item(stack[-1], key, value)
            case "SETITEMS":
                items, stack = stack, outer_stacks.pop()
                for key, value in zip(items[::2], items[1::2], strict=True):
                    _set_item(stack[-1], key, value)
            case "GLOBAL":
                stack.append(_find_global(arg))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                if not type(name) is type(module) is str:
                    raise TypeError("a global is not named by strings")
                stack.append(_find_global(f"{module}.{name}"))
            case "REDUCE":
                args, function = stack.pop(), stack.pop()
                stack.append(function(*args))  # nothing but the functions above can be called
            case "BUILD":  # the attributes of a dictionary or parameter; none matters here
                _attributes, target = stack.pop(), stack[-1]
                if not isinstance(target, dict | View):
                    raise TypeError("something that is not a dictionary or tensor is given attributes")
            case "BINPERSID":
                storage = _storage(stack.pop())
                storages[storage.key] = storage
                stack.append(storage)
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop(), storages, file.tell()
            case other:
                name = f" {arg[:200]!r}" if isinstance(arg, str) else ""
                raise CheckpointError(
                    f"is refused: its pickle uses {other}{name}, which no tensor needs and which could run code; "
                    "save only the state_dict, for example as .safetensors."
                )
    raise EOFError("the pickle has no end")


def _opcodes(file: io.BytesIO) -> Iterator[tuple[str, Any]]:
    """Each opcode with its argument; the arguments of opcodes that no tensor needs are not read."""
    while code := file.read(1):
        opcode = _NAMES[code]
        yield opcode, _ARGUMENTS[opcode](file) if opcode in _ARGUMENTS else None


def state_dict(content: Any, entry: str | None = None) -> dict[str, View]:
    """The tensors of a file's content: all of it if that is one state dict (scalars in it are ignored), else the one
    under a usual key, or under the key `entry` ("a.b" for "b" within "a")."""
    if entry is not None:
        return _entry(content, entry)
    if views := _flat_views(content):
        return views
    entries = _entries(content)
    usual = [name for name in entries if name in _USUAL_ENTRIES]
    if len(usual) == 1:
        return entries[usual[0]]
    if entries:
        raise CheckpointError(f"has state dicts under {listing(list(entries))}; pass one of these as `entry`.")
    keys = list(content) if isinstance(content, dict) else []
    raise CheckpointError(
        f"should be a dictionary of tensors, or hold one; its keys are {listing(keys)}. Save the state_dict by itself."
    )


def _entry(content: Any, entry: str) -> dict[str, View]:
    found = content
    for key in [entry] if isinstance(content, dict) and entry in content else entry.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    if views := _flat_views(found):
        return views
    names = list(_entries(content))
    if not names and _flat_views(content):
        raise CheckpointError(f"is one state dict without entries; leave out entry={entry!r}.")
    near = difflib.get_close_matches(entry, [name for name in names if len(name) < 100][:1000], n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has them under {listing(names)}."
    raise CheckpointError(f"has no state dict under entry={entry!r}; {hint}")


def _entries(content: Any) -> dict[str, dict[str, View]]:
    """The state dicts in a dictionary and one level below, by their dotted names; the same one twice counts once."""
    entries: dict[str, dict[str, View]] = {}
    seen = set()
    level = [("", content)] if isinstance(content, dict) else []
    for _ in range(2):
        below = []
        for prefix, outer in level:
            for key, inner in outer.items():
                if type(key) is not str or not isinstance(inner, dict) or id(inner) in seen:
                    continue
                seen.add(id(inner))
                if views := _flat_views(inner):
                    entries[prefix + key] = views
                else:
                    below.append((f"{prefix}{key}.", inner))
        level = below
    return entries


def _flat_views(content: Any) -> dict[str, View]:
    """The tensors of a dictionary that holds nothing else but scalars; of any other object, none."""
    if not isinstance(content, dict):
        return {}
    views = {key: value for key, value in content.items() if isinstance(key, str) and isinstance(value, View)}
    others = [value for key, value in content.items() if key not in views]
    return views if all(isinstance(value, str | int | float | None) for value in others) else {}
