"""Importing eqzoo loads nothing it doesn't need and starts nothing."""

import subprocess
import sys

import pytest

BACKENDS = "from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", ["torch", "huggingface_hub", "safetensors", "sklearn", "rich", "tyro"])
def test_importing_loads_no_optional_package(module):
    assert run(f"import sys, eqzoo; print({module!r} in sys.modules)").strip() == "False"


def test_importing_starts_no_backend():
    assert run(f"import eqzoo, eqzoo.sharding; {BACKENDS}").strip() == "False"


def test_listing_the_models_starts_no_backend():
    assert run(f"import eqzoo; eqzoo.list_models(); {BACKENDS}").strip() == "False"


def test_importing_prints_nothing():
    assert run("import eqzoo") == ""
