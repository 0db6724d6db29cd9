"""Which rank holds which stage: looped (round and round) or V-shaped (there and back)."""

from __future__ import annotations

__all__ = ["looped_placement", "v_shaped_placement"]


def looped_placement(num_ranks: int, num_virtual_stages: int) -> tuple[int, ...]:
    """Stages 0, 1, 2, ... go to ranks 0, 1, ..., p-1, 0, 1, ...: ``0 1 2 0 1 2`` for 3 ranks, 2 virtual."""
    return tuple(range(num_ranks)) * num_virtual_stages


def v_shaped_placement(num_ranks: int) -> tuple[int, ...]:
    """Two stages a rank, the second ones in reverse: ``0 1 2 2 1 0``; rank 0 has both ends of the model."""
    ranks = tuple(range(num_ranks))
    return ranks + ranks[::-1]
