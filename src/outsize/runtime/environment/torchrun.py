"""Processes counted by RANK and WORLD_SIZE: torchrun, launchers like it, and Kubeflow v1 (it counts pods)."""

from __future__ import annotations

from collections.abc import Mapping

from outsize.errors import LaunchError
from outsize.runtime.environment.addresses import is_loopback, split_address
from outsize.runtime.environment.launch_environment import (
    LaunchEnvironment,
    one_process_of_many,
    one_task_a_machine,
)
from outsize.runtime.environment.variables import read_index, read_number, read_port

__all__ = ["read_rank_variables", "read_torchrun"]


def read_torchrun(environ: Mapping[str, str], _processes_per_machine: int) -> LaunchEnvironment | None:
    """Read what torchrun tells the processes it started; such a process starts no others."""
    if "TORCHELASTIC_RUN_ID" not in environ or "RANK" not in environ:
        return None
    world_size = read_number(environ, "WORLD_SIZE")
    num_machines = read_number(environ, "GROUP_WORLD_SIZE", 1)
    return one_process_of_many(
        "torchrun",
        rank=read_index(environ, "RANK", world_size),
        world_size=world_size,
        local_rank=read_number(environ, "LOCAL_RANK"),
        processes_per_machine=read_number(environ, "LOCAL_WORLD_SIZE"),
        master=_master(environ),
        machine=(read_index(environ, "GROUP_RANK", num_machines, 0), num_machines),
    )


def read_rank_variables(environ: Mapping[str, str], processes_per_machine: int) -> LaunchEnvironment | None:
    """Read RANK and WORLD_SIZE set by something other than torchrun.

    With LOCAL_RANK they count processes. Without it they count machines, as Kubeflow's PyTorchJob v1 and
    Alibaba DLC do (pods, not devices), unless the master is this machine itself. (Inside Kubernetes not even
    then: PyTorchJob may tell its master pod ``localhost``.)
    """
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    world_size = read_number(environ, "WORLD_SIZE")
    rank = read_index(environ, "RANK", world_size)
    master = _master(environ)
    by_hand = is_loopback(master[0]) and "KUBERNETES_SERVICE_HOST" not in environ
    if "LOCAL_RANK" not in environ and not by_hand:
        default = _pod_processes(environ, processes_per_machine)
        return one_task_a_machine(
            "kubeflow_v1",
            num_machines=world_size,
            machine_rank=rank,
            processes_per_machine=read_number(environ, "NPROC_PER_NODE", default),
            master=master,
        )
    return one_process_of_many(
        "rank_variables",
        rank=rank,
        world_size=world_size,
        local_rank=read_number(environ, "LOCAL_RANK", rank),
        processes_per_machine=_local_world_size(environ, world_size, master[0]),
        master=master,
    )


def _pod_processes(environ: Mapping[str, str], processes_per_machine: int) -> int:
    text = environ.get("PET_NPROC_PER_NODE", "")
    return int(text) if text.isdecimal() else processes_per_machine


def _local_world_size(environ: Mapping[str, str], world_size: int, master_address: str) -> int:
    if "LOCAL_WORLD_SIZE" in environ:
        return max(1, read_number(environ, "LOCAL_WORLD_SIZE"))
    if world_size == 1 or is_loopback(master_address):
        return world_size
    raise LaunchError(
        "RANK, WORLD_SIZE and LOCAL_RANK are set, LOCAL_WORLD_SIZE is not",
        why="how many processes share a machine cannot be told from the others",
        attempt="start with torchrun, or set LOCAL_WORLD_SIZE",
    )


def _master(environ: Mapping[str, str]) -> tuple[str, int]:
    host, port = split_address(environ.get("MASTER_ADDR") or "127.0.0.1")
    return host, read_port(environ, "MASTER_PORT", port)
