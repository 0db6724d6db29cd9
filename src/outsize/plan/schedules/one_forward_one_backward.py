"""1F1B (Narayanan et al. 2021, the non-interleaved schedule): backwards as early as they can be."""

from __future__ import annotations

from outsize.plan.actions import Action, ActionKind, Schedule
from outsize.plan.schedules.interleaving import alternate, interleaved_actions
from outsize.plan.schedules.placement import looped_placement

__all__ = ["generate_1f1b"]


def generate_1f1b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return 1F1B's lists; rank r keeps at most ``min(m, p - r)`` micro-batches in flight.

    ```
    rank 0  F0 F1 F2       B0 F3 B1 F4 B2    B3    B4     warm-up: p - 1 - r forwards
    rank 1     F0 F1    B0 F2 B1 F3 B2 F4 B3    B4        then one forward, one backward
    rank 2        F0 B0 F1 B1 F2 B2 F3 B3 F4 B4           then the backwards left over
    ```
    """
    return Schedule(
        name="1f1b",
        num_microbatches=num_microbatches,
        stage_to_rank=looped_placement(num_ranks, 1),
        actions=tuple(_rank_actions(rank, num_ranks, num_microbatches) for rank in range(num_ranks)),
    )


def _rank_actions(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    forwards, backwards = (
        interleaved_actions((rank,), kind, num_microbatches, num_microbatches)
        for kind in (ActionKind.FORWARD, ActionKind.FULL_BACKWARD)
    )
    return tuple(action for group in alternate(num_ranks - 1 - rank, forwards, backwards) for action in group)
