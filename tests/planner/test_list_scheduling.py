"""Schedules built by policy end, keep to memory, and follow the policy."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.plan.actions import ActionKind
from outsize.plan.schedule_memory import StageActivations, peak_activation_bytes
from outsize.plan.schedule_simulation import ScheduleTimes, StageTimes, simulate
from outsize.plan.schedule_validation import validate_schedule
from outsize.plan.schedules.placement import v_shaped_placement
from outsize.planner.list_scheduling import Policy, build_schedule
from outsize.planner.schedule_problem import ScheduleProblem


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_policy_deadlocks_however_little_memory_there_is(data: st.DataObject) -> None:
    """Any placement, even a shuffled one, with as little as one micro-batch's bytes on each rank."""
    num_ranks = data.draw(st.integers(1, 4))
    stage_to_rank = tuple(data.draw(st.permutations(list(range(num_ranks)) * data.draw(st.integers(1, 3)))))
    sizes = st.integers(1, 5)
    activations = tuple(
        StageActivations(size, data.draw(st.integers(0, size)))
        for size in (data.draw(sizes) for _ in stage_to_rank)
    )
    least = [0] * num_ranks
    for stage, rank in enumerate(stage_to_rank):
        least[rank] += activations[stage].forward_bytes
    seconds = st.integers(1, 9).map(float)
    problem = ScheduleProblem(
        times=ScheduleTimes(
            tuple(StageTimes.split(*(data.draw(seconds) for _ in range(3))) for _ in stage_to_rank),
            tuple(data.draw(seconds) for _ in stage_to_rank[:-1]),
        ),
        stage_to_rank=stage_to_rank,
        num_microbatches=data.draw(st.integers(1, 7)),
        activations=activations,
        memory_limit_bytes=tuple(size + data.draw(st.integers(0, 6)) for size in least),
    )
    policy = Policy(
        forwards_first=data.draw(st.booleans()),
        fill_tolerance=data.draw(st.sampled_from([0.0, 0.5, 1.0])),
        depth=data.draw(st.sampled_from([0.0, 0.5, 1.0, 2.0, 9.0])),
    )
    schedule = build_schedule(problem, policy)
    validate_schedule(schedule)
    peaks = peak_activation_bytes(schedule, activations)
    assert all(peak <= limit for peak, limit in zip(peaks, problem.memory_limit_bytes, strict=True))


def unit_problem(stage_to_rank: tuple[int, ...], num_microbatches: int, room: int) -> ScheduleProblem:
    """F = I = W = 1, free transfers, ``room`` (stage, micro-batch) pairs on each rank."""
    return ScheduleProblem(
        times=ScheduleTimes.uniform(len(stage_to_rank), StageTimes.split(1, 1, 1)),
        stage_to_rank=stage_to_rank,
        num_microbatches=num_microbatches,
        activations=(StageActivations(1, 1),) * len(stage_to_rank),
        memory_limit_bytes=(room,) * (max(stage_to_rank) + 1),
    )


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0, 2.0])
def test_depth_bounds_forwards_ahead_of_their_gradients(depth: float) -> None:
    """With memory to spare, a stage that n others follow is at most 1 + depth n micro-batches ahead."""
    schedule = build_schedule(unit_problem((0, 1, 2, 3), 12, 100), Policy(depth=depth))
    for stage, actions in enumerate(schedule.actions):
        ahead = most = 0
        for action in actions:
            ahead += {ActionKind.FORWARD: 1, ActionKind.INPUT_GRADIENT: -1}.get(action.kind, 0)
            most = max(most, ahead)
        assert most < 1 + depth * (3 - stage) + 1
        if depth in (0.0, 1.0):
            assert most == 1 + depth * (3 - stage)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_v_with_room_enough_has_no_bubble_on_any_rank(num_ranks: int) -> None:
    """Forwards first, every gap filled and 4p half stages of room: no rank idles once it has started."""
    problem = unit_problem(v_shaped_placement(num_ranks), 3 * num_ranks, 4 * num_ranks)
    run = simulate(build_schedule(problem, Policy(forwards_first=True, depth=inf)), problem.times)
    assert run.longest_span_s == 3 * 2 * 3 * num_ranks


@pytest.mark.parametrize(("tolerance", "row"), [(0.0, "F0 I0 F1 I1 W0 W1"), (1.0, "F0 I0 W0 F1 I1 W1")])
def test_fill_tolerance_lets_weight_gradients_stick_out_of_gaps(tolerance: float, row: str) -> None:
    """By hand: rank 1 waits 1.5 s for F1, and W takes 2; it is put there only if it may stick out."""
    first, second = StageTimes.split(3.5, 1, 2), StageTimes.split(1, 1, 2)
    problem = replace(unit_problem((0, 1), 2, 9), times=ScheduleTimes((first, second), (0.0,)))
    schedule = build_schedule(problem, Policy(fill_tolerance=tolerance))
    assert " ".join(f"{action.kind}{action.microbatch}" for action in schedule.actions[1]) == row
