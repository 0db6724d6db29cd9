"""Run several strategies for a few steps each, to hold the verdicts against what really happens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from outsize.errors import DoesNotFitError
from outsize.jobs.planning import PlanRequest, plan_profile
from outsize.jobs.training import RunSettings, run_under_plan
from outsize.model.profile import ModelProfile
from outsize.model.source import ModelSource
from outsize.plan.plan import Mesh, Plan, ScheduleSpec, StageSpec, Verdict
from outsize.report.trial_table import Trial

__all__ = ["Candidate", "try_candidate"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy to try on a mesh."""

    strategy: str
    mesh: Mesh


def try_candidate(
    candidate: Candidate,
    profile: ModelProfile,
    source: ModelSource,
    request: PlanRequest,
    verdicts: tuple[Verdict, ...],
    directory: Path,
) -> Trial:
    """Train a few steps under the candidate, also where its verdict says that it does not fit.

    A device that runs out of memory is a result here: the trial holds its message.
    """
    verdict = next((verdict for verdict in verdicts if verdict.name == candidate.strategy), None)
    is_hopeless = candidate.mesh.dp > 1 and verdict is not None and not verdict.fits
    try:
        plan = (
            _replica_plan(candidate, request, verdict)
            if is_hopeless and verdict is not None
            else plan_profile(
                profile, source, replace(request, mesh=candidate.mesh, num_microbatches=request.global_batch)
            ).best
        )
        settings = RunSettings(num_steps=3, write_checkpoint=False, show_progress=False)
        reports = run_under_plan(plan, request, settings, directory / candidate.strategy)
    except DoesNotFitError as error:
        needed = verdict.needed_bytes if verdict is not None else None
        available = verdict.available_bytes if verdict is not None else None
        return Trial(candidate.strategy, candidate.mesh, needed, None, available, failure=str(error))
    peaks = [report.peak_memory_bytes for report in reports if report.peak_memory_bytes is not None]
    return Trial(
        candidate.strategy,
        candidate.mesh,
        plan.prediction.peak_memory_bytes if plan.prediction else None,
        max(peaks, default=None),
        plan.device_memory_bytes,
        predicted_step_time_s=plan.prediction.step_time_s if plan.prediction else None,
        measured_step_time_s=reports[0].step_time_s,
    )


def _replica_plan(candidate: Candidate, request: PlanRequest, verdict: Verdict) -> Plan:
    """Return the plan of whole replicas that the planner refuses, with the smallest micro-batches."""
    assert request.cluster is not None
    return Plan(
        strategy=candidate.strategy,
        mesh=candidate.mesh,
        stages=(StageSpec(0, ""),),
        schedule=ScheduleSpec("gpipe", request.global_batch // candidate.mesh.dp),
        global_batch=request.global_batch,
        model=request.model,
        cluster=request.cluster,
        optimizer=request.optimizer,
        seed=request.seed,
        device_memory_bytes=verdict.available_bytes,
    )
