"""The lessons' pages are what the lessons' scripts say and print."""

import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import load_script

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts" / "lessons"
PAGES = ROOT / "docs" / "lessons"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py"))
NUMBER = re.compile(r"[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?")
CODE_AND_OUTPUT = re.compile(r"^```python\n.*?^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)

LESSON = '''"""A title

An introduction.
"""

# %%
# Prose, [with a link](a.md).
#
# ## A heading

# A comment of the code.
print("one")

# %% timing
print("two  ")
print()
print("three")

# %%
# Prose alone.
# %%
# More prose.
'''

PAGE = """# A title

An introduction.

*Code and output of this page are those of `python scripts/lessons/small.py`.*

Prose, [with a link](a.md).

## A heading

```python
# A comment of the code.
print("one")
```

```text
one
```

```python
print("two  ")
print()
print("three")
```

```text
two

three
```

Prose alone.

More prose.
"""


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The script `make_lessons` on a folder that holds one small lesson."""
    make_lessons = load_script("make_lessons")
    monkeypatch.setattr(make_lessons, "SCRIPTS", tmp_path)
    monkeypatch.setattr(make_lessons, "PAGES", tmp_path)
    monkeypatch.setattr("sys.argv", ["make_lessons.py"])
    (tmp_path / "small.py").write_text(LESSON)
    return make_lessons


def test_a_page_is_the_scripts_prose_code_and_output(small, tmp_path):
    small.main()
    assert (tmp_path / "small.md").read_text() == PAGE
    assert [cell.is_timing for cell in small.read("small").cells] == [False, True, False, False]


@pytest.mark.parametrize(
    ("old", "new", "stale"),
    [
        ("A title", "Another", True),
        ("An introduction", "None", True),
        ("Prose alone", "No prose", True),
        ("A heading", "Another", True),
        ("A comment", "No comment", True),
        ('print("one")', 'print("1")', True),
        ("three\n```", "four\n```", False),
    ],
)
def test_check_compares_all_but_what_is_printed(small, monkeypatch, tmp_path, old, new, stale):
    monkeypatch.setattr("sys.argv", ["make_lessons.py", "--check"])
    page = tmp_path / "small.md"
    with pytest.raises(SystemExit, match="docs/lessons/small.md: stale"):
        small.main()
    assert not page.exists()
    assert old in PAGE
    page.write_text(PAGE.replace(old, new))
    if stale:
        with pytest.raises(SystemExit, match="docs/lessons/small.md: stale; run `python scripts/make_lessons.py`"):
            small.main()
    else:
        small.main()


def test_a_lesson_that_fails_leaves_its_page_alone(small, tmp_path):
    (tmp_path / "small.py").write_text(LESSON + "\n1 / 0\n")
    (tmp_path / "small.md").write_text("as it was")
    with pytest.raises(SystemExit, match="small.py failed"):
        small.main()
    assert (tmp_path / "small.md").read_text() == "as it was"


def test_every_lesson_has_a_page_that_is_up_to_date():
    assert {page.stem for page in PAGES.glob("*.md")} - {"index"} == set(NAMES)
    stale = [name for name in NAMES if load_script("make_lessons").is_stale(name)]
    assert not stale, "run python scripts/make_lessons.py"


def assert_like(printed: str, promised: str) -> None:
    """Equal but for white space, and for numbers within 2 %."""
    assert NUMBER.sub("#", " ".join(printed.split())) == NUMBER.sub("#", " ".join(promised.split()))
    for ours, theirs in zip(NUMBER.findall(printed), NUMBER.findall(promised), strict=True):
        assert math.isclose(float(ours), float(theirs), rel_tol=2e-2, abs_tol=1e-6), f"{promised}\n{printed}"


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_prints_what_its_page_shows(name, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}  # this run's 8 devices
    done = subprocess.run(
        [sys.executable, "-W", "error", SCRIPTS / f"{name}.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page = (PAGES / f"{name}.md").read_text()
    cells = [cell for cell in load_script("make_lessons").read(name).cells if cell.code]
    promised = [
        (line, cell.is_timing)
        for cell, output in zip(cells, CODE_AND_OUTPUT.findall(page), strict=True)
        for line in output.splitlines()
        if line
    ]
    printed = [line for line in done.stdout.splitlines() if line.strip()]
    assert len(printed) == len(promised), done.stdout
    for line, (promise, is_timing) in zip(printed, promised, strict=True):
        if not is_timing:
            assert_like(line, promise)
    pictures = set(re.findall(r"!\[[^]]*\]\(([^)]+)\)", page))
    assert pictures == {path.name for path in tmp_path.iterdir()}
    assert all((PAGES / picture).is_file() for picture in pictures)


def test_new_arrays_keep_the_trace_and_new_static_data_does_not():
    lesson = runpy.run_path(str(SCRIPTS / "nodes.py"))
    weight, bias, apply, count_traces = (lesson[name] for name in ("weight", "bias", "apply", "count_traces"))
    for name in ("KeyedDense", "DataDense", "PlainDense", "ModuleDense"):
        dense = lesson[name]
        assert count_traces(apply, [dense(weight * scale, bias + scale, "relu") for scale in range(3)]) == 1
        assert count_traces(apply, [dense(weight, bias, activation) for activation in ("relu", "tanh")]) == 2
        assert count_traces(apply, [dense(weight, bias, activation) for activation in ("relu", "relu")]) == 1
