"""The validator names what is wrong with a schedule, down to the action."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.errors import PlanError
from outsize.plan.actions import Action, ActionKind, Schedule
from outsize.plan.schedule_validation import validate_schedule
from outsize.plan.schedules import make_schedule

F, I, W, B = ActionKind  # noqa: E741 - the letters of the papers


def schedule_of(
    *rows: str, stage_to_rank: tuple[int, ...] | None = None, num_microbatches: int = 2
) -> Schedule:
    """Build a schedule from rows like ``0F0 0B0``."""
    actions = tuple(
        tuple(Action(int(word[0]), ActionKind(word[1]), int(word[2:])) for word in row.split())
        for row in rows
    )
    return Schedule("by hand", num_microbatches, stage_to_rank or tuple(range(len(rows))), actions)


def test_a_circle_of_waits_is_told_action_by_action() -> None:
    """Rank 0 wants a gradient before it sends the forward that the gradient needs: both ranks are named."""
    schedule = schedule_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    with pytest.raises(PlanError) as refusal:
        validate_schedule(schedule)
    assert "on rank 0, 0B0 can never run: it waits for the input gradient of stage 1 on micro-batch 0" in str(
        refusal.value
    )
    assert "on rank 1, 1F1 can never run: it waits for the forward of stage 0 on micro-batch 1" in str(
        refusal.value
    )


def test_an_action_before_its_own_forward_can_never_run() -> None:
    """A backward ahead of its forward on the same rank is told as such."""
    with pytest.raises(PlanError, match=r"0B1 can never run.*comes later on the same rank"):
        validate_schedule(schedule_of("0F0 0B0 0B1 0F1"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["0F0 0B0 0F1"], r"stage 0 has no backward \(B\) for micro-batch 1"),
        (["0F0 0B0 0B1"], r"stage 0 has no forward \(F\) for micro-batch 1"),
        (["0F0 0B0 0F1 0I1"], r"input gradient \(I\) but no weight gradient \(W\) for micro-batch 1"),
        (["0F0 0B0 0F1 0W1"], r"weight gradient \(W\) but no input gradient \(I\) for micro-batch 1"),
        (["0F0 0B0 0F1 0B1 0W1"], "both a full backward"),
        (["0F0 0B0 0F1 0B1 0F1"], "0F1 is there 2 times"),
        (["0F0 0B0 0F1 0B1 0F2"], "0F2, but the micro-batches are 0 to 1"),
        (["0F0 0B0 0F1 0B1 3F1"], "3F1, but the stages are 0 to 0"),
        (["0F0 0F1 0B0 0B1 1F0", "1F1 1B0 1B1"], "rank 0 has 1F0, but rank 1 holds stage 1"),
    ],
)
def test_what_is_missing_double_or_misplaced_is_named(rows: list[str], message: str) -> None:
    """Each kind of incompleteness has a message with the action or the pair in it."""
    with pytest.raises(PlanError, match=message):
        validate_schedule(schedule_of(*rows))


def test_stages_on_ranks_that_do_not_exist_and_idle_ranks_are_refused() -> None:
    """Placement is checked before actions."""
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=2)
    with pytest.raises(PlanError, match="stage 1 is placed on rank 5"):
        validate_schedule(replace(schedule, stage_to_rank=(0, 5)))
    with pytest.raises(PlanError, match="rank 1 holds no stage"):
        validate_schedule(replace(schedule, stage_to_rank=(0, 0)))


def test_more_microbatches_in_flight_than_there_is_room_for_are_refused() -> None:
    """GPipe keeps all eight where 1F1B keeps two; the rank and both numbers are named."""
    room = (2, 2)
    validate_schedule(make_schedule("1f1b", num_ranks=2, num_microbatches=8), max_in_flight=room)
    with pytest.raises(PlanError, match="rank 0 keeps 8 micro-batches in flight, and has room for 2"):
        validate_schedule(make_schedule("gpipe", num_ranks=2, num_microbatches=8), max_in_flight=room)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_shuffled_schedule_is_accepted_exactly_if_brute_force_can_run_it(data: st.DataObject) -> None:
    """The validator agrees with an independent oracle that retries every rank until nothing moves."""
    schedule = make_schedule("zb_h1", num_ranks=2, num_microbatches=2)
    rows = tuple(tuple(data.draw(st.permutations(actions))) for actions in schedule.actions)
    shuffled = replace(schedule, actions=rows)
    if _brute_force_runs(shuffled):
        validate_schedule(shuffled)
    else:
        with pytest.raises(PlanError, match="can never run"):
            validate_schedule(shuffled)


def _brute_force_runs(schedule: Schedule) -> bool:
    rows = [list(actions) for actions in schedule.actions]
    done: set[str] = set()
    last = schedule.num_stages - 1

    def can_run(action: Action) -> bool:
        stage, microbatch = action.stage, action.microbatch
        if action.kind is F:
            return stage == 0 or f"{stage - 1}F{microbatch}" in done
        if action.kind is W:
            return f"{stage}I{microbatch}" in done
        return f"{stage}F{microbatch}" in done and (stage == last or f"{stage + 1}I{microbatch}" in done)

    moved = True
    while moved:
        moved = False
        for row in rows:
            if row and can_run(row[0]):
                done.add(str(row.pop(0)))
                moved = True
    return not any(rows)
