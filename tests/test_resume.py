"""Runs that are killed and resumed end as one that never stopped; `scripts/check_resume.py` does it many times."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_run_killed_at_random_moments_ends_bit_for_bit_as_an_uninterrupted_one():
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, ROOT / "scripts" / "check_resume.py", "--kills", "3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "the same (3 kills so far)" in done.stdout
