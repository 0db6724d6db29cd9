"""Train a model under a plan: check everything, start the processes, show what came of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from outsize.jobs.joint_training import train_jointly
from outsize.jobs.machine_commands import machine_commands
from outsize.jobs.planning import PlanRequest, find_cluster, find_plan
from outsize.jobs.run_directory import choose_run_directory
from outsize.jobs.server_roles import train_in_role
from outsize.jobs.server_training import (
    ServerSettings,
    check_strategy,
    names_servers,
    run_with_servers,
    server_job,
)
from outsize.plan.files import save_plan
from outsize.plan.plan import Plan
from outsize.plan.plan_values import with_denominator
from outsize.report.tables import memory_table, plan_summary
from outsize.report.training_table import RunFigures, training_table
from outsize.runtime.environment.launch_environment import LaunchEnvironment
from outsize.runtime.environment.outsize_variables import LaunchFlags
from outsize.runtime.environment.read_environment import read_environment

if TYPE_CHECKING:
    from outsize.runtime.worker import RankReport, TrainingJob

__all__ = ["Launch", "RunSettings", "run_under_plan", "train_model"]


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
    denominator: str | None = None  # "samples" or "replicas"; None: as the plan says
    servers: ServerSettings = field(default_factory=ServerSettings)


@dataclass(frozen=True, slots=True)
class Launch:
    """What the user said of the machines, and the command, to be typed again on each of them."""

    flags: LaunchFlags = field(default_factory=LaunchFlags)
    command: Sequence[str] = ()


def train_model(
    request: PlanRequest, settings: RunSettings, *, name: str | None = None, launch: Launch | None = None
) -> Sequence[RunFigures]:
    """Plan or read the plan, train under it, and print loss, speed and memory beside what was predicted.

    Started by a launcher, this process is the part of the job that the launcher says. Started plainly, it
    runs one process a device of this machine, and the parameter servers of a plan that has any; where the
    plan needs several machines it prints the command for each and trains nothing.

    Raises:
        OutsizeError: anything that cannot work, before a process starts; or what stopped the processes.
    """
    console, launch = Console(), launch or Launch()
    cluster = find_cluster(request)
    environment = read_environment(
        os.environ, flags=launch.flags, processes_per_machine=len(cluster.machines[0].devices)
    )

    def make_plan() -> Plan:
        plan = find_plan(request)
        if settings.synchronise_batch_norm:
            plan = replace(plan, batch_norm="synchronised")
        if settings.denominator is not None:
            plan = with_denominator(plan, settings.denominator)
        console.print(plan_summary(plan))
        num_machines = cluster.machine_of(plan.mesh.world_size - 1) + 1
        check_strategy(plan, request, settings.servers, environment, num_machines)
        return plan

    reports: Sequence[RunFigures]
    if environment.source != "single_machine":
        plan, directory, reports = _take_part(environment, request, settings, make_plan, name)
        if not environment.is_first or not reports:
            return reports
    else:
        directory = choose_run_directory(name, resume=settings.resume)
        plan = make_plan()
        if commands := machine_commands(plan, cluster, launch.command, master=launch.flags.master):
            _print_commands(console, commands)
            return []
        run = run_with_servers if plan.strategy == "parameter_server" else run_under_plan
        reports = run(plan, request, settings, directory)
    console.print(training_table(plan, reports))
    console.print(memory_table(plan, reports[0].peak_memory_by_rank))
    console.print(f"plan, metrics and checkpoint are in {directory}/")
    return reports


def _take_part(
    environment: LaunchEnvironment,
    request: PlanRequest,
    settings: RunSettings,
    make_plan: Callable[[], Plan],
    name: str | None,
) -> tuple[Plan, Path, Sequence[RunFigures]]:
    """Train as the part of a job that a launcher says this process is."""
    if environment.cluster is not None and names_servers(request):
        return train_in_role(
            environment,
            make_plan,
            lambda plan, directory: server_job(plan, request, settings, directory, environment),
            name=name,
            resume=settings.resume,
        )
    return train_jointly(
        environment,
        make_plan,
        lambda plan, directory: training_job(plan, request, settings, directory),
        name=name,
        resume=settings.resume,
    )


def _print_commands(console: Console, commands: Sequence[str]) -> None:
    console.print(
        f"Nothing was started: the plan needs {len(commands)} machines. Machine 0 is the one at the "
        "master address (--master host:port names another). In the same folder on each machine:"
    )
    for command in commands:
        console.print(command, soft_wrap=True, markup=False, highlight=False)


def run_under_plan(
    plan: Plan, request: PlanRequest, settings: RunSettings, directory: Path
) -> list[RankReport]:
    """Write the plan into ``directory`` and run the job there, one process a device.

    Raises:
        OutsizeError: the job cannot run; nothing was written.
    """
    from outsize.runtime.worker import check_job, run_job

    job = training_job(plan, request, settings, directory)
    check_job(job)
    directory.mkdir(parents=True, exist_ok=True)
    save_plan(plan, directory / "plan.json")
    return run_job(job)


def training_job(plan: Plan, request: PlanRequest, settings: RunSettings, directory: Path) -> TrainingJob:
    """Return the job as its processes get it."""
    from outsize.runtime.worker import TrainingJob

    return TrainingJob(
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
