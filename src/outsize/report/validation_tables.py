"""Tables of predicted against published runs: by source and by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from outsize.planner.validation import Prediction

__all__ = ["row_table", "source_table"]


def source_table(form: dict[str, Any]) -> Table:
    """Return number of rows, mean and median |error| of time and memory by source, and overall."""
    table = Table(title="predicted against published: rows, mean and median |error|", title_justify="left")
    table.add_column("source", min_width=24, overflow="fold")
    for column in ("time", "|error|", "median", "bias", "memory", "|error|", "median"):
        table.add_column(column, justify="right")
    time, memory = form["time"], form["memory"]
    for source in dict.fromkeys([*time["by_source"], *memory["by_source"]]):
        table.add_row(
            source, *_cells(time["by_source"].get(source)), *_cells(memory["by_source"].get(source))[:3]
        )
    table.add_section()
    table.add_row("all", *_cells(time), *_cells(memory)[:3])
    return table


def _cells(figures: dict[str, Any] | None) -> list[str]:
    if not figures or not figures["num_rows"]:
        return ["–"] * 4
    return [
        str(figures["num_rows"]),
        f"{figures['mean_abs_error']:.1%}",
        f"{figures['median_abs_error']:.1%}",
        f"{figures['mean_error']:+.1%}",
    ]


def row_table(predictions: Sequence[Prediction]) -> Table:
    """Return one row a run with the errors of time and memory."""
    table = Table(title="runs", title_justify="left")
    for column in ("row", "model", "cluster", "mesh", "time", "memory"):
        table.add_column(column)
    for prediction in predictions:
        run = prediction.run
        mesh = " ".join(f"{axis}={degree}" for axis, degree in run.layout.mesh.degrees.items() if degree > 1)
        table.add_row(
            str(run.row),
            run.job.profile.name,
            run.job.cluster.argument,
            mesh,
            _percent(prediction.time_error),
            _percent(prediction.memory_error),
        )
    return table


def _percent(error: float | None) -> str:
    return "–" if error is None else f"{error:+.1%}"
