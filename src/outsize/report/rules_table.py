"""Operators and their splits as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from outsize.planner.operator_listing import OperatorSplits

__all__ = ["rules_summary", "rules_table"]


def rules_table(operators: Sequence[OperatorSplits]) -> Table:
    """Return one row for each operator; operators without a split are replicated."""
    table = Table("operator", "shapes", "calls", "splits", caption=_LEGEND, caption_justify="left")
    for operator in operators:
        splits = "\n".join(map(str, operator.splits)) or "none: every rank runs it whole"
        table.add_row(operator.name, " ".join(map(_shape, operator.shapes)), str(operator.count), splits)
    return table


def rules_summary(operators: Sequence[OperatorSplits], degree: int) -> str:
    """Say how many operators can be split."""
    able = sum(bool(operator.splits) for operator in operators)
    return f"{able} of {len(operators)} distinct operators can be split over {degree} devices."


_LEGEND = (
    "R: whole on every rank (R~: its gradient is a sum over ranks), S1: dim 1 is divided, S1[24]/6: its "
    "24 elements in 6 parts that do not divide evenly, P: a partial sum"
)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
