"""Moves on the critical path repair schedules that were spoilt on purpose, and never make one worse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outsize.plan.actions import ActionKind, Schedule
from outsize.plan.schedule_memory import StageActivations
from outsize.plan.schedule_simulation import ScheduleTimes, StageTimes
from outsize.plan.schedules import SCHEDULE_NAMES, make_schedule
from outsize.planner.schedule_improvement import improve_rows
from outsize.planner.schedule_problem import Objective, ScheduleProblem
from outsize.planner.schedule_timing import ScheduleTiming


def timing_for(
    schedule: Schedule, stage: StageTimes, limit: int, objective: Objective = Objective.MAKESPAN
) -> ScheduleTiming:
    """Equal stages, one byte a (stage, micro-batch), a transfer of a tenth of a second."""
    return ScheduleTiming(
        ScheduleProblem(
            times=ScheduleTimes.uniform(schedule.num_stages, stage, 0.1),
            stage_to_rank=schedule.stage_to_rank,
            num_microbatches=schedule.num_microbatches,
            activations=(StageActivations(1, 1),) * schedule.num_stages,
            memory_limit_bytes=(limit,) * schedule.num_ranks,
            objective=objective,
        )
    )


def value_of(timing: ScheduleTiming, rows: list[list[int]]) -> tuple[float, float]:
    """Return the value of lists that run."""
    starts = timing.start_times(rows)
    assert starts is not None
    return timing.value(rows, starts)


@pytest.mark.parametrize("objective", list(Objective))
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_no_schedule_gets_worse_or_larger(name: str, objective: Objective) -> None:
    """Whatever the start, the result runs, is worth at least as much and keeps to the limit."""
    schedule = make_schedule(name, num_ranks=3, num_microbatches=6)
    timing = timing_for(schedule, StageTimes(3, 2, 1, 2.75), 20, objective)
    rows = timing.encode(schedule)
    improved = improve_rows(timing, rows, max_timings=200)
    assert value_of(timing, improved) <= value_of(timing, rows)
    assert all(timing.peak_bytes(row) <= 20 for row in improved)


def test_weight_gradients_that_delay_others_are_moved_away() -> None:
    """ZB-H1 with every W right after its I is no better than 1F1B; moving Ws gives ZB-H1's time again."""
    good = make_schedule("zb_h1", num_ranks=3, num_microbatches=6)
    rows = []
    for actions in good.actions:
        others = [action for action in actions if action.kind is not ActionKind.WEIGHT_GRADIENT]
        rows.append(
            tuple(
                part
                for action in others
                for part in (
                    (action, replace(action, kind=ActionKind.WEIGHT_GRADIENT))
                    if action.kind is ActionKind.INPUT_GRADIENT
                    else (action,)
                )
            )
        )
    spoilt = replace(good, actions=tuple(rows))
    timing = timing_for(good, StageTimes.split(1, 1, 1), 3)
    before, wanted = (value_of(timing, timing.encode(schedule))[0] for schedule in (spoilt, good))
    assert before > wanted
    improved = improve_rows(timing, timing.encode(spoilt), max_timings=5000)
    assert value_of(timing, improved)[0] <= wanted + 1e-12


def test_backwards_are_joined_where_that_is_cheaper_and_parted_where_not() -> None:
    """On one rank the only moves that help are between B and I, W; both directions are found."""
    split = make_schedule("zb_h1", num_ranks=1, num_microbatches=3)
    full = make_schedule("1f1b", num_ranks=1, num_microbatches=3)
    cheap_full = timing_for(full, StageTimes(1, 1, 1, 1.5), 3)
    joined = improve_rows(cheap_full, cheap_full.encode(split), max_timings=1000)
    assert value_of(cheap_full, joined)[0] == 3 * 2.5
    dear_full = timing_for(full, StageTimes(1, 1, 1, 4), 3)
    parted = improve_rows(dear_full, dear_full.encode(full), max_timings=1000)
    assert value_of(dear_full, parted)[0] == 3 * 3
