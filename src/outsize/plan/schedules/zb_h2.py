"""ZB-H2 (Qi et al. 2023): no bubble where F = I = W, for about twice the memory of 1F1B (the 2p setting)."""

from __future__ import annotations

from outsize.plan.actions import Schedule
from outsize.plan.schedules.placement import looped_placement
from outsize.plan.schedules.split_backward import split_backward_actions

__all__ = ["generate_zb_h2"]


def generate_zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return ZB-H2's lists; every rank keeps at most 2p - 1 micro-batches.

    Rank r warms up with 2 (p - 1 - r) forwards, enough to be busy until the first gradient is back, and
    holds back 2r weight gradients, enough to be busy until the last rank is done. Ranks start and end in
    turn; the time from a rank's own start to its own end has a bubble of ``(p - 1) (F + I - 2W)`` for F, I,
    W alike on all stages, which is none where F = I = W and m >= 2p - 1.
    """
    return Schedule(
        name="zb_h2",
        num_microbatches=num_microbatches,
        stage_to_rank=looped_placement(num_ranks, 1),
        actions=tuple(
            split_backward_actions(
                range(rank, rank + 1),
                num_microbatches,
                round_size=num_microbatches,
                num_warmup=2 * (num_ranks - 1 - rank),
                num_held_back=2 * rank,
            )
            for rank in range(num_ranks)
        ),
    )
