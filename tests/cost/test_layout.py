"""Micro-batches that a layout counts as kept are those of the schedule that is executed."""

from __future__ import annotations

from collections import Counter

import pytest

from outsize.cost.layout import Layout
from outsize.plan.actions import ActionKind
from outsize.plan.plan import Mesh
from outsize.plan.schedules import make_schedule

FOR_WEIGHTS = 0.9  # of what a forward keeps, any share that is less than 1 and more than none


def kept_at_peak(name: str, num_ranks: int, num_microbatches: int) -> tuple[Counter[int], Counter[int]]:
    """Return, by stage, micro-batches before their backward and between its parts, at each rank's peak."""
    schedule = make_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    before: Counter[int] = Counter()
    between: Counter[int] = Counter()
    for actions in schedule.actions:
        forward: Counter[int] = Counter()
        held: Counter[int] = Counter()
        peaks = []
        for action in actions:
            forward[action.stage] += 1 if action.kind is ActionKind.FORWARD else 0
            forward[action.stage] -= action.kind in {ActionKind.FULL_BACKWARD, ActionKind.INPUT_GRADIENT}
            held[action.stage] += action.kind is ActionKind.INPUT_GRADIENT
            held[action.stage] -= action.kind is ActionKind.WEIGHT_GRADIENT
            peaks.append((forward.total() + FOR_WEIGHTS * held.total(), Counter(forward), Counter(held)))
        _, most, most_held = max(peaks, key=lambda peak: peak[0])
        before += most
        between += most_held
    return before, between


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "zb_h2", "zb_v"])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 2), (2, 6), (4, 8), (4, 16), (8, 24)])
def test_what_is_counted_is_what_runs(name: str, num_ranks: int, num_microbatches: int) -> None:
    """Before the backward, and (ZB-H1: as many as the rank's number, ZB-H2: twice) between its two parts."""
    virtual = 2 if name == "zb_v" else 1
    layout = Layout(Mesh(pp=num_ranks), 1, num_microbatches, name, virtual)
    before, between = kept_at_peak(name, num_ranks, num_microbatches)
    chunks = range(layout.num_chunks)
    assert list(layout.in_flight_by_chunk) == [before[chunk] for chunk in chunks]
    assert list(layout.held_back_by_chunk) == [between[chunk] for chunk in chunks]
