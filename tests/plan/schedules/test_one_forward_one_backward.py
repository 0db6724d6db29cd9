"""1F1B has the published order and memory."""

from __future__ import annotations

import pytest

from outsize.plan.schedule_memory import peak_microbatches_in_flight
from outsize.plan.schedules import make_schedule


def test_order_is_warm_up_then_alternation_then_the_rest() -> None:
    """The lists for three ranks and five micro-batches, as a staircase."""
    schedule = make_schedule("1f1b", num_ranks=3, num_microbatches=5)
    assert [" ".join(f"{action.kind}{action.microbatch}" for action in row) for row in schedule.actions] == [
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_earlier_ranks_keep_more_microbatches(num_ranks: int, num_microbatches: int) -> None:
    """Rank r keeps min(m, p - r) micro-batches in flight."""
    schedule = make_schedule("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches)
    assert peak_microbatches_in_flight(schedule) == tuple(
        min(num_microbatches, num_ranks - rank) for rank in range(num_ranks)
    )
