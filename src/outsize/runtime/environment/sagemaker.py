"""SageMaker: SM_HOSTS and SM_CURRENT_HOST."""

from __future__ import annotations

import json
from collections.abc import Mapping

from outsize.errors import LaunchError
from outsize.runtime.environment.launch_environment import LaunchEnvironment, one_task_a_machine
from outsize.runtime.environment.variables import read_number, read_port

__all__ = ["read_sagemaker"]

_PORT = 2223


def read_sagemaker(environ: Mapping[str, str], processes_per_machine: int) -> LaunchEnvironment | None:
    """Read the list of hosts. No host is told a rank: position in the sorted list is the rank everywhere.

    Raises:
        LaunchError: the list is not JSON, or this host is not in it.
    """
    if "SM_HOSTS" not in environ or "SM_CURRENT_HOST" not in environ:
        return None
    hosts, current = _hosts(environ["SM_HOSTS"]), environ["SM_CURRENT_HOST"]
    if current not in hosts:
        raise LaunchError(f"SM_CURRENT_HOST is {current!r}", why=f"SM_HOSTS lists {', '.join(hosts)}")
    return one_task_a_machine(
        "sagemaker",
        num_machines=len(hosts),
        machine_rank=hosts.index(current),
        processes_per_machine=read_number(environ, "SM_NUM_GPUS", 0) or processes_per_machine,
        master=(hosts[0], read_port(environ, "MASTER_PORT", _PORT)),
    )


def _hosts(text: str) -> list[str]:
    try:
        hosts = json.loads(text)
    except ValueError as error:
        raise LaunchError("SM_HOSTS is not JSON", why=str(error)) from None
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise LaunchError("SM_HOSTS is not a list of names")
    return sorted(hosts)
