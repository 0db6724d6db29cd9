"""The command to type on each machine, where a plan needs more machines than this one."""

from __future__ import annotations

from collections.abc import Sequence

from outsize.cluster.topology import Cluster
from outsize.errors import LaunchError
from outsize.plan.plan import Plan
from outsize.runtime.environment.addresses import split_address
from outsize.runtime.environment.interface import own_address
from outsize.runtime.environment.torchrun_command import torchrun_command

__all__ = ["machine_commands"]

# torchrun says these, and would take ``--master`` for a short form of its own ``--master-addr``.
_PLACE_OPTIONS = ("--num-machines", "--machine-rank", "--master")


def machine_commands(
    plan: Plan, cluster: Cluster, arguments: Sequence[str], *, master: str | None = None
) -> list[str]:
    """Return one shell line a machine, or none where one machine is enough.

    ``arguments`` are those of this ``outsize`` command. Machine 0 is at ``master`` (host or host:port), or is
    this one.

    Raises:
        LaunchError: the machines would have to start different numbers of processes.
    """
    devices = [len(machine.devices) for machine in cluster.machines]
    num_machines = cluster.machine_of(plan.mesh.world_size - 1) + 1
    if num_machines == 1:
        return []
    per_machine, left_over = divmod(plan.mesh.world_size, num_machines)
    if left_over or set(devices[: num_machines - 1]) != {per_machine}:
        raise LaunchError(
            f"The plan's {plan.mesh.world_size} processes do not fill {num_machines} machines alike.",
            why=f"the machines have {', '.join(map(str, devices[:num_machines]))} devices.",
            attempt="--mesh with a number of devices that fills whole machines.",
        )
    host, port = split_address(master or own_address())
    return [
        torchrun_command(
            ["outsize", *_without_place(arguments)],
            num_machines=num_machines,
            machine_rank=machine_rank,
            processes_per_machine=per_machine,
            master_address=host,
            master_port=port,
        )
        for machine_rank in range(num_machines)
    ]


def _without_place(arguments: Sequence[str]) -> list[str]:
    kept: list[str] = []
    follows_option = False
    for argument in arguments:
        if follows_option:
            follows_option = False
        elif argument in _PLACE_OPTIONS:
            follows_option = True
        elif argument.partition("=")[0] not in _PLACE_OPTIONS:
            kept.append(argument)
    return kept
