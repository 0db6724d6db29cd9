"""Seeks a schedule for the predicted times of a plan's stages and the memory its ranks have left."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from outsize.cost.blocks import BlockCosts
from outsize.cost.layout import Job
from outsize.cost.ranks import Ranks
from outsize.cost.step import sent_parts, stage_devices, stage_link
from outsize.plan.plan import Plan
from outsize.plan.schedule_memory import StageActivations
from outsize.plan.schedule_simulation import ScheduleTimes, StageTimes
from outsize.planner.evaluate import Evaluated
from outsize.planner.schedule_problem import ScheduleProblem
from outsize.planner.schedule_synthesis import SynthesisedSchedule, synthesise_schedule

__all__ = ["MOST_ACTIONS", "SYNTHESISED", "schedule_problem", "seek_schedule", "with_schedule"]

SYNTHESISED = "synthesised"
MOST_ACTIONS = 20_000  # forwards, input and weight gradients: what is sought in half a minute


def seek_schedule(job: Job, found: Evaluated, costs: BlockCosts) -> SynthesisedSchedule | None:
    """Return the best schedule found for the plan's stages; never worse than a fixed one in its memory.

    None for a single stage, or for more actions than can be searched in time.
    """
    layout = found.layout
    if layout.mesh.pp == 1 or 3 * layout.num_chunks * layout.num_microbatches > MOST_ACTIONS:
        return None
    return synthesise_schedule(schedule_problem(job, found, costs))


def with_schedule(plan: Plan, sought: SynthesisedSchedule) -> Plan:
    """Return the plan under the schedule found, with the step time that simulating it gives.

    Transfers run beside computing here, so what ranks wait for them counts as idle time.
    """
    assert plan.prediction is not None, "a plan just made holds its prediction"
    parts = dict(plan.prediction.time_by_part_s)
    busy = parts["compute"] + parts["recompute"] + parts["tensor_parallel"]
    parts["pipeline_send"] = 0.0
    parts["bubble"] = max(sought.objective_s - busy, 0.0)
    step_time_s = sum(parts.values())
    tokens = plan.prediction.tokens_per_s * plan.prediction.step_time_s
    prediction = replace(
        plan.prediction,
        step_time_s=step_time_s,
        time_by_part_s=parts,
        tokens_per_s=tokens / step_time_s,
    )
    spec = replace(plan.schedule, name=sought.schedule.name)
    return replace(plan, schedule=spec, prediction=prediction)


def schedule_problem(job: Job, found: Evaluated, costs: BlockCosts) -> ScheduleProblem:
    """Return times and bytes of one micro-batch on each chunk, and each rank's memory for activations."""
    layout, assignment = found.layout, found.assignment
    ranks = Ranks(layout, assignment)
    blocks = np.arange(len(costs.blocks))
    again = ranks.by_chunk(costs.again_by_mode[assignment.modes, blocks])
    forward = ranks.by_chunk(costs.forward_s + costs.communication_s)
    weight = ranks.by_chunk(costs.weight_s)
    backward = ranks.by_chunk(costs.backward_s + costs.backward_communication_s) - weight + again
    saved = ranks.by_chunk(costs.saved_by_mode[assignment.modes, blocks])
    reference = job.cluster.weakest_device().rate(job.precision)
    devices = stage_devices(job, layout)
    slower = np.array([reference / device.rate(job.precision) for device in devices])[ranks.rank_of_chunk]
    factor = job.software.factor
    stages = tuple(
        StageTimes.split(*(float(part) for part in parts))
        for parts in zip(*(factor * slower * part for part in (forward, backward, weight)), strict=True)
    )
    for_weights = ranks.by_chunk(costs.weight_gradient_by_mode[assignment.modes, blocks])
    activations = tuple(
        StageActivations(int(kept), int(later)) for kept, later in zip(saved, for_weights, strict=True)
    )
    return ScheduleProblem(
        times=ScheduleTimes(stages, _transfers(job, found, costs, ranks)),
        stage_to_rank=tuple(int(rank) for rank in layout.rank_of_chunk),
        num_microbatches=layout.num_microbatches,
        activations=activations,
        memory_limit_bytes=tuple(
            device.memory_bytes - sum(memory.values()) + memory["activations"]
            for device, memory in zip(devices, found.estimate.memory, strict=True)
        ),
    )


def _transfers(job: Job, found: Evaluated, costs: BlockCosts, ranks: Ranks) -> tuple[float, ...]:
    """Seconds from each chunk to the next, one way."""
    link = stage_link(job, found.layout)
    received = ranks.received_bytes(costs)[1:] / sent_parts(job, found.layout)
    return tuple(float(each) for each in received / link.bandwidth_bytes_per_s + link.latency_s)
