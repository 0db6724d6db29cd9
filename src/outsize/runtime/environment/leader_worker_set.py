"""Kubernetes LeaderWorkerSet: LWS_LEADER_ADDRESS, LWS_GROUP_SIZE and LWS_WORKER_INDEX (the leader is 0)."""

from __future__ import annotations

from collections.abc import Mapping

from outsize.runtime.environment.addresses import split_address
from outsize.runtime.environment.launch_environment import LaunchEnvironment, one_task_a_machine
from outsize.runtime.environment.variables import read_index, read_number, read_port

__all__ = ["read_leader_worker_set"]


def read_leader_worker_set(
    environ: Mapping[str, str], processes_per_machine: int
) -> LaunchEnvironment | None:
    """Read the group of pods that this pod belongs to."""
    if "LWS_LEADER_ADDRESS" not in environ:
        return None
    num_machines = read_number(environ, "LWS_GROUP_SIZE")
    host, port = split_address(environ["LWS_LEADER_ADDRESS"])
    return one_task_a_machine(
        "leader_worker_set",
        num_machines=num_machines,
        machine_rank=read_index(environ, "LWS_WORKER_INDEX", num_machines),
        processes_per_machine=processes_per_machine,
        master=(host, read_port(environ, "MASTER_PORT", port)),
    )
