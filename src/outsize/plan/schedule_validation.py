"""Says whether a schedule can run, and if not, which action stops it and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from outsize.errors import PlanError
from outsize.plan.actions import Action, ActionKind, Schedule
from outsize.plan.schedule_dependencies import Result, StuckSchedule, runnable_order
from outsize.plan.schedule_memory import peak_microbatches_in_flight

__all__ = ["validate_schedule"]

_WORDS = {
    ActionKind.FORWARD: "the forward",
    ActionKind.INPUT_GRADIENT: "the input gradient",
    ActionKind.WEIGHT_GRADIENT: "the weight gradient",
    ActionKind.FULL_BACKWARD: "the backward",
}


def validate_schedule(schedule: Schedule, *, max_in_flight: Sequence[int] | None = None) -> None:
    """Check that a schedule is complete and ends, and keeps to ``max_in_flight`` micro-batches by rank.

    Every (stage, micro-batch) needs one F and either one B, or one I and one W, on the stage's rank.

    Raises:
        PlanError: names the first action that is wrong, missing, twice there, or can never run.
    """
    _check_placement(schedule)
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            _check_action(schedule, rank, action)
    _check_complete(schedule)
    _check_progress(schedule)
    if max_in_flight is not None:
        _check_in_flight(schedule, max_in_flight)


def _refuse(schedule: Schedule, why: str, attempt: str = "") -> PlanError:
    return PlanError(f"Schedule {schedule.name!r} cannot run.", why=why, attempt=attempt)


def _check_placement(schedule: Schedule) -> None:
    for stage, rank in enumerate(schedule.stage_to_rank):
        if not 0 <= rank < schedule.num_ranks:
            raise _refuse(
                schedule,
                f"stage {stage} is placed on rank {rank}, but there are ranks 0 to {schedule.num_ranks - 1}.",
            )
    idle = sorted(set(range(schedule.num_ranks)) - set(schedule.stage_to_rank))
    if idle:
        raise _refuse(schedule, f"rank {idle[0]} holds no stage.", "fewer ranks, or more stages.")
    if schedule.num_microbatches < 1:
        raise _refuse(schedule, f"it has {schedule.num_microbatches} micro-batches.", "1 or more.")


def _check_action(schedule: Schedule, rank: int, action: Action) -> None:
    if not 0 <= action.stage < schedule.num_stages:
        raise _refuse(
            schedule, f"rank {rank} has {action}, but the stages are 0 to {schedule.num_stages - 1}."
        )
    if not 0 <= action.microbatch < schedule.num_microbatches:
        raise _refuse(
            schedule,
            f"rank {rank} has {action}, but the micro-batches are 0 to {schedule.num_microbatches - 1}.",
        )
    owner = schedule.stage_to_rank[action.stage]
    if owner != rank:
        raise _refuse(schedule, f"rank {rank} has {action}, but rank {owner} holds stage {action.stage}.")


def _check_complete(schedule: Schedule) -> None:
    counts = Counter(action for actions in schedule.actions for action in actions)
    twice = next((action for actions in schedule.actions for action in actions if counts[action] > 1), None)
    if twice is not None:
        raise _refuse(schedule, f"{twice} is there {counts[twice]} times.", "once.")
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            kinds = [kind for kind in ActionKind if counts[Action(stage, kind, microbatch)]]
            problem = _problem_of_kinds({str(kind) for kind in kinds})
            if problem:
                raise _refuse(schedule, f"stage {stage} {problem} for micro-batch {microbatch}.")


def _problem_of_kinds(kinds: set[str]) -> str:
    if "F" not in kinds:
        return "has no forward (F)"
    if "B" in kinds:
        return "has both a full backward (B) and a split one (I, W)" if kinds & {"I", "W"} else ""
    if "I" not in kinds:
        return (
            "has a weight gradient (W) but no input gradient (I)" if "W" in kinds else "has no backward (B)"
        )
    return "" if "W" in kinds else "has an input gradient (I) but no weight gradient (W)"


def _check_progress(schedule: Schedule) -> None:
    try:
        for _ in runnable_order(schedule):
            pass
    except StuckSchedule as stuck:
        raise _refuse(
            schedule, _why_stuck(schedule, stuck), "move the awaited action before the others."
        ) from stuck


def _why_stuck(schedule: Schedule, stuck: StuckSchedule) -> str:
    """Follow the waits from the lowest blocked rank until they close a circle, and tell the circle."""
    rank = min(stuck.blocked)
    seen: list[int] = []
    while rank not in seen:
        seen.append(rank)
        rank = schedule.stage_to_rank[stuck.blocked[rank][1][0]]
    circle = seen[seen.index(rank) :]
    return "; ".join(_wait_in_words(schedule, blocked, *stuck.blocked[blocked]) for blocked in circle) + "."


def _wait_in_words(schedule: Schedule, rank: int, action: Action, missing: Result) -> str:
    stage, kind, microbatch = missing
    owner = schedule.stage_to_rank[stage]
    where = "which comes later on the same rank" if owner == rank else f"which rank {owner} has later"
    return (
        f"on rank {rank}, {action} can never run: it waits for {_WORDS[kind]} of stage {stage} on "
        f"micro-batch {microbatch}, {where}"
    )


def _check_in_flight(schedule: Schedule, max_in_flight: Sequence[int]) -> None:
    for rank, peak in enumerate(peak_microbatches_in_flight(schedule)):
        if peak > max_in_flight[rank]:
            raise _refuse(
                schedule,
                f"rank {rank} keeps {peak} micro-batches in flight, and has room for {max_in_flight[rank]}.",
                "fewer forwards before the first backward.",
            )
