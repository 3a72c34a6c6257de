"""Write the pages docs/lessons/NAME.md from the scripts scripts/lessons/NAME.py: prose, code and what the code prints.

python scripts/make_lessons.py                 # all lessons
python scripts/make_lessons.py tree_map nodes  # some of them
python scripts/make_lessons.py --check         # only say whether the pages hold the scripts' prose and code

A lesson is a script of cells; its docstring is the page's title and introduction. A cell begins with a line `# %%`, or
`# %% timing` if what it prints depends on the machine. The comment directly below that is prose in Markdown, and the
rest is code.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts" / "lessons"
PAGES = ROOT / "docs" / "lessons"
CELL = re.compile(r"^# %%( timing)?\n((?:#(?! %%).*\n)*)", re.MULTILINE)
OUTPUT = re.compile(r"\n```text\n.*?^```\n", re.DOTALL | re.MULTILINE)
END_OF_CELL = chr(30)


class Cell(NamedTuple):
    prose: str
    code: str
    is_timing: bool


class Lesson(NamedTuple):
    name: str
    title: str
    introduction: str
    cells: list[Cell]


def names() -> list[str]:
    return sorted(path.stem for path in SCRIPTS.glob("*.py"))


def read(name: str) -> Lesson:
    source = (SCRIPTS / f"{name}.py").read_text()
    title, _, introduction = (ast.get_docstring(ast.parse(source)) or "").partition("\n")
    _, *parts = CELL.split(source)
    cells = [
        Cell(re.sub(r"^# ?", "", prose, flags=re.MULTILINE).strip(), code.strip(), bool(timing))
        for timing, prose, code in zip(parts[0::3], parts[1::3], parts[2::3], strict=True)
    ]
    return Lesson(name, title, introduction.strip(), cells)


def run(name: str) -> list[str]:
    """What each cell prints, in a fresh process; its pictures land beside the pages."""
    source = (SCRIPTS / f"{name}.py").read_text()
    marked = re.sub(r"^# %%( timing)?$", f"print(chr({ord(END_OF_CELL)}), end='')", source, flags=re.MULTILINE)
    command = [sys.executable, "-c", marked]
    done = subprocess.run(command, cwd=PAGES, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"scripts/lessons/{name}.py failed; its page is as it was")
    return done.stdout.split(END_OF_CELL)[1:]


def page(lesson: Lesson, outputs: Sequence[str]) -> str:
    script = f"python scripts/lessons/{lesson.name}.py"
    parts = [f"# {lesson.title}", lesson.introduction, f"*Code and output of this page are those of `{script}`.*"]
    for cell, output in zip(lesson.cells, outputs, strict=True):
        lines = [line.rstrip() for line in output.strip("\n").splitlines()]
        parts += [
            cell.prose,
            f"```python\n{cell.code}\n```" if cell.code else "",
            "\n".join(["```text", *lines, "```"]) if lines else "",
        ]
    return "\n\n".join(part for part in parts if part) + "\n"


def is_stale(name: str) -> bool:
    """Whether the page's prose or code is not the script's; what it prints isn't looked at."""
    path, lesson = PAGES / f"{name}.md", read(name)
    without_outputs = page(lesson, [""] * len(lesson.cells))
    return not path.exists() or OUTPUT.sub("", path.read_text()) != OUTPUT.sub("", without_outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of scripts/lessons/NAME.py; all of them by default")
    parser.add_argument("--check", action="store_true", help="run and write nothing; exit 1 if a page is stale")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(names()):
        parser.error(f"no lesson {', '.join(sorted(unknown))}; there are {', '.join(names())}")
    chosen = arguments.names or names()
    if arguments.check:
        if stale := [f"docs/lessons/{name}.md" for name in chosen if is_stale(name)]:
            sys.exit(f"{', '.join(stale)}: stale; run `python scripts/make_lessons.py`")
        return
    PAGES.mkdir(exist_ok=True)
    for name in chosen:
        (PAGES / f"{name}.md").write_text(page(read(name), run(name)))
        print(f"wrote docs/lessons/{name}.md")


if __name__ == "__main__":
    main()
