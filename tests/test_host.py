"""`host.tune` starts a program again, once, as it was started, where its settings apply and are wanted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eqzoo import host

ROOT = Path(__file__).parents[1]
PROGRAM = """
import os, sys
import jax
from eqzoo import host
if __name__ == "__main__":
    print("before")
    host.tune()
    print(sys.flags.utf8_mode, sys.argv[1:], os.environ.get("GLIBC_TUNABLES"))
    print("async", jax.config.read("jax_cpu_enable_async_dispatch"))
"""
ON_LINUX = pytest.mark.skipif(not host._has_glibc(), reason="the settings are glibc's")


def run(*command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    left_out = ("EQZOO_HOST", "GLIBC_TUNABLES")
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=inherited | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.fixture
def program(tmp_path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


@ON_LINUX
@pytest.mark.parametrize("start", [["program.py"], ["-m", "program"]], ids=["script", "module"])
def test_a_program_starts_again_once_with_its_own_arguments(program, start):
    done = run("-X", "utf8=1", *start, "--name", "two words", "", folder=program)
    assert done.stdout.splitlines() == [
        "before",
        "before",
        f"1 ['--name', 'two words', ''] {host.MEMORY}",
        "async False",
    ]
    assert done.stderr.count("eqzoo: started again with") == 1


def test_a_program_stays_as_it_is_where_the_environment_says_so(program):
    done = run("program.py", folder=program, EQZOO_HOST="off")
    assert done.stdout.count("before") == 1
    assert "async True" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"JAX_PLATFORMS": "cpu"}, True),
        ({"JAX_PLATFORMS": "cpu", "EQZOO_HOST": "on"}, True),
        ({"JAX_PLATFORMS": "cpu", "EQZOO_HOST": "off"}, False),
        ({"JAX_PLATFORMS": "cpu", "EQZOO_HOST": "tuned"}, False),
        ({"JAX_PLATFORMS": "cpu", "GLIBC_TUNABLES": ""}, False),
        ({"JAX_PLATFORMS": "cpu", "GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}, False),
        ({"JAX_PLATFORMS": "cuda,cpu"}, False),
    ],
)
@ON_LINUX
def test_settings_are_for_cpus_and_leave_the_users_own_alone(environment, expected):
    assert host._should_restart(environment) == expected


@pytest.mark.parametrize(
    ("flags", "processor", "expected"),
    [
        ("", "flags : avx2", ""),
        ("", "flags : avx2 avx512f", "--xla_cpu_prefer_vector_width=512"),
        ("--xla_a=1", "flags : avx512f", "--xla_a=1 --xla_cpu_prefer_vector_width=512"),
        ("--xla_cpu_prefer_vector_width=256", "flags : avx512f", "--xla_cpu_prefer_vector_width=256"),
    ],
)
def test_wide_vectors_are_for_processors_that_have_them(flags, processor, expected):
    assert host._flags(flags, processor) == expected


def test_where_jax_has_an_accelerator_nothing_changes(monkeypatch):
    assert host._computes_on_cpu({})
    monkeypatch.setattr(host.importlib.metadata, "entry_points", lambda group: ("a plugin",))
    assert not host._computes_on_cpu({})


def test_a_misspelt_wish_is_not_guessed():
    with pytest.raises(ValueError, match="EQZOO_HOST=Off: expected `off`, or `on`"):
        host._should_restart({"EQZOO_HOST": "Off"})
