"""Seconds of one training step under a layout, and what they consist of.

A pipeline of stages that take t_0 … t_{p-1} seconds a micro-batch (forward and backward), m micro-batches
and v virtual stages takes

    m · max t  +  (Σ t - max t) / v          fill and drain once, the slowest stage sets the pace

which for equal stages is the (p-1)/(v m) bubble of Narayanan et al. (2021). Gradients of replicas are
reduced while the last micro-batch's backward runs; what does not fit under it is exposed.
"""

from __future__ import annotations

from dataclasses import dataclass

from outsize.cluster.device import Device
from outsize.cluster.link import Link
from outsize.cost.blocks import BlockCosts, axis_span, mesh_stride
from outsize.cost.collective import all_gather_s, all_reduce_s, reduce_scatter_s, send_s
from outsize.cost.compute import efficiency_of
from outsize.cost.layout import Assignment, Job, Layout
from outsize.cost.memory import estimate_stage_memory, tied_elsewhere

__all__ = ["StepEstimate", "estimate_step", "recompute_s", "sent_parts", "stage_devices", "stage_link"]


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """One step: seconds in all and by part, and bytes by category of each pipeline rank."""

    step_time_s: float
    by_part_s: dict[str, float]
    memory: tuple[dict[str, int], ...]

    @property
    def peak_memory_bytes(self) -> int:
        """Bytes of the device that needs most."""
        return max(sum(categories.values()) for categories in self.memory)


@dataclass(frozen=True, slots=True)
class _StageTime:
    compute: float
    communication: float
    recompute: float
    send: float
    backward: float

    @property
    def total(self) -> float:
        return self.compute + self.communication + self.recompute + self.send


def recompute_s(costs: BlockCosts, block: int, mode: str) -> float:
    """Seconds that recomputing adds to a block's backward."""
    if mode == "none":
        return 0.0
    return float((costs.selective_s if mode == "selective" else costs.full_s)[block])


def stage_devices(job: Job, layout: Layout) -> tuple[Device, ...]:
    """Return for each pipeline rank the weakest of its devices (``pp`` is the slowest axis)."""
    per_stage = layout.mesh.world_size // layout.mesh.pp
    if job.cluster.is_uniform:
        return (job.cluster.weakest_device(),) * layout.mesh.pp
    return tuple(
        job.cluster.weakest_device(stage * per_stage, (stage + 1) * per_stage)
        for stage in range(layout.mesh.pp)
    )


def estimate_step(job: Job, layout: Layout, costs: BlockCosts, assignment: Assignment) -> StepEstimate:
    """Return the time and memory of one step of ``job`` laid out as given."""
    stages = [_stage_time(job, layout, costs, assignment, stage) for stage in range(layout.mesh.pp)]
    pace = max(stages, key=lambda stage: stage.total)
    m = layout.num_microbatches
    parts = {
        "compute": m * pace.compute,
        "recompute": m * pace.recompute,
        "tensor_parallel": m * pace.communication,
        "pipeline_send": m * pace.send,
        "bubble": (sum(stage.total for stage in stages) - pace.total) * layout.idle_share,
        "data_parallel": max(
            _data_parallel_s(job, layout, costs, assignment, stage, time) for stage, time in enumerate(stages)
        ),
        "optimizer": max(_optimizer_s(job, layout, costs, assignment, s) for s in range(layout.mesh.pp)),
    }
    parts = {name: time * job.software.factor for name, time in parts.items()}
    parts["contention"] = _contention_s(job, layout, stages, sum(parts.values()))
    memory = tuple(
        estimate_stage_memory(job, layout, costs, assignment, stage) for stage in range(layout.mesh.pp)
    )
    return StepEstimate(sum(parts.values()), parts, memory)


def _contention_s(job: Job, layout: Layout, stages: list[_StageTime], step_s: float) -> float:
    """Emulated devices share cores: a step cannot be shorter than all work over all cores."""
    cores = job.cluster.shared_cores
    if cores is None:
        return 0.0
    copies = layout.mesh.world_size // layout.mesh.pp
    busy = layout.num_microbatches * sum(stage.total for stage in stages) * copies
    return max(busy / cores * job.software.factor - step_s, 0.0)


def _stage_time(
    job: Job, layout: Layout, costs: BlockCosts, assignment: Assignment, stage: int
) -> _StageTime:
    blocks = [index for chunk in layout.chunks_of(stage) for index in assignment.blocks_of(chunk)]
    reference = job.cluster.weakest_device().rate(job.precision)
    slower = reference / stage_devices(job, layout)[stage].rate(job.precision)
    forward = float(sum(costs.forward_s[index] for index in blocks)) * slower
    backward = float(sum(costs.backward_s[index] for index in blocks)) * slower
    communication = 2 * float(sum(costs.communication_s[index] for index in blocks))
    again = sum(recompute_s(costs, index, assignment.recompute[index]) for index in blocks) * slower
    link = stage_link(job, layout)
    sends = sum(
        2 * send_s(link, float(costs.output_bytes[assignment.bounds[chunk] - 1]) / sent_parts(job, layout))
        for chunk in layout.chunks_of(stage)
        if chunk > 0 and layout.mesh.pp > 1
    )
    return _StageTime(forward + backward, communication, again, sends, backward)


def sent_parts(job: Job, layout: Layout) -> int:
    """Into how many parts a value sent between stages is scattered over the tensor-parallel group."""
    return layout.mesh.tp if job.software.scatters_sends and not layout.sequence_parallel else 1


def stage_link(job: Job, layout: Layout) -> Link:
    """The slowest link between neighbouring stages."""
    return axis_span(job, mesh_stride(layout, "pp"), layout.mesh.pp).slowest


def _data_parallel_s(
    job: Job, layout: Layout, costs: BlockCosts, assignment: Assignment, stage: int, time: _StageTime
) -> float:
    """Exposed seconds of reducing gradients and gathering parameters over the replicas."""
    if layout.num_replicas == 1 and layout.state_sharding != "servers":
        return 0.0
    blocks = [index for chunk in layout.chunks_of(stage) for index in assignment.blocks_of(chunk)]
    per = job.state
    tied = tied_elsewhere(costs, blocks)
    gradients = (float(sum(costs.trainable[index] for index in blocks)) + tied) * per.gradient
    parameters = (float(sum(costs.parameters[index] for index in blocks)) + tied) * per.parameter
    mesh = layout.mesh
    if layout.state_sharding == "servers":
        return server_traffic_s(job, mesh.dp, parameters + gradients)
    stride = mesh_stride(layout, "fsdp") if mesh.fsdp > 1 else mesh.cp * mesh.tp * mesh.ep
    replicas = axis_span(job, stride, mesh.dp * mesh.fsdp)
    hidden = job.software.overlap * (time.backward + time.communication / 2)
    if layout.state_sharding == "none" or mesh.fsdp == 1:
        return max(all_reduce_s(replicas, gradients) - hidden, 0.0)
    shards = axis_span(job, stride, mesh.fsdp)
    outer = 0.0
    if mesh.dp > 1:
        outer = all_reduce_s(axis_span(job, mesh_stride(layout, "dp"), mesh.dp), gradients / mesh.fsdp)
    if layout.state_sharding != "full":
        reduce_s = reduce_scatter_s(shards, gradients) + outer
        return max(reduce_s - hidden, 0.0) + max(all_gather_s(shards, parameters) - hidden / 2, 0.0)
    return _fully_sharded_s(
        job,
        layout,
        shards_s=(all_gather_s(shards, parameters), reduce_scatter_s(shards, gradients)),
        outer=outer,
        time=time,
    )


def server_traffic_s(job: Job, num_workers: int, num_bytes: float) -> float:
    """Seconds the servers (one a machine in use) need to serve every worker's pull and push."""
    num_machines = job.cluster.machine_of(num_workers - 1) + 1
    link = job.cluster.network or job.cluster.machines[0].link
    return num_workers * num_bytes / (num_machines * link.bandwidth_bytes_per_s)


def _fully_sharded_s(
    job: Job, layout: Layout, *, shards_s: tuple[float, float], outer: float, time: _StageTime
) -> float:
    """Gathers run beside each forward and backward, reductions beside each backward."""
    gather, reduce = shards_s
    forward_hides = job.software.overlap * (time.compute - time.backward)
    backward_hides = job.software.overlap * time.backward
    each = max(gather - forward_hides, 0.0) + max(gather + reduce - backward_hides, 0.0)
    return each * layout.num_microbatches + max(outer - backward_hides, 0.0)


def _optimizer_s(job: Job, layout: Layout, costs: BlockCosts, assignment: Assignment, stage: int) -> float:
    """The optimizer reads and writes its states and parameters once and reads gradients."""
    blocks = [index for chunk in layout.chunks_of(stage) for index in assignment.blocks_of(chunk)]
    per = job.state
    trainable = float(sum(costs.trainable[index] for index in blocks)) / layout.num_state_shards
    traffic = trainable * (2 * per.optimizer_state + 2 * per.parameter + per.gradient)
    device = job.cluster.weakest_device()
    return traffic / (device.memory_bandwidth_bytes_per_s * efficiency_of(device).bandwidth)
