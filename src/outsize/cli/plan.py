"""``outsize plan``: judge every strategy for a model on a cluster, and plan the fastest split."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outsize.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outsize.plan.plan import Mesh, Plan, Verdict
    from outsize.planner.schedule_synthesis import SynthesisedSchedule
    from outsize.planner.search import NothingFitsError, PlanningResult

__all__ = ["parse_mesh", "plan"]


_MAX_SEQUENCE = 10_000_000  # tokens; more is a slip, and overflows bytes

_Model = Annotated[str, typer.Argument(help="preset, file.py:function, package.module:function or hf:<dir>")]
_Sequence = Annotated[int | None, typer.Option(help="tokens in a sample", min=1, max=_MAX_SEQUENCE)]
_Schedule = Annotated[
    str | None,
    typer.Option(help="run pipelines by this schedule; synthesised: one sought for the stages' times"),
]
_Cuts = Annotated[
    str | None, typer.Option(help="begin pipeline stages at these blocks, such as layers.8,layers.16")
]
_Placements = Annotated[
    Path | None, typer.Option(help="TOML file of operator splits decided by you: docs/guides/operators.md")
]
_DeviceMtbf = Annotated[
    float | None, typer.Option(help="mean hours between failures of one device: adds the goodput")
]


def plan(  # noqa: PLR0913, PLR0917 - a command's options
    model: _Model,
    cluster: Annotated[str, typer.Option(help="4xcpu:1GiB, 2x24GiB, 8x8xH100 or a TOML file")],
    global_batch: Annotated[int, typer.Option(help="samples in one step over all devices")],
    sequence: _Sequence = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16, fp16 or fp8")] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, adam or sgd")] = "adamw",
    strategy: Annotated[str | None, typer.Option(help="plan this strategy instead of the fastest")] = None,
    mesh: Annotated[str | None, typer.Option(help="plan this mesh, such as pp=2,tp=4")] = None,
    microbatches: Annotated[int | None, typer.Option(help="micro-batches in one step of a replica")] = None,
    schedule: _Schedule = None,
    cuts: _Cuts = None,
    placements: _Placements = None,
    save: Annotated[Path | None, typer.Option(help="write the plan to this JSON file")] = None,
    html: Annotated[Path | None, typer.Option(help="write a page to this file")] = None,
    device_mtbf_hours: _DeviceMtbf = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Say for each strategy whether the model fits, why, and how fast; plan the best one."""
    from outsize.cli.model_profile import find_profile
    from outsize.cluster.argument import parse_cluster
    from outsize.plan.files import check_writable, save_plan
    from outsize.plan.plan import OptimizerSpec
    from outsize.planner.search import NothingFitsError, plan_job

    title = f"{model} on {cluster}, global batch {global_batch}"
    check_writable(save, html)
    parsed_cluster = parse_cluster(cluster)
    wished_mesh = parse_mesh(mesh) if mesh else None
    profile, space = find_profile(model, sequence=sequence)
    try:
        result = plan_job(
            profile,
            parsed_cluster,
            global_batch=global_batch,
            optimizer=OptimizerSpec(name=optimizer),
            precision=precision or ("fp32" if parsed_cluster.shared_cores else "bf16"),
            strategy=strategy,
            mesh=wished_mesh,
            num_microbatches=microbatches,
            schedule=schedule,
            cuts=None if cuts is None else cuts.replace(",", " ").split(),
            space=space,
        )
    except NothingFitsError as error:
        _show_refusal(error, title, as_json=as_json)
        raise
    best = replace(result.best, model=model)
    if save is not None or placements is not None:
        best = _with_splits(best, sequence, placements, result.verdicts, None if as_json else title)
    if save is not None:
        best = _with_schedule_file(best, result, save)
        save_plan(best, save)
    if html is not None:
        _write_page(html, best)
    if as_json:
        print(json.dumps(_form(result, best, device_mtbf_hours)))
    else:
        _show_verdicts(result.verdicts, title, best.strategy)
        _show_best(best, result, device_mtbf_hours)


def _with_splits(
    best: Plan, sequence: int | None, placements: Path | None, verdicts: Sequence[Verdict], title: str | None
) -> Plan:
    """Return the plan with its operator splits; where there are none, the verdicts, which hold, are told."""
    try:
        return _trainable(best, sequence, placements)
    except PlanError:
        if title is not None:
            _show_verdicts(verdicts, title, best.strategy)
        raise


def _with_schedule_file(best: Plan, result: PlanningResult, save: Path) -> Plan:
    """Write a schedule that has no name of its own beside the plan, which then names the file."""
    if result.sought is None or best.schedule.name != "synthesised":
        return best
    from outsize.plan.schedule_files import save_schedule

    path = save.with_suffix(".schedule.json")
    save_schedule(result.sought.schedule, path)
    return replace(best, schedule=replace(best.schedule, name=str(path)))


def _write_page(path: Path, best: Plan) -> None:
    from outsize.report.page import write_page

    write_page(path, best)


def _show_refusal(error: NothingFitsError, title: str, *, as_json: bool) -> None:
    """Nothing fits: the verdicts still say why."""
    from outsize.report.json_forms import planning_form

    if as_json:
        print(json.dumps(planning_form(error.verdicts)))
    else:
        _show_verdicts(error.verdicts, title, chosen="")


def _form(result: PlanningResult, best: Plan, device_mtbf_hours: float | None) -> dict[str, Any]:
    from outsize.cost.goodput import goodput_of_plan
    from outsize.report.json_forms import planning_form

    form = planning_form(
        result.verdicts, best, optimality_gap=result.optimality_gap, search_time_s=result.search_time_s
    )
    if result.sought is not None:
        fixed = result.sought.best_fixed
        form["schedule_search"] = {
            "pipeline_s": result.sought.objective_s,
            "best_fixed": fixed.schedule.name if fixed else None,
            "best_fixed_s": fixed.makespan_s if fixed else None,
            "lower_bound_s": result.sought.lower_bound_s,
            "gap": result.sought.gap,
        }
    if device_mtbf_hours is not None:
        form["goodput"] = asdict(goodput_of_plan(best, device_mtbf_hours=device_mtbf_hours))
    return form


def _trainable(best: Plan, sequence: int | None, placements: Path | None) -> Plan:
    """Return the plan with its operator splits, if its model can be trained (a preset cannot)."""
    if best.mesh.tp == 1 or ":" not in best.model:
        if placements is not None:
            raise PlanError(
                f"{placements} has nothing to decide.",
                why=f"the plan is {best.strategy} and splits no operators of a model that can be built",
                attempt="--strategy tensor_parallel or --mesh tp=2, and a model that is no preset",
            )
        return best
    from outsize.model.argument import load_model
    from outsize.planner.operator_splits import add_operator_splits
    from outsize.planner.sharding_overrides import load_sharding_overrides

    overrides = None if placements is None else load_sharding_overrides(placements)
    return add_operator_splits(best, load_model(best.model, sequence=sequence), overrides)


def parse_mesh(text: str) -> Mesh:
    """Return the mesh of a text such as ``pp=2,tp=4``.

    Raises:
        PlanError: an axis is unknown or given twice, or a degree is not a positive number.
    """
    from outsize.plan.plan import AXES, Mesh

    degrees: dict[str, int] = {}
    for part in text.replace(" ", ",").split(","):
        axis, _, degree = part.partition("=")
        is_number = degree.isascii() and degree.isdigit() and int(degree) > 0
        if axis not in AXES or not is_number or axis in degrees:
            why = f"{axis} is given twice" if axis in degrees else ""
            raise PlanError(
                f"{part!r} is no degree of a mesh axis.",
                why=why,
                attempt="pp=2,tp=4; axes: " + ", ".join(AXES),
            )
        degrees[axis] = int(degree)
    return Mesh(**degrees)


def _show_verdicts(verdicts: Sequence[Verdict], title: str, chosen: str) -> None:
    from rich.console import Console

    from outsize.report.tables import category_table, verdict_reasons, verdict_table

    console = Console()
    console.print(verdict_table(verdicts, title=title, chosen=chosen))
    console.print(verdict_reasons(verdicts))
    console.print(category_table(verdicts))


def _show_best(best: Plan, result: PlanningResult, device_mtbf_hours: float | None) -> None:
    from rich.console import Console

    from outsize.cost.goodput import goodput_of_plan
    from outsize.report.tables import goodput_summary, plan_summary

    console = Console()
    console.print(plan_summary(best))
    if device_mtbf_hours is not None:
        console.print(goodput_summary(best, goodput_of_plan(best, device_mtbf_hours=device_mtbf_hours)))
    if result.sought is not None:
        console.print(_schedule_sentence(result.sought))
    gap = f"a better plan could be at most {result.optimality_gap:.1%} faster"
    console.print(f"searched in {result.search_time_s:.2f} s; {gap}", style="dim")


def _schedule_sentence(sought: SynthesisedSchedule) -> str:
    """What the search for a schedule found, in words."""
    from outsize.units import format_seconds

    fixed = sought.best_fixed
    against = (
        f"{fixed.schedule.name} takes {format_seconds(fixed.makespan_s)}" if fixed else "no fixed one fits"
    )
    return (
        f"pipeline: {format_seconds(sought.objective_s)} by the schedule sought; {against}; "
        f"none takes less than {format_seconds(sought.lower_bound_s)}"
    )
