"""Tables of predicted against published runs: by source and by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from outsize.planner.validation import Prediction

__all__ = ["row_table", "source_table"]


def source_table(form: dict[str, Any]) -> Table:
    """Return number of rows, mean and median |error| of time and memory by source, and overall."""
    table = Table(
        title="predicted against published: rows, mean / median |error|", title_justify="left", box=SIMPLE
    )
    table.add_column("source", overflow="fold")
    for column in ("rows", "time", "bias", "rows", "memory"):
        table.add_column(column, justify="right", no_wrap=True)
    time, memory = form["time"], form["memory"]
    for source in dict.fromkeys([*time["by_source"], *memory["by_source"]]):
        table.add_row(source, *_cells(time["by_source"].get(source), memory["by_source"].get(source)))
    table.add_section()
    table.add_row("all", *_cells(time, memory))
    return table


def _cells(time: dict[str, Any] | None, memory: dict[str, Any] | None) -> list[str]:
    bias = f"{time['mean_error']:+.1%}" if time and time["num_rows"] else "–"
    return [*_errors(time), bias, *_errors(memory)]


def _errors(figures: dict[str, Any] | None) -> list[str]:
    if not figures or not figures["num_rows"]:
        return ["–", "–"]
    return [
        str(figures["num_rows"]),
        f"{figures['mean_abs_error']:.1%} / {figures['median_abs_error']:.1%}",
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
