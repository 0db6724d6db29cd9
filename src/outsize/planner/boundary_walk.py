"""Walks over boundaries: the dynamic programs behind stage cuts.

``cost[s, i, j]`` are the seconds of stage s from boundary i to boundary j, infinite where that cannot be.
A walk goes from the first boundary to the last in one step a stage.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["best_walk", "least_maximum", "least_sum"]

Array = NDArray[np.float64]


def best_walk(
    cost: Array, tail: Array, num_microbatches: int, idle: float, legal: list[int]
) -> tuple[int, ...] | None:
    """Boundaries of the walk with the least pipeline time, or None if no walk is possible.

    ``idle`` is the schedule's idle share, see `outsize.cost.idle_share`.
    """
    weight = num_microbatches - idle
    bottleneck = least_maximum(cost)
    if not math.isfinite(bottleneck):
        return None
    best_time, best_path = math.inf, None
    floor_sum, _ = least_sum(cost, tail / idle, math.inf)
    while math.isfinite(bottleneck) and weight * bottleneck + idle * floor_sum < best_time:
        total, path = least_sum(cost, tail / idle, bottleneck)
        time = weight * bottleneck + idle * total
        if time < best_time * (1 - 1e-12):
            best_time, best_path = time, path
        looser = cost[(cost > bottleneck) & np.isfinite(cost)]
        bottleneck = float(looser.min()) if looser.size else math.inf
    assert best_path is not None
    return tuple(legal[index] for index in best_path)


def least_maximum(cost: Array) -> float:
    """Return the least possible largest step of a walk; infinite where there is no walk."""
    reach = np.full(cost.shape[1], np.inf)
    reach[0] = 0.0
    for table in cost:
        reach = np.maximum(reach[:, None], table).min(axis=0)
    return float(reach[-1])


def least_sum(cost: Array, tail: Array, bottleneck: float) -> tuple[float, list[int]]:
    """Least sum of a walk whose every step is at most ``bottleneck``, and its boundaries.

    ``tail`` is added for the end of the first step.
    """
    reach = np.full(cost.shape[1], np.inf)
    reach[0] = 0.0
    parents = []
    for stage, table in enumerate(cost):
        sums = reach[:, None] + np.where(table <= bottleneck, table, np.inf)
        sums = sums + tail if stage == 0 else sums
        parents.append(sums.argmin(axis=0))
        reach = sums.min(axis=0)
    path = [cost.shape[1] - 1]
    for parent in reversed(parents):
        path.append(int(parent[path[-1]]))
    return float(reach[-1]), path[::-1]
