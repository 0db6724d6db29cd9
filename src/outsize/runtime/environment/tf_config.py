"""TF_CONFIG, as TensorFlow, Kubeflow's TFJob and Vertex AI write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outsize.errors import LaunchError
from outsize.runtime.environment.addresses import split_address
from outsize.runtime.environment.cluster_roles import ClusterRoles
from outsize.runtime.environment.launch_environment import LaunchEnvironment, one_task_a_machine
from outsize.runtime.environment.variables import read_json_object

__all__ = ["environment_of_task", "read_task_index", "read_tf_config", "role_addresses"]

_ROLE_NAMES = {"master": "chief"}  # Vertex AI's older name


def read_tf_config(environ: Mapping[str, str], processes_per_machine: int) -> LaunchEnvironment | None:
    """Read TF_CONFIG. Unset, ``{}`` or without a cluster it says nothing, so another reader may.

    A dynamic TFJob writes ``sparseCluster`` instead of ``cluster``: every worker sees itself and the servers.

    Raises:
        LaunchError: it is not JSON, or describes an impossible cluster or task.
    """
    config = read_json_object(environ, "TF_CONFIG")
    described = config.get("cluster") or config.get("sparseCluster")
    if not described:
        return None
    cluster = ClusterRoles(role_addresses(described, "TF_CONFIG"))
    task = config.get("task") or {}
    if not isinstance(task, dict):
        raise LaunchError(
            "the task in TF_CONFIG is not an object", attempt='write {"type": ..., "index": ...}'
        )
    role = _role_name(task.get("type", "worker"))
    index = read_task_index(task.get("index", 0), "TF_CONFIG")
    return environment_of_task("tf_config", cluster, role, index, processes_per_machine)


def environment_of_task(
    source: str, cluster: ClusterRoles, role: str, index: int, processes_per_machine: int
) -> LaunchEnvironment:
    """Return the environment of one task of a cluster of roles; one process for servers and evaluators.

    Raises:
        LaunchError: the cluster has no such task, or no meeting point.
    """
    machine_rank = cluster.task_id(role, index)
    return one_task_a_machine(
        source,
        num_machines=cluster.num_training_tasks(role),
        machine_rank=machine_rank,
        processes_per_machine=processes_per_machine if role in ("chief", "worker") else 1,
        master=split_address(cluster.master(role, index)),
        role=role,
        cluster=cluster,
    )


def role_addresses(described: Any, where: str) -> dict[str, dict[int, str]]:
    """Return addresses by role and index, from lists in their given order or from maps of indices.

    Raises:
        LaunchError: the description has another form.
    """
    if not isinstance(described, dict):
        raise LaunchError(
            f"the cluster in {where} is not an object", attempt='write {"worker": ["host:port"]}'
        )
    return {
        _role_name(role): _task_addresses(tasks, f"role {role} of {where}")
        for role, tasks in described.items()
        if tasks
    }


def _role_name(name: Any) -> str:
    return _ROLE_NAMES.get(str(name), str(name))


def _task_addresses(tasks: Any, where: str) -> dict[int, str]:
    if isinstance(tasks, list):
        tasks = dict(enumerate(tasks))
    if not isinstance(tasks, dict) or not all(isinstance(address, str) for address in tasks.values()):
        raise LaunchError(f"{where} is neither a list nor a map of addresses")
    return {read_task_index(index, where): address for index, address in tasks.items()}


def read_task_index(value: Any, where: str) -> int:
    """Return a task's index, written as a number or as text.

    Raises:
        LaunchError: it is neither.
    """
    if str(value).isdecimal():
        return int(value)
    raise LaunchError(f"{value!r} is not a task index", why=f"found in {where}")
