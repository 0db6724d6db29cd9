"""Bytes, seconds and rates: how they are parsed and printed."""

from __future__ import annotations

import re

__all__ = ["GIB", "KIB", "MIB", "TIB", "format_bytes", "format_count", "format_seconds", "parse_bytes"]

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_BYTE_UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": TIB,
}  # fmt: skip


def parse_bytes(text: str) -> int:
    """Return the number of bytes in a text such as ``24GiB``, ``512 MiB`` or ``80GB``.

    Raises:
        ValueError: the text is not a non-negative number followed by a known unit.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2].upper() not in _BYTE_UNITS:
        raise ValueError(f"{text!r} is not an amount of memory such as 24GiB, 512MiB or 80GB")
    return round(float(match[1]) * _BYTE_UNITS[match[2].upper()])


def format_bytes(num_bytes: float) -> str:
    """Return an amount of bytes with a binary unit and three significant digits: ``1.50 GiB``."""
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{_three_digits(num_bytes / size)} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return a duration with a fitting unit and three significant digits: ``12.3 ms``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds * 1e9)} ns" if seconds else "0 s"


def format_count(count: float) -> str:
    """Return a large count with a decimal prefix: ``8.03 B`` for 8.03e9 parameters."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(count) >= size:
            return f"{_three_digits(count / size)} {unit}"
    return f"{count:.0f}"


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    return f"{value:.0f}" if magnitude >= 100 else f"{value:.1f}" if magnitude >= 10 else f"{value:.2f}"
