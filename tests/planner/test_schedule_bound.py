"""The lower bound against exhaustive search on tiny problems, and against the published optimum."""

from __future__ import annotations

from itertools import permutations, product

import pytest

from outsize.plan.actions import Action, ActionKind, Schedule
from outsize.plan.schedule_dependencies import StuckSchedule
from outsize.plan.schedule_memory import StageActivations, peak_activation_bytes
from outsize.plan.schedule_simulation import ScheduleTimes, StageTimes, simulate
from outsize.planner.schedule_bound import estimate_lower_bound_s
from outsize.planner.schedule_problem import Objective, ScheduleProblem
from outsize.planner.schedule_synthesis import synthesise_schedule

F, I, W, _B = ActionKind  # noqa: E741 - the letters of the papers


def tiny(stage: tuple[float, float, float], limit: int, objective: Objective) -> ScheduleProblem:
    """Two ranks, two micro-batches; F keeps 2 bytes, 1 of them until W."""
    return ScheduleProblem(
        times=ScheduleTimes.uniform(2, StageTimes.split(*stage), 0.5),
        stage_to_rank=(0, 1),
        num_microbatches=2,
        activations=(StageActivations(2, 1),) * 2,
        memory_limit_bytes=(limit, limit),
        objective=objective,
    )


def exhaustive_best_s(problem: ScheduleProblem) -> float:
    """Try every order of every rank that keeps F before I before W and keeps to memory."""

    def rows_of(stage: int) -> list[tuple[Action, ...]]:
        actions = [Action(stage, kind, microbatch) for microbatch in range(2) for kind in (F, I, W)]
        return [
            row
            for row in permutations(actions)
            if all(row.index(actions[3 * mb]) < row.index(actions[3 * mb + 1]) for mb in range(2))
            and all(row.index(actions[3 * mb + 1]) < row.index(actions[3 * mb + 2]) for mb in range(2))
            and peak_activation_bytes(Schedule("row", 2, (0, 1), (row,)), problem.activations)[0]
            <= problem.memory_limit_bytes[stage]
        ]

    best_s = float("inf")
    for rows in product(rows_of(0), rows_of(1)):
        try:
            run = simulate(Schedule("tried", 2, (0, 1), rows), problem.times)
        except StuckSchedule:
            continue
        best_s = min(best_s, problem.objective.seconds(run))
    return best_s


@pytest.mark.parametrize("objective", list(Objective))
@pytest.mark.parametrize("limit", [2, 3, 4])
@pytest.mark.parametrize("stage", [(1, 1, 1), (3, 2, 1), (1, 2, 5)])
def test_bound_and_synthesis_enclose_the_best_of_all_schedules(
    stage: tuple[float, float, float], limit: int, objective: Objective
) -> None:
    """The bound is never above the exhaustive optimum, and synthesis finds that optimum."""
    problem = tiny(stage, limit, objective)
    best_s = exhaustive_best_s(problem)
    assert estimate_lower_bound_s(problem) <= best_s + 1e-12
    assert synthesise_schedule(problem).objective_s == pytest.approx(best_s, rel=1e-12)


def test_bound_without_memory_limit_or_bubble_is_the_work() -> None:
    """One rank never idles: m (F + I + W)."""
    problem = ScheduleProblem(
        times=ScheduleTimes.uniform(1, StageTimes.split(3, 2, 1)),
        stage_to_rank=(0,),
        num_microbatches=5,
        activations=(StageActivations(1, 1),),
        memory_limit_bytes=(1,),
    )
    assert estimate_lower_bound_s(problem) == 30


def test_a_cheaper_full_backward_lowers_the_bound() -> None:
    """Work counts the cheaper of B and I + W."""
    problem = ScheduleProblem(
        times=ScheduleTimes.uniform(1, StageTimes(3, 2, 2, 3)),
        stage_to_rank=(0,),
        num_microbatches=5,
        activations=(StageActivations(1, 1),),
        memory_limit_bytes=(1,),
    )
    assert estimate_lower_bound_s(problem) == 30
