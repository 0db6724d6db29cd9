"""Which stages of the program this process runs, and on which schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outsize.errors import PlanError
from outsize.model.cuts import cut_points, find_cut, parts_writes
from outsize.model.loss_shares import share_loss
from outsize.model.program import Program
from outsize.model.slice import Slice, slice_program
from outsize.plan.actions import Schedule
from outsize.plan.plan import Plan
from outsize.plan.schedule_files import find_schedule
from outsize.plan.schedule_validation import validate_schedule
from outsize.plan.stage_cuts import check_cuts
from outsize.runtime.tensor_parallel import lower

__all__ = ["StagePlacement", "place_stages"]


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity
class StagePlacement:
    """The slices of a program, in order, and the schedule that says which pipeline rank runs which.

    ``recording`` is the program as the model runs it; ``program`` is what this rank runs of it, on local
    shapes where operators are split.
    """

    recording: Program
    program: Program
    slices: Sequence[Slice]
    schedule: Schedule

    def slices_of(self, pipeline_rank: int) -> list[Slice]:
        """Return the slices that a pipeline rank runs, in stage order."""
        ranks = self.schedule.stage_to_rank
        return [part for part in self.slices if ranks[part.index] == pipeline_rank]


def place_stages(
    plan: Plan,
    recording: Program,
    tensor_parallel_rank: int,
    *,
    planned_for: Program | None = None,
    keeps_outputs: bool = False,
) -> StagePlacement:
    """Lower the recording where the plan splits operators, cut it where the plan says, make its schedule.

    ``planned_for`` and ``keeps_outputs`` are for recordings unlike the plan's: see :func:`lower`.

    Raises:
        PlanError: the plan's cuts are not cuts of this program, its schedule cannot run, or a stage
            recomputes a block that it does not hold.
    """
    schedule = find_schedule(
        plan.schedule.name,
        num_ranks=plan.mesh.pp,
        num_microbatches=plan.schedule.num_microbatches,
        num_virtual_stages=plan.schedule.num_virtual_stages,
    )
    if len(plan.stages) != schedule.num_stages:
        raise PlanError(
            f"The plan has {len(plan.stages)} stages, and its schedule {schedule.num_stages}.",
            why=f"{plan.schedule.name} places them on ranks {', '.join(map(str, schedule.stage_to_rank))}.",
            attempt=f"{schedule.num_stages} entries of `stages`, one for each.",
        )
    validate_schedule(schedule)
    if plan.sharding is not None:
        program = lower(
            recording,
            plan.sharding,
            rank=tensor_parallel_rank,
            planned_for=planned_for,
            keeps_outputs=keeps_outputs,
        )
    else:
        program = share_loss(recording)[0]
    slices = _cut(plan, program)
    if planned_for is None:  # other recordings need not call every block
        _check_recomputed(plan, slices)
    return StagePlacement(recording, program, slices, schedule)


def _check_recomputed(plan: Plan, slices: Sequence[Slice]) -> None:
    """Refuse to recompute what a stage does not hold, which would otherwise keep its activations unsaid."""
    for stage, part in zip(plan.stages, slices, strict=True):
        held = {*part.modules, *stage.blocks}
        unknown = [name for name in stage.recompute if name not in held]
        if unknown:
            raise PlanError(
                f"Stage {part.index} of the plan cannot recompute {', '.join(map(repr, unknown))}.",
                why=f"It holds no such block; its blocks are {', '.join(part.modules[:8]) or 'none'}"
                f"{', ...' if len(part.modules) > 8 else ''}.",
                attempt="names of blocks of the stage in its `recompute`.",
            )


def _cut(plan: Plan, program: Program) -> list[Slice]:
    labels = [stage.begins_at for stage in plan.stages[1:]]
    try:
        cuts = [find_cut(program, label) for label in labels]
        slices = slice_program(program, cuts)
    except PlanError:
        check_cuts(labels, [cut.label for cut in cut_points(program)])  # says which one, and what would do
        raise
    if parts_writes(program, cuts) or not all(part.modules or part.parameters for part in slices):
        check_cuts(labels, [cut.label for cut in cut_points(program)])
    return slices
