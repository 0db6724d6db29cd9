"""ZB-V (Qi et al. 2023, section 6): two stages a rank in a V; no bubble where F = I = W, in 1F1B's memory."""

from __future__ import annotations

from outsize.plan.actions import Action, Schedule
from outsize.plan.schedules.placement import v_shaped_placement
from outsize.plan.schedules.rank_actions import RankActions

__all__ = ["generate_zb_v"]


def generate_zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return ZB-V's lists; at most 2p (stage, micro-batch) pairs on each rank, each half of a 1F1B stage.

    For fewer than 2p - 1 micro-batches the lists are those of 2p - 1 with the surplus left out.
    """
    return Schedule(
        name="zb_v",
        num_microbatches=num_microbatches,
        stage_to_rank=v_shaped_placement(num_ranks),
        actions=tuple(_rank_actions(rank, num_ranks, num_microbatches) for rank in range(num_ranks)),
    )


def _rank_actions(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    down, up = rank, 2 * num_ranks - 1 - rank  # the stage on the way down the V, and on the way up
    num_full = max(num_microbatches, 2 * num_ranks - 1)
    actions = RankActions()
    _warm_up(actions, rank, num_ranks, down, up)
    for step in range(num_full - num_ranks):
        if 2 * num_ranks - 1 - rank + step < num_full:
            actions.forward(down)
        for stage in (down, up):
            if stage == up:
                actions.forward(up)
            actions.input_gradient(stage)
            actions.weight_gradient(stage)
    for _ in range(rank):
        actions.input_gradient(down)
        actions.input_gradient(up)
    for _ in range(num_ranks - rank):
        actions.input_gradient(down)
        actions.weight_gradient(down)
    return actions.finish(num_microbatches)


def _warm_up(actions: RankActions, rank: int, num_ranks: int, down: int, up: int) -> None:
    for _ in range(2 * (num_ranks - rank) - 1):
        actions.forward(down)
    for _ in range(rank):
        actions.forward(up)
        actions.forward(down)
    for _ in range(num_ranks - rank):
        actions.forward(up)
        actions.input_gradient(up)
        actions.weight_gradient(up)
