"""When each action of a schedule starts and ends, given the time of every action and transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outsize.plan.actions import Action, ActionKind, Schedule
from outsize.plan.schedule_dependencies import Result, needed_results, produced_results, runnable_order
from outsize.plan.schedule_memory import (
    StageActivations,
    peak_activation_bytes,
    peak_microbatches_in_flight,
)

__all__ = ["ScheduleTimes", "SimulatedRun", "StageTimes", "TimedAction", "simulate"]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds one micro-batch takes on one stage, by kind of action.

    ``full_backward_s`` may be less than I and W together: splitting a backward costs something.
    """

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    full_backward_s: float

    @classmethod
    def split(cls, forward_s: float, input_gradient_s: float, weight_gradient_s: float) -> StageTimes:
        """Return times where a full backward takes exactly as long as its two parts."""
        return cls(forward_s, input_gradient_s, weight_gradient_s, input_gradient_s + weight_gradient_s)

    def of(self, kind: ActionKind) -> float:
        """Return the seconds of an action of this kind."""
        if kind is ActionKind.FORWARD:
            return self.forward_s
        if kind is ActionKind.INPUT_GRADIENT:
            return self.input_gradient_s
        return self.weight_gradient_s if kind is ActionKind.WEIGHT_GRADIENT else self.full_backward_s


@dataclass(frozen=True, slots=True)
class ScheduleTimes:
    """Times of all stages, and of the transfer over each boundary (``transfer_s[s]``: stage s and s + 1).

    A transfer delays the receiver and occupies neither rank; between stages of one rank it takes no time.
    """

    stages: tuple[StageTimes, ...]
    transfer_s: tuple[float, ...]

    @classmethod
    def uniform(cls, num_stages: int, stage: StageTimes, transfer_s: float = 0.0) -> ScheduleTimes:
        """Return times equal for all stages and boundaries."""
        return cls((stage,) * num_stages, (transfer_s,) * (num_stages - 1))

    def between(self, stage: int, other: int) -> float:
        """Return the seconds of a transfer between two neighbouring stages on different ranks."""
        return self.transfer_s[min(stage, other)]


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action with its start and end, in seconds from the start of the step."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """A schedule with times: what a timeline shows, what a plan predicts."""

    schedule: Schedule
    timeline: tuple[tuple[TimedAction, ...], ...]  # by rank
    peak_in_flight: tuple[int, ...]  # by rank, (stage, micro-batch) pairs
    peak_activation_bytes: tuple[int, ...] = field(default=())  # by rank; empty where no bytes were given

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end over all ranks: the step, if ranks wait at its end."""
        return max(self.end_s(rank) for rank in range(self.schedule.num_ranks))

    @property
    def longest_span_s(self) -> float:
        """Longest time from a rank's own first start to its own last end: the step, if no rank waits."""
        return max(self.span_s(rank) for rank in range(self.schedule.num_ranks))

    @property
    def bubble_rate(self) -> float:
        """Share of the makespan in which ranks idle, on average over ranks."""
        busy_s = sum(self.busy_s(rank) for rank in range(self.schedule.num_ranks))
        return 1 - busy_s / (self.schedule.num_ranks * self.makespan_s)

    @property
    def span_bubble_rate(self) -> float:
        """Share of the longest span in which its rank idles: the bubble rate of the Zero Bubble paper."""
        longest = max(range(self.schedule.num_ranks), key=self.span_s)
        return 1 - self.busy_s(longest) / self.span_s(longest)

    def span_s(self, rank: int) -> float:
        """Return the seconds from a rank's first start to its last end."""
        return self.end_s(rank) - self.timeline[rank][0].start_s

    def busy_s(self, rank: int) -> float:
        """Return the seconds a rank computes."""
        return sum(timed.end_s - timed.start_s for timed in self.timeline[rank])

    def end_s(self, rank: int) -> float:
        """Return when a rank's last action ends."""
        return self.timeline[rank][-1].end_s


def simulate(
    schedule: Schedule, times: ScheduleTimes, activations: Sequence[StageActivations] | None = None
) -> SimulatedRun:
    """Run a valid schedule on paper: each action starts once its rank is free and its inputs have come.

    Exact for the given times, in O(actions). With ``activations`` (one a stage) also the peak bytes.

    Raises:
        StuckSchedule: the schedule cannot run to its end; ``validate_schedule`` says why in words.
    """
    placement = schedule.stage_to_rank
    ready_s: dict[Result, float] = {}
    free_s = [0.0] * schedule.num_ranks
    timeline: list[list[TimedAction]] = [[] for _ in range(schedule.num_ranks)]
    for rank, action in runnable_order(schedule):
        start_s = free_s[rank]
        for result in needed_results(action, schedule.num_stages):
            elsewhere = placement[result[0]] != rank
            delay_s = times.between(action.stage, result[0]) if elsewhere else 0.0
            start_s = max(start_s, ready_s[result] + delay_s)
        free_s[rank] = end_s = start_s + times.stages[action.stage].of(action.kind)
        timeline[rank].append(TimedAction(action, start_s, end_s))
        for result in produced_results(action):
            ready_s[result] = end_s
    return SimulatedRun(
        schedule=schedule,
        timeline=tuple(tuple(actions) for actions in timeline),
        peak_in_flight=peak_microbatches_in_flight(schedule),
        peak_activation_bytes=() if activations is None else peak_activation_bytes(schedule, activations),
    )
