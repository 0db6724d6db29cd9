"""Emulated device memory: a process that stands for a device gets no more data than the device holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from outsize.errors import DoesNotFitError, LaunchError
from outsize.runtime.process_memory import is_supported, read_memory_bytes
from outsize.units import format_bytes

__all__ = ["apply_memory_limit", "lift_memory_limit", "readable_out_of_memory"]

_REFUSED = re.compile(
    r"can.t allocate memory|not enough memory|bad_alloc|out of memory|cannot allocate memory", re.IGNORECASE
)
_ASKED = re.compile(r"tried to allocate (\d+ bytes|[\d.]+ [KMGT]i?B)", re.IGNORECASE)


def apply_memory_limit(limit_bytes: int) -> None:
    """Let this process's data grow by ``limit_bytes`` from now on, and no further (``RLIMIT_DATA``, Linux).

    Whatever the process holds now, imports and threads included, stays outside the limit: call this when all
    is up and no tensor of the model exists. ``RLIMIT_DATA`` counts what is allocated, touched or not, and
    stops within 4% of the limit for large and small tensors; ``RLIMIT_AS`` is 15% off.

    Raises:
        LaunchError: this system cannot limit a process's data.
    """
    if not is_supported():
        raise LaunchError(
            "Device memory cannot be limited here.",
            why="Emulated devices with a memory limit need Linux.",
            attempt="a cluster argument without a memory size for CPUs, or a Linux machine.",
        )
    import resource  # absent on Windows

    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = read_memory_bytes("VmData") + limit_bytes
    soft_limit = wanted if hard_limit == resource.RLIM_INFINITY else min(wanted, hard_limit)
    resource.setrlimit(resource.RLIMIT_DATA, (soft_limit, hard_limit))


def lift_memory_limit() -> None:
    """Let this process allocate again as much as the system allows; without a limit, change nothing."""
    if not is_supported():
        return
    import resource  # absent on Windows

    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard_limit, hard_limit))


@contextmanager
def readable_out_of_memory(rank: int, limit_bytes: int | None, doing: str) -> Iterator[None]:
    """Turn any kind of out-of-memory error inside into one :class:`DoesNotFitError` that names the rank.

    ``doing`` says what was under way, for example "building its part of the model".
    """
    try:
        yield
    except Exception as error:
        reason = _out_of_memory_reason(error)
        if reason is None:
            raise
        raise DoesNotFitError(
            f"Device {rank} ran out of memory while {doing}.",
            why=_why(reason, limit_bytes),
            attempt="a plan that splits the model further, smaller micro-batches, or larger devices.",
        ) from error


def _why(reason: str, limit_bytes: int | None) -> str:
    limit = f"The device holds {format_bytes(limit_bytes)}" if limit_bytes else "The device is full"
    asked = _ASKED.search(reason)
    amount = _in_binary_units(asked.group(1)) if asked else "more"
    return f"{limit}, and {amount} was asked for on top of what is in use."


def _in_binary_units(amount: str) -> str:
    number, unit = amount.split()
    return format_bytes(int(number)) if unit == "bytes" else amount


def _out_of_memory_reason(error: BaseException | None) -> str | None:
    """Return the message of the out-of-memory error in this chain of causes, if one is there."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return str(error)
        if isinstance(error, RuntimeError | OSError) and _REFUSED.search(str(error)):
            return str(error)
        error = error.__cause__ or error.__context__
    return None
