"""``outsize rules``: every operator of a model with the ways it can be split."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["rules"]


def rules(
    model: Annotated[
        str, typer.Argument(help="file.py:function, package.module:function or hf:<directory>.")
    ],
    degree: Annotated[int, typer.Option(help="Over how many devices.", min=2)] = 2,
    samples: Annotated[int, typer.Option(help="Samples in the batch that is recorded.", min=1)] = 2,
) -> None:
    """List the operators of MODEL with their splits, found by running each on shards."""
    from rich.console import Console

    from outsize.model.argument import load_model
    from outsize.planner.operator_listing import list_operator_rules
    from outsize.report.rules_table import rules_summary, rules_table

    operators = list_operator_rules(load_model(model), degree, num_samples=samples)
    console = Console()
    console.print(rules_table(operators))
    console.print(rules_summary(operators, degree))
