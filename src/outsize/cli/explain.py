"""``outsize explain``: why a plan is what it is, and why not something else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from outsize.plan.plan import Plan

__all__ = ["explain"]


def explain(
    plan: Annotated[Path, typer.Argument(help="a plan file")],
    why_not: Annotated[
        str | None, typer.Option(help="a strategy, or degrees such as pp=2,tp=4, to hold against the plan")
    ] = None,
) -> None:
    """Say what a plan's time and memory consist of, what binds it, and why another choice lost."""
    from rich.console import Console

    from outsize.plan.files import load_plan
    from outsize.plan.plan import STRATEGIES
    from outsize.report.explanation import explain_plan, explain_strategy

    console = Console()
    loaded = load_plan(plan)
    if why_not is None:
        console.print(explain_plan(loaded))
    elif why_not in STRATEGIES:
        console.print(explain_strategy(loaded, why_not))
    else:
        _explain_mesh(console, loaded, why_not)


def _explain_mesh(console: Console, plan: Plan, degrees: str) -> None:
    """Plan the same job on the other mesh and show both."""
    from outsize.cli.model_profile import find_profile
    from outsize.cli.plan import parse_mesh
    from outsize.cluster.argument import parse_cluster
    from outsize.errors import DoesNotFitError, PlanError
    from outsize.planner.search import plan_job
    from outsize.report.explanation import explain_other_plan

    mesh = parse_mesh(degrees)
    profile, space = find_profile(plan.model)
    try:
        other = plan_job(
            profile,
            parse_cluster(plan.cluster),
            global_batch=plan.global_batch,
            optimizer=plan.optimizer,
            precision=plan.precision,
            mesh=mesh,
            space=space,
        ).best
    except (DoesNotFitError, PlanError) as error:
        console.print(f"{degrees}: {error}")
        return
    console.print(explain_other_plan(plan, other, degrees))
