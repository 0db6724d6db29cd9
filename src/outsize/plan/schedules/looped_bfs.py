"""Looped breadth-first (Lamy-Poirier 2023): all micro-batches on a stage before the rank's next stage."""

from __future__ import annotations

from outsize.plan.actions import Action, ActionKind, Schedule
from outsize.plan.schedules.placement import looped_placement

__all__ = ["generate_looped_bfs"]


def generate_looped_bfs(num_ranks: int, num_virtual_stages: int, num_microbatches: int) -> Schedule:
    """Return the lists: every forward stage by stage, then every backward in the opposite order.

    All micro-batches of all stages are in flight, as in GPipe; the bubble is that of interleaved 1F1B,
    and a stage's parameters are needed in one stretch of forwards and one of backwards.
    """
    microbatches = range(num_microbatches)

    def rank_actions(rank: int) -> tuple[Action, ...]:
        stages = range(rank, num_ranks * num_virtual_stages, num_ranks)
        forwards = [Action(stage, ActionKind.FORWARD, mb) for stage in stages for mb in microbatches]
        backwards = [Action(action.stage, ActionKind.FULL_BACKWARD, action.microbatch) for action in forwards]
        return (*forwards, *reversed(backwards))

    return Schedule(
        name="looped_bfs",
        num_microbatches=num_microbatches,
        stage_to_rank=looped_placement(num_ranks, num_virtual_stages),
        actions=tuple(rank_actions(rank) for rank in range(num_ranks)),
    )
