"""Interleaved 1F1B (Narayanan et al. 2021): several stages a rank, so that the pipeline fills sooner."""

from __future__ import annotations

from outsize.plan.actions import Action, ActionKind, Schedule
from outsize.plan.schedules.interleaving import alternate, interleaved_actions
from outsize.plan.schedules.placement import looped_placement

__all__ = ["generate_interleaved_1f1b"]


def generate_interleaved_1f1b(
    num_ranks: int, num_virtual_stages: int, num_microbatches: int, *, round_size: int
) -> Schedule:
    """Return interleaved 1F1B's lists, in rounds of ``round_size`` micro-batches (p where p divides m).

    Rank r warms up with ``(v - 1) round + 2 (p - 1 - r)`` forwards, one round on each stage but its last
    and two more for each rank that follows it; then one forward, one backward. With equal stages and m a
    multiple of p the bubble is ``(p - 1) / (v m + p - 1)`` of the step.
    """

    def rank_actions(rank: int) -> tuple[Action, ...]:
        stages = range(rank, num_ranks * num_virtual_stages, num_ranks)
        forwards = interleaved_actions(stages, ActionKind.FORWARD, num_microbatches, round_size)
        backwards = interleaved_actions(stages[::-1], ActionKind.FULL_BACKWARD, num_microbatches, round_size)
        num_warmup = (num_virtual_stages - 1) * round_size + 2 * (num_ranks - 1 - rank)
        return tuple(action for group in alternate(num_warmup, forwards, backwards) for action in group)

    return Schedule(
        name="interleaved_1f1b",
        num_microbatches=num_microbatches,
        stage_to_rank=looped_placement(num_ranks, num_virtual_stages),
        actions=tuple(rank_actions(rank) for rank in range(num_ranks)),
    )
