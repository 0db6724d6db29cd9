"""The exact command to type on each machine of a cluster, for torchrun with a fixed meeting point."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from outsize.runtime.environment.addresses import DEFAULT_MASTER_PORT

__all__ = ["torchrun_command"]


def torchrun_command(
    arguments: Sequence[str],
    *,
    num_machines: int,
    machine_rank: int,
    processes_per_machine: int,
    master_address: str,
    master_port: int = DEFAULT_MASTER_PORT,
) -> str:
    """Return one shell line that starts this machine's processes of ``python -m <arguments>``.

    The lines of all machines differ in the machine's rank alone.

    Raises:
        ValueError: the machine's rank lies outside the number of machines.
    """
    if not 0 <= machine_rank < num_machines:
        raise ValueError(f"machine rank {machine_rank} of {num_machines} machines")
    command = [
        "torchrun",
        f"--nnodes={num_machines}",
        f"--node-rank={machine_rank}",
        f"--nproc-per-node={processes_per_machine}",
        f"--master-addr={master_address}",
        f"--master-port={master_port}",
        "-m",
        *arguments,
    ]
    return shlex.join(command)
