"""The readers give what torch, safetensors and numpy wrote, and refuse the rest without running or allocating it."""

import collections
import copyreg
import io
import json
import pickle
import random
import struct
import subprocess
import sys
import tracemalloc
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from eqzoo.checkpoint import _torch_pickle
from eqzoo.checkpoint.errors import CheckpointError
from eqzoo.checkpoint.formats import open_checkpoint, write_safetensors

FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = ("float16", "bfloat16", "float32", "float64", "bool", "complex64", *INTEGERS, *FLOAT8)


def save_zip(tensors, path):
    torch.save(tensors, path)


def save_legacy(tensors, path):
    torch.save(tensors, path, _use_new_zipfile_serialization=False)


def save_safetensors(tensors, path):
    safetensors.torch.save_file(tensors, path)


def save_npz(tensors, path):
    with open(path, "wb") as file:
        np.savez(file, **{name: tensor.numpy() for name, tensor in tensors.items()})


TORCH = [save_zip, save_legacy]
EVERY = [*TORCH, save_safetensors, save_npz]


def random_tensor(dtype: str, *shape: int) -> torch.Tensor:
    """Any bit pattern but, for booleans, those that mean something."""
    size = torch.empty((), dtype=getattr(torch, dtype)).element_size()
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8)
    return raw.view(getattr(torch, dtype))


def assert_equal(tensor, expected: torch.Tensor):
    """Same dtype, shape and bits; and the array is the caller's own."""
    dtype = str(expected.dtype).removeprefix("torch.")
    array = tensor.read()
    assert tensor.dtype == array.dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
    assert tensor.shape == array.shape == tuple(expected.shape)
    assert array.flags.c_contiguous
    assert array.flags.writeable
    raw = expected.detach().contiguous().reshape(-1).view(torch.uint8).numpy() if expected.numel() else np.empty(0)
    assert array.tobytes() == raw.tobytes()


def assert_all_equal(path, expected):
    tensors, _ = open_checkpoint(path)
    assert set(tensors) == set(expected)
    for name, tensor in expected.items():
        assert_equal(tensors[name], tensor)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint.pth"


@pytest.mark.parametrize("save", [*TORCH, save_safetensors])
def test_every_dtype(save, path):
    expected = {dtype: random_tensor(dtype, 3, 5) for dtype in DTYPES}
    # An odd number of bytes first, so that later tensors are not aligned to their element size.
    save({"odd": torch.zeros(1, dtype=torch.int8), **expected}, path)
    tensors, _ = open_checkpoint(path)
    for dtype in DTYPES:
        assert_equal(tensors[dtype], expected[dtype])


def test_every_npz_dtype(path):
    expected = {dtype: random_tensor(dtype, 3, 5) for dtype in DTYPES if dtype not in ("bfloat16", *FLOAT8)}
    save_npz(expected, path)
    assert_all_equal(path, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
def test_misaligned_safetensors_data(dtype, path):
    expected = random_tensor(dtype, 2, 3)
    begin = 1
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, begin]},
        "b": {
            "dtype": {"bfloat16": "BF16", "float8_e5m2": "F8_E5M2"}[dtype],
            "shape": [2, 3],
            "data_offsets": [begin, begin + expected.nbytes],
        },
    }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\7" + expected.view(torch.uint8).numpy().tobytes())
    assert_equal(open_checkpoint(path)[0]["b"], expected)


@pytest.mark.parametrize("save", TORCH)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "uint16"])
def test_every_stride(save, dtype, path):
    base = random_tensor(dtype, 4, 6)
    expected = {
        "contiguous": base,
        "transposed": base.t(),
        "offset": base[1:, 2:],
        "stepped": base[::2, ::3],
        "row": base[3],
        "last element": base[3, 5],
        "expanded": base[:, :1].expand(4, 5),
        "permuted": random_tensor(dtype, 2, 3, 4).permute(2, 0, 1),
        "channels last": random_tensor(dtype, 1, 2, 3, 4).to(memory_format=torch.channels_last),
        "scalar": random_tensor(dtype, 1)[0],
        "empty": base[:0],
        "empty inside": base[:, 3:3],
        "no elements": torch.empty((0, 3), dtype=base.dtype),
    }
    save(expected, path)
    assert_all_equal(path, expected)


@pytest.mark.parametrize("save", [save_safetensors, save_npz])
def test_scalars_and_empty_arrays(save, path):
    expected = {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}
    save(expected, path)
    assert_all_equal(path, expected)


def test_npz_fortran_order(path):
    array = np.arange(24.0).reshape(2, 3, 4)
    with open(path, "wb") as file:
        np.savez(file, x=np.asfortranarray(array))
    np.testing.assert_array_equal(open_checkpoint(path)[0]["x"].read(), array)


@pytest.mark.parametrize("save", TORCH)
def test_what_modules_save(save, path):
    """Parameters, buffers, a parameter with attributes of its own, and the `_metadata` of a state dict."""
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    expected = collections.OrderedDict(module.state_dict())
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.note = "x"
    save(collections.OrderedDict(module.state_dict(keep_vars=True), extra=parameter), path)
    assert_all_equal(path, expected | {"extra": parameter})
    save(module.state_dict(), path)
    assert_all_equal(path, expected)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_binary_protocol(protocol, path):
    expected = {"a": torch.ones(2), "b": torch.zeros(1)}
    torch.save(expected, path, pickle_protocol=protocol)
    assert_all_equal(path, expected)


def test_shared_storage_is_one_copy_in_the_file_and_two_arrays(path):
    weight = torch.randn(3)
    save_zip({"a": weight, "b": weight}, path)
    tensors, _ = open_checkpoint(path)
    first = tensors["a"].read()
    first[:] = 0
    assert_equal(tensors["b"], weight)


@pytest.mark.parametrize("flag", ["conj", "neg"])
def test_pending_conjugation_is_refused(flag, path):
    x = torch.ones(2, dtype=torch.complex64).conj()
    torch.save({"x": x if flag == "conj" else x.imag}, path)
    with pytest.raises(CheckpointError, match="resolve_conj"):
        open_checkpoint(path)


@pytest.mark.parametrize("save", EVERY)
def test_content_decides_not_the_ending(save, tmp_path):
    for ending in (".safetensors", ".pth", ".npz", ""):
        save({"x": torch.ones(2)}, tmp_path / f"file{ending}")
        assert_all_equal(tmp_path / f"file{ending}", {"x": torch.ones(2)})


def test_metadata(tmp_path):
    safetensors.torch.save_file({"x": torch.ones(1)}, tmp_path / "a", metadata={"config": "{}"})
    assert open_checkpoint(tmp_path / "a")[1] == {"config": "{}"}
    assert open_checkpoint(str(tmp_path / "a"))[1] == {"config": "{}"}
    torch.save({"x": torch.ones(1)}, tmp_path / "b")
    assert open_checkpoint(tmp_path / "b")[1] == {}


@pytest.mark.parametrize("save", TORCH)
@pytest.mark.parametrize("key", ["state_dict", "model", "module", "params", "state_dict_ema", "model_ema", "ema"])
def test_wrapped_state_dict(save, key, path):
    optimizer = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    save({"epoch": 3, "optimizer": optimizer, key: {"x": torch.ones(2)}}, path)
    assert_all_equal(path, {"x": torch.ones(2)})


def test_scalars_beside_tensors_are_ignored(path):
    save_zip({"x": torch.ones(2), "epoch": 3, "lr": 0.1, "name": "r50", "best": None, "ema": True}, path)
    assert_all_equal(path, {"x": torch.ones(2)})


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({0: torch.ones(1)}, "'0'"),
        ({"x": torch.ones(1), "history": [1, 2]}, "'x', 'history'"),
        ({"epoch": 1}, "'epoch'"),
        ([torch.ones(1)], "nothing"),
        (torch.ones(1), "nothing"),
    ],
)
def test_anything_but_one_state_dict_is_refused(content, named, path):
    save_zip(content, path)
    with pytest.raises(CheckpointError, match=f"keys are {named}"):
        open_checkpoint(path)


SEVERAL = {
    "model": {"x": torch.zeros(1)},
    "ema": {"module.x": torch.ones(2)},
    "students": {"large": {"x": torch.ones(3)}, "note": [1]},
    "dotted.name": {"x": torch.ones(4)},
    "optimizer": {"state": {0: {"step": torch.ones(5)}}},
}


@pytest.mark.parametrize("save", TORCH)
@pytest.mark.parametrize(("entry", "size"), [("model", 1), ("ema", 2), ("students.large", 3), ("dotted.name", 4)])
def test_an_entry_chooses_one_of_several_state_dicts(save, entry, size, path):
    save(SEVERAL, path)
    tensors, _ = open_checkpoint(path, entry)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {"x": (size,)}


def test_several_state_dicts_without_a_choice_are_refused_and_listed(path):
    save_zip(SEVERAL, path)
    listed = "under 'model', 'ema', 'dotted.name', 'students.large'; pass one of these as `entry`"
    with pytest.raises(CheckpointError, match=listed):
        open_checkpoint(path)
    save_zip({"teacher": {"x": torch.ones(1)}}, path)
    with pytest.raises(CheckpointError, match="under 'teacher'; pass"):
        open_checkpoint(path)


def test_one_state_dict_under_two_keys_is_no_choice(path):
    both = {"x": torch.ones(1)}
    save_zip({"model": both, "state_dict": both}, path)
    assert_all_equal(path, both)
    assert set(open_checkpoint(path, "state_dict")[0]) == {"x"}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("emo", "no state dict under entry='emo'; did you mean 'ema'?"),
        ("zzz", "entry='zzz'; it has them under 'model', 'ema', 'dotted.name', 'students.large'"),
        ("optimizer", "no state dict under entry='optimizer'"),
        ("model.x", "no state dict under entry='model.x'"),
        ("", "no state dict under entry=''"),
    ],
)
def test_an_unknown_entry_is_refused_with_those_that_exist(entry, message, path):
    save_zip(SEVERAL, path)
    with pytest.raises(CheckpointError, match=message.replace("?", r"\?")):
        open_checkpoint(path, entry)


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (save_zip, "is one state dict without entries"),
        (save_safetensors, "is no torch file"),
        (save_npz, "is no torch file"),
    ],
)
def test_an_entry_of_a_file_that_has_none_is_refused(save, message, path):
    save({"x": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match=f"{message}.*leave out entry='ema'"):
        open_checkpoint(path, "ema")


def test_an_entry_of_every_shard(tmp_path):
    wrap = lambda tensors, path: save_zip({"a": tensors, "b": {}}, path)
    save_shards(tmp_path, "pytorch_model.bin.index.json", wrap, ".bin")
    assert set(open_checkpoint(tmp_path, "a")[0]) == {"a", "b"}


@pytest.mark.parametrize("save", EVERY)
def test_prefixes_of_all_names_are_removed(save, path):
    save({"module._orig_mod.a": torch.ones(1), "module._orig_mod.module.b": torch.ones(1)}, path)
    assert set(open_checkpoint(path)[0]) == {"a", "module.b"}
    save({"module.a": torch.ones(1), "b": torch.ones(1)}, path)
    assert set(open_checkpoint(path)[0]) == {"module.a", "b"}


@pytest.mark.parametrize("save", TORCH)
def test_an_averaged_model_is_read_without_its_counter(save, path):
    averaged = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 3))
    save({"model": {}, "model_ema": averaged.state_dict()}, path)
    assert set(open_checkpoint(path, "model_ema")[0]) == {"weight", "bias"}


# Folders


def save_shards(folder, index, save, ending):
    save({"a": torch.ones(1)}, folder / f"one{ending}")
    save({"b": torch.zeros(2)}, folder / f"two{ending}")
    weight_map = {"a": f"one{ending}", "b": f"two{ending}"}
    (folder / index).write_text(json.dumps({"metadata": {"total_size": 12}, "weight_map": weight_map}))


@pytest.mark.parametrize(
    ("index", "save", "ending"),
    [
        ("model.safetensors.index.json", save_safetensors, ".safetensors"),
        ("pytorch_model.bin.index.json", save_zip, ".bin"),
    ],
)
def test_folder_of_shards(index, save, ending, tmp_path):
    save_shards(tmp_path, index, save, ending)
    tensors, _ = open_checkpoint(tmp_path)
    assert_equal(tensors["a"], torch.ones(1))
    assert_equal(tensors["b"], torch.zeros(2))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_folder_with_the_usual_file(name, tmp_path):
    save_zip({"x": torch.zeros(1)}, tmp_path / "training_args.bin")
    (save_safetensors if name == "model.safetensors" else save_zip)({"x": torch.ones(1)}, tmp_path / name)
    assert_all_equal(tmp_path, {"x": torch.ones(1)})


def test_folder_with_one_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_zip({"x": torch.ones(1)}, tmp_path / "any.pth")
    assert_all_equal(tmp_path, {"x": torch.ones(1)})
    save_zip({"x": torch.ones(1)}, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match=r"it holds 'any\.pth', 'config\.json', 'other\.pth'"):
        open_checkpoint(tmp_path)


def test_folder_without_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="it holds nothing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "sub/x.safetensors", "..", ".", "", "{absolute}"])
def test_shards_outside_the_folder_are_refused(shard, tmp_path):
    save_safetensors({"a": torch.ones(1)}, tmp_path / "outside.safetensors")
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    save_safetensors({"a": torch.ones(1)}, folder / "sub" / "x.safetensors")
    shard = shard.format(absolute=tmp_path / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointError, match="outside its own folder"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "\x00", "[" * 100_000, "é"]
)
def test_corrupt_index(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"index\.json is truncated or corrupt"):
        open_checkpoint(tmp_path)


def test_index_and_shards_must_agree(tmp_path):
    save_shards(tmp_path, "model.safetensors.index.json", save_safetensors, ".safetensors")
    save_safetensors({"c": torch.ones(1)}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match="lacks 'b' and repeats nothing"):
        open_checkpoint(tmp_path)
    save_safetensors({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match="lacks nothing and repeats 'a'"):
        open_checkpoint(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"two\.safetensors"):
        open_checkpoint(tmp_path)


def test_metadata_of_shards(tmp_path):
    save_shards(tmp_path, "model.safetensors.index.json", save_safetensors, ".safetensors")
    safetensors.torch.save_file({"b": torch.zeros(2)}, tmp_path / "two.safetensors", metadata={"format": "pt"})
    assert open_checkpoint(tmp_path)[1] == {"format": "pt"}


# Damaged files


def test_missing_file_names_its_neighbours(tmp_path):
    (tmp_path / "resnet50.pth").touch()
    with pytest.raises(FileNotFoundError, match=r"did you mean resnet50\.pth\?"):
        open_checkpoint(tmp_path / "resnet5.pth")
    with pytest.raises(FileNotFoundError, match="check the path"):
        open_checkpoint(tmp_path / "nowhere" / "x.pth")


@pytest.mark.parametrize("content", [b"", b"\x80", b"<!DOCTYPE html>", b"version https://git-lfs", pickle.dumps({})])
def test_not_a_checkpoint(content, path):
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="was expected"):
        open_checkpoint(path)


def read_all(path):
    for tensor in open_checkpoint(path)[0].values():
        tensor.read()


@pytest.mark.parametrize("save", EVERY)
def test_truncated_files(save, path):
    save({"weight": torch.randn(7, 9), "bias": torch.randn(3), "steps": torch.tensor(3)}, path)
    content = path.read_bytes()
    for length in [*range(0, len(content), 7), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="download it again"):
            open_checkpoint(path)


@pytest.mark.parametrize("save", EVERY)
def test_mutated_files_are_read_or_refused(save, path):
    """Whatever the bytes, the outcome is tensors or a CheckpointError, within the file's own order of memory."""
    save({"weight": torch.randn(7, 9), "bias": torch.randn(3), "steps": torch.tensor(3)}, path)
    content, rng = path.read_bytes(), random.Random(0)
    outcomes = collections.Counter()
    tracemalloc.start()
    for _ in range(400):
        mutated = bytearray(content)
        for _ in range(rng.choice((1, 1, 4, 16))):
            mutated[rng.randrange(len(mutated))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        path.write_bytes(mutated)
        try:
            read_all(path)
            outcomes["read"] += 1
        except CheckpointError:
            outcomes["refused"] += 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert outcomes["read"] > 10
    assert outcomes["refused"] > 10
    assert peak < 20e6


def test_corrupt_message_says_what_and_where(path):
    save_zip({"x": torch.ones(3)}, path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(
        CheckpointError, match=r"checkpoint\.pth is truncated or corrupt: a complete zip archive .* was"
    ):
        open_checkpoint(path)


def test_compressed_archives_are_refused(path):
    with open(path, "wb") as file:
        np.savez_compressed(file, x=np.ones(3))
    with pytest.raises(CheckpointError, match="is compressed or"):
        open_checkpoint(path)


RECORD = np.zeros(2, [("a", "<f4"), ("b", "<i8")])


@pytest.mark.parametrize(
    "array", [np.array([{}]), np.array(["a"]), np.ones(2, ml_dtypes.bfloat16), np.ones(2, ">f4"), RECORD]
)
def test_npz_of_other_than_native_numbers_is_refused(array, path):
    with open(path, "wb") as file:
        np.savez(file, x=array)
    with pytest.raises(CheckpointError, match=r"stores 'x\.npy' as"):
        open_checkpoint(path)


def test_other_archives_are_refused(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(CheckpointError, match=r"neither torch nor numpy: it holds 'readme\.txt'"):
        open_checkpoint(path)


def test_torchscript_is_refused(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", b"")
        archive.writestr("model/constants.pkl", b"")
    with pytest.raises(CheckpointError, match="TorchScript"):
        open_checkpoint(path)


@pytest.mark.parametrize("save", TORCH)
def test_big_endian_is_refused(save, path, monkeypatch):
    monkeypatch.setattr(sys, "byteorder", "big")
    save({"x": torch.ones(1)}, path)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="big-endian"):
        open_checkpoint(path)


def test_float4_is_refused_by_name(path):
    safetensors.torch.save_file({"x": torch.zeros(2, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, path)
    with pytest.raises(CheckpointError, match="stores 'x' as F4"):
        open_checkpoint(path)


# Hostile pickles


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


class Reduced:
    def __init__(self, function, *args):
        self.reduced = function, args

    def __reduce__(self):
        return self.reduced


def attacks(marker):
    """Pickles that create the marker when unpickled, and what the refusal must name."""
    import os

    command, source = f"touch {marker}", f"open({str(marker)!r}, 'w').close()"
    for protocol in range(6):
        yield pickle.dumps(Reduced(os.system, command), protocol), "system"
        yield pickle.dumps(Reduced(eval, source), protocol), "eval"
    yield (
        b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n("
        + text("os")
        + b"tR"
        + text("system")
        + b"tR("
        + text(command)
        + b"tR.",
        "builtins.getattr",
    )
    yield b"\x80\x02(" + text(command) + b"ios\nsystem\n.", "os.system"
    yield b"\x80\x02(cos\nsystem\n" + text(command) + b"o.", "os.system"
    yield b"\x80\x02ccollections\nOrderedDict\n)Rcos\nsystem\n(" + text(command) + b"tR0.", "os.system"
    yield b"\x80\x04" + text("collections") + text("abc.sys.modules") + b"\x93.", "collections.abc.sys.modules"


def save_pickle_zip(content: bytes, path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", b"3\n")


def save_pickle_legacy(content: bytes, path):
    head = io.BytesIO()
    for part in (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {"little_endian": True}):
        pickle.dump(part, head, protocol=2)
    path.write_bytes(head.getvalue() + content + pickle.dumps([], protocol=2))


PICKLES = [save_pickle_zip, save_pickle_legacy]


@pytest.mark.parametrize("save", PICKLES)
def test_code_is_refused_by_name_and_not_run(save, path, tmp_path):
    marker = tmp_path / "marker"
    for content, name in attacks(marker):
        if b"modules" not in content:
            pickle.loads(content)
            assert marker.exists(), "the attack itself must work, or its refusal proves nothing"
            marker.unlink()
        save(content, path)
        with pytest.raises(CheckpointError, match=f"is refused.*{name}"):
            open_checkpoint(path)
        assert not marker.exists()


def test_extension_registry_is_refused(path, tmp_path, monkeypatch):
    marker = tmp_path / "marker"
    copyreg.add_extension("os", "system", 240)
    try:
        content = b"\x80\x02\x82\xf0(" + text(f"touch {marker}") + b"tR."
        save_pickle_zip(content, path)
        with pytest.raises(CheckpointError, match="EXT1"):
            open_checkpoint(path)
    finally:
        copyreg.remove_extension("os", "system", 240)
    assert not marker.exists()


ORDERED_DICT = b"ccollections\nOrderedDict\n"
STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x01tQ"


REBUILD = b"ctorch._utils\n_rebuild_tensor\n("


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (ORDERED_DICT + b")\x81.", "uses NEWOBJ,"),
        (ORDERED_DICT + b")}\x92.", "uses NEWOBJ_EX,"),
        (b"(" + ORDERED_DICT + b"o.", "uses OBJ,"),
        (b"Pname\n.", "uses PERSID 'name'"),
        (b"](K\x01l.", "uses LIST,"),
        (ORDERED_DICT + b"}b.", "not a dictionary or tensor is given attributes"),
        (b"}" + ORDERED_DICT + b"K\x01s.", "keyed by strings or small integers"),
        (b"}" + b"\x8a\x08" + b"\1" * 8 + b"Ns.", "keyed by strings or small integers"),
        (b"})" + b"\x85" * 500_000 + b"Ns.", "keyed by strings or small integers"),  # hashing it overflows C's stack
        (b"]K\x01K\x02s.", "keyed by strings or small integers"),
        (b"}(K\x01u.", "shorter"),
        (b"K\x01)R.", "not callable"),
        (b"K\x01K\x01a.", "no attribute 'append'"),
        (b"K\x01K\x01\x93.", "not named by strings"),
        (ORDERED_DICT + b"(K\x01K\x02tR.", "positional arguments"),
        (b"ctorch\nSize\n](K\x01K\x02e\x85R.", "Size is not made of a tuple"),
        (b"ctorch._utils\n_rebuild_parameter\n(K\x00\x89NtR.", "parameter is not made of a tensor"),
        (REBUILD + b"K\x00K\x00))tR.", "tensor is not described by"),
        (REBUILD + STORAGE + b"K\x00]]tR.", "tensor is not described by"),
        (REBUILD + STORAGE + b"K\x00)]tR.", "tensor is not described by"),
        (REBUILD + STORAGE + b"N))tR.", "tensor is not described by"),
        (REBUILD + STORAGE + b"K\x00(NtK\x01\x85tR.", "tensor is not described by"),
        (REBUILD + STORAGE + b"K\x00)(\x88ttR.", "tensor is not described by"),
        (STORAGE.replace(b"storage", b"modules") + b".", "storage is not described by"),
        (STORAGE.replace(b"K\x01t", b"Nt") + b".", "storage is not described by"),
        (STORAGE.replace(b"K\x01t", b"K\x01K\x01t") + b".", "storage is not described by"),
        (STORAGE.replace(b"K\x01t", b"K\x01Nt") + b".", "keys are nothing"),
        (STORAGE.replace(b"ctorch\nFloatStorage\n", b"N") + b".", "storage is not described by"),
        (b"(" * 100_000, "no end"),
        (b"(" * 100_000 + b".", "IndexError"),
        (b"0.", "uses POP,"),
        (b"t.", "IndexError"),
        (b"h\x05.", "KeyError"),
    ],
)
@pytest.mark.parametrize("save", PICKLES)
def test_ill_formed_pickles_are_refused(save, content, reason, path):
    save(b"\x80\x02" + content, path)
    if reason == "no end" and save is save_pickle_legacy:
        reason = "refused|corrupt"  # it runs on into the pickle behind it
    with pytest.raises(CheckpointError, match=reason):
        open_checkpoint(path)


def test_legacy_storage_keys_are_strings(path):
    deep = pickle.PROTO + b"\x02]q\x00)" + b"\x85" * 500_000 + b"a."  # hashing it overflows C's stack
    save_pickle_legacy(b"\x80\x02}.", path)
    path.write_bytes(path.read_bytes().removesuffix(pickle.dumps([], protocol=2)) + deep + b"\0" * 8)
    with pytest.raises(CheckpointError, match="key is not a string"):
        open_checkpoint(path)


@pytest.mark.parametrize("save", PICKLES)
@pytest.mark.parametrize(
    "content",
    [
        b"Nr\xff\xff\xff\xff.",  # LONG_BINPUT: 4 billion memo slots
        b"X\xff\xff\xff\xff.",  # BINUNICODE: 4 GB of text
        b"\x8e" + b"\xff" * 7 + b"\x7f.",  # BINBYTES8
        b"\x8d" + b"\xff" * 7 + b"\x7f.",  # BINUNICODE8
        b"\x96" + b"\xff" * 7 + b"\x7f.",  # BYTEARRAY8
        b"\x8b\xff\xff\xff\x7f.",  # LONG4
        b"T\xff\xff\xff\x7f.",  # BINSTRING
        b"\x95" + b"\xff" * 7 + b"\x7f.",  # FRAME
    ],
)
def test_pickles_cannot_ask_for_memory(save, content, path):
    save(b"\x80\x04" + content, path)
    tracemalloc.start()
    with pytest.raises(CheckpointError):
        open_checkpoint(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2e6


def test_number_of_opcodes_is_limited(path, monkeypatch):
    save_pickle_zip(b"\x80\x02" + b"}" * 100 + b".", path)
    with pytest.raises(CheckpointError, match="keys are"):
        open_checkpoint(path)
    monkeypatch.setattr(_torch_pickle, "MAX_OPCODES", 50)
    with pytest.raises(CheckpointError, match="more than 50 opcodes"):
        open_checkpoint(path)


def test_one_list_cannot_become_many_dictionaries(path):
    """Python 2 pickled an OrderedDict as a call on its items; naming those items again must not copy them again."""
    items = b"](" + b"".join(b"(" + text(f"k{i}") + b"K\x01t" for i in range(1000)) + b"eq\x00"
    save_pickle_zip(b"\x80\x02" + items + (ORDERED_DICT + b"h\x00\x85R") * 2000 + b".", path)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="keys are nothing"):
        open_checkpoint(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10e6


def python2_ordered_dict(key: bytes, value: bytes) -> bytes:
    return ORDERED_DICT + b"](](" + key + value + b"ee\x85R"


def test_python2_state_dict(path):
    tensor = b"ctorch._utils\n_rebuild_tensor\n(" + STORAGE + b"K\x00K\x01\x85K\x01\x85tR"
    parameter = b"ctorch.nn.parameter\nParameter\n" + tensor + b"\x85R(\x88NtB".replace(b"B", b"b")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + python2_ordered_dict(b"U\x01x", parameter) + b".")
        archive.writestr("archive/data/0", struct.pack("<f", 2.5))
    assert_all_equal(path, {"x": torch.tensor([2.5])})


def tensor_pickle(offset: int, shape: tuple, strides: tuple, size: int) -> bytes:
    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            return ("storage", torch.FloatStorage, "0", "cpu", size) if isinstance(obj, Storage) else None

    file = io.BytesIO()
    Pickler(file, 2).dump({"x": Reduced(torch._utils._rebuild_tensor, Storage(), offset, shape, strides)})
    return file.getvalue()


def save_view(path, offset, shape, strides, size=6, stored=6):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", tensor_pickle(offset, shape, strides, size))
        archive.writestr("archive/data/0", np.arange(stored, dtype=np.float32).tobytes())


def test_views_up_to_the_last_element_of_their_storage(path):
    save_view(path, 1, (2, 2), (3, 1))
    assert open_checkpoint(path)[0]["x"].read().tolist() == [[1, 2], [4, 5]]


@pytest.mark.parametrize(
    ("offset", "shape", "strides", "reason"),
    [
        (2, (2, 2), (3, 1), "beyond its storage"),
        (0, (7,), (1,), "beyond its storage"),
        (6, (1,), (1,), "beyond its storage"),
        (6, (), (), "beyond its storage"),
        (2**80, (1,), (1,), "beyond its storage"),
        (0, (2**62, 2**62), (1, 2**62), "beyond its storage"),
        (-1, (1,), (1,), "not possible"),
        (0, (-1,), (1,), "not possible"),
        (5, (2,), (-1,), "not possible"),
        (0, (1,) * 65, (1,) * 65, "not described by"),
        (0, (2,), (1, 1), "longer"),
        (0, (2**20,), (0,), "larger than the file"),
        (0, (0, 2**62), (0, 0), "corrupt"),
        (0, (0, 2**30, 2**30, 2**30), (0, 0, 0, 0), "corrupt"),
        (0, (1,), (2**70,), "corrupt"),
    ],
)
def test_views_beyond_their_storage_are_refused(offset, shape, strides, reason, path):
    save_view(path, offset, shape, strides)
    with pytest.raises(CheckpointError, match=reason):
        open_checkpoint(path)


def test_archive_entries_must_begin_with_their_signature(path):
    save_view(path, 0, (6,), (1,))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"PK\x03\x04", b"PK\x03\x05").replace(b"PK\x03\x05", b"PK\x03\x04", 1))
    with pytest.raises(CheckpointError, match="not where its directory says"):
        open_checkpoint(path)


def test_storages_must_lie_in_the_file(path):
    """The directory and the pickle agree on a size that the file doesn't have."""
    save_view(path, 0, (6,), (1,), size=2**18)
    content = bytearray(path.read_bytes())
    last_directory_entry = content.rindex(b"PK\x01\x02")
    struct.pack_into("<II", content, last_directory_entry + 20, 2**20, 2**20)  # its two sizes
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="beyond the end of the file"):
        open_checkpoint(path)


@pytest.mark.parametrize(("size", "stored"), [(7, 6), (6, 7), (2**62, 6), (-6, 6)])
def test_storages_of_another_size_are_refused(size, stored, path):
    save_view(path, 0, (2,), (1,), size, stored)
    with pytest.raises(CheckpointError, match="corrupt"):
        open_checkpoint(path)


# Writing


def test_written_files_are_what_safetensors_reads(tmp_path):
    expected = {dtype: random_tensor(dtype, 3, 5) for dtype in DTYPES}
    expected |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}
    tensors = {}
    save_zip(expected, tmp_path / "source.pth")
    for name, tensor in open_checkpoint(tmp_path / "source.pth")[0].items():
        tensors[name] = tensor.read()
    tensors["strided"] = np.arange(12.0).reshape(3, 4).T[1:]
    expected["strided"] = torch.from_numpy(tensors["strided"])
    path = tmp_path / "written.safetensors"
    write_safetensors(path, tensors, {"config": '{"depth": 3}'})
    theirs = safetensors.torch.load_file(path)
    assert set(theirs) == set(expected)
    for name, tensor in expected.items():
        assert theirs[name].dtype == tensor.dtype
        assert torch.equal(
            theirs[name].reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8)
        )
    assert_all_equal(path, expected)
    assert open_checkpoint(path)[1] == {"config": '{"depth": 3}'}


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"x": np.ones(3)}, {})
    with pytest.raises(CheckpointError, match="could not be written"):
        write_safetensors(path, {"x": np.array(["text"])}, {})
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_safetensors(path, {"x": np.zeros(3)}, {})
    assert list(tmp_path.iterdir()) == [path]
    np.testing.assert_array_equal(safetensors.numpy.load_file(path)["x"], np.ones(3))


def test_writing_replaces_a_file_that_is_still_mapped(tmp_path):
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"x": np.ones(3)}, {})
    old = open_checkpoint(path)[0]["x"]
    write_safetensors(path, {"x": np.zeros(3)}, {})
    assert old.read().tolist() == [1, 1, 1]
    assert open_checkpoint(path)[0]["x"].read().tolist() == [0, 0, 0]


def test_writing_into_a_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        write_safetensors(tmp_path / "nowhere" / "x.safetensors", {}, {})


def test_reading_torch_files_imports_neither_torch_nor_safetensors(path):
    save_zip({"x": torch.ones(1)}, path)
    code = (
        "import sys; from eqzoo.checkpoint.formats import open_checkpoint; open_checkpoint(sys.argv[1]);"
        "print({'torch', 'safetensors', 'huggingface_hub'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


def test_others_may_read_a_written_file_as_any_other(tmp_path):
    (tmp_path / "usual").touch()
    write_safetensors(tmp_path / "x.safetensors", {"x": np.ones(3)}, {})
    assert (tmp_path / "x.safetensors").stat().st_mode == (tmp_path / "usual").stat().st_mode
