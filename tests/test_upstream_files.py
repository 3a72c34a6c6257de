"""What upstream wrote loads without torch, and computes what upstream does: see `tests/upstream_files.py`.

With EQZOO_UPSTREAM_FILES set to a folder of files made beforehand, this needs no torch at all.
"""

import json
import os
import sys
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import eqzoo
from eqzoo.checkpoint import open_checkpoint
from tests.upstream_files import CASES


@pytest.fixture
def case(request, tmp_path) -> Path:
    made = os.environ.get("EQZOO_UPSTREAM_FILES")
    if made is not None:
        assert "torch" not in sys.modules
        return Path(made) / request.param
    CASES[request.param](tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("tensors, ")], indirect=True)
def test_tensors_have_upstreams_bits(case):
    with np.load(case / "expected.npz") as expected:
        kinds = {name.removeprefix("kind "): expected[name] for name in expected if name.startswith("kind ")}
        bits = {name: expected[f"bytes {name}"] for name in kinds}
    tensors, _ = open_checkpoint(case / "files")
    assert set(tensors) == set(kinds)
    for name, (dtype, *shape) in kinds.items():
        array = tensors[name].read()
        assert array.dtype == tensors[name].dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
        assert array.shape == tensors[name].shape == tuple(map(int, shape))
        assert array.tobytes() == bits[name].tobytes(), name


@pytest.mark.parametrize("case", [name for name in CASES if not name.startswith("tensors, ")], indirect=True)
def test_a_loaded_model_computes_what_upstream_does(case):
    how = json.loads((case / "case.json").read_text())
    model = eqzoo.load(case / how["source"], **how["load"])
    with np.load(case / "expected.npz") as expected:
        inputs, outputs = expected["inputs"], expected["outputs"]
    ours = np.asarray(eqx.filter_jit(model)(jnp.asarray(inputs)))
    assert ours.shape == outputs.shape
    assert np.abs(ours - outputs).max() <= 1e-4 * np.abs(outputs).max()
