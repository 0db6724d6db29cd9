"""Take part in a parameter-server job that a launcher started: as its coordinator, or in another role."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from outsize.errors import LaunchError
from outsize.jobs.run_directory import choose_run_directory
from outsize.plan.files import save_plan
from outsize.plan.plan import Plan
from outsize.runtime.environment.addresses import split_address
from outsize.runtime.environment.cluster_roles import ClusterRoles
from outsize.runtime.environment.interface import address_towards
from outsize.runtime.environment.launch_environment import LaunchEnvironment

if TYPE_CHECKING:
    from outsize.runtime.parameter_server.job import ParameterServerJob
    from outsize.runtime.parameter_server.training import JobSummary

__all__ = ["train_in_role"]

_ROLES = {"worker": "worker", "ps": "server", "evaluator": "evaluator"}


def train_in_role(
    environment: LaunchEnvironment,
    make_plan: Callable[[], Plan],
    make_job: Callable[[Plan, Path], ParameterServerJob],
    *,
    name: str | None,
    resume: bool,
) -> tuple[Plan, Path, list[JobSummary]]:
    """Do what the environment's cluster has this task for; only the chief, which coordinates, has a summary.

    It plans and chooses the run directory; the others are told. All machines see the same folders.

    Raises:
        LaunchError: the cluster has no chief, or other numbers of workers and servers than the job.
        OutsizeError: what stopped the job.
    """
    cluster, role = environment.cluster, environment.role
    assert cluster is not None
    if 0 not in cluster.addresses.get("chief", {}):
        raise LaunchError(
            f"{environment.source} describes no chief, which coordinates parameter servers.",
            why=f"It has {', '.join(f'{cluster.count(role)} x {role}' for role in cluster.addresses)}.",
            attempt="a chief with its address in the cluster.",
        )
    chief, port = split_address(cluster.addresses["chief"][0])
    if role != "chief":
        from outsize.runtime.parameter_server.several_machines import join_server_job

        index = environment.machine_rank - (cluster.count("chief") if role == "worker" else 0)
        job = join_server_job(_ROLES[role], index, chief, port)
        return job.plan, Path(job.run_directory), []
    from outsize.runtime.parameter_server.run_job import prepare_job
    from outsize.runtime.parameter_server.several_machines import coordinate_here

    directory = choose_run_directory(name, resume=resume)
    plan = make_plan()
    job = make_job(plan, directory)
    _check_numbers(job, cluster, environment.source)
    prepared = prepare_job(job)
    directory.mkdir(parents=True, exist_ok=True)
    save_plan(plan, directory / "plan.json")
    own = address_towards(split_address(next(iter(cluster.addresses["worker"].values())))[0]) or chief
    return plan, directory, [coordinate_here(prepared, chief, port, own)]


def _check_numbers(job: ParameterServerJob, cluster: ClusterRoles, source: str) -> None:
    for what, wanted, found in (
        ("workers", job.num_workers, cluster.count("worker")),
        ("servers", job.num_servers, cluster.count("ps")),
    ):
        if wanted != found:
            raise LaunchError(
                f"The job has {wanted} {what}, and {source} starts {found}.",
                attempt=f"--mesh dp={cluster.count('worker')}, --servers {cluster.count('ps')}.",
            )
