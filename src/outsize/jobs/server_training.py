"""Train under a plan for parameter servers: this process coordinates servers and workers that it starts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from outsize.errors import LaunchError, PlanError
from outsize.jobs.planning import PlanRequest
from outsize.plan.files import load_plan, save_plan
from outsize.plan.plan import Plan
from outsize.runtime.environment.launch_environment import LaunchEnvironment

if TYPE_CHECKING:
    from outsize.jobs.training import RunSettings
    from outsize.runtime.parameter_server.job import ParameterServerJob
    from outsize.runtime.parameter_server.training import JobSummary

__all__ = ["ServerSettings", "check_strategy", "names_servers", "run_with_servers", "server_job"]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What only jobs with parameter servers have; None is the usual."""

    updates: str | None = None  # synchronous
    num_servers: int | None = None  # 1
    partitioner: str | None = None  # variables stay whole
    checkpoint_every: int | None = None  # steps; only after the last
    with_evaluator: bool = False


def check_strategy(
    plan: Plan,
    request: PlanRequest,
    settings: ServerSettings,
    environment: LaunchEnvironment,
    num_machines: int,
) -> None:
    """Refuse settings of parameter servers under another strategy, and what cannot start them.

    Raises:
        PlanError: the plan's strategy has no servers, and something was said of them.
        LaunchError: the plan has workers on several machines, and no launcher said who is what.
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
        return
    if environment.source == "single_machine" and num_machines > 1:
        raise LaunchError(
            f"The plan's {plan.mesh.dp} workers are on {num_machines} machines.",
            why="Servers and workers of several machines are started by something that gives each its role.",
            attempt="TF_CONFIG with chief, worker and ps on each, --mesh for fewer workers, or one machine.",
        )
    if environment.source != "single_machine" and environment.cluster is None:
        raise LaunchError(
            f"{environment.source} gives its processes no roles.",
            why="A job with parameter servers has one coordinator, servers and workers.",
            attempt="TF_CONFIG or CLUSTER_SPEC with chief, worker and ps, or outsize train on one machine.",
        )


def names_servers(request: PlanRequest) -> bool:
    """Whether the request asks for parameter servers, by name or by its plan."""
    if request.plan is None:
        return request.strategy == "parameter_server"
    return load_plan(request.plan).strategy == "parameter_server"


def run_with_servers(
    plan: Plan, request: PlanRequest, settings: RunSettings, directory: Path
) -> list[JobSummary]:
    """Write the plan into ``directory`` and run the job there; its one report is the coordinator's.

    Raises:
        OutsizeError: the job cannot run, before any process starts; or what stopped it.
    """
    from outsize.runtime.parameter_server.run_job import prepare_job, run_server_job

    prepared = prepare_job(server_job(plan, request, settings, directory))
    directory.mkdir(parents=True, exist_ok=True)
    save_plan(plan, directory / "plan.json")
    return [run_server_job(prepared)]


def server_job(
    plan: Plan,
    request: PlanRequest,
    settings: RunSettings,
    directory: Path,
    environment: LaunchEnvironment | None = None,
) -> ParameterServerJob:
    """Return the job as its processes get it; an environment with roles says how many servers there are.

    Raises:
        PlanError: updates are said in a way that is none.
        LaunchError: there is nothing to resume from.
    """
    from outsize.runtime.checkpoint import find_checkpoint
    from outsize.runtime.parameter_server.job import ParameterServerJob
    from outsize.runtime.parameter_server.updates import parse_updates

    of_servers = settings.servers
    cluster = None if environment is None else environment.cluster
    num_servers = 1 if cluster is None else cluster.count("ps")
    return ParameterServerJob(
        model=request.model,
        sequence=request.sequence,
        plan=plan,
        run_directory=str(directory),
        num_steps=settings.num_steps,
        updates=parse_updates(of_servers.updates or "synchronous"),
        num_servers=num_servers if of_servers.num_servers is None else of_servers.num_servers,
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
        is_on_one_machine=cluster is None,
    )
