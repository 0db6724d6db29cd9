"""Posts each receive well before it is needed, so that the transfer runs beside a computation.

torch puts a receive where its sender has sent, often just before the action that needs it:

    torch    R0 F0 R1 F1 R2 F2           the second transfer starts after F0
    here     R0 R1 F0 R2 F1 F2           it runs while F0 does

At most one more buffer for each stage and direction exists at a time. Only for backends that match receives
by tag and run them independently (gloo): others run what is posted in order, and two ranks would wait for
each other for ever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch.distributed.pipelining.schedules import _Action, _ComputationType

__all__ = ["post_receives_early"]

_RECEIVED_BY = {
    _ComputationType.FORWARD: _ComputationType.RECV_F,
    _ComputationType.FULL_BACKWARD: _ComputationType.RECV_B,
    _ComputationType.BACKWARD_INPUT: _ComputationType.RECV_B,
}


def post_receives_early(actions: Sequence[_Action]) -> list[_Action]:
    """Move each receive of a stage to before the action that uses the one before it.

    A stage's first receive of a kind moves to before the computation that it stands behind.
    """
    computations = [at for at, action in enumerate(actions) if action.is_compute_op]
    previous_use: dict[tuple[int, _ComputationType], int] = {}
    moved_to: dict[int, list[_Action]] = defaultdict(list)
    posted_at = {(a.stage_index, a.computation_type, a.microbatch_index): at for at, a in enumerate(actions)}
    moved: set[int] = set()
    for at in computations:
        action = actions[at]
        kind = _RECEIVED_BY.get(action.computation_type)
        if kind is None:
            continue
        posted = posted_at.get((action.stage_index, kind, action.microbatch_index))
        if posted is None:
            continue
        first_place = max((before for before in computations if before < posted), default=0)
        place = previous_use.get((action.stage_index, kind), first_place)
        previous_use[action.stage_index, kind] = at
        if place < posted:
            moved_to[place].append(actions[posted])
            moved.add(posted)
    order: list[_Action] = []
    for at, action in enumerate(actions):
        order += moved_to[at]
        if at not in moved:
            order.append(action)
    return order
