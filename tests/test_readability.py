"""The code stays readable at a glance: sizes, docstrings, names and lazy imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "outsize"
FILES = sorted(SOURCE.rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
FORBIDDEN_NAMES = {"utils", "util", "common", "misc", "manager", "core", "helpers"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_file_is_short_and_says_what_it_is_for(path: Path) -> None:
    """A file has a module docstring, a telling name, and stays within the limits on length."""
    text = path.read_text()
    tree = ast.parse(text)
    long_functions = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert ast.get_docstring(tree), "no module docstring"
    assert path.stem not in FORBIDDEN_NAMES
    assert text.count("\n") <= MAX_FILE_LINES
    assert long_functions == []


@pytest.mark.parametrize(
    "module",
    ["outsize", "outsize.cli.app", "outsize.plan.plan", "outsize.model.profile"],
)
def test_planning_modules_import_no_torch(module: str) -> None:
    """Help and planning from a description start at once because torch stays out."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
