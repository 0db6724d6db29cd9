"""What Linux says of this process's memory, and allocator settings that make the figures repeat."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

__all__ = ["apply_steady_allocation", "is_supported", "read_memory_bytes", "reset_resident_peak"]

_STATUS = Path("/proc/self/status")
_CLEAR_REFERENCES = Path("/proc/self/clear_refs")
_KIBIBYTES = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)

# glibc's mallopt(3): parameter numbers of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_STEADY_THRESHOLD_BYTES = 512 * 1024


def is_supported() -> bool:
    """Whether this system tells a process its own memory (Linux does)."""
    return sys.platform == "linux" and _STATUS.exists()


def read_memory_bytes(field: str) -> int:
    """Return a field of ``/proc/self/status`` in bytes, such as ``VmRSS``, ``VmHWM`` or ``VmData``."""
    fields = dict(_KIBIBYTES.findall(_STATUS.read_text()))
    return int(fields[field]) * 1024


def reset_resident_peak() -> None:
    """Let ``VmHWM`` start again from what is resident now (proc_pid_clear_refs(5), value 5)."""
    _CLEAR_REFERENCES.write_text("5")


def apply_steady_allocation() -> bool:
    """Make freed tensors leave the process at once, so that resident memory is what tensors hold.

    glibc keeps freed blocks below a threshold that it raises as it goes, and one arena a thread. With the
    thresholds pinned at 512 KiB and one arena, a peak repeats to within a mebibyte. Lower thresholds would
    round small tensors up to pages. Returns whether the C library took the settings; others than glibc
    keep their own ways.
    """
    library = ctypes.CDLL(None)
    if not is_supported() or not hasattr(library, "mallopt"):
        return False
    settings = (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, _STEADY_THRESHOLD_BYTES),
        (_M_TRIM_THRESHOLD, _STEADY_THRESHOLD_BYTES),
    )
    return all(library.mallopt(parameter, value) == 1 for parameter, value in settings)
