"""Every Python block of README and docs runs, page by page from top to bottom, and prints what its comments say (those
of the lessons: `test_lessons`); every shell command's script exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PRINTED = re.compile(r"^print\(.*\)  # (.+)$", re.MULTILINE)
BLOCK = re.compile(r"(<!-- not run: .+? -->\n)?```(\w+)\n(.*?)```", re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [code for skip, lang, code in BLOCK.findall(page.read_text()) if lang == language and not skip]


RUN = [page for page in PAGES if page.parent.name != "lessons" and blocks(page, "python")]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_the_python_of_a_page_runs_and_prints_what_it_says(page, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "page"}
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), namespace)
        printed = capsys.readouterr().out.splitlines()
        promised = PRINTED.findall(code)
        assert [line for line in printed if line in promised] == promised


def test_the_commands_name_scripts_that_exist():
    named = {
        script
        for page in PAGES
        for code in blocks(page, "sh")
        for script in re.findall(r"python (scripts/\S+\.py)", code)
    }
    assert "scripts/train_classifier.py" in named
    assert all((ROOT / script).is_file() for script in named)


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
