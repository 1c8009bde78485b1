"""What the layer contract of import-linter does not say: sizes, docstrings, silence."""

from __future__ import annotations

import ast

import launch
import pytest

MODULES = sorted((launch.ROOT / "graft").rglob("*.py")) + sorted(
    (launch.ROOT / "scripts").glob("*.py")
)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(launch.ROOT)))
def test_modules_are_documented_short_and_silent(path):
    source = path.read_text()
    tree = ast.parse(source)
    assert ast.get_docstring(tree), "every module says what it is"
    assert source.count("\n") <= 300
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno <= 80, f"{node.name} is too long"
        if "graft" in path.parts and isinstance(node, ast.Name):
            assert node.id != "print", "the package logs, scripts print"


def test_every_config_says_what_it_is():
    for path in launch.CONF.rglob("*.yaml"):
        assert path.read_text().startswith("#"), path


def test_the_loop_fits_on_one_screen():
    tree = ast.parse((launch.ROOT / "graft/decode/loop.py").read_text())
    generate = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    loop = next(node for node in ast.walk(generate) if isinstance(node, ast.While))
    assert loop.end_lineno - loop.lineno < 40
