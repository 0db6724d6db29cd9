"""Strategies that were tried for a few steps: what was predicted beside what happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from outsize.plan.plan import Mesh
from outsize.units import format_bytes, format_seconds

__all__ = ["Trial", "trial_table"]


@dataclass(frozen=True, slots=True)
class Trial:
    """A strategy that was run; memory is that of the neediest device."""

    strategy: str
    mesh: Mesh
    predicted_peak_bytes: int | None
    measured_peak_bytes: int | None
    limit_bytes: int | None
    predicted_step_time_s: float | None = None
    measured_step_time_s: float | None = None
    failure: str = ""


def trial_table(trials: Sequence[Trial]) -> Table:
    """Return one row a trial."""
    table = Table(
        title=f"tried for real: memory of the neediest device (limit {_limit(trials)}), time of a step",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    table.add_column("strategy", no_wrap=True)
    table.add_column("mesh", no_wrap=True)
    for column in ("needed", "measured", "predicted", "measured"):
        table.add_column(column, justify="right", no_wrap=True)
    for trial in trials:
        step = (
            (Text("out of memory", style="red"), "")
            if trial.failure
            else (_seconds(trial.predicted_step_time_s), _seconds(trial.measured_step_time_s))
        )
        table.add_row(
            trial.strategy,
            " ".join(f"{axis}={degree}" for axis, degree in trial.mesh.degrees.items() if degree > 1),
            *(_bytes(value) for value in (trial.predicted_peak_bytes, trial.measured_peak_bytes)),
            *step,
        )
    return table


def _limit(trials: Sequence[Trial]) -> str:
    return ", ".join(sorted({_bytes(trial.limit_bytes) for trial in trials}))


def _bytes(value: int | None) -> str:
    return "–" if value is None else format_bytes(value)


def _seconds(value: float | None) -> str:
    return "–" if value is None else format_seconds(value)
