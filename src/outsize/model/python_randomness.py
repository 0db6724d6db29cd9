"""Random numbers that a forward takes from Python or NumPy: a recording would keep those it drew."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from outsize.errors import RecordingError

__all__ = ["python_randomness_refused"]


@contextmanager
def python_randomness_refused() -> Iterator[None]:
    """Refuse code inside that draws from the generators of ``random`` or ``numpy.random``; put them back.

    Raises:
        RecordingError: numbers were drawn.
    """
    python, numpy = random.getstate(), _numpy_state()
    drawn = ""
    try:
        yield
        drawn = "Python's random" if random.getstate() != python else ""
        if numpy is not None and _differ(numpy, _numpy_state()):
            drawn = "numpy.random"
    finally:
        random.setstate(python)
        if numpy is not None:
            sys.modules["numpy.random"].set_state(numpy)
    if drawn:
        raise RecordingError(
            f"the forward draws random numbers from {drawn}",
            why="they are no tensors, so a recording would keep the first ones, and each process other ones",
            attempt="torch.rand inside a block with parameters, or numbers that come with the batch",
        )


def _numpy_state() -> Any:
    """Return the state of NumPy's global generator, or None where NumPy is not used."""
    numpy_random = sys.modules.get("numpy.random")
    return None if numpy_random is None else numpy_random.get_state()


def _differ(before: Any, after: Any) -> bool:
    return before[2:] != after[2:] or bool((before[1] != after[1]).any())
