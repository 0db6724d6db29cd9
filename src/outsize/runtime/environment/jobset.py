"""Kubernetes JobSet: the pod's index from its Job, the rest from its labels through the downward API.

JobSet itself sets only JOB_COMPLETION_INDEX. The pod template passes on the labels
``jobset.sigs.k8s.io/jobset-name``, ``replicatedjob-name`` and ``job-index`` as JOBSET_NAME,
REPLICATED_JOB_NAME and JOB_INDEX, and says how many pods there are (OUTSIZE_NUM_MACHINES, and PODS_PER_JOB
where the replicated job has several jobs of more than one pod).
"""

from __future__ import annotations

from collections.abc import Mapping

from outsize.errors import LaunchError
from outsize.runtime.environment.launch_environment import LaunchEnvironment, one_task_a_machine
from outsize.runtime.environment.variables import read_number, read_port

__all__ = ["read_jobset"]


def read_jobset(environ: Mapping[str, str], processes_per_machine: int) -> LaunchEnvironment | None:
    """Read the position in the set; pods are called ``<set>-<replicated job>-<job>-<index>.<set>``.

    Raises:
        LaunchError: the number of pods is not given, or this one lies outside it.
    """
    if "JOBSET_NAME" not in environ or "JOB_COMPLETION_INDEX" not in environ:
        return None
    needed = [name for name in ("REPLICATED_JOB_NAME", "OUTSIZE_NUM_MACHINES") if not environ.get(name)]
    if needed:
        raise LaunchError(
            f"this pod belongs to JobSet {environ['JOBSET_NAME']}, but {' and '.join(needed)} is not set",
            why="JobSet does not tell a pod its replicated job or how many pods there are",
            attempt="pass them in the pod template (the labels through the downward API)",
        )
    num_machines = read_number(environ, "OUTSIZE_NUM_MACHINES")
    job, pods_per_job = read_number(environ, "JOB_INDEX", 0), read_number(environ, "PODS_PER_JOB", 1)
    machine_rank = job * pods_per_job + read_number(environ, "JOB_COMPLETION_INDEX")
    if machine_rank >= num_machines:
        raise LaunchError(f"this pod is number {machine_rank}", why=f"OUTSIZE_NUM_MACHINES is {num_machines}")
    name = environ["JOBSET_NAME"]
    return one_task_a_machine(
        "jobset",
        num_machines=num_machines,
        machine_rank=machine_rank,
        processes_per_machine=processes_per_machine,
        master=(f"{name}-{environ['REPLICATED_JOB_NAME']}-0-0.{name}", read_port(environ, "MASTER_PORT")),
    )
