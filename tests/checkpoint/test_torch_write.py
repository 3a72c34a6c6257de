"""A state dict written without torch is read by torch, safely, as what was written; and by eqzoo's own reader."""

import pickle
from collections import OrderedDict

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from eqzoo.checkpoint import CheckpointError
from eqzoo.checkpoint._torch_write import _integer, write_state_dict
from eqzoo.checkpoint.formats import open_checkpoint

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
GRID = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
SHAPES = {
    "a number": np.asarray(3.5, np.float32),
    "nothing": np.zeros((0, 3), np.float32),
    "nothing in the middle": np.zeros((2, 0, 3), np.float32),
    "one axis": np.arange(5, dtype=np.float32),
    "many axes": GRID.reshape(2, 1, 3, 1, 2, 2),
    "transposed": GRID.transpose(2, 0, 1),
    "every second": GRID[:, ::2],
    "backwards": GRID[::-1, :, ::-1],
    "broadcast": np.broadcast_to(np.float32(2), (3, 4)),
    "from JAX": np.asarray(jnp.arange(6.0).reshape(2, 3)),
}


def written(path, tensors):
    write_state_dict(path, tensors)
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype, tmp_path):
    array = np.array([[0, 1, 100], [1, 0, 3]]).astype(dtype)
    tensor = written(tmp_path / "x.pth", {"x": array})["x"]
    assert tensor.dtype == DTYPES[dtype]
    assert np.array_equal(tensor.double().numpy(), array.astype(np.float64))
    back = open_checkpoint(tmp_path / "x.pth")[0]["x"]
    assert back.dtype == array.dtype
    assert np.array_equal(back.read(), array)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape, tmp_path):
    tensor = written(tmp_path / "x.pth", {"x": SHAPES[shape]})["x"]
    assert tensor.is_contiguous()
    assert tuple(tensor.shape) == SHAPES[shape].shape
    assert np.array_equal(tensor.numpy(), SHAPES[shape])
    assert np.array_equal(open_checkpoint(tmp_path / "x.pth")[0]["x"].read(), SHAPES[shape])


def test_names_keep_their_order_and_their_letters(tmp_path):
    names = ["z.weight", "a.0.bias", "ünï🦓", "", "x" * 70_000, *map(str, range(300))]
    tensors = {name: np.full(2, number, np.float32) for number, name in enumerate(names)}
    loaded = written(tmp_path / "x.pth", tensors)
    assert type(loaded) is OrderedDict
    assert list(loaded) == names
    assert all(torch.equal(loaded[name], torch.tensor(tensors[name])) for name in names)


def test_the_modules_version_is_stated_as_torch_does(tmp_path):
    write_state_dict(tmp_path / "x.pth", {}, version=2)
    module = torch.nn.Module()
    module._version = 2
    assert torch.load(tmp_path / "x.pth", weights_only=True)._metadata == module.state_dict()._metadata


def test_an_empty_state_dict(tmp_path):
    assert written(tmp_path / "x.pth", {}) == OrderedDict()


def test_tensors_are_plain_and_can_be_changed(tmp_path):
    tensor = written(tmp_path / "x.pth", {"x": GRID, "y": GRID})["x"]
    assert not tensor.requires_grad
    tensor += 1
    assert np.array_equal(tensor.numpy(), GRID + 1)


def test_torch_can_map_the_file_into_memory(tmp_path):
    write_state_dict(tmp_path / "x.pth", {"a": np.ones(3, np.int8), "x": GRID})
    mapped = torch.load(tmp_path / "x.pth", weights_only=True, mmap=True)
    assert np.array_equal(mapped["x"].numpy(), GRID)


def test_the_numbers_are_stored_byte_for_byte(tmp_path):
    """Not-a-number with a payload, minus zero, the smallest numbers."""
    bits = np.array([0x7FC00123, 0xFFC00001, 0x80000000, 1, 0x7F800000], np.uint32)
    tensor = written(tmp_path / "x.pth", {"x": bits.view(np.float32)})["x"]
    assert np.array_equal(tensor.numpy().view(np.uint32), bits)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, np.complex64, np.uint64])
def test_a_dtype_that_torch_has_no_storage_for_is_refused(dtype, tmp_path):
    with pytest.raises(CheckpointError, match=f"no storage of {np.dtype(dtype)} for 'x'; write a .safetensors"):
        write_state_dict(tmp_path / "x.pth", {"x": np.zeros(2, dtype)})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [0, 1, 255, 2**31 - 1, 2**31, 2**40 + 1, 2**63 - 1])
def test_large_sizes_are_pickled(number):
    assert pickle.loads(b"\x80\x02" + _integer(number) + b".") == number
