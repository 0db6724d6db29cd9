"""GPipe (Huang et al. 2019): every forward, then every backward."""

from __future__ import annotations

from outsize.plan.actions import Action, ActionKind, Schedule
from outsize.plan.schedules.placement import looped_placement

__all__ = ["generate_gpipe"]


def generate_gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return GPipe's lists; every rank keeps all micro-batches in flight.

    ```
    rank 0  F0 F1 F2          B0 B1 B2
    rank 1     F0 F1 F2 B0 B1 B2
    ```
    """
    microbatches = range(num_microbatches)
    return Schedule(
        name="gpipe",
        num_microbatches=num_microbatches,
        stage_to_rank=looped_placement(num_ranks, 1),
        actions=tuple(
            tuple(Action(rank, ActionKind.FORWARD, microbatch) for microbatch in microbatches)
            + tuple(Action(rank, ActionKind.FULL_BACKWARD, microbatch) for microbatch in microbatches)
            for rank in range(num_ranks)
        ),
    )
