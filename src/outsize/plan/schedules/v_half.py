"""V-Half (Qi et al. 2024): about half the activations of 1F1B for less bubble than 1F1B."""

from __future__ import annotations

from outsize.plan.actions import Schedule
from outsize.plan.schedules.v_block import repeat_block

__all__ = ["generate_v_half"]


def generate_v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return V-Half's lists: forwards go down the V in steps of two units and up in steps of one.

    At most p + 2 of the 2p pairs that 1F1B's first rank would keep are in flight (each half a 1F1B stage).
    """
    shift = 0 if num_ranks % 2 else 3  # so that no two actions of the repeated block fall on one unit
    return repeat_block(
        "v_half",
        num_microbatches,
        [
            (
                2 * rank,
                3 * num_ranks - 2 - rank,
                3 * num_ranks - 1 + shift + 2 * rank,
                6 * num_ranks - 2 + shift - rank,
            )
            for rank in range(num_ranks)
        ],
    )
