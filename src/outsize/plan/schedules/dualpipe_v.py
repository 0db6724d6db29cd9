"""DualPipeV (DeepSeek 2025): a V of stages, forwards of one way paired with backwards of the other."""

from __future__ import annotations

from outsize.plan.actions import Action, Schedule
from outsize.plan.schedules.placement import v_shaped_placement
from outsize.plan.schedules.rank_actions import RankActions

__all__ = ["generate_dualpipe_v"]


def generate_dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return DualPipeV's lists, for at least 2p micro-batches; at most 2p + 1 pairs on each rank.

    The forward and backward that the original overlaps stand side by side here, forward first.
    """
    return Schedule(
        name="dualpipe_v",
        num_microbatches=num_microbatches,
        stage_to_rank=v_shaped_placement(num_ranks),
        actions=tuple(_rank_actions(rank, num_ranks, num_microbatches) for rank in range(num_ranks)),
    )


def _rank_actions(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    down, up = rank, 2 * num_ranks - 1 - rank  # the stage on the way down the V, and on the way up
    num_after = num_ranks - 1 - rank
    actions = RankActions()
    for _ in range(2 * num_after):
        actions.forward(down)
    for _ in range(rank + 1):
        actions.forward(down)
        actions.forward(up)
    for _ in range(num_after):
        actions.input_gradient(up)
        actions.oldest_weight_gradient()
        actions.forward(up)
    for _ in range(num_microbatches - 2 * num_ranks + rank + 1):
        actions.forward(down)
        actions.backward(up)
        actions.forward(up)
        actions.backward(down)
    for _ in range(num_after):
        actions.backward(up)
        actions.forward(up)
        actions.backward(down)
    _cool_down(actions, rank, num_after, down, up)
    return actions.finish(num_microbatches)


def _cool_down(actions: RankActions, rank: int, num_after: int, down: int, up: int) -> None:
    """Add the last backwards: the first half in full, the others split so that gradients travel sooner."""
    num_full = rank + 1
    for index in range(2 * (rank + 1)):
        stage = down if index % 2 else up
        if index < num_full:
            actions.backward(stage)
        else:
            actions.input_gradient(stage)
    for _ in range(num_after):
        actions.oldest_weight_gradient()
        actions.input_gradient(down)
