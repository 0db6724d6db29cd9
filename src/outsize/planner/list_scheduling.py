"""Builds a schedule by going through time: a rank that is free takes the best action that it can start.

The choice follows a `Policy`; memory limits hold at every moment, and no choice can lead to a deadlock.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from math import inf

from outsize.plan.actions import Action, ActionKind, Schedule
from outsize.planner.schedule_problem import ScheduleProblem

__all__ = ["Policy", "build_schedule"]


@dataclass(frozen=True, slots=True)
class Policy:
    """How a free rank chooses; where it could go on with several stages, the one nearest to the end counts.

    ``forwards_first`` takes forwards before input gradients. ``fill_tolerance`` is how much of a weight
    gradient may stick out of a gap for it to be put there: 0 only if it fits, 1 always.
    A stage that ``n`` stages follow keeps at most ``1 + depth n`` micro-batches whose input gradient has not
    run: with depth 1 as many as 1F1B, with 2 as ZB-H2.
    """

    forwards_first: bool = False
    fill_tolerance: float = 1.0
    depth: float = 1.0


def build_schedule(problem: ScheduleProblem, policy: Policy) -> Schedule:
    """Return the schedule that the policy gives; deterministic, O(actions x stages of a rank).

    Micro-batches go through every stage in order. A forward starts only if its bytes fit and if the oldest
    micro-batches that are still on their way forward keep room for their later stages on this rank; so the
    oldest can always go on, and there is no deadlock.
    """
    return _Builder(problem, policy).run()


class _Builder:
    def __init__(self, problem: ScheduleProblem, policy: Policy) -> None:
        self.problem, self.policy = problem, policy
        num_ranks, num_stages, num_microbatches = (
            problem.num_ranks,
            problem.num_stages,
            problem.num_microbatches,
        )
        self.stages_of = [
            [stage for stage, holder in enumerate(problem.stage_to_rank) if holder == rank]
            for rank in range(num_ranks)
        ]
        self.forward_ready_s = [[inf] * num_microbatches for _ in range(num_stages)]
        self.forward_ready_s[0] = [0.0] * num_microbatches
        self.input_ready_s = [[inf] * num_microbatches for _ in range(num_stages)]
        self.forward_bytes = [activation.forward_bytes for activation in problem.activations]
        self.num_forwards = [0] * num_stages
        self.num_inputs = [0] * num_stages
        self.held_back: list[deque[tuple[int, int]]] = [deque() for _ in range(num_ranks)]
        self.free_s = [0.0] * num_ranks
        self.kept_bytes = [0] * num_ranks
        self.actions: list[list[Action]] = [[] for _ in range(num_ranks)]
        self.events = [(0.0, rank) for rank in range(num_ranks)]

    def run(self) -> Schedule:
        """Go from event to event: a rank becomes free, or something arrives at it."""
        while self.events:
            now_s, rank = heapq.heappop(self.events)
            if self.free_s[rank] > now_s:
                continue
            choice = self._choose(rank, now_s)
            if choice is not None:
                self._start(rank, now_s, *choice)
        return Schedule(
            name="synthesised",
            num_microbatches=self.problem.num_microbatches,
            stage_to_rank=self.problem.stage_to_rank,
            actions=tuple(tuple(actions) for actions in self.actions),
        )

    def _choose(self, rank: int, now_s: float) -> tuple[ActionKind, int, int] | None:
        """Return what to start now, or None to wait for the next event."""
        forward_s, forward, waits_for_room = self._next_forward(rank, now_s)
        gradient_s, gradient = self._next_input_gradient(rank, now_s)
        forward_is_ready, gradient_is_ready = forward_s <= now_s, gradient_s <= now_s
        if forward_is_ready and (self.policy.forwards_first or not gradient_is_ready):
            return ActionKind.FORWARD, forward, self.num_forwards[forward]
        if gradient_is_ready:
            return ActionKind.INPUT_GRADIENT, gradient, self.num_inputs[gradient]
        if not self.held_back[rank]:
            return None
        stage, microbatch = self.held_back[rank][0]
        gap_s = min(forward_s, gradient_s) - now_s
        least_s = self.problem.times.stages[stage].weight_gradient_s * (1 - self.policy.fill_tolerance)
        if waits_for_room or gap_s >= least_s:
            return ActionKind.WEIGHT_GRADIENT, stage, microbatch
        return None

    def _next_forward(self, rank: int, now_s: float) -> tuple[float, int, bool]:
        """Return when the next forward with room can start, its stage, and if one waits for room alone."""
        best_s, best, waits_for_room = inf, -1, False
        for stage in reversed(self.stages_of[rank]):
            microbatch = self.num_forwards[stage]
            if microbatch == self.problem.num_microbatches:
                continue
            ready_s = max(self.forward_ready_s[stage][microbatch], now_s)
            if ready_s < best_s:
                if self._has_room(rank, stage):
                    best_s, best = ready_s, stage
                else:
                    waits_for_room |= ready_s == now_s
        return best_s, best, waits_for_room

    def _next_input_gradient(self, rank: int, now_s: float) -> tuple[float, int]:
        """Return when the next input gradient can start, and its stage."""
        return min(
            (max(self.input_ready_s[stage][self.num_inputs[stage]], now_s), stage)
            if self.num_inputs[stage] < self.num_forwards[stage]
            else (inf, stage)
            for stage in self.stages_of[rank]
        )

    def _has_room(self, rank: int, stage: int) -> bool:
        """Say whether a forward's bytes fit, now and until the micro-batches under way are through."""
        stages = self.stages_of[rank]
        num_ahead = self.num_forwards[stage] - self.num_inputs[stage]
        if num_ahead >= 1 + self.policy.depth * (self.problem.num_stages - 1 - stage):
            return False
        limit = self.problem.memory_limit_bytes[rank]
        if self.kept_bytes[rank] + self.forward_bytes[stage] > limit:
            return False
        counts = [self.num_forwards[local] + (local == stage) for local in stages]
        oldest = counts[-1]  # the first micro-batch that is not through
        through_and_begun = sum(
            max(count - oldest, count == oldest) * self.forward_bytes[local]
            for local, count in zip(stages, counts, strict=True)
        )
        return through_and_begun <= limit or oldest == self.problem.num_microbatches

    def _start(self, rank: int, now_s: float, kind: ActionKind, stage: int, microbatch: int) -> None:
        self.actions[rank].append(Action(stage, kind, microbatch))
        end_s = now_s + self.problem.times.stages[stage].of(kind)
        self.free_s[rank] = end_s
        heapq.heappush(self.events, (end_s, rank))
        activation = self.problem.activations[stage]
        if kind is ActionKind.FORWARD:
            self.num_forwards[stage] += 1
            self.kept_bytes[rank] += activation.forward_bytes
            if stage + 1 < self.problem.num_stages:
                self._deliver(self.forward_ready_s, stage, stage + 1, microbatch, end_s)
            else:
                self.input_ready_s[stage][microbatch] = end_s
        elif kind is ActionKind.INPUT_GRADIENT:
            self.num_inputs[stage] += 1
            self.kept_bytes[rank] += activation.weight_gradient_bytes - activation.forward_bytes
            self.held_back[rank].append((stage, microbatch))
            if stage > 0:
                self._deliver(self.input_ready_s, stage, stage - 1, microbatch, end_s)
        else:
            self.held_back[rank].popleft()
            self.kept_bytes[rank] -= activation.weight_gradient_bytes

    def _deliver(
        self, ready_s: list[list[float]], stage: int, to: int, microbatch: int, end_s: float
    ) -> None:
        receiver = self.problem.stage_to_rank[to]
        if receiver != self.problem.stage_to_rank[stage]:
            end_s += self.problem.times.between(stage, to)
        ready_s[to][microbatch] = end_s
        heapq.heappush(self.events, (end_s, receiver))
