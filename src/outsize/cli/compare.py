"""``outsize compare``: what differs between two plans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["compare"]


def compare(
    first: Annotated[Path, typer.Argument(help="a plan file")],
    second: Annotated[Path, typer.Argument(help="another plan file")],
) -> None:
    """Print every field in which two plans differ, predictions included."""
    from rich.console import Console
    from rich.table import Table

    from outsize.plan.diff import compare_plans
    from outsize.plan.files import load_plan

    differences = compare_plans(load_plan(first), load_plan(second))
    console = Console()
    if not differences:
        console.print("the plans are the same")
        return
    table = Table()
    for column in ("", first.name, second.name):
        table.add_column(column, overflow="fold")
    for difference in differences:
        table.add_row(difference.name, difference.first, difference.second)
    console.print(table)
