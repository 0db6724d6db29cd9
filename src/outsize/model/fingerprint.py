"""A short name for what a program does."""

from __future__ import annotations

import hashlib

from outsize.model.program import Program

__all__ = ["operator_fingerprint"]


def operator_fingerprint(program: Program) -> str:
    """Return a name for the sequence of a program's nodes, whatever their shapes."""
    names = [f"{node.kind}:{node.target}" for node in program.nodes]
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
