"""Where a run keeps its plan, metrics and checkpoints: ``runs/<name>/``."""

from __future__ import annotations

import re
from pathlib import Path

from outsize.errors import LaunchError

__all__ = ["choose_run_directory"]

_ROOT = Path("runs")


def choose_run_directory(name: str | None, *, resume: bool = False) -> Path:
    """Return the folder of a run; it is not made yet. Without a name, the next free number is taken.

    Raises:
        LaunchError: the name is no folder name, the run exists and is not to be resumed, or the reverse, or
            what is to be resumed has no name.
    """
    if name is None and resume:
        names = sorted(path.name for path in _ROOT.glob("*") if path.is_dir())
        raise LaunchError(
            "--resume goes on with a run, and none is named.",
            why=f"Runs in {_ROOT}/: {', '.join(names[-8:]) or 'none'}.",
            attempt="--name with one of them.",
        )
    if name is None:
        return _ROOT / _next_number()
    if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
        raise LaunchError(
            f"{name!r} cannot be the name of a run.",
            why="it names a folder below runs/",
            attempt="letters and digits",
        )
    directory = _ROOT / name
    has_content = directory.is_dir() and any(directory.iterdir())
    if has_content and not resume:
        raise LaunchError(
            f"The run directory {directory} exists already.",
            why="A new run would mix its metrics and checkpoints with those there.",
            attempt=f"another --name, `outsize train --resume` to go on with it, or remove {directory}.",
        )
    if resume and not has_content:
        raise LaunchError(
            f"There is no run in {directory} to resume.",
            attempt="the name of a run below runs/, or no --resume.",
        )
    return directory


def _next_number() -> str:
    taken = [int(path.name) for path in _ROOT.glob("*") if path.name.isdigit()] if _ROOT.is_dir() else []
    return f"{max(taken, default=0) + 1:04d}"
