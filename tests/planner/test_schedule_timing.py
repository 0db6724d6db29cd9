"""The fast timing of the search gives exactly the simulator's times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outsize.plan.schedule_memory import StageActivations, peak_activation_bytes
from outsize.plan.schedule_simulation import ScheduleTimes, StageTimes, simulate
from outsize.plan.schedules import SCHEDULE_NAMES, make_schedule
from outsize.planner.schedule_problem import Objective, ScheduleProblem
from outsize.planner.schedule_timing import ScheduleTiming


@pytest.mark.parametrize("objective", list(Objective))
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_times_values_and_bytes_are_the_simulators(name: str, objective: Objective) -> None:
    """Two independent implementations agree on unequal stages, bit for bit."""
    schedule = make_schedule(name, num_ranks=3, num_microbatches=6)
    stages = range(schedule.num_stages)
    problem = ScheduleProblem(
        times=ScheduleTimes(
            tuple(StageTimes(1 + s, 2 + s % 2, 1.5, 3 + s % 3) for s in stages),
            tuple(0.25 * (s + 1) for s in stages[:-1]),
        ),
        stage_to_rank=schedule.stage_to_rank,
        num_microbatches=6,
        activations=tuple(StageActivations(10 + s, 3) for s in stages),
        memory_limit_bytes=(1000,) * 3,
        objective=objective,
    )
    timing = ScheduleTiming(problem)
    rows = timing.encode(schedule)
    starts = timing.start_times(rows)
    run = simulate(schedule, problem.times)
    assert starts is not None
    assert [[starts[action] for action in row] for row in rows] == [
        [timed.start_s for timed in actions] for actions in run.timeline
    ]
    assert timing.value(rows, starts)[0] == objective.seconds(run)
    assert timing.decode(rows, schedule.name) == schedule
    peaks = peak_activation_bytes(schedule, problem.activations)
    assert tuple(timing.peak_bytes(row) for row in rows) == peaks


def test_a_schedule_that_cannot_run_has_no_times() -> None:
    """A backward before its forward gives None, not wrong numbers."""
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=2)
    problem = ScheduleProblem(
        times=ScheduleTimes.uniform(2, StageTimes.split(1, 1, 1)),
        stage_to_rank=(0, 1),
        num_microbatches=2,
        activations=(StageActivations(1, 1),) * 2,
        memory_limit_bytes=(9, 9),
    )
    timing = ScheduleTiming(problem)
    stuck = replace(schedule, actions=(schedule.actions[0], schedule.actions[1][::-1]))
    assert timing.start_times(timing.encode(stuck)) is None
