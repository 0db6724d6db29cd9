"""Recomputes no more than a stage's memory asks for: gives back time where a rank has room left."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from outsize.cost.blocks import BlockCosts
from outsize.cost.layout import RECOMPUTE_MODES, Assignment, Job, Layout
from outsize.cost.memory import estimate_memory
from outsize.cost.step import stage_devices

__all__ = ["recompute_less"]

_SELECTIVE = RECOMPUTE_MODES.index("selective")


def recompute_less(job: Job, layout: Layout, costs: BlockCosts, assignment: Assignment) -> Assignment:
    """Return the assignment with attention scores kept in as many blocks as fit, dearest seconds first.

    Only blocks whose scores alone are recomputed change; ranks that are full stay as they are.
    """
    modes = assignment.modes.copy()
    memory = sum(estimate_memory(job, layout, costs, assignment).values())
    room = np.array([device.memory_bytes for device in stage_devices(job, layout)]) - memory
    sizes = np.diff(assignment.bounds)
    kept = costs.saved_bytes - costs.selective_saved_bytes
    modes[(modes == _SELECTIVE) & (kept <= 0)] = 0  # no scores, nothing to recompute
    needed = np.repeat(layout.in_flight_by_chunk, sizes) * kept
    ranks = np.repeat(layout.rank_of_chunk, sizes)
    for rank in np.flatnonzero(room > 0):
        able = np.flatnonzero((ranks == rank) & (modes == _SELECTIVE) & (needed > 0))
        order = able[np.argsort(-costs.selective_s[able] / needed[able], kind="stable")]
        modes[order[np.cumsum(needed[order]) <= room[rank]]] = 0
    return replace(assignment, recompute=tuple(RECOMPUTE_MODES[mode] for mode in modes))
