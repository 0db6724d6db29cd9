"""Bytes per device by category: the sum that decides whether a layout fits.

State per parameter as in `precision`; activations are what each block keeps times the micro-batches in
flight on that rank, and what it keeps for weight gradients times those that are held back; the verdict is
about the device that needs most, never about the mean. Everything is one array over the pipeline ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outsize.cost.blocks import BlockCosts
from outsize.cost.layout import Assignment, Job, Layout
from outsize.cost.precision import BytesPerParameter
from outsize.cost.ranks import Ranks
from outsize.plan.plan import MEMORY_CATEGORIES
from outsize.units import MIB

__all__ = ["StateBytes", "estimate_memory", "memory_by_rank", "message_bytes", "state_bytes"]

BUCKET_BYTES = 25 * MIB  # gradients are reduced in buckets of this size

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of parameters, gradients and optimizer states, gathered blocks included."""

    parameters: Any
    gradients: Any
    optimizer_states: Any


def state_bytes(
    parameters: Any, trainable: Any, largest: Any, layout: Layout, per: BytesPerParameter
) -> StateBytes:
    """Return the state of ``parameters`` on one device; ``largest`` is the biggest block's.

    Sharded in full, a rank also holds two gathered blocks (the one computed and the next) and one
    unsharded block of gradients. Numbers or arrays.
    """
    level, shards = layout.state_sharding, layout.num_state_shards
    held = parameters * per.parameter
    if level == "servers":
        return StateBytes(held, trainable * per.gradient, 0.0 * held)
    gradients = trainable * per.gradient
    states = trainable * per.optimizer_state
    if shards == 1 or level == "none":
        return StateBytes(held, gradients, states)
    states = states / shards
    if level in {"gradients", "full"}:
        gradients = gradients / shards + largest * per.gradient
    if level == "full":
        held = held / shards + 2 * largest * per.parameter
    return StateBytes(held, gradients, states)


def message_bytes(gradients: Any, largest: Any, layout: Layout, per: BytesPerParameter) -> Any:
    """Return the bytes of gradients on their way between replicas: two buckets, or one block's."""
    if layout.num_replicas == 1:
        return 0.0
    if layout.num_state_shards > 1 and layout.state_sharding in {"gradients", "full"}:
        return largest * per.gradient
    return np.minimum(2.0 * BUCKET_BYTES, gradients)


def estimate_memory(job: Job, layout: Layout, costs: BlockCosts, assignment: Assignment) -> dict[str, Array]:
    """Return the peak bytes of a device on each pipeline rank, by category."""
    ranks = Ranks(layout, assignment)
    tied = ranks.tied_elsewhere(costs)
    parameters = ranks.total(costs.parameters) + tied
    trainable = ranks.total(costs.trainable) + tied
    largest = ranks.largest(costs.parameters)
    state = state_bytes(parameters, trainable, largest, layout, job.state)
    modes = assignment.modes
    blocks = np.arange(len(modes))
    messages = message_bytes(state.gradients, largest, layout, job.state)
    activations = _activations(
        job,
        ranks,
        costs,
        saved=costs.saved_by_mode[modes, blocks],
        for_weights=costs.weight_gradient_by_mode[modes, blocks],
    )
    temporaries = ranks.largest(costs.temporary_by_mode[modes, blocks])
    buffers = job.software.bucket_bytes + messages + 2.0 * ranks.crossing_bytes(costs)
    return {
        "parameters": state.parameters + ranks.total(costs.buffer_bytes),
        "gradients": state.gradients,
        "optimizer_states": state.optimizer_states,
        "activations": activations,
        "temporaries": temporaries,
        "communication_buffers": np.maximum(
            buffers, _gathered_bytes(state.parameters, layout) - activations - temporaries
        ),
        "reserve": np.full(layout.mesh.pp, float(job.cluster.weakest_device().reserve_bytes)),
    }


def _gathered_bytes(parameters: Any, layout: Layout) -> Any:
    """Return the bytes of a bucket of updated parameters on its way, when activations are gone."""
    if layout.num_state_shards == 1 or layout.state_sharding not in {"optimizer_states", "gradients"}:
        return 0.0
    return np.minimum(BUCKET_BYTES, parameters)


def _activations(job: Job, ranks: Ranks, costs: BlockCosts, *, saved: Array, for_weights: Array) -> Array:
    kept = ranks.total_in_flight(ranks.by_chunk(saved)) + ranks.total_held_back(ranks.by_chunk(for_weights))
    if job.software.keeps_outputs:
        kept += ranks.total_in_flight(costs.output_bytes[ranks.ends - 1])
    return kept


def memory_by_rank(categories: dict[str, Array]) -> tuple[dict[str, int], ...]:
    """Return whole bytes by category, one mapping a pipeline rank."""
    rows = np.rint(np.stack([categories[name] for name in MEMORY_CATEGORIES])).astype(np.int64).T.tolist()
    return tuple(dict(zip(MEMORY_CATEGORIES, row, strict=True)) for row in rows)
