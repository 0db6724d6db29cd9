"""The pipeline's step as rectangles: the plan's own schedule, simulated with the predicted times."""

from __future__ import annotations

from dataclasses import dataclass

from outsize.errors import OutsizeError
from outsize.plan.actions import ActionKind
from outsize.plan.plan import Plan
from outsize.plan.schedule_simulation import ScheduleTimes, StageTimes, simulate
from outsize.plan.schedules import make_schedule

__all__ = ["Timeline", "draw_timeline"]

_MAX_RANKS, _MAX_MICROBATCHES = 16, 32
_ROW, _WIDTH = 26, 1000


@dataclass(frozen=True, slots=True)
class Rectangle:
    """One action: place and size in the drawing, its kind, and its name."""

    x: float
    y: float
    width: float
    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """The drawing of one step; ``is_cropped`` where only some ranks or micro-batches are drawn."""

    rectangles: tuple[Rectangle, ...]
    num_ranks: int
    num_microbatches: int
    row_height: int
    width: int
    height: int
    idle_share: float
    is_cropped: bool


def draw_timeline(plan: Plan) -> Timeline | None:
    """Return the drawing of the plan's pipeline; None without stages or for an unknown schedule.

    Stages are drawn as equal: forward one third of the compute, backward two.
    """
    pp, schedule = plan.mesh.pp, plan.schedule
    if pp == 1 or plan.prediction is None:
        return None
    ranks, microbatches = min(pp, _MAX_RANKS), min(schedule.num_microbatches, _MAX_MICROBATCHES)
    if schedule.num_virtual_stages > 1:
        microbatches -= microbatches % ranks
    try:
        actions = make_schedule(
            schedule.name,
            num_ranks=ranks,
            num_microbatches=max(microbatches, 1),
            num_virtual_stages=schedule.num_virtual_stages,
        )
    except OutsizeError:
        return None
    run = simulate(actions, ScheduleTimes.uniform(actions.num_stages, StageTimes.split(1.0, 1.0, 1.0)))
    end = max(action.end_s for rank in run.timeline for action in rank)
    busy = sum(action.end_s - action.start_s for rank in run.timeline for action in rank)
    rectangles = tuple(
        Rectangle(
            x=timed.start_s / end * _WIDTH,
            y=rank * _ROW,
            width=(timed.end_s - timed.start_s) / end * _WIDTH,
            kind="forward" if timed.action.kind is ActionKind.FORWARD else "backward",
            name=str(timed.action),
        )
        for rank, row in enumerate(run.timeline)
        for timed in row
    )
    return Timeline(
        rectangles=rectangles,
        num_ranks=ranks,
        num_microbatches=microbatches,
        row_height=_ROW,
        width=_WIDTH,
        height=ranks * _ROW,
        idle_share=1 - busy / (end * ranks),
        is_cropped=ranks < pp or microbatches < schedule.num_microbatches,
    )
