"""What an action needs before it can run, and an order in which a whole schedule can run.

```
F(s-1) ──transfer──▶ F(s) ──▶ I or B (s) ──▶ W(s)
                                 ▲
I or B (s+1) ────transfer────────┘            all of one micro-batch; stage s, s-1, s+1
```
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from outsize.plan.actions import Action, ActionKind, Schedule

__all__ = ["Result", "StuckSchedule", "needed_results", "produced_results", "runnable_order"]

# What an action leaves behind: (stage, kind, micro-batch). A full backward leaves both gradients, so that
# whoever waits for an input gradient need not know how it was computed.
Result = tuple[int, ActionKind, int]


class StuckSchedule(Exception):  # noqa: N818 - not an error for users; the validator words it
    """No rank can go on: ``blocked`` has, by rank, the action that cannot run and the result it lacks."""

    def __init__(self, blocked: dict[int, tuple[Action, Result]]) -> None:
        super().__init__(f"{len(blocked)} ranks cannot go on")
        self.blocked = blocked


def needed_results(action: Action, num_stages: int) -> tuple[Result, ...]:
    """Return the results ``action`` waits for, its own rank's first."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is ActionKind.FORWARD:
        return ((stage - 1, ActionKind.FORWARD, microbatch),) if stage > 0 else ()
    if action.kind is ActionKind.WEIGHT_GRADIENT:
        return ((stage, ActionKind.INPUT_GRADIENT, microbatch),)
    own_forward = (stage, ActionKind.FORWARD, microbatch)
    if stage == num_stages - 1:
        return (own_forward,)
    return (own_forward, (stage + 1, ActionKind.INPUT_GRADIENT, microbatch))


def produced_results(action: Action) -> tuple[Result, ...]:
    """Return the results ``action`` leaves behind."""
    if action.kind is ActionKind.FULL_BACKWARD:
        return (
            (action.stage, ActionKind.INPUT_GRADIENT, action.microbatch),
            (action.stage, ActionKind.WEIGHT_GRADIENT, action.microbatch),
        )
    return ((action.stage, action.kind, action.microbatch),)


def runnable_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Yield (rank, action) so that each comes after all it needs; O(actions).

    Raises:
        StuckSchedule: at the end, if some actions can never run.
    """
    position = [0] * schedule.num_ranks
    done: set[Result] = set()
    waiting: dict[Result, list[int]] = defaultdict(list)
    blocked: dict[int, tuple[Action, Result]] = {}
    ready = list(range(schedule.num_ranks))[::-1]
    while ready:
        rank = ready.pop()
        blocked.pop(rank, None)
        while position[rank] < len(schedule.actions[rank]):
            action = schedule.actions[rank][position[rank]]
            missing = next(
                (need for need in needed_results(action, schedule.num_stages) if need not in done), None
            )
            if missing is not None:
                waiting[missing].append(rank)
                blocked[rank] = (action, missing)
                break
            yield rank, action
            position[rank] += 1
            for result in produced_results(action):
                done.add(result)
                ready.extend(waiting.pop(result, ()))
    if blocked:
        raise StuckSchedule(blocked)
