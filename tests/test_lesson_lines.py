"""The lessons count their lines: the numbers in the prose are those of the code."""

import ast
import re
from pathlib import Path

LESSONS = Path(__file__).parents[1] / "scripts" / "lessons"


def lines_of(lesson: str, names: str) -> int:
    """The lines of what these names are first defined as at the top level, without blank lines and comments."""
    source = (LESSONS / f"{lesson}.py").read_text()
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        for name in names_defined_by(node):
            decorators = getattr(node, "decorator_list", [])
            first = min(part.lineno for part in (node, *decorators))
            found.setdefault(name, range(first - 1, node.end_lineno or first))
    chosen = {number for name in names.split() for number in found[name]}
    return sum(bool(lines[number].strip()) and not lines[number].strip().startswith("#") for number in chosen)


def names_defined_by(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.For):
        return ["for"]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def numbers_in(lesson: str, sentence: str) -> list[int]:
    prose = re.sub(r"\n# ?", " ", (LESSONS / f"{lesson}.py").read_text())
    match = re.search(sentence, prose)
    assert match is not None, sentence
    return [int(number) for number in match.groups()]


def test_the_network_takes_a_third_of_the_lines():
    network = "init start apply cross_entropy loss global_norm clip is_matrix mask rate step velocity"
    training = "decay descent optimizer opt_state mean_loss update"
    by_hand, module = lines_of("network", network), lines_of("network", f"network {training}")
    own = lines_of("network", f"Network keys own {training}")
    assert numbers_in("network", r"These are (\d+) lines against (\d+);.* That makes (\d+) lines") == [
        *(module, by_hand, own)
    ]
    assert 3 * module <= by_hand


def test_the_loop_has_about_thirty_lines():
    loop = lines_of("loop", "loss_fn train_step show optimizer train_state history for")
    trainer = lines_of("loop", "Callback History Print Trainer")
    use = lines_of("loop", "recorded trainer model")
    assert numbers_in("loop", r"The loop has (\d+) lines, .* The Trainer with its callbacks has (\d+) without") == [
        loop,
        trainer,
    ]
    assert use + 1 == 4  # and the call of `fit`
    assert loop <= 35
