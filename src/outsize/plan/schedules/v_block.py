"""Schedules made by repeating one building block on a V of stages (Qi et al. 2024, controllable memory)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from outsize.plan.actions import Action, ActionKind, Schedule
from outsize.plan.schedule_dependencies import Result, needed_results, produced_results
from outsize.plan.schedule_memory import peak_microbatches_in_flight
from outsize.plan.schedules.placement import v_shaped_placement

__all__ = ["BlockOffsets", "repeat_block"]

# When one rank runs, for micro-batch 0: F on the way down the V, F on the way up, I up, I down. One unit of
# time an action; micro-batch m does the same 6 m units later, and the two Ws take the units left over.
BlockOffsets = tuple[int, int, int, int]
_PERIOD = 6
_LOOK_AHEAD = 8  # actions; further ahead nothing was gained for up to 32 ranks

_CHANGE_IN_FLIGHT = {
    ActionKind.FORWARD: 1,
    ActionKind.INPUT_GRADIENT: 0,
    ActionKind.WEIGHT_GRADIENT: -1,
}


def repeat_block(name: str, num_microbatches: int, offsets: Sequence[BlockOffsets]) -> Schedule:
    """Return the block repeated for every micro-batch, then closed up where ranks would idle.

    The distance from F to W on a rank, divided by the period, is what that rank keeps in flight: the block
    alone decides the memory. Closing up never adds to the largest number in flight over ranks.
    """
    num_ranks = len(offsets)
    loose = Schedule(
        name=name,
        num_microbatches=num_microbatches,
        stage_to_rank=v_shaped_placement(num_ranks),
        actions=tuple(
            _rank_actions(rank, 2 * num_ranks - 1 - rank, num_microbatches, offsets[rank])
            for rank in range(num_ranks)
        ),
    )
    return _close_up(loose)


def _rank_actions(down: int, up: int, num_microbatches: int, offsets: BlockOffsets) -> tuple[Action, ...]:
    block = (
        (down, ActionKind.FORWARD),
        (up, ActionKind.FORWARD),
        (up, ActionKind.INPUT_GRADIENT),
        (down, ActionKind.INPUT_GRADIENT),
    )
    at_unit = {
        offset + _PERIOD * microbatch: Action(stage, kind, microbatch)
        for microbatch in range(num_microbatches)
        for offset, (stage, kind) in zip(offsets, block, strict=True)
    }
    actions: list[Action] = []
    held_back: deque[Action] = deque()
    for unit in range(max(at_unit) + 1):
        if unit in at_unit:
            action = at_unit[unit]
            actions.append(action)
            if action.kind is ActionKind.INPUT_GRADIENT:
                held_back.append(replace(action, kind=ActionKind.WEIGHT_GRADIENT))
        elif held_back:
            actions.append(held_back.popleft())
    return (*actions, *held_back)


def _close_up(schedule: Schedule) -> Schedule:
    """Let a rank that would idle for a unit run the next action of its list that can, memory permitting."""
    limit = max(peak_microbatches_in_flight(schedule))
    remaining = [list(actions) for actions in schedule.actions]
    chosen: list[list[Action]] = [[] for _ in remaining]
    in_flight = [0] * schedule.num_ranks
    done: set[Result] = set()
    while any(remaining):
        now: list[Action] = []
        for rank, actions in enumerate(remaining):
            index = _first_runnable(actions, in_flight[rank], limit, done, schedule.num_stages)
            if index is not None:
                action = actions.pop(index)
                in_flight[rank] += _CHANGE_IN_FLIGHT[action.kind]
                chosen[rank].append(action)
                now.append(action)
        done.update(result for action in now for result in produced_results(action))
    return replace(schedule, actions=tuple(tuple(actions) for actions in chosen))


def _first_runnable(
    actions: Sequence[Action], in_flight: int, limit: int, done: set[Result], num_stages: int
) -> int | None:
    """Return the index of the first action with all inputs that leaves room for those it overtakes."""
    peak = in_flight  # of the actions overtaken
    for index, action in enumerate(actions[:_LOOK_AHEAD]):
        fits = index == 0 or action.kind is not ActionKind.FORWARD or peak < limit
        if fits and all(result in done for result in needed_results(action, num_stages)):
            return index
        in_flight += _CHANGE_IN_FLIGHT[action.kind]
        peak = max(peak, in_flight)
    return None
