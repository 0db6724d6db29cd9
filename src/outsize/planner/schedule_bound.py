"""A time that no schedule can beat, from work, round trips and memory; it measures how good a schedule is."""

from __future__ import annotations

from math import inf

from outsize.planner.schedule_problem import Objective, ScheduleProblem

__all__ = ["estimate_lower_bound_s"]


def estimate_lower_bound_s(problem: ScheduleProblem) -> float:
    """Return seconds below which the problem's objective cannot be.

    For each rank, with L its bytes, in the time from its first F to its end:

    ```
    │◀── round trip of micro-batch 0 ──▶│                    │◀── round trip of the last one ──▶│
    F F F F ............................ I ... F I W F I W ... F ............................ I W
            only Fs, as many as fit in L                         only Is and Ws of what fits in L
    ```

    Whatever part of the two round trips cannot be filled is idle time on top of the rank's work. They
    overlap, and only the longer counts, where all micro-batches fit in L at once. Besides, once a rank has
    run its last input gradient, with all forwards and the Ws that did not fit in L behind it, that gradient
    still has to travel to the first stage. And what micro-batches keep, times how long they must keep it,
    cannot be more than L times the whole time.
    """
    ranks = [_Rank(problem, rank) for rank in range(problem.num_ranks)]
    to_first_stage_s = max(rank.until_last_gradient_s() + rank.gradient_to_first_stage_s() for rank in ranks)
    spans = [max(rank.work_s() + rank.idle_s(), rank.occupied_s()) for rank in ranks]
    if problem.objective is Objective.LONGEST_SPAN:
        return max(*spans, to_first_stage_s)
    ends = [rank.start_s() + span for rank, span in zip(ranks, spans, strict=True)]
    return max(*ends, to_first_stage_s)


class _Rank:
    """The quantities of one rank; every one errs on the side of the schedule."""

    def __init__(self, problem: ScheduleProblem, rank: int) -> None:
        self.problem = problem
        self.limit = problem.memory_limit_bytes[rank]
        self.stages = [stage for stage, holder in enumerate(problem.stage_to_rank) if holder == rank]
        self.first, self.last = self.stages[0], self.stages[-1]

    def start_s(self) -> float:
        """Earliest start of its first forward."""
        return self._forward_s(0, self.first) if self.first else 0.0

    def work_s(self) -> float:
        """Least time it computes."""
        return self.problem.num_microbatches * sum(
            self._forward(stage) + self._whole_backward(stage) for stage in self.stages
        )

    def idle_s(self) -> float:
        """Least time it idles between its start and its end."""
        out_and_back_s = self._out_and_back_s(self.last)
        first_trip_s = self._forward_s(self.first, self.last) + self._forward(self.last) + out_and_back_s
        last_trip_s = out_and_back_s + self._gradient_s(self.last, self.first)
        last_trip_s += self._whole_backward(self.first)
        at_start_s = max(0.0, first_trip_s - self._most_forward_s())
        at_end_s = max(0.0, last_trip_s - self._most_backward_s())
        if self._all_forward_bytes() > self.limit:
            return at_start_s + at_end_s
        return max(at_start_s, at_end_s)

    def occupied_s(self) -> float:
        """Least time from its start to its end for all micro-batches to find room, one after another."""
        byte_seconds = 0.0
        for stage in self.stages:
            times, kept = self.problem.times.stages[stage], self.problem.activations[stage]
            weights = kept.weight_gradient_bytes * times.weight_gradient_s
            until_backward = kept.forward_bytes * (times.forward_s + self._out_and_back_s(stage))
            byte_seconds += until_backward + min(
                kept.forward_bytes * times.input_gradient_s + weights,
                kept.forward_bytes * times.full_backward_s,
            )
        return self.problem.num_microbatches * byte_seconds / self.limit if self.limit else 0.0

    def until_last_gradient_s(self) -> float:
        """Least time from the first rank's start until this rank's last input gradient starts."""
        work_s = sum(self._forward(stage) + self._input(stage) for stage in self.stages)
        weights_s = sum(
            min(
                self.problem.times.stages[stage].weight_gradient_s,
                max(0.0, self._whole_backward(stage) - self._input(stage)),
            )
            for stage in self.stages
        )
        forced_s = self.problem.num_microbatches * weights_s - self._most_held_back_s()
        all_work_s = self.problem.num_microbatches * work_s - self._input(self.first)
        return self.start_s() + all_work_s + max(0.0, forced_s)

    def gradient_to_first_stage_s(self) -> float:
        """Least time from the start of an input gradient here until its last weight gradient is done."""
        return self._gradient_s(self.first, 0) + self._whole_backward(0)

    def _forward(self, stage: int) -> float:
        return self.problem.times.stages[stage].forward_s

    def _input(self, stage: int) -> float:
        times = self.problem.times.stages[stage]
        return min(times.input_gradient_s, times.full_backward_s)

    def _whole_backward(self, stage: int) -> float:
        times = self.problem.times.stages[stage]
        return min(times.input_gradient_s + times.weight_gradient_s, times.full_backward_s)

    def _transfer_s(self, stage: int) -> float:
        """Seconds from ``stage`` to the next, or back."""
        placement = self.problem.stage_to_rank
        same = placement[stage] == placement[stage + 1]
        return 0.0 if same else self.problem.times.between(stage, stage + 1)

    def _forward_s(self, begin: int, end: int) -> float:
        """Seconds from the start of F on ``begin`` until F can start on ``end``."""
        return sum(self._forward(stage) + self._transfer_s(stage) for stage in range(begin, end))

    def _gradient_s(self, begin: int, end: int) -> float:
        """Seconds from the start of I on ``begin`` until I can start on ``end``, which comes before it."""
        return sum(self._input(stage) + self._transfer_s(stage - 1) for stage in range(end + 1, begin + 1))

    def _out_and_back_s(self, stage: int) -> float:
        """Seconds from the end of F on a stage until I can start on it."""
        end = self.problem.num_stages - 1
        if stage == end:
            return 0.0
        forward_s = self._forward_s(stage, end) - self._forward(stage) + self._forward(end)
        return forward_s + self._gradient_s(end, stage)

    def _all_forward_bytes(self) -> int:
        activations = self.problem.activations
        return self.problem.num_microbatches * sum(activations[stage].forward_bytes for stage in self.stages)

    def _most_forward_s(self) -> float:
        """Most seconds of forwards whose activations fit at once."""
        return self._most_s(
            [(self._forward(s), self.problem.activations[s].forward_bytes) for s in self.stages]
        )

    def _most_held_back_s(self) -> float:
        """Most seconds of weight gradients whose inputs fit at once."""
        return self._most_s([self._weight_item(stage) for stage in self.stages])

    def _most_backward_s(self) -> float:
        """Most seconds of backwards whose activations fit at once."""
        items = [self._weight_item(stage) for stage in self.stages]
        for stage in self.stages:
            times = self.problem.times.stages[stage]
            seconds = max(times.input_gradient_s + times.weight_gradient_s, times.full_backward_s)
            items.append((seconds, self.problem.activations[stage].forward_bytes))
        return self._most_s(items)

    def _weight_item(self, stage: int) -> tuple[float, int]:
        seconds = self.problem.times.stages[stage].weight_gradient_s
        return seconds, self.problem.activations[stage].weight_gradient_bytes

    def _most_s(self, items: list[tuple[float, int]]) -> float:
        """Most seconds of items (seconds, bytes) within the limit, each up to m times; fractions allowed.

        A single kind of item is counted in whole numbers, which is exact.
        """
        count = self.problem.num_microbatches
        if len(items) == 1:
            seconds, size = items[0]
            return seconds * (min(count, self.limit // size) if size else count)
        total_s, room = 0.0, float(self.limit)
        for seconds, size in sorted(items, key=lambda item: -item[0] / item[1] if item[1] else -inf):
            taken = min(float(count), room / size) if size else float(count)
            total_s += taken * seconds
            room -= taken * size
        return total_s
