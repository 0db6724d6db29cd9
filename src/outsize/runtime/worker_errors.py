"""Turns what failed worker processes left behind into one readable error."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import outsize.errors
from outsize.errors import LaunchError, OutsizeError

__all__ = ["error_of_workers"]

_WHY, _TRY = "\nWhy: ", "\nTry: "


@dataclass(frozen=True, slots=True)
class _Report:
    """What one rank wrote to its error file before it ended."""

    rank: int
    kind: str
    text: str
    traceback: str
    written_s: float


def error_of_workers(
    error_files: Mapping[int, str], failures: Mapping[int, Any], log_folder: Path | None
) -> OutsizeError:
    """Return the error to raise: an OutsizeError of any rank, else the first other one, else the death.

    ``error_files`` are the paths that torch's error handler writes to, ``failures`` torch's
    ``ProcessFailure`` of the processes it saw end. When one rank fails, others soon lose their connection
    to it: their errors are consequences and come last.
    """
    reports = sorted(
        filter(None, (_read(rank, Path(path)) for rank, path in error_files.items())),
        key=lambda report: (_outsize_error(report) is None, report.written_s),
    )
    if reports:
        return _outsize_error(reports[0]) or _unexpected(reports[0], log_folder)
    rank, failure = min(failures.items())
    return _died(rank, failure.exitcode, log_folder)


def _read(rank: int, path: Path) -> _Report | None:
    if not path.is_file():
        return None
    message = json.loads(path.read_text())["message"]
    kind, _, text = message["message"].partition(": ")
    return _Report(rank, kind, text, message["extraInfo"]["py_callstack"], path.stat().st_mtime)


def _outsize_error(report: _Report) -> OutsizeError | None:
    kind = getattr(outsize.errors, report.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, OutsizeError)):
        return None
    rest, _, attempt = report.text.partition(_TRY)
    what, _, why = rest.partition(_WHY)
    return kind(what, why=why, attempt=attempt)


def _unexpected(report: _Report, log_folder: Path | None) -> LaunchError:
    where = "the traceback below"
    if log_folder is not None:
        path = log_folder / f"traceback-rank{report.rank}.txt"
        path.write_text(report.traceback)
        where = str(path)
    error = LaunchError(
        f"Process {report.rank} failed: {report.kind}: {report.text.strip()}", attempt=f"{where}."
    )
    if log_folder is None:
        error.add_note(report.traceback)
    return error


def _died(rank: int, exit_code: int, log_folder: Path | None) -> LaunchError:
    how = f"exit code {exit_code}"
    if exit_code < 0:
        how = f"signal {-exit_code} ({signal.Signals(-exit_code).name})"
    return LaunchError(
        f"Process {rank} ended without a message ({how}).",
        why="It was killed from outside, or ran out of memory where no error can be raised.",
        attempt=f"the logs under {log_folder}." if log_folder else "",
    )
