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
from outsize.cost.collective import send_s
from outsize.cost.layout import Assignment, Job, Layout
from outsize.cost.memory import estimate_stage_memory, tied_elsewhere
from outsize.cost.replicas import gather_wait_s, optimizer_s, reduce_wait_s

__all__ = ["StepEstimate", "estimate_step", "sent_parts", "stage_devices", "stage_link"]


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
    gather: float
    reduce: float  # once a step, as the next
    optimizer: float

    @property
    def total(self) -> float:
        return self.compute + self.communication + self.recompute + self.send + self.gather


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
        "data_parallel": m * pace.gather + stages[0].reduce,
        "optimizer": stages[0].optimizer,
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
    forward = float(costs.forward_s[blocks].sum()) * slower
    backward = float(costs.backward_s[blocks].sum()) * slower
    communication = 2 * float(costs.communication_s[blocks].sum())
    again = float(costs.again_by_mode[assignment.modes[blocks], blocks].sum()) * slower
    link = stage_link(job, layout)
    sends = sum(
        2 * send_s(link, float(costs.output_bytes[assignment.bounds[chunk] - 1]) / sent_parts(job, layout))
        for chunk in layout.chunks_of(stage)
        if chunk > 0 and layout.mesh.pp > 1
    )
    tied = tied_elsewhere(costs, blocks)
    held = {
        "parameters": float(costs.parameters[blocks].sum()) + tied,
        "trainable": float(costs.trainable[blocks].sum()) + tied,
    }
    gather = gather_wait_s(job, layout, **held, forward_s=forward, backward_s=backward)
    reduce = reduce_wait_s(job, layout, **held, backward_s=backward + communication / 2)
    optimizer = optimizer_s(job, layout, held["trainable"])
    return _StageTime(
        forward + backward, communication, again, sends, float(gather), float(reduce), float(optimizer)
    )


def sent_parts(job: Job, layout: Layout) -> int:
    """Into how many parts a value sent between stages is scattered over the tensor-parallel group."""
    return layout.mesh.tp if job.software.scatters_sends and not layout.sequence_parallel else 1


def stage_link(job: Job, layout: Layout) -> Link:
    """The slowest link between neighbouring stages."""
    return axis_span(job, mesh_stride(layout, "pp"), layout.mesh.pp).slowest
