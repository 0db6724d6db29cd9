"""Run a function in a forked process, because what it tries may crash the process."""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["TrialCrashedError", "run_guarded"]


class TrialCrashedError(RuntimeError):
    """The forked process died, or did not answer in time."""


def run_guarded(function: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """Return ``function()`` computed in a forked process on one thread; the result is pickled.

    Raises:
        TrialCrashedError: the process crashed, raised, or took longer than ``timeout_s``.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(function, reader, writer)
    os.close(writer)
    try:
        payload = _read_all(reader, time.monotonic() + timeout_s)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not payload:
        raise TrialCrashedError("the process died or did not answer in time")
    return pickle.loads(payload)  # written by our own fork


def _answer(function: Callable[[], Any], reader: int, writer: int) -> None:
    """Send the result and leave without running any of the parent's clean-up."""
    try:
        os.close(reader)
        faulthandler.disable()  # a crash here is a finding, not news
        torch.set_num_threads(1)
        with os.fdopen(writer, "wb") as stream:
            stream.write(pickle.dumps(function()))
    finally:
        os._exit(0)


def _read_all(reader: int, deadline: float) -> bytes:
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return b""
        part = os.read(reader, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)
