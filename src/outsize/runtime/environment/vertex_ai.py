"""Vertex AI's CLUSTER_SPEC: worker pools 0 to 3 are the primary, workers, servers and evaluators."""

from __future__ import annotations

from collections.abc import Mapping

from outsize.errors import LaunchError
from outsize.runtime.environment.cluster_roles import ClusterRoles
from outsize.runtime.environment.launch_environment import LaunchEnvironment
from outsize.runtime.environment.tf_config import environment_of_task, read_task_index, role_addresses
from outsize.runtime.environment.variables import read_json_object

__all__ = ["read_vertex_ai"]

_POOL_ROLES = {
    "workerpool0": "chief",
    "workerpool1": "worker",
    "workerpool2": "ps",
    "workerpool3": "evaluator",
}


def read_vertex_ai(environ: Mapping[str, str], processes_per_machine: int) -> LaunchEnvironment | None:
    """Read CLUSTER_SPEC, which every replica has, also in a job of one replica that has no TF_CONFIG.

    Raises:
        LaunchError: it is not JSON, or names unknown pools.
    """
    spec = read_json_object(environ, "CLUSTER_SPEC")
    pools = role_addresses(spec.get("cluster") or {}, "CLUSTER_SPEC")
    if not pools:
        return None
    task = spec.get("task") or {}
    pool = str(task.get("type", "workerpool0"))
    unknown = [name for name in (*pools, pool) if name not in _POOL_ROLES]
    if unknown:
        raise LaunchError(f"CLUSTER_SPEC names {unknown[0]!r}", why=f"known pools: {', '.join(_POOL_ROLES)}")
    cluster = ClusterRoles({_POOL_ROLES[name]: addresses for name, addresses in pools.items()})
    index = read_task_index(task.get("index", 0), "CLUSTER_SPEC")
    return environment_of_task("vertex_ai", cluster, _POOL_ROLES[pool], index, processes_per_machine)
