"""Activations kept by each rank: the bounds the papers claim, in micro-batches and in bytes."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.plan.actions import Action, ActionKind, Schedule
from outsize.plan.schedule_memory import StageActivations, peak_activation_bytes, peak_microbatches_in_flight
from outsize.plan.schedules import SCHEDULE_NAMES, legal_microbatch_counts, make_schedule

F, I, W, B = ActionKind  # noqa: E741 - the letters of the papers

NAMES = sorted(SCHEDULE_NAMES)


def published_bound(name: str, p: int, v: int, m: int) -> int:
    """Largest number of (stage, micro-batch) pairs in flight on any of p ranks with v stages each."""
    return {
        "gpipe": m,
        "1f1b": p,
        "interleaved_1f1b": v * p + p - 1,  # Korthikanti et al. 2022: v p (1 + (p - 1) / (p v))
        "looped_bfs": v * m,
        "zb_h1": p,  # Qi et al. 2023, table 2
        "zb_h2": 2 * p - 1,  # the same
        "interleaved_zero_bubble": v * p,
        "zb_v": 2 * p,  # half stages: p of 1F1B's, section 6
        "v_half": p + 2,  # Qi et al. 2024: tends to half of 2p
        "v_min": ceil(2 * p / 3) + 2,  # tends to a third of 2p
        "dualpipe_v": 2 * p + 1,  # DeepSeek's table: p + 1 whole stages, rounded up from p + 1/2
    }[name]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 9), st.integers(2, 5))
def test_no_schedule_keeps_more_than_its_paper_claims(name: str, num_ranks: int, num_rounds: int) -> None:
    """The largest number in flight over ranks is within the published bound, whatever the size."""
    num_microbatches = num_rounds * num_ranks
    schedule = make_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    bound = published_bound(name, num_ranks, schedule.num_stages // num_ranks, num_microbatches)
    assert max(peak_microbatches_in_flight(schedule)) <= bound


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_h2", "interleaved_zero_bubble", "zb_v"])
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_the_bound_is_reached(name: str, num_ranks: int) -> None:
    """These schedules use all the memory that they claim, so the bounds above are not idle."""
    num_microbatches = legal_microbatch_counts(name, num_ranks=num_ranks, near=4 * num_ranks)[0]
    schedule = make_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    bound = published_bound(name, num_ranks, schedule.num_stages // num_ranks, num_microbatches)
    assert max(peak_microbatches_in_flight(schedule)) == bound


def test_inputs_of_weight_gradients_are_kept_until_w() -> None:
    """By hand: F F keeps 20, I leaves 10 + 4, the next F makes 24, which is the peak."""
    actions = tuple(
        Action(0, kind, microbatch)
        for kind, microbatch in [(F, 0), (F, 1), (I, 0), (F, 2), (W, 0), (I, 1), (W, 1), (B, 2)]
    )
    schedule = Schedule("by hand", 3, (0,), (actions,))
    assert peak_activation_bytes(schedule, [StageActivations(10, 4)]) == (24,)
    assert peak_microbatches_in_flight(schedule) == (3,)


def test_stages_of_one_rank_share_its_memory() -> None:
    """Two stages on one rank add up, each with its own bytes."""
    actions = tuple(Action(stage, kind, 0) for stage, kind in [(0, F), (1, F), (1, B), (0, B)])
    schedule = Schedule("by hand", 1, (0, 0), (actions,))
    assert peak_activation_bytes(schedule, [StageActivations(3, 1), StageActivations(5, 1)]) == (8,)
