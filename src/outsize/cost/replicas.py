"""What replicas cost a step: reducing gradients, gathering sharded state, and the optimizer.

Gradients are reduced once a step, while the last backward runs; state sharded in full is gathered in every
pass. A rank that ends its backward early does this while the first stage still works, so only the first
stage's share is added to a step. All functions take arrays too, one entry a range of blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outsize.cost.blocks import axis_span, mesh_stride
from outsize.cost.collective import all_gather_s, all_reduce_s, reduce_scatter_s
from outsize.cost.compute import efficiency_of
from outsize.cost.layout import Job, Layout

__all__ = ["gather_wait_s", "optimizer_s", "reduce_wait_s", "server_traffic_s"]

Number = float | NDArray[np.float64]


def gather_wait_s(
    job: Job, layout: Layout, *, parameters: Number, trainable: Number, forward_s: Number, backward_s: Number
) -> Any:
    """Seconds a micro-batch waits for gathers and reductions of state sharded in full.

    Gathers run beside each forward and backward, reductions beside each backward.
    """
    if layout.state_sharding != "full" or layout.num_state_shards == 1:
        return 0.0 * forward_s
    shards = axis_span(job, mesh_stride(layout, "cp"), layout.num_state_shards)
    gather = all_gather_s(shards, parameters * job.state.parameter)
    reduce = reduce_scatter_s(shards, trainable * job.state.gradient)
    overlap = job.software.overlap
    return np.maximum(gather - overlap * forward_s, 0.0) + np.maximum(
        gather + reduce - overlap * backward_s, 0.0
    )


def reduce_wait_s(
    job: Job,
    layout: Layout,
    *,
    parameters: Number,
    trainable: Number,
    backward_s: Number,
    expert_parameters: Number = 0.0,
) -> Any:
    """Seconds a step waits for gradients to be reduced and updated parameters to be gathered.

    Members of ``ep`` hold different experts and see different samples: what is not an expert is reduced over
    them too.
    """
    mesh, per = layout.mesh, job.state
    if layout.state_sharding == "servers":
        num_bytes = parameters * per.parameter + trainable * per.gradient
        return server_traffic_s(job, mesh.dp, num_bytes)
    replicas = mesh.dp * mesh.fsdp * mesh.cp
    hidden = job.software.overlap * backward_s
    gradients = trainable * per.gradient
    shared = 0.0
    if mesh.ep > 1:
        over_experts = axis_span(job, mesh_stride(layout, "ep"), mesh.ep)
        shared = all_reduce_s(over_experts, np.maximum(trainable - expert_parameters, 0.0) * per.gradient)
    if replicas == 1:
        return np.maximum(shared - hidden, 0.0 * backward_s)
    inner, num_shards = mesh_stride(layout, "cp"), layout.num_state_shards
    if num_shards == 1:
        reduce = all_reduce_s(axis_span(job, inner, replicas), gradients) + shared
        return np.maximum(reduce - hidden, 0.0)
    outer = all_reduce_s(axis_span(job, mesh_stride(layout, "dp"), mesh.dp), gradients / num_shards) + shared
    if layout.state_sharding == "full":
        return np.maximum(outer - hidden, 0.0)
    shards = axis_span(job, inner, num_shards)
    gather = all_gather_s(shards, parameters * per.parameter)
    reduce = reduce_scatter_s(shards, gradients) + outer
    return np.maximum(reduce - hidden, 0.0) + np.maximum(gather - hidden / 2, 0.0)


def server_traffic_s(job: Job, num_workers: int, num_bytes: Number) -> Any:
    """Seconds the servers (one a machine in use) need to serve every worker's pull and push."""
    num_machines = job.cluster.machine_of(num_workers - 1) + 1
    link = job.cluster.network or job.cluster.machines[0].link
    return num_workers * num_bytes / (num_machines * link.bandwidth_bytes_per_s)


def optimizer_s(job: Job, layout: Layout, trainable: Number) -> Any:
    """The optimizer reads and writes states and parameters; gradients are read for their norm, then again."""
    per = job.state
    each = 2 * per.optimizer_state + 2 * per.parameter + 2 * per.gradient
    traffic = trainable / layout.num_state_shards * each
    device = job.cluster.weakest_device()
    return traffic / (device.memory_bandwidth_bytes_per_s * efficiency_of(device).bandwidth)
