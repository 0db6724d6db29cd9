"""The simulator against formulas, published bubble rates and an independent fixed-point oracle."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.plan.actions import Action, ActionKind, Schedule
from outsize.plan.schedule_memory import StageActivations
from outsize.plan.schedule_simulation import ScheduleTimes, StageTimes, simulate
from outsize.plan.schedules import SCHEDULE_NAMES, legal_microbatch_counts, make_schedule

UNIT = StageTimes.split(1, 1, 1)

# Profiled times in ms of the Zero Bubble paper's models (F, I, W, transfer), as the authors' scheduler
# carries them in its settings; v is the number of layers each rank holds, their interleaving.
MODELS = {
    "1.5B": {
        "num_ranks": 8,
        "num_microbatches": 24,
        "stage": (18.522, 18.086, 9.337),
        "transfer": 0.601,
        "v": 3,
    },
    "28.3B": {
        "num_ranks": 32,
        "num_microbatches": 96,
        "stage": (10.419, 10.207, 7.715),
        "transfer": 0.408,
        "v": 2,
    },
}


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 3), (4, 8), (8, 24)])
def test_bubble_of_gpipe_and_1f1b(name: str, p: int, m: int) -> None:
    """With equal stages and free transfers it is (p - 1) / (m + p - 1)."""
    run = simulate(make_schedule(name, num_ranks=p, num_microbatches=m), ScheduleTimes.uniform(p, UNIT))
    assert run.bubble_rate == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "looped_bfs"])
@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 12), (8, 4, 16)])
def test_interleaving_divides_the_bubble_by_the_stages_on_a_rank(name: str, p: int, v: int, m: int) -> None:
    """With equal stages and m a multiple of p it is (p - 1) / (v m + p - 1)."""
    schedule = make_schedule(name, num_ranks=p, num_microbatches=m, num_virtual_stages=v)
    run = simulate(schedule, ScheduleTimes.uniform(p * v, UNIT))
    assert run.bubble_rate == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (5, 15), (8, 24)])
@pytest.mark.parametrize("stage", [(1, 1, 1), (5, 5, 3), (4, 5, 4)])
def test_zb_h1_bubble_is_the_papers(p: int, m: int, stage: tuple[float, float, float]) -> None:
    """Qi et al. 2023, table 2: a rank idles (p - 1) (F + I - W)."""
    forward_s, input_s, weight_s = stage
    run = simulate(
        make_schedule("zb_h1", num_ranks=p, num_microbatches=m),
        ScheduleTimes.uniform(p, StageTimes.split(*stage)),
    )
    bubble_s = (p - 1) * (forward_s + input_s - weight_s)
    assert run.longest_span_s == pytest.approx(m * sum(stage) + bubble_s, rel=1e-12)


@pytest.mark.parametrize("name", ["zb_h2", "zb_v"])
@pytest.mark.parametrize(("p", "m"), [(2, 3), (2, 8), (4, 7), (4, 8), (5, 16), (8, 15), (8, 40)])
def test_zero_bubble_schedules_have_none_between_a_ranks_start_and_end(name: str, p: int, m: int) -> None:
    """Where F = I = W and m >= 2p - 1, no rank idles once it has started."""
    schedule = make_schedule(name, num_ranks=p, num_microbatches=m)
    run = simulate(schedule, ScheduleTimes.uniform(schedule.num_stages, UNIT))
    assert run.longest_span_s == 3 * m * schedule.num_stages / p
    assert run.span_bubble_rate == 0


@pytest.mark.parametrize("p", [4, 8, 16])
def test_controllable_memory_schedules_idle_less_than_1f1b(p: int) -> None:
    """V-Half and V-Min need a fraction of 1F1B's memory and still have at most 0.7 of its bubble."""
    bubble_s = {}
    for name in ("1f1b", "v_half", "v_min"):
        schedule = make_schedule(name, num_ranks=p, num_microbatches=4 * p)
        stage_s = p / schedule.num_stages
        times = ScheduleTimes.uniform(schedule.num_stages, StageTimes.split(stage_s, stage_s, stage_s))
        bubble_s[name] = simulate(schedule, times).longest_span_s - 3 * 4 * p
    assert bubble_s["v_half"] <= 0.6 * bubble_s["1f1b"]
    assert bubble_s["v_min"] <= 0.7 * bubble_s["1f1b"]


@pytest.mark.parametrize(
    ("model", "name", "published", "tolerance"),
    [
        ("1.5B", "1f1b", 0.243, 0.0005),
        ("1.5B", "zb_h1", 0.159, 0.0005),
        ("1.5B", "zb_h2", 0.108, 0.0005),
        ("28.3B", "1f1b", 0.265, 0.0005),
        ("28.3B", "zb_h1", 0.142, 0.0005),
        ("28.3B", "zb_h2", 0.064, 0.0005),
        # The authors' interleaved stages are not all alike (embedding, output layer); ours are.
        ("1.5B", "interleaved_1f1b", 0.106, 0.004),
        ("28.3B", "interleaved_1f1b", 0.149, 0.004),
    ],
)
def test_bubble_rates_of_the_zero_bubble_paper(
    model: str, name: str, published: float, tolerance: float
) -> None:
    """Table 5 from the profiled times; its ZB-1p column is what ZB-H1 gives with these times."""
    setting = MODELS[model]
    num_ranks = setting["num_ranks"]
    v = setting["v"] if name == "interleaved_1f1b" else 1
    schedule = make_schedule(
        name, num_ranks=num_ranks, num_microbatches=setting["num_microbatches"], num_virtual_stages=v
    )
    stage = StageTimes.split(*(seconds / v for seconds in setting["stage"]))
    run = simulate(schedule, ScheduleTimes.uniform(num_ranks * v, stage, setting["transfer"]))
    assert run.span_bubble_rate == pytest.approx(published, abs=tolerance)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_times_are_those_of_an_independent_fixed_point(data: st.DataObject) -> None:
    """For random unequal times the simulator gives the least solution of 'start after all you need'."""
    name = data.draw(st.sampled_from(SCHEDULE_NAMES))
    num_ranks = data.draw(st.integers(1, 4))
    counts = legal_microbatch_counts(name, num_ranks=num_ranks, near=data.draw(st.integers(1, 9)))
    schedule = make_schedule(name, num_ranks=num_ranks, num_microbatches=counts[0])
    seconds = st.integers(1, 9).map(float)
    stages = tuple(StageTimes(*(data.draw(seconds) for _ in range(4))) for _ in range(schedule.num_stages))
    transfer_s = tuple(data.draw(seconds) for _ in range(schedule.num_stages - 1))
    run = simulate(schedule, ScheduleTimes(stages, transfer_s))
    simulated = {timed.action: timed.start_s for row in run.timeline for timed in row}
    assert simulated == _fixed_point(schedule, stages, transfer_s)


def _fixed_point(
    schedule: Schedule, stages: tuple[StageTimes, ...], transfer_s: tuple[float, ...]
) -> dict[Action, float]:
    start = {action: 0.0 for actions in schedule.actions for action in actions}

    def end(stage: int, kinds: str, microbatch: int) -> float:
        action = next(
            found for kind in kinds if (found := Action(stage, ActionKind(kind), microbatch)) in start
        )
        return start[action] + stages[stage].of(action.kind)

    def transfer(stage: int, other: int) -> float:
        same = schedule.stage_to_rank[stage] == schedule.stage_to_rank[other]
        return 0.0 if same else transfer_s[min(stage, other)]

    changed = True
    while changed:
        changed = False
        for actions in schedule.actions:
            free = 0.0
            for action in actions:
                stage, microbatch = action.stage, action.microbatch
                earliest = [free]
                if action.kind is ActionKind.FORWARD and stage > 0:
                    earliest.append(end(stage - 1, "F", microbatch) + transfer(stage, stage - 1))
                if action.kind in "IB":
                    earliest.append(end(stage, "F", microbatch))
                    if stage + 1 < schedule.num_stages:
                        earliest.append(end(stage + 1, "IB", microbatch) + transfer(stage, stage + 1))
                if action.kind is ActionKind.WEIGHT_GRADIENT:
                    earliest.append(end(stage, "I", microbatch))
                changed |= start[action] != max(earliest)
                start[action] = max(earliest)
                free = start[action] + stages[stage].of(action.kind)
    return start


def test_a_slow_stage_sets_the_pace() -> None:
    """By hand: stage 1 takes 3 + 6, so the step is 1 (first forward) + 4 x 9 + 2 (last backward)."""
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=4)
    times = ScheduleTimes((StageTimes.split(1, 1, 1), StageTimes.split(3, 3, 3)), (0.0,))
    assert simulate(schedule, times).makespan_s == 1 + 4 * 9 + 2


def test_a_transfer_delays_the_receiver_and_occupies_no_rank() -> None:
    """By hand, one micro-batch on two ranks: F, transfer, F, B, transfer, B."""
    schedule = make_schedule("gpipe", num_ranks=2, num_microbatches=1)
    run = simulate(schedule, ScheduleTimes.uniform(2, UNIT, transfer_s=0.25))
    assert run.makespan_s == 1 + 0.25 + 1 + 2 + 0.25 + 2
    assert run.busy_s(0) == run.busy_s(1) == 3


def test_stages_of_one_rank_need_no_transfer() -> None:
    """In a V, the fold between stages p - 1 and p is free: only the other boundaries delay."""
    schedule = make_schedule("zb_v", num_ranks=2, num_microbatches=1)
    slow_fold = ScheduleTimes((UNIT,) * 4, (0.0, 100.0, 0.0))
    assert simulate(schedule, slow_fold) == simulate(schedule, ScheduleTimes.uniform(4, UNIT))


def test_memory_limit_and_not_time_alone_ranks_schedules() -> None:
    """ZB-2p's setting is faster than ZB-H1 and keeps almost twice the bytes (row B201)."""
    activations = [StageActivations(10, 4)] * 4
    runs = {
        name: simulate(
            make_schedule(name, num_ranks=4, num_microbatches=12), ScheduleTimes.uniform(4, UNIT), activations
        )
        for name in ("zb_h1", "zb_h2")
    }
    assert runs["zb_h2"].longest_span_s < runs["zb_h1"].longest_span_s
    assert max(runs["zb_h1"].peak_activation_bytes) == 40
    assert max(runs["zb_h2"].peak_activation_bytes) == 70


def test_a_large_schedule_is_simulated_in_well_under_a_second() -> None:
    """32 ranks, 96 micro-batches, 64 stages: 18,432 actions."""
    schedule = make_schedule("zb_v", num_ranks=32, num_microbatches=96)
    begin_s = time.perf_counter()
    simulate(schedule, ScheduleTimes.uniform(64, UNIT))
    assert time.perf_counter() - begin_s < 1


def test_doubling_all_times_doubles_all_starts() -> None:
    """Time has no hidden scale."""
    schedule = make_schedule("v_half", num_ranks=3, num_microbatches=6)
    once = simulate(schedule, ScheduleTimes.uniform(6, StageTimes.split(3, 5, 2), 1))
    twice = simulate(schedule, ScheduleTimes.uniform(6, StageTimes.split(6, 10, 4), 2))
    doubled = tuple(
        tuple(replace(timed, start_s=2 * timed.start_s, end_s=2 * timed.end_s) for timed in row)
        for row in once.timeline
    )
    assert twice.timeline == doubled
