"""Every public function of `eqzoo.tree` and `eqzoo.train` has an example in its docstring, which runs and gives what
its comments say."""

import ast
import inspect
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import eqzoo

FUNCTIONS = {
    f"{module.__name__}.{name}": value
    for module in (eqzoo.tree, eqzoo.train)
    for name, value in vars(module).items()
    if inspect.isfunction(value) or (inspect.isclass(value) and issubclass(value, eqx.Module))
}
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example_of_a_docstring_runs_and_gives_what_it_says(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    examples = BLOCK.findall(inspect.getdoc(FUNCTIONS[name]) or "")
    assert examples, f"{name} needs an example in its docstring"
    namespace = {"jax": jax, "jnp": jnp, "eqx": eqx, "optax": optax, "eqzoo": eqzoo}
    namespace |= vars(eqzoo.tree) | vars(eqzoo.train)
    for example in examples:
        lines = example.splitlines()
        for statement in ast.parse(example).body:
            _, _, promised = lines[statement.end_lineno - 1].partition("  # ")
            if isinstance(statement, ast.Expr) and promised:
                assert repr(eval(ast.unparse(statement), namespace)) == promised
            else:
                exec(ast.unparse(statement), namespace)
