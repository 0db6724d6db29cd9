"""``outsize validate``: predict published runs and say how far off the predictions are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outsize.planner.validation import Prediction

__all__ = ["validate"]


def validate(
    runs: Annotated[Path, typer.Argument(help="CSV file of published runs")],
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    rows: Annotated[bool, typer.Option("--rows", help="print every row")] = False,
    choices: Annotated[bool, typer.Option(help="also plan each job and compare with what was run")] = True,
) -> None:
    """Predict step time and memory of every run in RUNS, and summarise the errors."""
    from outsize.planner.published_runs import Unmodelled, load_runs
    from outsize.planner.validation import predict_run

    described, refused = load_runs(runs)
    predictions = []
    for run in described:
        try:
            predictions.append(predict_run(run))
        except Unmodelled as reason:
            refused.append((run.row, str(reason)))
    form = _form(predictions, sorted(refused), choices=choices)
    if as_json:
        print(json.dumps(form))
        return
    _show(predictions, form, rows=rows)


def _form(predictions: list[Prediction], refused: list[tuple[int, str]], *, choices: bool) -> dict[str, Any]:
    from statistics import median

    from outsize.planner.choice import choice_ratios
    from outsize.planner.validation import error_summary

    ran_out = [prediction for prediction in predictions if prediction.run.ran_out_of_memory]
    timed = [prediction for prediction in predictions if prediction.run.step_time_s]
    known = _with_progress(choice_ratios(timed), len(timed)) if choices else []
    return {
        "time": error_summary(predictions, lambda prediction: prediction.time_error),
        "memory": error_summary(predictions, lambda prediction: prediction.memory_error),
        "out_of_memory": {"right": sum(not each.fits for each in ran_out), "total": len(ran_out)},
        "not_modelled": [{"row": row, "reason": reason} for row, reason in refused],
        "choice_ratio": {
            "min": min(known, default=None),
            "median": median(known) if known else None,
            "max": max(known, default=None),
            "num_rows": len(known),
        },
    }


def _with_progress(ratios: Iterator[float], most: int) -> list[float]:
    """Take all ratios, counting them on the error stream."""
    from rich.console import Console
    from rich.progress import track

    return list(track(ratios, "planning", total=most, console=Console(stderr=True), transient=True))


def _show(predictions: list[Prediction], form: dict[str, Any], *, rows: bool) -> None:
    from rich.console import Console

    from outsize.report.validation_tables import row_table, source_table

    console = Console()
    if rows:
        console.print(row_table(predictions))
    console.print(source_table(form))
    out = form["out_of_memory"]
    console.print(f"out of memory: {out['right']} of {out['total']} predicted as such")
    ratio = form["choice_ratio"]
    if ratio["num_rows"]:
        console.print(
            f"the planner's own choice is predicted {ratio['median']:.2f} times as fast as the published one "
            f"(median of {ratio['num_rows']}; {ratio['min']:.2f} to {ratio['max']:.2f})"
        )
    reasons: dict[str, int] = {}
    for entry in form["not_modelled"]:
        reasons[entry["reason"]] = reasons.get(entry["reason"], 0) + 1
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        console.print(f"not modelled: {count} rows, {reason}")
