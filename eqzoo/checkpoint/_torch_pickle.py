"""The pickles inside torch's files, interpreted without importing, calling or allocating anything they ask for.

`pickle.Unpickler` is not used: even with a restricted `find_class` it allocates what a few corrupt bytes demand
(`LONG_BINPUT` with a large index takes tens of gigabytes) and builds whatever the remaining opcodes describe.
"""

import pickletools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from .errors import CheckpointError, listing

# A tensor takes about thirty opcodes. The limit bounds the time and memory that a hostile pickle can cost.
MAX_OPCODES = 2_000_000

_WRAPPERS = ("state_dict", "model", "model_state_dict", "module", "params")

DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    )
}


_LITERALS = (
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINSTRING",
    "SHORT_BINSTRING",
)


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


def unpickle(file: Any) -> tuple[Any, dict[str, Storage]]:
    """What one pickle holds, tensors as `View`s, and the storages it names. Leaves `file` just behind the pickle."""
    storages: dict[str, Storage] = {}
    memo: dict[int, Any] = {}
    stack: list[Any] = []
    outer_stacks: list[list[Any]] = []  # MARK starts a new stack; the opcode that consumes it returns to the outer one
    arg: Any
    for count, (opcode, arg, _) in enumerate(pickletools.genops(file)):
        if count == MAX_OPCODES:
            raise CheckpointError(f"is refused: its pickle has more than {MAX_OPCODES} opcodes; save fewer objects.")
        match opcode.name:
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
                stack.append(opcode.name == "NEWTRUE")
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                length = int(opcode.name[-1])
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
                stack.append(_find_global(arg.replace(" ", ".")))
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
                return stack.pop(), storages
            case other:
                name = f" {arg[:200]!r}" if isinstance(arg, str) else ""
                raise CheckpointError(
                    f"is refused: its pickle uses {other}{name}, which no tensor needs and which could run code; "
                    "save only the state_dict, for example as .safetensors."
                )
    raise EOFError("the pickle has no end")


def state_dict(content: Any) -> dict[str, View]:
    """The tensors of a file's content: a flat dictionary (scalars in it are ignored), or one under a usual key."""
    if views := _flat_views(content):
        return views
    keys = list(content) if isinstance(content, dict) else []
    wrapped = {key: views for key in _WRAPPERS if key in keys and (views := _flat_views(content[key]))}
    if len(wrapped) != 1:
        raise CheckpointError(
            f"should be a dictionary of tensors, or hold exactly one under {listing(_WRAPPERS)}; "
            f"its keys are {listing(keys)}, of which {listing(list(wrapped))} fit. Save the one you want by itself."
        )
    return next(iter(wrapped.values()))


def _flat_views(content: Any) -> dict[str, View]:
    """The tensors of a dictionary that holds nothing else but scalars; of any other object, none."""
    if not isinstance(content, dict):
        return {}
    views = {key: value for key, value in content.items() if isinstance(key, str) and isinstance(value, View)}
    others = [value for key, value in content.items() if key not in views]
    return views if all(isinstance(value, str | int | float | None) for value in others) else {}
