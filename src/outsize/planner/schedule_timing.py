"""The simulator once more, on whole numbers, for searches that time thousands of schedules of one problem."""

from __future__ import annotations

from collections.abc import Sequence

from outsize.plan.actions import Action, ActionKind, Schedule
from outsize.planner.schedule_problem import Objective, ScheduleProblem

__all__ = ["Rows", "ScheduleTiming"]

_KINDS = tuple(ActionKind)
_NUMBER_OF = {kind: number for number, kind in enumerate(_KINDS)}

Rows = list[list[int]]  # by rank, actions as numbers


class ScheduleTiming:
    """Times lists of actions, each written as ``4 (stage m + micro-batch) + kind``.

    A (stage, micro-batch) pair has two results, F's at ``2 pair`` and the input gradient's at the next
    number; of the two last numbers one stands for "nothing needed", there from the start, and one for the
    result of W, which nobody needs.
    """

    def __init__(self, problem: ScheduleProblem) -> None:
        self.problem = problem
        num_pairs = problem.num_stages * problem.num_microbatches
        self._nothing = 2 * num_pairs
        self.seconds: list[float] = []
        self.change_bytes: list[int] = []
        self._own_need: list[int] = []  # on the action's own stage, ready as soon as it is there
        self._far_need: list[int] = []  # on the neighbouring stage
        self._far_delay_s: list[float] = []
        self._result: list[int] = []
        for pair in range(num_pairs):
            for kind in _KINDS:
                self._describe(pair, kind)

    def encode(self, schedule: Schedule) -> Rows:
        """Return the schedule's lists as numbers."""
        count = self.problem.num_microbatches
        return [
            [4 * (action.stage * count + action.microbatch) + _NUMBER_OF[action.kind] for action in actions]
            for actions in schedule.actions
        ]

    def decode(self, rows: Rows, name: str) -> Schedule:
        """Return the schedule that numbers stand for."""
        count = self.problem.num_microbatches
        return Schedule(
            name=name,
            num_microbatches=count,
            stage_to_rank=self.problem.stage_to_rank,
            actions=tuple(
                tuple(Action(number // 4 // count, _KINDS[number % 4], number // 4 % count) for number in row)
                for row in rows
            ),
        )

    def start_times(self, rows: Rows) -> list[float] | None:
        """Return when each action starts (by its number), or None if some can never run."""
        ready_s = [*[-1.0] * self._nothing, 0.0, 0.0]
        own_need, far_need, far_delay_s = self._own_need, self._far_need, self._far_delay_s
        seconds, results = self.seconds, self._result
        position, free_s = [0] * len(rows), [0.0] * len(rows)
        waiting: dict[int, int] = {}
        starts = [0.0] * len(seconds)
        runnable = list(range(len(rows)))
        while runnable:
            rank = runnable.pop()
            now_s = free_s[rank]
            for index, action in enumerate(rows[rank][position[rank] :], position[rank]):
                own_s, far_s = ready_s[own_need[action]], ready_s[far_need[action]]
                if own_s < 0 or far_s < 0:
                    waiting[own_need[action] if own_s < 0 else far_need[action]] = rank
                    position[rank], free_s[rank] = index, now_s
                    break
                far_s += far_delay_s[action]
                if far_s > now_s:  # noqa: PLR1730 - max() would make a fifth more of the whole
                    now_s = far_s
                if own_s > now_s:  # noqa: PLR1730
                    now_s = own_s
                starts[action] = now_s
                now_s += seconds[action]
                ready_s[results[action]] = now_s
                if results[action] in waiting:
                    runnable.append(waiting.pop(results[action]))
        return None if waiting else starts

    def value(self, rows: Rows, starts: Sequence[float]) -> tuple[float, float]:
        """Return what to compare schedules by: the objective, and where that is equal its sum over ranks.

        The second makes it count that one of several ranks is relieved which are all critical.
        """
        ends = [starts[row[-1]] + self.seconds[row[-1]] for row in rows]
        if self.problem.objective is Objective.LONGEST_SPAN:
            ends = [end - starts[row[0]] for end, row in zip(ends, rows, strict=True)]
        return max(ends), sum(ends)

    def awaited(self, action: int) -> Sequence[int]:
        """Return the actions on the neighbouring stage of which this one waits for one."""
        stride = 4 * self.problem.num_microbatches
        kind = _KINDS[action % 4]
        if kind is ActionKind.FORWARD:
            return (action - stride,)
        pair = action - action % 4 + stride
        return pair + _NUMBER_OF[ActionKind.INPUT_GRADIENT], pair + _NUMBER_OF[ActionKind.FULL_BACKWARD]

    def peak_bytes(self, row: Sequence[int]) -> int:
        """Return the most activation bytes that one rank's list keeps."""
        kept = peak = 0
        for action in row:
            kept += self.change_bytes[action]
            peak = max(peak, kept)
        return peak

    def _describe(self, pair: int, kind: ActionKind) -> None:
        problem = self.problem
        stage, count = pair // problem.num_microbatches, problem.num_microbatches
        own, far, neighbour = self._nothing, self._nothing, stage
        if kind is ActionKind.FORWARD:
            if stage > 0:
                far, neighbour = 2 * (pair - count), stage - 1
        elif kind is ActionKind.WEIGHT_GRADIENT:
            own = 2 * pair + 1
        else:
            own = 2 * pair
            if stage + 1 < problem.num_stages:
                far, neighbour = 2 * (pair + count) + 1, stage + 1
        same = problem.stage_to_rank[stage] == problem.stage_to_rank[neighbour]
        self._own_need.append(own)
        self._far_need.append(far)
        self._far_delay_s.append(0.0 if same else problem.times.between(stage, neighbour))
        self._result.append(
            {ActionKind.FORWARD: 2 * pair, ActionKind.WEIGHT_GRADIENT: self._nothing + 1}.get(
                kind, 2 * pair + 1
            )
        )
        self.seconds.append(problem.times.stages[stage].of(kind))
        activation = problem.activations[stage]
        self.change_bytes.append(
            {
                ActionKind.FORWARD: activation.forward_bytes,
                ActionKind.INPUT_GRADIENT: activation.weight_gradient_bytes - activation.forward_bytes,
                ActionKind.WEIGHT_GRADIENT: -activation.weight_gradient_bytes,
                ActionKind.FULL_BACKWARD: -activation.forward_bytes,
            }[kind]
        )
