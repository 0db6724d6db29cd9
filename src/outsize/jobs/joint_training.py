"""Take part in a job that something else started: as one rank, or as a machine that starts its own ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outsize.errors import LaunchError
from outsize.jobs.run_directory import choose_run_directory
from outsize.plan.files import plan_from_json, plan_to_json, save_plan
from outsize.plan.plan import Plan
from outsize.runtime.environment.launch_environment import LaunchEnvironment

if TYPE_CHECKING:
    from outsize.runtime.worker import RankReport, TrainingJob

__all__ = ["train_jointly"]


def train_jointly(
    environment: LaunchEnvironment,
    make_plan: Callable[[], Plan],
    make_job: Callable[[Plan, Path], TrainingJob],
    *,
    name: str | None,
    resume: bool,
) -> tuple[Plan, Path, list[RankReport]]:
    """Train as the part of a job that the environment says this process is.

    The job's first process plans and chooses the run directory; the others are told. All machines see the
    same folders.

    Raises:
        LaunchError: the plan needs another number of processes, this task has a role that trains nothing
            under it, or the first process does not answer.
        OutsizeError: what stopped the first process before training, on every process.
    """
    from outsize.runtime.job_store import decide_together, join_store
    from outsize.runtime.worker import join_job, run_job

    _check_role(environment)

    def decide() -> dict[str, Any]:
        directory = choose_run_directory(name, resume=resume)
        plan = make_plan()
        _check_size(plan, environment)
        directory.mkdir(parents=True, exist_ok=True)
        save_plan(plan, directory / "plan.json")
        return {"plan": plan_to_json(plan), "directory": str(directory)}

    store = join_store(environment)
    told = decide_together(store, is_first=environment.is_first, decide=decide)
    plan, directory = plan_from_json(told["plan"]), Path(told["directory"])
    directory.mkdir(parents=True, exist_ok=True)
    job = make_job(plan, directory)
    if environment.rank is None:
        return plan, directory, run_job(job, machine=environment)
    return plan, directory, [join_job(job, environment)]


def _check_role(environment: LaunchEnvironment) -> None:
    if environment.role not in ("chief", "worker"):
        raise LaunchError(
            f"{environment.source} starts this process as {environment.role}, which only a parameter-server "
            "job has.",
            why="Under this strategy the chief and the workers train, all alike.",
            attempt="--strategy parameter_server, or a job without that role.",
        )


def _check_size(plan: Plan, environment: LaunchEnvironment) -> None:
    if plan.mesh.world_size != environment.world_size:
        raise LaunchError(
            f"The plan needs {plan.mesh.world_size} processes, and {environment.source} starts "
            f"{environment.world_size}.",
            why=f"{environment.num_machines} machines x {environment.processes_per_machine} processes.",
            attempt="a cluster of as many devices, --mesh to use all of them, or other numbers there.",
        )
