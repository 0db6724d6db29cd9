"""Interleaved zero bubble: the interleaved order with split backwards (Qi et al. 2023)."""

from __future__ import annotations

from outsize.plan.actions import Schedule
from outsize.plan.schedules.placement import looped_placement
from outsize.plan.schedules.split_backward import split_backward_actions

__all__ = ["generate_interleaved_zero_bubble"]


def generate_interleaved_zero_bubble(
    num_ranks: int, num_virtual_stages: int, num_microbatches: int, *, round_size: int
) -> Schedule:
    """Return the lists, in rounds of ``round_size`` micro-batches (p where p divides m).

    Input gradients travel without waiting for weight gradients, so rank r needs p - 1 - r forwards more
    than its own stages' rounds to warm up, half of interleaved 1F1B's; it holds back r weight gradients.
    """
    return Schedule(
        name="interleaved_zero_bubble",
        num_microbatches=num_microbatches,
        stage_to_rank=looped_placement(num_ranks, num_virtual_stages),
        actions=tuple(
            split_backward_actions(
                range(rank, num_ranks * num_virtual_stages, num_ranks),
                num_microbatches,
                round_size=round_size,
                num_warmup=(num_virtual_stages - 1) * round_size + num_ranks - 1 - rank,
                num_held_back=rank,
            )
            for rank in range(num_ranks)
        ),
    )
