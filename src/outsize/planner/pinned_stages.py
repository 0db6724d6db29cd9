"""The user's own stage cuts: on how many ranks the stages lie, and which schedules run so many a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outsize.cost.layout import V_SHAPED
from outsize.errors import PlanError
from outsize.model.profile import ModelProfile
from outsize.plan.plan import Mesh
from outsize.planner.stages import pinned_bounds
from outsize.strategies.base import Space

__all__ = ["PinnedStages", "pin_stages"]

_SEVERAL_STAGES = ("interleaved_1f1b", "zb_v", "v_half")  # schedules to choose from for several a rank


@dataclass(frozen=True, slots=True)
class PinnedStages:
    """Stages between given blocks, the mesh they lie on, and the layouts that have so many a rank."""

    bounds: tuple[int, ...]
    mesh: Mesh
    space: Space

    def check_any(self, num_layouts: int, schedule: str | None) -> None:
        """Raise PlanError where no layout was found to choose from."""
        if num_layouts:
            return
        virtual, ranks = self.space.num_virtual_stages, self.mesh.pp
        raise PlanError(
            f"{schedule or 'No schedule'} cannot run {virtual} stages on each of {ranks} ranks.",
            why="V-shaped schedules have 2 a rank, interleaved 1F1B takes micro-batches in rounds of "
            f"{ranks}, others have 1 a rank.",
            attempt=f"a global batch and micro-batches that divide by {ranks}, --schedule interleaved_1f1b, "
            f"or {ranks - 1} cuts.",
        )


def pin_stages(
    profile: ModelProfile, cuts: Sequence[str], mesh: Mesh | None, space: Space, schedule: str | None
) -> PinnedStages:
    """Return the stages that begin at ``cuts``: one a rank, or several where mesh or schedule say so.

    Raises:
        PlanError: a label is no legal cut, or the stages do not divide over the ranks.
    """
    bounds = pinned_bounds(profile, cuts)
    num_stages = len(cuts) + 1
    mesh = mesh or Mesh(pp=_num_ranks(num_stages, schedule))
    virtual, left = divmod(num_stages, mesh.pp)
    if left or not virtual:
        raise PlanError(
            f"{len(cuts)} cuts make {num_stages} stages, the mesh has {mesh.pp}.",
            why="each rank holds the same number of stages.",
            attempt=f"{mesh.pp - 1} cuts, or {2 * mesh.pp - 1} for two stages a rank.",
        )
    allowed = space.schedules if virtual == 1 or schedule in space.schedules else _SEVERAL_STAGES
    most = max(space.max_virtual_stages, virtual)
    space = replace(space, schedules=allowed, max_virtual_stages=most, num_virtual_stages=virtual)
    return PinnedStages(bounds, mesh, space)


def _num_ranks(num_stages: int, schedule: str | None) -> int:
    """How many ranks the stages are for, where no mesh says it: two a rank in a V or interleaved."""
    has_two = schedule in V_SHAPED or schedule == "interleaved_1f1b"
    return num_stages // 2 if has_two and num_stages % 2 == 0 else num_stages
