"""Metrics of a run as lines of JSON, written by one process."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["EvaluationMetrics", "MetricsFile", "StepMetrics", "UpdateMetrics"]


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One training step. Tokens (samples, where the batch has no token ids) are those of the data, once."""

    step: int
    loss: float
    gradient_norm: float
    num_tokens: int  # since the start of the run
    tokens_per_s: float
    step_time_s: float
    peak_memory_bytes: list[int | None]  # by rank, since the start


@dataclass(frozen=True, slots=True)
class EvaluationMetrics:
    """The loss on validation batches after a number of steps."""

    step: int
    validation_loss: float


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """One update on parameter servers; where a global batch had parts, with what each part's worker says."""

    step: int
    loss: float
    num_tokens: int  # since the start of the run
    tokens_per_s: float  # since the start of the run
    step_time_s: float  # of the slowest part, with pull and push
    workers: list[int]
    peak_memory_bytes: list[int | None]  # of these workers, since the start


class MetricsFile:
    """Appends each record as one line; ``path`` None writes nothing (every process but the first)."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, metrics: StepMetrics | EvaluationMetrics | UpdateMetrics) -> None:
        """Append a record."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(metrics)) + "\n")
