"""Judges every strategy on a cluster and plans the fastest split that can be run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outsize.cluster.topology import Cluster
from outsize.cost.layout import SCHEDULES, Job
from outsize.cost.precision import bytes_per_parameter
from outsize.errors import DoesNotFitError, PlanError
from outsize.model.profile import ModelProfile
from outsize.plan.plan import STRATEGIES, Mesh, OptimizerSpec, Plan, Verdict
from outsize.plan.schedules import SCHEDULE_NAMES
from outsize.planner.build import build_plan, strategy_of
from outsize.planner.checks import check_batch, check_mesh
from outsize.planner.evaluate import Evaluator, Outcome
from outsize.planner.pinned_stages import PinnedStages, pin_stages
from outsize.planner.plan_schedule import SYNTHESISED, seek_schedule, with_schedule
from outsize.planner.schedule_synthesis import SynthesisedSchedule
from outsize.planner.verdicts import judge
from outsize.strategies.base import RUNNABLE, Space, layouts_on
from outsize.strategies.registry import ALL_STRATEGIES
from outsize.units import format_bytes

__all__ = ["NothingFitsError", "PlanningResult", "judge_strategies", "plan_job"]


class NothingFitsError(DoesNotFitError):
    """Nothing (or not what was forced) fits; ``verdicts`` say why for every strategy."""

    verdicts: tuple[Verdict, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanningResult:
    """The plan chosen, a verdict on every strategy, and how far from the best the plan could be."""

    best: Plan
    verdicts: tuple[Verdict, ...]
    optimality_gap: float  # (step time - lower bound over all layouts considered) ÷ step time
    search_time_s: float
    num_layouts: int
    sought: SynthesisedSchedule | None = None  # where a schedule was sought for the plan's own times


def plan_job(  # noqa: PLR0913 - the job and the caller's wishes, all by keyword
    profile: ModelProfile,
    cluster: Cluster,
    *,
    global_batch: int,
    optimizer: OptimizerSpec | None = None,
    precision: str = "fp32",
    strategy: str | None = None,
    mesh: Mesh | None = None,
    num_microbatches: int | None = None,
    schedule: str | None = None,
    cuts: Sequence[str] | None = None,
    space: Space = RUNNABLE,
) -> PlanningResult:
    """Judge every strategy and return the fastest plan that ``space`` allows.

    ``strategy``, ``mesh``, ``num_microbatches``, ``schedule`` and stage ``cuts`` (labels) may be forced. The
    schedule "synthesised" is sought for the times of the plan's stages; it is never worse than a fixed one.

    Raises:
        PlanError: what is forced is not legal for this model, batch or cluster.
        NothingFitsError: nothing (or not what is forced) fits; names the smallest change.
    """
    started = time.perf_counter()
    job = Job(profile, cluster, global_batch, optimizer or OptimizerSpec(), precision)
    bytes_per_parameter(precision, job.optimizer)
    space = replace(space, num_microbatches=num_microbatches)
    if schedule not in {None, SYNTHESISED}:
        space = _with_schedule(space, str(schedule))
    check_batch(job, num_microbatches)
    if strategy is not None and strategy not in STRATEGIES:
        raise PlanError(f"No strategy is called {strategy!r}.", attempt=", ".join(STRATEGIES))
    pinned = None if cuts is None else pin_stages(profile, cuts, mesh, space, schedule)
    if pinned is not None:
        mesh = pinned.mesh
    if mesh is not None:
        check_mesh(job, mesh, num_microbatches)
    judged = judge_strategies(job, space)
    verdicts = tuple(verdict for verdict, _ in judged)
    outcome = _choose(job, space, judged, strategy, mesh, pinned)
    if pinned is not None:
        pinned.check_any(outcome.num_layouts, schedule)
    if outcome.best is None:
        error = _does_not_fit(job, verdicts, outcome, strategy)
        error.verdicts = verdicts
        raise error
    estimate = outcome.best.estimate
    gap = max(1 - outcome.lower_bound_s / estimate.step_time_s, 0.0)
    has_servers = outcome.best.layout.state_sharding == "servers"
    name = "parameter_server" if has_servers else strategy_of(outcome.best.layout.mesh, cluster)
    plan = build_plan(job, outcome.best, name, verdicts)
    sought = None
    if schedule == SYNTHESISED:
        sought = seek_schedule(job, outcome.best, Evaluator(job).costs(outcome.best.layout))
        plan = plan if sought is None else with_schedule(plan, sought)
    num_layouts = sum(each.num_layouts for _, each in judged)
    return PlanningResult(plan, verdicts, gap, time.perf_counter() - started, num_layouts, sought)


def _with_schedule(space: Space, schedule: str) -> Space:
    """The space with pipelines of this schedule only, and the virtual stages it needs."""
    known = sorted(set(SCHEDULES) & set(SCHEDULE_NAMES))
    if schedule not in known:
        raise PlanError(
            f"No schedule called {schedule!r} can be planned.", attempt=", ".join([*known, SYNTHESISED])
        )
    return replace(space, schedules=(schedule,), max_virtual_stages=max(space.max_virtual_stages, 8))


def judge_strategies(job: Job, space: Space) -> list[tuple[Verdict, Outcome]]:
    """Return the verdict on every strategy and the outcome of its search, in the order of STRATEGIES."""
    evaluator = Evaluator(job, space.allows_recompute)
    judged = []
    for strategy in ALL_STRATEGIES:
        refusal = strategy.refusal(job)
        outcome = Outcome() if refusal else evaluator.search_by_size(strategy, space)
        judged.append((judge(strategy, job, space, outcome, refusal), outcome))
    return judged


def _choose(
    job: Job,
    space: Space,
    judged: list[tuple[Verdict, Outcome]],
    strategy: str | None,
    mesh: Mesh | None,
    pinned: PinnedStages | None,
) -> Outcome:
    """The outcome of what is forced, else of the fastest runnable strategy."""
    if mesh is not None:
        sharding = "none" if mesh.fsdp == 1 else "full"
        if strategy == "parameter_server":
            sharding = _servers(mesh)
        evaluator = Evaluator(job, space.allows_recompute, None if pinned is None else pinned.bounds)
        space = space if pinned is None else pinned.space
        return evaluator.search(layouts_on(job, mesh, sharding, space))
    outcomes = {
        verdict.name: outcome
        for verdict, outcome in judged
        if strategy in {None, verdict.name} and (strategy or _is_runnable(outcome, space))
    }
    fitting = [outcome for outcome in outcomes.values() if outcome.best is not None]
    if not fitting:
        return next(iter(outcomes.values()), Outcome())
    best = min(fitting, key=_preference)
    floor = min(outcome.lower_bound_s for outcome in fitting)
    return replace(best, lower_bound_s=floor)


def _servers(mesh: Mesh) -> str:
    """Return how state is divided under parameter servers, whose mesh counts workers alone."""
    if mesh.world_size != mesh.dp:
        raise PlanError(
            "Workers of parameter servers compute whole passes.",
            why=f"The mesh asked for is {mesh.degrees}.",
            attempt="a mesh of dp alone, such as dp=4.",
        )
    return "servers"


def _preference(outcome: Outcome) -> tuple[float, int]:
    """Fastest first; of equals, the one with fewer devices."""
    assert outcome.best is not None
    return outcome.best.estimate.step_time_s, outcome.best.layout.mesh.world_size


def _is_runnable(outcome: Outcome, space: Space) -> bool:
    if outcome.best is None:
        return False
    layout = outcome.best.layout
    axes = {axis for axis, degree in layout.mesh.degrees.items() if degree > 1}
    return axes <= set(space.axes) and layout.state_sharding in space.state_shardings


def _does_not_fit(
    job: Job, verdicts: tuple[Verdict, ...], outcome: Outcome, strategy: str | None
) -> NothingFitsError:
    available = format_bytes(job.cluster.weakest_device().memory_bytes)
    by_name = {verdict.name: verdict for verdict in verdicts}
    if strategy is not None:
        verdict = by_name[strategy]
        return NothingFitsError(
            f"{strategy} does not fit devices of {available}.",
            why=verdict.reason,
            attempt=verdict.smallest_change,
        )
    if outcome.nearest is not None:
        needed = format_bytes(outcome.nearest.estimate.peak_memory_bytes)
        return NothingFitsError(
            "The mesh asked for does not fit.", why=f"a device needs {needed} of {available}"
        )
    splitting = [
        v for v in verdicts if v.needed_bytes and v.name not in {"mirrored", "multi_worker_mirrored"}
    ]
    nearest = min(splitting or verdicts, key=lambda verdict: verdict.needed_bytes)
    return NothingFitsError(
        f"No strategy fits {job.cluster.num_devices} devices of {available}.",
        why=f"{nearest.name} comes nearest and needs {format_bytes(nearest.needed_bytes)}: {nearest.reason}",
        attempt=nearest.smallest_change,
    )
