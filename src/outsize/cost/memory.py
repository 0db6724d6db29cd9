"""Bytes per device by category: the sum that decides whether a layout fits.

State per parameter as in `precision`; activations are what each block keeps times the micro-batches in
flight on that rank; the verdict is about the device that needs most, never about the mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from outsize.cost.blocks import BlockCosts
from outsize.cost.layout import SPLIT_BACKWARD, SPLIT_BACKWARD_SHARE, Assignment, Job, Layout
from outsize.cost.precision import BytesPerParameter
from outsize.units import MIB

__all__ = ["BUCKET_BYTES", "StateBytes", "estimate_stage_memory", "saved_bytes", "state_bytes"]

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


def saved_bytes(costs: BlockCosts, block: int, mode: str) -> float:
    """Bytes one micro-batch keeps of ``block`` from forward to backward."""
    by_mode = {
        "none": costs.saved_bytes,
        "selective": costs.selective_saved_bytes,
        "full": costs.full_saved_bytes,
    }
    return float(by_mode[mode][block])


def estimate_stage_memory(
    job: Job, layout: Layout, costs: BlockCosts, assignment: Assignment, stage: int
) -> dict[str, int]:
    """Return the peak bytes by category of a device on pipeline rank ``stage``."""
    blocks = [index for chunk in layout.chunks_of(stage) for index in assignment.blocks_of(chunk)]
    parameters = sum(costs.parameters[index] for index in blocks) + tied_elsewhere(costs, blocks)
    trainable = sum(costs.trainable[index] for index in blocks) + tied_elsewhere(costs, blocks)
    largest = max(costs.parameters[index] for index in blocks)
    state = state_bytes(parameters, trainable, largest, layout, job.state)
    kept = sum(
        count * saved_bytes(costs, index, assignment.recompute[index])
        for chunk, count in zip(layout.chunks_of(stage), layout.in_flight(stage), strict=True)
        for index in assignment.blocks_of(chunk)
    )
    if layout.schedule in SPLIT_BACKWARD:
        kept *= SPLIT_BACKWARD_SHARE
    if job.software.keeps_outputs:
        kept += sum(
            count * float(costs.output_bytes[assignment.bounds[chunk + 1] - 1])
            for chunk, count in zip(layout.chunks_of(stage), layout.in_flight(stage), strict=True)
        )
    categories = {
        "parameters": state.parameters + sum(costs.buffer_bytes[index] for index in blocks),
        "gradients": state.gradients,
        "optimizer_states": state.optimizer_states,
        "activations": kept,
        "temporaries": max(
            block_temporary_bytes(costs, index, assignment.recompute[index]) for index in blocks
        ),
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


def block_temporary_bytes(costs: BlockCosts, block: int, mode: str) -> float:
    """Highest extra memory while a block runs; a recomputed block holds its activations meanwhile."""
    again = costs.saved_bytes[block] - saved_bytes(costs, block, mode)
    return float(costs.temporary_bytes[block] + max(again, 0.0))


def communication_buffer_bytes(
    layout: Layout, costs: BlockCosts, gradients: float, first: int, last: int
) -> float:
    """Buckets of gradients being reduced, and a value received and one sent on either side."""
    buckets = min(2.0 * BUCKET_BYTES, gradients) if layout.num_replicas > 1 else 0.0
    received = costs.output_bytes[first - 1] if first > 0 else 0.0
    sent = costs.output_bytes[last] if last + 1 < len(costs.blocks) else 0.0
    return buckets + 2.0 * float(received + sent)
