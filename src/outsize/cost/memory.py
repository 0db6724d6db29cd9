"""Bytes per device by category: the sum that decides whether a layout fits.

State as in `state`; activations are what each block keeps times the micro-batches in
flight on that rank, and what it keeps for weight gradients times those that are held back; the verdict is
about the device that needs most, never about the mean. Everything is one array over the pipeline ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outsize.cost.blocks import BlockCosts
from outsize.cost.layout import Assignment, Job, Layout
from outsize.cost.ranks import Ranks
from outsize.cost.state import HeldParameters, estimate_state
from outsize.plan.plan import MEMORY_CATEGORIES

__all__ = ["estimate_memory", "memory_by_rank"]

Array = NDArray[np.float64]


def estimate_memory(job: Job, layout: Layout, costs: BlockCosts, assignment: Assignment) -> dict[str, Array]:
    """Return the peak bytes of a device on each pipeline rank, by category."""
    ranks = Ranks(layout, assignment)
    tied = ranks.tied_elsewhere(costs)
    held = HeldParameters(
        all=ranks.total(costs.parameters) + tied,
        trainable=ranks.total(costs.trainable) + tied,
        in_largest_block=ranks.largest(costs.parameters),
        in_largest=ranks.largest(costs.largest_parameter),
    )
    state = estimate_state(held, layout, job.state)
    modes = assignment.modes
    blocks = np.arange(len(modes))
    activations = _activations(
        job,
        ranks,
        costs,
        saved=costs.saved_by_mode[modes, blocks],
        for_weights=costs.weight_gradient_by_mode[modes, blocks],
    )
    temporaries = state.temporaries(activations, ranks.largest(costs.temporary_by_mode[modes, blocks]))
    messages = state.messages(activations + temporaries)
    return {
        "parameters": state.parameters + ranks.total(costs.buffer_bytes),
        "gradients": state.gradients,
        "optimizer_states": state.optimizer_states,
        "activations": activations,
        "temporaries": temporaries,
        "communication_buffers": job.software.bucket_bytes + messages + 2.0 * ranks.crossing_bytes(costs),
        "reserve": np.full(layout.mesh.pp, float(job.cluster.weakest_device().reserve_bytes)),
    }


def _activations(job: Job, ranks: Ranks, costs: BlockCosts, *, saved: Array, for_weights: Array) -> Array:
    kept = ranks.total_in_flight(ranks.by_chunk(saved)) + ranks.total_held_back(ranks.by_chunk(for_weights))
    if job.software.keeps_outputs:
        kept += ranks.total_in_flight(costs.output_bytes[ranks.ends - 1])
    return kept


def memory_by_rank(categories: dict[str, Array]) -> tuple[dict[str, int], ...]:
    """Return whole bytes by category, one mapping a pipeline rank."""
    rows = np.rint(np.stack([categories[name] for name in MEMORY_CATEGORIES])).astype(np.int64).T.tolist()
    return tuple(dict(zip(MEMORY_CATEGORIES, row, strict=True)) for row in rows)
