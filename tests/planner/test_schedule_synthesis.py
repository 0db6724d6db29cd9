"""Synthesis is never worse than a fixed schedule, keeps to memory, and meets or beats published rates."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.errors import DoesNotFitError
from outsize.plan.schedule_memory import StageActivations
from outsize.plan.schedule_simulation import ScheduleTimes, StageTimes, simulate
from outsize.plan.schedule_validation import validate_schedule
from outsize.plan.schedules.placement import looped_placement, v_shaped_placement
from outsize.planner.schedule_problem import Objective, ScheduleProblem
from outsize.planner.schedule_synthesis import fixed_schedules, synthesise_schedule

# Profiled times in ms of the Zero Bubble paper's models and their hidden size and heads (sequence 1024).
# Bytes of one micro-batch as in that paper: 34 h + 5 a s kept by F, 32 h of them until W.
MODELS = {
    "1.5B": {"p": 8, "m": 24, "stage": (18.522, 18.086, 9.337), "transfer": 0.601, "h": 2304, "a": 24},
    "28.3B": {"p": 32, "m": 96, "stage": (10.419, 10.207, 7.715), "transfer": 0.408, "h": 6144, "a": 48},
}


def published(model: str, memory: float, num_virtual: int = 1) -> ScheduleProblem:
    """Return the paper's setting with ``memory`` times what 1F1B keeps; virtual stages halve the stages."""
    setting = MODELS[model]
    num_ranks = setting["p"]
    kept = 34 * setting["h"] + 5 * setting["a"] * 1024
    num_stages = num_ranks * num_virtual
    return ScheduleProblem(
        times=ScheduleTimes.uniform(
            num_stages,
            StageTimes.split(*(seconds / num_virtual for seconds in setting["stage"])),
            setting["transfer"],
        ),
        stage_to_rank=looped_placement(num_ranks, 1) if num_virtual == 1 else v_shaped_placement(num_ranks),
        num_microbatches=setting["m"],
        activations=(StageActivations(kept // num_virtual, 32 * setting["h"] // num_virtual),) * num_stages,
        memory_limit_bytes=(int(memory * num_ranks * kept),) * num_ranks,
        objective=Objective.LONGEST_SPAN,
    )


def rate(model: str, seconds: float) -> float:
    """Return the paper's bubble rate."""
    return 1 - MODELS[model]["m"] * sum(MODELS[model]["stage"]) / seconds


@pytest.mark.parametrize(("model", "zb_1p"), [("1.5B", 0.159), ("28.3B", 0.142)])
def test_zb_1p_is_the_best_there_is_for_one_stage_a_rank(model: str, zb_1p: float) -> None:
    """In 1F1B's memory the published rate is met and equals the lower bound: nothing can beat it."""
    found = synthesise_schedule(published(model, 1))
    assert rate(model, found.objective_s) == pytest.approx(zb_1p, abs=0.0005)
    assert found.gap == pytest.approx(0, abs=1e-9)


def test_a_v_of_stages_beats_zb_1p_in_the_same_memory() -> None:
    """The same layers as two half stages a rank, in a V: less than half of ZB-1p's bubble."""
    found = synthesise_schedule(published("1.5B", 1, num_virtual=2))
    assert rate("1.5B", found.objective_s) < 0.159 / 2
    limits = published("1.5B", 1).memory_limit_bytes
    assert all(peak <= limit for peak, limit in zip(found.run.peak_activation_bytes, limits, strict=True))


def test_zb_2p_is_met_with_an_eighth_less_memory_and_beaten_by_a_v_with_a_quarter_less() -> None:
    """0.043 is proven best for one stage a rank and 24 micro-batches; two half stages have no such bound."""
    single = synthesise_schedule(published("1.5B", 1.75))
    assert rate("1.5B", single.objective_s) == pytest.approx(0.043, abs=0.0005)
    assert single.gap == pytest.approx(0, abs=1e-9)
    v_shaped = synthesise_schedule(published("1.5B", 1.5, num_virtual=2))
    assert rate("1.5B", v_shaped.objective_s) < 0.02


SECONDS = st.integers(1, 9).map(float)


@st.composite
def problems(draw: st.DrawFn) -> ScheduleProblem:
    num_ranks = draw(st.integers(1, 4))
    placement = draw(st.sampled_from(["single", "v", "looped"]))
    stage_to_rank = {
        "single": looped_placement(num_ranks, 1),
        "v": v_shaped_placement(num_ranks),
        "looped": looped_placement(num_ranks, 3),
    }[placement]
    num_stages = len(stage_to_rank)
    stages = tuple(
        StageTimes(forward, inputs, weights, max(forward, inputs + weights - saved))
        for forward, inputs, weights, saved in (
            (draw(SECONDS), draw(SECONDS), draw(SECONDS), draw(st.integers(0, 1))) for _ in range(num_stages)
        )
    )
    activations = tuple(
        StageActivations(size, draw(st.integers(0, size)))
        for size in (draw(st.integers(1, 5)) for _ in range(num_stages))
    )
    least = [0] * num_ranks
    for stage, rank in enumerate(stage_to_rank):
        least[rank] += activations[stage].forward_bytes
    return ScheduleProblem(
        times=ScheduleTimes(stages, tuple(draw(SECONDS) for _ in range(num_stages - 1))),
        stage_to_rank=stage_to_rank,
        num_microbatches=draw(st.integers(1, 6)),
        activations=activations,
        memory_limit_bytes=tuple(size + draw(st.integers(0, 20)) for size in least),
        objective=draw(st.sampled_from(Objective)),
    )


@settings(max_examples=25, deadline=None)
@given(problems())
def test_synthesis_is_between_the_bound_and_the_best_fixed_schedule(problem: ScheduleProblem) -> None:
    """For random unequal stages, bytes, limits and placements: valid, within memory, never worse, never
    faster than the lower bound."""
    found = synthesise_schedule(problem)
    validate_schedule(found.schedule)
    again = simulate(found.schedule, problem.times, problem.activations)
    assert problem.objective.seconds(again) == pytest.approx(found.objective_s, rel=1e-12)
    assert all(
        peak <= limit
        for peak, limit in zip(again.peak_activation_bytes, problem.memory_limit_bytes, strict=True)
    )
    assert found.objective_s >= found.lower_bound_s * (1 - 1e-12)
    for schedule in fixed_schedules(problem):
        fixed = simulate(schedule, problem.times, problem.activations)
        fits = all(
            peak <= limit
            for peak, limit in zip(fixed.peak_activation_bytes, problem.memory_limit_bytes, strict=True)
        )
        if fits:
            assert found.objective_s <= problem.objective.seconds(fixed) * (1 + 1e-12)


def test_the_same_problem_gives_the_same_schedule() -> None:
    """Every rank can synthesise for itself: nothing is drawn at random."""
    problem = published("1.5B", 1.25)
    assert synthesise_schedule(problem).schedule == synthesise_schedule(problem).schedule


def test_full_backwards_are_kept_where_splitting_costs_more_than_it_gives() -> None:
    """With two ranks and a split that costs half a backward, the best has full backwards (B)."""
    problem = ScheduleProblem(
        times=ScheduleTimes.uniform(2, StageTimes(1, 1.5, 1.5, 2)),
        stage_to_rank=(0, 1),
        num_microbatches=8,
        activations=(StageActivations(1, 1),) * 2,
        memory_limit_bytes=(4, 4),
    )
    found = synthesise_schedule(problem)
    split = replace(problem, times=ScheduleTimes.uniform(2, StageTimes.split(1, 1, 1)))
    assert "B" in {action.kind for actions in found.schedule.actions for action in actions}
    assert "B" not in {
        action.kind for actions in synthesise_schedule(split).schedule.actions for action in actions
    }


def test_a_rank_too_small_for_one_microbatch_is_named() -> None:
    """No schedule exists, and the message has both numbers."""
    problem = replace(published("1.5B", 1), memory_limit_bytes=(2**30,) * 7 + (1000,))
    with pytest.raises(DoesNotFitError, match="Rank 7 cannot hold"):
        synthesise_schedule(problem)
