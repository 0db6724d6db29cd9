"""Bytes per device by category: the sum that decides whether a layout fits.

State per parameter as in `precision`; activations are what each block keeps times the micro-batches in
flight on that rank; the verdict is about the device that needs most, never about the mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outsize.cost.blocks import BlockCosts
from outsize.cost.layout import SPLIT_BACKWARD, SPLIT_BACKWARD_SHARE, Assignment, Job, Layout
from outsize.cost.precision import BytesPerParameter
from outsize.units import MIB

__all__ = ["BUCKET_BYTES", "StateBytes", "estimate_stage_memory", "state_bytes", "tied_elsewhere"]

BUCKET_BYTES = 25 * MIB  # gradients are reduced in buckets of this size


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of a stage's parameters, gradients, optimizer states and gathered units."""

    parameters: float
    gradients: float
    optimizer_states: float


def state_bytes(
    parameters: float, trainable: float, largest: float, layout: Layout, per: BytesPerParameter
) -> StateBytes:
    """Return a stage's state for its local parameters; ``largest`` is the biggest block's.

    Sharded in full, a stage also holds two gathered blocks (the one computed and the next) and one
    unsharded block of gradients.
    """
    level, shards = layout.state_sharding, layout.num_state_shards
    held = parameters * per.parameter
    if level == "servers":
        return StateBytes(held, trainable * per.gradient, 0.0)
    gradients = trainable * per.gradient
    states = trainable * per.optimizer_state
    if shards == 1 or level == "none":
        return StateBytes(held, gradients, states)
    states /= shards
    if level in {"gradients", "full"}:
        gradients = gradients / shards + largest * per.gradient
    if level == "full":
        held = held / shards + 2 * largest * per.parameter
    return StateBytes(held, gradients, states)


def estimate_stage_memory(
    job: Job, layout: Layout, costs: BlockCosts, assignment: Assignment, stage: int
) -> dict[str, int]:
    """Return the peak bytes by category of a device on pipeline rank ``stage``."""
    blocks = [index for chunk in layout.chunks_of(stage) for index in assignment.blocks_of(chunk)]
    tied = tied_elsewhere(costs, blocks)
    parameters = float(costs.parameters[blocks].sum()) + tied
    trainable = float(costs.trainable[blocks].sum()) + tied
    state = state_bytes(parameters, trainable, float(costs.parameters[blocks].max()), layout, job.state)
    kept = 0.0
    for chunk, count in zip(layout.chunks_of(stage), layout.in_flight(stage), strict=True):
        held = np.array(assignment.blocks_of(chunk))
        kept += count * float(costs.saved_by_mode[assignment.modes[held], held].sum())
    if layout.schedule in SPLIT_BACKWARD:
        kept *= SPLIT_BACKWARD_SHARE
    if job.software.keeps_outputs:
        kept += sum(
            count * float(costs.output_bytes[assignment.bounds[chunk + 1] - 1])
            for chunk, count in zip(layout.chunks_of(stage), layout.in_flight(stage), strict=True)
        )
    categories = {
        "parameters": state.parameters + float(costs.buffer_bytes[blocks].sum()),
        "gradients": state.gradients,
        "optimizer_states": state.optimizer_states,
        "activations": kept,
        "temporaries": float(costs.temporary_by_mode[assignment.modes[blocks], blocks].max()),
        "communication_buffers": job.software.bucket_bytes
        + communication_buffer_bytes(layout, costs, state.gradients, blocks[0], blocks[-1]),
        "reserve": job.cluster.weakest_device().reserve_bytes,
    }
    return {name: round(num_bytes) for name, num_bytes in categories.items()}


def tied_elsewhere(costs: BlockCosts, blocks: list[int]) -> float:
    """Parameters held once more because the block that owns them is on another stage."""
    held = set(blocks)
    elsewhere = [block for block in blocks if costs.owners[block] not in held]
    return float(costs.tied_parameters[elsewhere].sum())


def communication_buffer_bytes(
    layout: Layout, costs: BlockCosts, gradients: float, first: int, last: int
) -> float:
    """Buckets of gradients being reduced, and a value received and one sent on either side."""
    buckets = min(2.0 * BUCKET_BYTES, gradients) if layout.num_replicas > 1 else 0.0
    received = costs.output_bytes[first - 1] if first > 0 else 0.0
    sent = costs.output_bytes[last] if last + 1 < len(costs.blocks) else 0.0
    return buckets + 2.0 * float(received + sent)
