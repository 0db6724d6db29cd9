"""Every schedule by name, for many sizes: complete, free of deadlock, refused where illegal, run by torch."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.errors import PlanError
from outsize.plan.actions import Action, ActionKind, Schedule
from outsize.plan.schedule_validation import validate_schedule
from outsize.plan.schedules import SCHEDULE_NAMES, legal_microbatch_counts, make_schedule

LOOPED = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble")
V_SHAPED = ("zb_v", "v_half", "v_min", "dualpipe_v")


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(SCHEDULE_NAMES))
    num_ranks = draw(st.integers(1, 9))
    wanted = draw(st.integers(1, 40))
    num_microbatches = draw(st.sampled_from(legal_microbatch_counts(name, num_ranks=num_ranks, near=wanted)))
    virtual = draw(st.integers(2, 5)) if name in LOOPED else None
    return make_schedule(
        name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_virtual_stages=virtual
    )


@settings(max_examples=300, deadline=None)
@given(schedules())
def test_every_stage_and_microbatch_is_computed_exactly_once(schedule: Schedule) -> None:
    """Each (stage, micro-batch) has one F, and one B or one I and one W after it, on the stage's rank."""
    counts = Counter(action for actions in schedule.actions for action in actions)
    assert set(counts.values()) == {1}
    for rank, actions in enumerate(schedule.actions):
        place = {action: index for index, action in enumerate(actions)}
        assert {schedule.stage_to_rank[action.stage] for action in actions} == {rank}
        for stage in {action.stage for action in actions}:
            for microbatch in range(schedule.num_microbatches):
                forward, inputs, weights, full = (
                    place.get(Action(stage, kind, microbatch)) for kind in ActionKind
                )
                assert forward is not None
                if full is None:
                    assert inputs is not None
                    assert weights is not None
                    assert forward < inputs < weights
                else:
                    assert inputs is weights is None
                    assert forward < full
    assert len(counts) == sum(len(actions) for actions in schedule.actions)


@settings(max_examples=300, deadline=None)
@given(schedules())
def test_every_schedule_runs_to_its_end(schedule: Schedule) -> None:
    """No generated schedule has actions that wait for each other in a circle."""
    validate_schedule(schedule)


@pytest.mark.parametrize("num_microbatches", [8, 12])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_torch_lowers_the_schedule_and_finds_no_deadlock(
    name: str, num_ranks: int, num_microbatches: int
) -> None:
    """torch's own validation, insertion of sends and receives, and simulation accept every schedule."""
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = make_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    compute = {
        rank: [
            torch_schedules._Action(
                action.stage, torch_schedules._ComputationType(str(action.kind)), action.microbatch
            )
            for action in actions
        ]
        for rank, actions in enumerate(schedule.actions)
    }
    placement = torch_schedules._validate_schedule(compute, num_ranks, schedule.num_stages, num_microbatches)
    assert placement == dict(enumerate(schedule.stage_to_rank))
    lowered = torch_schedules._add_send_recv(compute, placement.__getitem__, schedule.num_stages)
    torch_schedules._simulate_comms_compute(lowered, placement.__getitem__, schedule.num_stages)


@pytest.mark.parametrize("name", ["zb_v", "dualpipe_v"])
@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches"), [(1, 3), (2, 4), (3, 5), (3, 8), (4, 19), (6, 13)]
)
def test_v_shaped_lists_are_those_of_torch(name: str, num_ranks: int, num_microbatches: int) -> None:
    """ZB-V and DualPipeV give torch's order, but for the order of the weight gradients left to the end."""
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    if name == "dualpipe_v":
        num_microbatches = max(num_microbatches, 2 * num_ranks)
    schedule = make_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    torch_class = {
        "zb_v": torch_schedules.ScheduleZBVZeroBubble,
        "dualpipe_v": torch_schedules.ScheduleDualPipeV,
    }[name]
    generator = torch_class.__new__(torch_class)
    generator.pp_group_size, generator._n_microbatches = num_ranks, num_microbatches
    generator.num_stages = schedule.num_stages
    for rank, actions in enumerate(schedule.actions):
        theirs = [
            str(part)
            for action in generator._calculate_single_rank_operations(rank)
            if action is not None
            for part in (action.sub_actions or (action,))
        ]
        assert _with_sorted_tail([str(action) for action in actions]) == _with_sorted_tail(theirs)


def _with_sorted_tail(actions: list[str]) -> list[str]:
    end = len(actions)
    while "W" in actions[end - 1]:
        end -= 1
    return actions[:end] + sorted(actions[end:])


@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zero_bubble"])
def test_uneven_rounds_are_refused_with_the_nearest_legal_numbers(name: str) -> None:
    """Nine micro-batches on four ranks make two rounds of unequal size; eight and ten do not."""
    with pytest.raises(PlanError, match=r"9 micro-batches on 4 ranks[\s\S]*Try: 8 or 10 micro-batches"):
        make_schedule(name, num_ranks=4, num_microbatches=9)


def test_too_few_microbatches_for_dualpipe_v_are_refused() -> None:
    """DualPipeV needs 2p micro-batches; the refusal names the least number."""
    with pytest.raises(PlanError, match="Try: 8 micro-batches"):
        make_schedule("dualpipe_v", num_ranks=4, num_microbatches=3)


@pytest.mark.parametrize("name", V_SHAPED)
def test_a_v_has_exactly_two_stages_on_each_rank(name: str) -> None:
    """Three stages a rank are refused for V-shaped schedules, with the legal number of stages."""
    with pytest.raises(PlanError, match=r"2 on each rank, that is 8 stages on 4 ranks"):
        make_schedule(name, num_ranks=4, num_microbatches=8, num_virtual_stages=3)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_one_microbatch_runs_or_is_refused_with_a_number_that_runs(name: str) -> None:
    """Fewer micro-batches than stages never hang (row B148): they run, or the refusal names what does."""
    legal = legal_microbatch_counts(name, num_ranks=4, near=1)
    validate_schedule(make_schedule(name, num_ranks=4, num_microbatches=legal[0]))
    if legal != (1,):
        with pytest.raises(PlanError, match=f"{legal[0]} micro-batches"):
            make_schedule(name, num_ranks=4, num_microbatches=1)


def test_an_unknown_name_is_answered_with_all_names() -> None:
    """A misspelt schedule is refused and every name is listed."""
    with pytest.raises(PlanError, match=", ".join(SCHEDULE_NAMES)):
        make_schedule("1fb1", num_ranks=2, num_microbatches=2)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(0, 4), (2, 0), (2, -1)])
def test_no_ranks_or_microbatches_are_refused(num_ranks: int, num_microbatches: int) -> None:
    """Numbers below one are refused before any list is made."""
    with pytest.raises(PlanError, match="1 or more"):
        make_schedule("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches)


def _allows(name: str, num_ranks: int, num_microbatches: int) -> bool:
    """Whether a schedule has lists for a number of micro-batches, in other words than its own."""
    if name == "dualpipe_v":
        return num_microbatches >= 2 * num_ranks
    if name in {"interleaved_1f1b", "interleaved_zero_bubble"}:
        return num_microbatches < 2 * num_ranks or num_microbatches % (num_microbatches // num_ranks) == 0
    return True


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_any_number_of_microbatches_runs_or_is_refused_with_its_neighbours(name: str, num_ranks: int) -> None:
    """From 1 to 6p + 1: a refusal names the next legal numbers below and above; no legal one is refused."""
    legal = [count for count in range(1, 9 * num_ranks + 1) if _allows(name, num_ranks, count)]
    for count in range(1, 6 * num_ranks + 2):
        if count in legal:
            validate_schedule(make_schedule(name, num_ranks=num_ranks, num_microbatches=count))
            continue
        below = [str(number) for number in legal if number < count][-1:]
        above = str(next(number for number in legal if number > count))
        with pytest.raises(PlanError) as caught:
            make_schedule(name, num_ranks=num_ranks, num_microbatches=count)
        assert caught.value.attempt == f"{' or '.join([*below, above])} micro-batches."


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_any_number_of_virtual_stages_runs_or_is_refused_with_the_nearest(name: str) -> None:
    """0 to 5 stages on each of 3 ranks: looped ones take 2 and more, V-shaped ones 2, all others 1."""
    least = 2 if name in (*LOOPED, *V_SHAPED) else 1
    for virtual in range(6):
        if virtual == least or (virtual > least and name in LOOPED):
            schedule = make_schedule(name, num_ranks=3, num_microbatches=6, num_virtual_stages=virtual)
            validate_schedule(schedule)
            assert schedule.num_stages == 3 * virtual
            continue
        with pytest.raises(PlanError) as caught:
            make_schedule(name, num_ranks=3, num_microbatches=6, num_virtual_stages=virtual)
        assert caught.value.attempt.startswith(f"{least} on each rank, that is {3 * least} stages on 3 ranks")
