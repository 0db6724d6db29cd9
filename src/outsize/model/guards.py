"""Numbers that a recording took from the batch, checked again for every other batch."""

from __future__ import annotations

from collections.abc import Mapping

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
        value = evaluate_from_batch(program, guard.value, entries)
        found = tuple(value.shape) if isinstance(guard.expected, tuple) else value.item()
        if found != guard.expected:
            broken.append(f"{guard.source} read {guard.expected} when recorded, {found} from this batch")
    return broken
