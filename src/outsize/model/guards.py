"""Numbers that a recording took from the batch, checked again for every other batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outsize.model.loss_elements import evaluate_from_batch
from outsize.model.program import Program

__all__ = ["broken_guards"]


def broken_guards(program: Program, entries: Mapping[str, torch.Tensor]) -> list[str]:
    """Say for which of the program's guards a batch gives another number or shape; none: it may be run.

    Raises:
        RecordingError: a guarded value depends on a parameter.
    """
    broken = []
    for guard in program.guards:
        value = evaluate_from_batch(program, guard.value, entries, before=guard.at)
        found = _what_was_taken(value, is_shape=isinstance(guard.expected, tuple))
        if found != guard.expected:
            broken.append(f"{guard.source} read {guard.expected} when recorded, {found} from this batch")
    return broken


def _what_was_taken(value: torch.Tensor, *, is_shape: bool) -> Any:
    if is_shape:
        return tuple(value.shape)
    return value.item() if value.numel() == 1 else int(value.count_nonzero())
