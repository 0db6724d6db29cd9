"""Train a model under a plan: check everything, start the processes, show what came of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from outsize.jobs.planning import PlanRequest, find_plan
from outsize.jobs.run_directory import choose_run_directory
from outsize.plan.files import save_plan
from outsize.plan.plan import Plan
from outsize.report.tables import memory_table, plan_summary
from outsize.report.training_table import training_table

if TYPE_CHECKING:
    from outsize.runtime.worker import RankReport

__all__ = ["RunSettings", "run_under_plan", "train_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How long to train, on what, and what to write."""

    num_steps: int = 100
    data: str | None = None
    evaluate_every: int = 0
    num_validation_batches: int = 0
    write_checkpoint: bool = True
    resume: bool = False
    show_progress: bool = True
    synchronise_batch_norm: bool = False  # whatever the plan says


def train_model(request: PlanRequest, settings: RunSettings, *, name: str | None = None) -> list[RankReport]:
    """Plan or read the plan, train under it, and print loss, speed and memory beside what was predicted.

    Raises:
        OutsizeError: anything that cannot work, before a process starts; or what stopped the processes.
    """
    console = Console()
    directory = choose_run_directory(name, resume=settings.resume)
    plan = find_plan(request)
    if settings.synchronise_batch_norm:
        plan = replace(plan, batch_norm="synchronised")
    console.print(plan_summary(plan))
    reports = run_under_plan(plan, request, settings, directory)
    console.print(training_table(plan, reports))
    console.print(memory_table(plan, [report.peak_memory_bytes for report in reports]))
    console.print(f"plan, metrics and checkpoint are in {directory}/")
    return reports


def run_under_plan(
    plan: Plan, request: PlanRequest, settings: RunSettings, directory: Path
) -> list[RankReport]:
    """Write the plan into ``directory`` and run the job there, one process a device."""
    from outsize.runtime.worker import TrainingJob, run_job

    directory.mkdir(parents=True, exist_ok=True)
    save_plan(plan, directory / "plan.json")
    return run_job(
        TrainingJob(
            model=request.model,
            sequence=request.sequence,
            plan=plan,
            run_directory=str(directory),
            num_steps=settings.num_steps,
            evaluate_every=settings.evaluate_every,
            num_validation_batches=settings.num_validation_batches,
            data=settings.data,
            write_checkpoint=settings.write_checkpoint,
            resume=settings.resume,
            show_progress=settings.show_progress,
        )
    )
