"""Refuses what cannot be: batches that do not divide, more stages than blocks, degrees nothing can take."""

from __future__ import annotations

from outsize.cost.layout import Job
from outsize.errors import PlanError
from outsize.plan.plan import Mesh
from outsize.strategies.base import tensor_degrees
from outsize.strategies.pipeline_parallel import max_stages

__all__ = ["check_batch", "check_mesh"]


def check_batch(job: Job, num_microbatches: int | None) -> None:
    """Raise PlanError unless there is something to train, and the batch divides as asked for."""
    if job.profile.num_parameters == 0:
        raise PlanError(
            "The model has no parameters.",
            why="There is nothing to train, and nothing to split.",
            attempt="a function that returns a module with parameters",
        )
    if job.global_batch < 1:
        raise PlanError(f"A global batch of {job.global_batch} holds no sample.", attempt="at least 1")
    if num_microbatches is not None and num_microbatches < 1:
        raise PlanError(f"{num_microbatches} micro-batches make no step.", attempt="at least 1")
    if num_microbatches is not None and job.global_batch % num_microbatches:
        raise PlanError(
            f"A global batch of {job.global_batch} does not divide into {num_microbatches} micro-batches.",
            attempt=_nearest(job.global_batch, num_microbatches),
        )


def check_mesh(job: Job, mesh: Mesh, num_microbatches: int | None) -> None:
    """Raise PlanError unless the model, the cluster and the batch allow the mesh."""
    if mesh.world_size > job.cluster.num_devices:
        raise PlanError(
            f"The mesh needs {mesh.world_size} devices, the cluster has {job.cluster.num_devices}.",
            attempt="smaller degrees, or a larger cluster",
        )
    stages = max_stages(job)
    if mesh.pp > stages:
        raise PlanError(
            f"{mesh.pp} pipeline stages are more than the model's {stages} blocks.",
            attempt=f"at most {stages} stages",
        )
    legal = tensor_degrees(job.profile, job.cluster.num_devices)
    if mesh.tp > 1 and mesh.tp not in legal:
        known = ", ".join(map(str, legal)) or "none above 1 on this cluster"
        raise PlanError(
            f"No operator of the model can be split {mesh.tp} ways.", attempt=f"a degree of: {known}"
        )
    _check_replicas(job, mesh, num_microbatches or 1)


def _check_replicas(job: Job, mesh: Mesh, num_microbatches: int) -> None:
    replicas = mesh.dp * mesh.fsdp * mesh.ep
    parts = replicas * num_microbatches
    if job.global_batch % parts == 0:
        return
    below, above = job.global_batch // parts * parts, -(-job.global_batch // parts) * parts
    near = " or ".join(str(batch) for batch in (below, above) if batch)
    raise PlanError(
        f"A global batch of {job.global_batch} does not divide over {replicas} replicas with "
        f"{num_microbatches} micro-batches each.",
        attempt=f"a global batch of {near}",
    )


def _nearest(batch: int, wanted: int) -> str:
    divisors = [count for count in range(1, batch + 1) if batch % count == 0]
    below = [count for count in divisors if count < wanted][-1:]
    above = [count for count in divisors if count > wanted][:1]
    return " or ".join(map(str, below + above)) + " micro-batches"
