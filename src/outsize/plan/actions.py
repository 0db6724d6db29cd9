"""Schedules as data: for each pipeline rank the list of actions it performs, in order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

__all__ = ["Action", "ActionKind", "Schedule"]


class ActionKind(StrEnum):
    """What a rank computes for one micro-batch on one stage (letters as in the Zero Bubble paper)."""

    FORWARD = "F"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    FULL_BACKWARD = "B"  # input and weight gradients in one go

    __hash__ = (
        str.__hash__
    )  # Enum's own is several times slower, and schedules are looked up by the ten thousand


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One computation: ``2F3`` is the forward of stage 2 on micro-batch 3."""

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Actions by rank; ``stage_to_rank[stage]`` tells who holds a stage (virtual stages share a rank)."""

    name: str
    num_microbatches: int
    stage_to_rank: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]  # one entry a rank

    @property
    def num_stages(self) -> int:
        """Number of stages, over all ranks."""
        return len(self.stage_to_rank)

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.actions)

    def of_first(self, num_microbatches: int) -> Schedule:
        """Return the schedule of the first micro-batches alone, each rank's actions in the same order."""
        kept = tuple(
            tuple(action for action in actions if action.microbatch < num_microbatches)
            for actions in self.actions
        )
        return replace(self, num_microbatches=num_microbatches, actions=kept)
