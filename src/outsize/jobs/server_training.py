"""Train under a plan for parameter servers: this process coordinates servers and workers that it starts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from outsize.errors import LaunchError, PlanError
from outsize.jobs.planning import PlanRequest
from outsize.plan.files import save_plan
from outsize.plan.plan import Plan
from outsize.runtime.environment.launch_environment import LaunchEnvironment

if TYPE_CHECKING:
    from outsize.jobs.training import RunSettings
    from outsize.runtime.parameter_server.job import ParameterServerJob
    from outsize.runtime.parameter_server.training import JobSummary

__all__ = ["ServerSettings", "check_strategy", "run_with_servers"]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What only jobs with parameter servers have; None is the usual."""

    updates: str | None = None  # synchronous
    num_servers: int | None = None  # 1
    partitioner: str | None = None  # variables stay whole
    checkpoint_every: int | None = None  # steps; only after the last
    with_evaluator: bool = False


def check_strategy(
    plan: Plan, request: PlanRequest, settings: ServerSettings, environment: LaunchEnvironment
) -> None:
    """Refuse settings of parameter servers under another strategy, and what cannot start them.

    Raises:
        PlanError: the plan's strategy has no servers, and something was said of them.
        LaunchError: a launcher started this process.
    """
    if plan.strategy != "parameter_server":
        said = [each.name for each in fields(settings) if getattr(settings, each.name) not in {None, False}]
        said += ["row_wise"] if request.row_wise else []
        if said:
            raise PlanError(
                f"The plan's strategy, {plan.strategy}, has no parameter servers.",
                why=f"For these alone there is {', '.join(name.replace('_', ' ') for name in said)}.",
                attempt="--strategy parameter_server, or a plan saved with it.",
            )
    elif environment.source != "single_machine":
        raise LaunchError(
            f"{environment.source} starts this process, and parameter servers cannot be started so yet.",
            why="One process coordinates the job, and starts servers and workers itself.",
            attempt="outsize train alone, on one machine, outside that job.",
        )


def run_with_servers(
    plan: Plan, request: PlanRequest, settings: RunSettings, directory: Path
) -> list[JobSummary]:
    """Write the plan into ``directory`` and run the job there; its one report is the coordinator's.

    Raises:
        OutsizeError: the job cannot run, before any process starts; or what stopped it.
    """
    from outsize.runtime.parameter_server.run_job import prepare_job, run_server_job

    prepared = prepare_job(_server_job(plan, request, settings, directory))
    directory.mkdir(parents=True, exist_ok=True)
    save_plan(plan, directory / "plan.json")
    return [run_server_job(prepared)]


def _server_job(
    plan: Plan, request: PlanRequest, settings: RunSettings, directory: Path
) -> ParameterServerJob:
    from outsize.runtime.checkpoint import find_checkpoint
    from outsize.runtime.parameter_server.job import ParameterServerJob
    from outsize.runtime.parameter_server.updates import parse_updates

    of_servers = settings.servers
    return ParameterServerJob(
        model=request.model,
        sequence=request.sequence,
        plan=plan,
        run_directory=str(directory),
        num_steps=settings.num_steps,
        updates=parse_updates(of_servers.updates or "synchronous"),
        num_servers=1 if of_servers.num_servers is None else of_servers.num_servers,
        partitioner=of_servers.partitioner,
        row_wise=request.row_wise,
        data=settings.data,
        evaluate_every=settings.evaluate_every,
        num_validation_batches=settings.num_validation_batches,
        write_checkpoint=settings.write_checkpoint,
        checkpoint_every=of_servers.checkpoint_every or 0,
        checkpoint=str(find_checkpoint(directory / "checkpoints")) if settings.resume else None,
        with_evaluator=of_servers.with_evaluator,
        show_progress=settings.show_progress,
    )
