"""Kubeflow Trainer v2: PET_* variables, which torchrun itself reads as its flags."""

from __future__ import annotations

from collections.abc import Mapping

from outsize.errors import LaunchError
from outsize.runtime.environment.addresses import split_address
from outsize.runtime.environment.launch_environment import LaunchEnvironment, one_task_a_machine
from outsize.runtime.environment.variables import read_index, read_port

__all__ = ["read_kubeflow_v2"]


def read_kubeflow_v2(environ: Mapping[str, str], processes_per_machine: int) -> LaunchEnvironment | None:
    """Read PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR and PET_MASTER_PORT.

    Raises:
        LaunchError: the number of machines is a range (only torchrun's rendezvous can settle that), or the
            machine's own rank is missing.
    """
    if "PET_NNODES" not in environ:
        return None
    num_machines = _num_machines(environ["PET_NNODES"])
    processes = environ.get("PET_NPROC_PER_NODE", "")  # may also be auto, cpu or gpu
    host, port = split_address(environ.get("PET_MASTER_ADDR") or "127.0.0.1")
    return one_task_a_machine(
        "kubeflow_v2",
        num_machines=num_machines,
        machine_rank=read_index(environ, "PET_NODE_RANK", num_machines, 0 if num_machines == 1 else None),
        processes_per_machine=int(processes) if processes.isdecimal() else processes_per_machine,
        master=(host, read_port(environ, "PET_MASTER_PORT", port)),
    )


def _num_machines(text: str) -> int:
    lowest, _, highest = text.partition(":")
    if lowest.isdecimal() and int(lowest) > 0 and highest in ("", lowest):
        return int(lowest)
    raise LaunchError(
        f"PET_NNODES is {text!r}",
        why="a plan needs one number of machines",
        attempt="give one number, or start the training through torchrun",
    )
