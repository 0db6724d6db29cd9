"""V-Min (Qi et al. 2024): about a third of the activations of 1F1B, the least a V of stages allows."""

from __future__ import annotations

from outsize.plan.actions import Schedule
from outsize.plan.schedules.v_block import repeat_block

__all__ = ["generate_v_min"]


def generate_v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return V-Min's lists: every action right after its input, both ways of the V in steps of one unit.

    At most ``ceil(2p / 3) + 2`` of the 2p pairs that 1F1B's first rank would keep are in flight (each half a
    1F1B stage).
    """
    shift = 0 if num_ranks % 3 else 2  # so that no two actions of the repeated block fall on one unit
    return repeat_block(
        "v_min",
        num_microbatches,
        [
            (
                rank,
                2 * num_ranks - 1 - rank,
                2 * num_ranks + shift + rank,
                4 * num_ranks - 1 + shift - rank,
            )
            for rank in range(num_ranks)
        ],
    )
