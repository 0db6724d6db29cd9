"""Seconds of one training step under a layout, and what they consist of.

A pipeline of stages that take t_0 … t_{p-1} seconds a micro-batch (forward and backward) and m micro-batches
takes

    m · max t  +  k (Σ t - max t)          fill and drain once, the slowest stage sets the pace

with k the schedule's idle share; k = 1/v for v virtual stages and equal ones is the (p-1)/(v m) bubble of
Narayanan et al. (2021). Gradients of replicas are
reduced while the last micro-batch's backward runs; what does not fit under it is exposed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outsize.cluster.device import Device
from outsize.cluster.link import Link
from outsize.cost.blocks import BlockCosts, axis_span, mesh_stride
from outsize.cost.idle_share import idle_share
from outsize.cost.layout import Assignment, Job, Layout
from outsize.cost.memory import estimate_memory, memory_by_rank
from outsize.cost.ranks import Ranks
from outsize.cost.replicas import gather_wait_s, optimizer_s, reduce_wait_s

__all__ = ["StepEstimate", "estimate_step", "sent_parts", "stage_devices", "stage_link"]

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """One step: seconds in all and by part, and bytes by category of each pipeline rank."""

    step_time_s: float
    by_part_s: dict[str, float]
    memory: tuple[dict[str, int], ...]
    idle_share: float = 1.0  # of the schedule, over 1F1B's

    @property
    def peak_memory_bytes(self) -> int:
        """Bytes of the device that needs most."""
        return max(sum(categories.values()) for categories in self.memory)


@dataclass(frozen=True, slots=True)
class _RankTimes:
    """Seconds of each pipeline rank, as arrays: a micro-batch's, and (the last two) a step's."""

    compute: Array
    communication: Array
    recompute: Array
    send: Array
    gather: Array
    reduce: Array
    optimizer: Array

    @property
    def total(self) -> Array:
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
    ranks = _rank_times(job, layout, costs, assignment)
    total = ranks.total
    pace = int(total.argmax())
    m = layout.num_microbatches
    share = idle_share(layout, costs.weight_share, ends_together=job.software.ends_together)
    parts = {
        "compute": m * ranks.compute[pace],
        "recompute": m * ranks.recompute[pace],
        "tensor_parallel": m * ranks.communication[pace],
        "pipeline_send": m * ranks.send[pace],
        "bubble": (total.sum() - total[pace]) * share,
        "data_parallel": m * ranks.gather[pace] + ranks.reduce[0],
        "optimizer": ranks.optimizer[0],
    }
    parts = {name: float(time) * job.software.factor for name, time in parts.items()}
    parts["contention"] = _contention_s(job, layout, float(total.sum()), sum(parts.values()))
    memory = memory_by_rank(estimate_memory(job, layout, costs, assignment))
    return StepEstimate(sum(parts.values()), parts, memory, share)


def _contention_s(job: Job, layout: Layout, microbatch_s: float, step_s: float) -> float:
    """Emulated devices share cores: a step cannot be shorter than all work over all cores."""
    cores = job.cluster.shared_cores
    if cores is None:
        return 0.0
    copies = layout.mesh.world_size // layout.mesh.pp
    busy = layout.num_microbatches * microbatch_s * copies
    return max(busy / cores * job.software.factor - step_s, 0.0)


def _rank_times(job: Job, layout: Layout, costs: BlockCosts, assignment: Assignment) -> _RankTimes:
    ranks = Ranks(layout, assignment)
    reference = job.cluster.weakest_device().rate(job.precision)
    slower = reference / np.array([device.rate(job.precision) for device in stage_devices(job, layout)])
    forward, backward = ranks.total(costs.forward_s) * slower, ranks.total(costs.backward_s) * slower
    communication = ranks.total(costs.exchange_s)
    again = ranks.total(costs.again_by_mode[assignment.modes, np.arange(len(costs.blocks))]) * slower
    tied = ranks.tied_elsewhere(costs)
    held = {
        "parameters": ranks.total(costs.parameters) + tied,
        "trainable": ranks.total(costs.trainable) + tied,
    }
    gather = gather_wait_s(job, layout, **held, forward_s=forward, backward_s=backward)
    reduce = reduce_wait_s(
        job,
        layout,
        **held,
        backward_s=backward + ranks.total(costs.backward_communication_s),
        expert_parameters=ranks.total(costs.expert_parameters),
    )
    optimizer = optimizer_s(job, layout, held["trainable"])
    sends = _send_s(job, layout, costs, ranks)
    return _RankTimes(forward + backward, communication, again, sends, gather, reduce, optimizer)


def _send_s(job: Job, layout: Layout, costs: BlockCosts, ranks: Ranks) -> Array:
    """Seconds each rank waits to receive its inputs and to send back their gradients."""
    if layout.mesh.pp == 1:
        return np.zeros(1)
    link = stage_link(job, layout)
    received = ranks.received_bytes(costs) / sent_parts(job, layout) / link.bandwidth_bytes_per_s
    received[1:] += link.latency_s
    return 2 * ranks.fold(received)


def sent_parts(job: Job, layout: Layout) -> int:
    """Into how many parts a value sent between stages is scattered over the tensor-parallel group."""
    return layout.mesh.tp if job.software.scatters_sends and not layout.sequence_parallel else 1


def stage_link(job: Job, layout: Layout) -> Link:
    """The slowest link between neighbouring stages."""
    return axis_span(job, mesh_stride(layout, "pp"), layout.mesh.pp).slowest
