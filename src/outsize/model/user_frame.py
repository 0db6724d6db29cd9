"""Where in the user's or a library's code we are."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

__all__ = ["user_frame"]

_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))


def user_frame() -> str:
    """Return ``file:line`` of the innermost frame outside torch and outsize."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_INSIDE, "<")) and not name.endswith("contextlib.py"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown"
