"""What a schedule is sought for: stages on ranks, their times and bytes, and each rank's memory."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from outsize.plan.schedule_memory import StageActivations
from outsize.plan.schedule_simulation import ScheduleTimes, SimulatedRun

__all__ = ["Objective", "ScheduleProblem"]


class Objective(StrEnum):
    """Which time to make small.

    ``makespan``: from the first start to the last end over all ranks, where ranks wait for each other after
    a step (clipping by a global norm does). ``longest_span``: the longest time from a rank's own start to
    its own end, where they do not; steps then overlap, and the Zero Bubble paper counts so.
    """

    MAKESPAN = "makespan"
    LONGEST_SPAN = "longest_span"

    def seconds(self, run: SimulatedRun) -> float:
        """Return this time of a simulated run."""
        return run.makespan_s if self is Objective.MAKESPAN else run.longest_span_s


@dataclass(frozen=True, slots=True)
class ScheduleProblem:
    """Times and bytes of one micro-batch on each stage, and what each rank may keep of activations."""

    times: ScheduleTimes
    stage_to_rank: tuple[int, ...]
    num_microbatches: int
    activations: tuple[StageActivations, ...]  # one a stage
    memory_limit_bytes: tuple[int, ...]  # one a rank
    objective: Objective = Objective.MAKESPAN

    @property
    def num_stages(self) -> int:
        """Number of stages, over all ranks."""
        return len(self.stage_to_rank)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.memory_limit_bytes)
