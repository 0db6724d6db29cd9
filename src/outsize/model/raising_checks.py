"""Checks of values that only raise, as libraries make them: a recording takes them to hold.

    if torch.any(var < 0):              if not valid.all():
        raise ValueError(...)               raise ValueError(...)

What they guard against is not looked for while training; PyTorch's own checks of shapes and types remain.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path
from types import FrameType

import torch

__all__ = ["passing_answer"]

_TORCH = Path(torch.__file__).parent
_MACHINERY = tuple(
    str(path)
    for path in (
        Path(__file__).parent.parent,
        _TORCH / "_dynamo",
        _TORCH / "_subclasses",
        _TORCH / "utils",
        _TORCH / "_compile.py",
        _TORCH / "_ops.py",
    )
)


def passing_answer() -> bool | None:
    """Return the truth value that passes the check which asks for it just now; None if it is no such check.

    An ``assert`` counts, and an ``if`` with nothing but a ``raise`` in it, on a value or on its ``not``.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_MACHINERY):
        frame = frame.f_back
    return None if frame is None else _checks_in(frame.f_code.co_filename).get(frame.f_lineno)


@cache
def _checks_in(path: str) -> dict[int, bool]:
    """Return the lines of the checks in a source file, with the answer that passes each."""
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):  # such as code typed in
        return {}
    found: dict[int, bool] = {}
    for node in ast.walk(tree):
        is_raising = isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise)
        if not isinstance(node, ast.If | ast.Assert) or not (is_raising or isinstance(node, ast.Assert)):
            continue
        asked, is_negated = node.test, False
        if isinstance(asked, ast.UnaryOp) and isinstance(asked.op, ast.Not):
            asked, is_negated = asked.operand, True
        if isinstance(asked, ast.Call | ast.Name | ast.Attribute | ast.Compare):
            lines = range(node.test.lineno, (node.test.end_lineno or node.test.lineno) + 1)
            found |= dict.fromkeys(lines, isinstance(node, ast.Assert) != is_negated)
    return found
