"""SkyPilot: SKYPILOT_NODE_RANK and SKYPILOT_NODE_IPS, one address a line, in rank order."""

from __future__ import annotations

from collections.abc import Mapping

from outsize.errors import LaunchError
from outsize.runtime.environment.addresses import split_address
from outsize.runtime.environment.launch_environment import LaunchEnvironment, one_task_a_machine
from outsize.runtime.environment.variables import read_index, read_number, read_port

__all__ = ["read_skypilot"]


def read_skypilot(environ: Mapping[str, str], processes_per_machine: int) -> LaunchEnvironment | None:
    """Read the node's rank and all addresses.

    Raises:
        LaunchError: the number of addresses is not SKYPILOT_NUM_NODES, or the rank lies outside.
    """
    if "SKYPILOT_NODE_RANK" not in environ or "SKYPILOT_NODE_IPS" not in environ:
        return None
    addresses = environ["SKYPILOT_NODE_IPS"].split()
    num_machines = read_number(environ, "SKYPILOT_NUM_NODES", len(addresses))
    if not addresses or len(addresses) != num_machines:
        raise LaunchError(
            f"SKYPILOT_NODE_IPS lists {len(addresses)} addresses", why=f"SKYPILOT_NUM_NODES is {num_machines}"
        )
    host, port = split_address(addresses[0])
    return one_task_a_machine(
        "skypilot",
        num_machines=num_machines,
        machine_rank=read_index(environ, "SKYPILOT_NODE_RANK", num_machines),
        processes_per_machine=read_number(environ, "SKYPILOT_NUM_GPUS_PER_NODE", 0) or processes_per_machine,
        master=(host, read_port(environ, "MASTER_PORT", port)),
    )
