"""What a run achieved, beside what its plan predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rich.table import Table

from outsize.plan.plan import Plan
from outsize.units import format_seconds

__all__ = ["RunFigures", "training_table"]


class RunFigures(Protocol):
    """What a rank, or the coordinator of parameter servers, reports of a run."""

    @property
    def first_loss(self) -> float:
        """Training loss of the first step."""

    @property
    def last_loss(self) -> float:
        """Training loss of the last step."""

    @property
    def validation_losses(self) -> Sequence[tuple[int, float]]:
        """(steps done, validation loss), in order."""

    @property
    def step_time_s(self) -> float:
        """Median time of a step, without the first."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens (or samples) of the global batch over the step time."""

    @property
    def peak_memory_by_rank(self) -> Sequence[int | None]:
        """Peak memory of each device, in bytes where it was measured."""


def training_table(plan: Plan, reports: Sequence[RunFigures]) -> Table:
    """Return a table of loss and speed: at the start and the end, predicted and measured."""
    figures = reports[0]
    table = Table(title="training", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("", "first", "last"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("training loss", f"{figures.first_loss:.4f}", f"{figures.last_loss:.4f}")
    if figures.validation_losses:
        first, last = figures.validation_losses[0][1], figures.validation_losses[-1][1]
        table.add_row("validation loss", f"{first:.4f}", f"{last:.4f}")
    table.add_section()
    table.add_row("", "predicted", "measured")
    prediction = plan.prediction
    table.add_row(
        "step time",
        format_seconds(prediction.step_time_s) if prediction else "–",
        format_seconds(figures.step_time_s),
    )
    table.add_row(
        "tokens/s",
        f"{prediction.tokens_per_s:,.0f}" if prediction else "–",
        f"{figures.tokens_per_s:,.0f}",
    )
    return table
