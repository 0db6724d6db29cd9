"""ZB-H1 (Qi et al. 2023): split backwards within the memory of 1F1B."""

from __future__ import annotations

from outsize.plan.actions import Schedule
from outsize.plan.schedules.placement import looped_placement
from outsize.plan.schedules.split_backward import split_backward_actions

__all__ = ["generate_zb_h1"]


def generate_zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return ZB-H1's lists; every rank keeps at most p micro-batches, as the first rank of 1F1B does.

    Rank r warms up with p - 1 - r forwards as in 1F1B and uses the r places this leaves free to hold back
    weight gradients. Bubble on each rank: ``(p - 1) (F + I - W)`` for F, I, W alike on all stages, a third of
    1F1B's where F = I = W.
    """
    return Schedule(
        name="zb_h1",
        num_microbatches=num_microbatches,
        stage_to_rank=looped_placement(num_ranks, 1),
        actions=tuple(
            split_backward_actions(
                range(rank, rank + 1),
                num_microbatches,
                round_size=num_microbatches,
                num_warmup=num_ranks - 1 - rank,
                num_held_back=rank,
            )
            for rank in range(num_ranks)
        ),
    )
