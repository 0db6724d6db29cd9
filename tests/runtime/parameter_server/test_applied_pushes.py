"""The set of applied push ids."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outsize.runtime.parameter_server.applied_pushes import AppliedPushes


@given(st.lists(st.integers(0, 30)))
def test_it_is_a_set(ids: list[int]) -> None:
    """Whatever order and repetitions, exactly the ids added are known."""
    applied = AppliedPushes()
    for push_id in ids:
        applied.add(push_id)
    assert {push_id for push_id in range(31) if push_id in applied} == set(ids)


def test_ids_in_order_take_no_memory() -> None:
    """A thousand ids in pairs of swapped order leave only a watermark."""
    applied = AppliedPushes()
    for push_id in range(0, 1000, 2):
        applied.add(push_id + 1)
        applied.add(push_id)
    assert (applied.watermark, applied.newer) == (1000, set())
