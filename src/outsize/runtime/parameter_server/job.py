"""A parameter-server training job as plain data, for every role, and what cannot be one."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from outsize.errors import PlanError
from outsize.plan.files import plan_from_json, plan_to_json
from outsize.plan.plan import Mesh, Plan
from outsize.runtime.parameter_server.updates import Updates
from outsize.runtime.runnable import check_runnable

__all__ = ["ParameterServerJob"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterServerJob:
    """Everything a role needs to know. The plan's mesh counts workers; servers are beside them."""

    model: str  # model argument
    plan: Plan
    run_directory: str  # exists; metrics, logs and checkpoints go there
    num_steps: int  # of the global batch, in all
    updates: Updates
    num_servers: int = 1
    partitioner: str | None = None
    row_wise: str | None = None  # names of tables to pull and push by rows, with wildcards, comma-separated
    sequence: int | None = None
    data: str | None = None
    evaluate_every: int = 0  # steps; 0: before the first and after the last alone
    num_validation_batches: int = 0
    write_checkpoint: bool = True
    checkpoint_every: int = 0  # steps; 0: after the last alone
    checkpoint: str | None = None  # to go on from
    with_evaluator: bool = False
    show_progress: bool = True
    is_on_one_machine: bool = True  # with all its processes

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self.plan.mesh.dp

    @property
    def num_parts(self) -> int:
        """Number of pushes that share one global batch."""
        return self.updates.num_parts(self.num_workers)

    @property
    def plan_of_parts(self) -> Plan:
        """The plan by which a global batch is cut into parts, each into micro-batches of the plan's size."""
        wanted = -(-self.plan.schedule.num_microbatches * self.num_workers // self.num_parts)
        most = max(1, self.plan.global_batch // self.num_parts)
        schedule = replace(self.plan.schedule, num_microbatches=min(wanted, most))
        mesh = Mesh(dp=self.num_parts)
        return replace(self.plan, mesh=mesh, schedule=schedule, state_sharding="none")

    def to_json(self) -> dict[str, Any]:
        """Return plain data from which ``from_json`` rebuilds the job."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        updates = [self.updates.mode, self.updates.amount]
        return values | {"plan": plan_to_json(self.plan), "updates": updates}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ParameterServerJob:
        """Rebuild what ``to_json`` wrote."""
        rebuilt = {"plan": plan_from_json(data["plan"]), "updates": Updates(*data["updates"])}
        return cls(**(data | rebuilt))

    def check(self) -> None:
        """Refuse numbers and plans that cannot be trained so, before any process starts.

        Raises:
            PlanError: with what does not go together.
        """
        if self.plan.mesh.world_size != self.plan.mesh.dp or self.plan.sharding is not None:
            raise PlanError(
                "Workers of parameter servers compute whole passes.",
                why=f"The plan's mesh is {self.plan.mesh.degrees}.",
                attempt="a mesh of dp alone, such as --mesh dp=4.",
            )
        check_runnable(replace(self.plan, state_sharding="none"))
        if self.num_servers < 1:
            raise PlanError(f"{self.num_servers} servers hold nothing.", attempt="--servers 1, or more.")
        self.updates.check(self.num_workers)
        check_runnable(self.plan_of_parts)
        self._check_intervals()
        self._check_clipping()
        if self.updates.mode == "local" and self.row_wise:
            raise PlanError(
                "Local steps keep no rows of tables.",
                why="A worker would need the rows of all its local steps, and their optimizer states.",
                attempt="other --updates, or no --row-wise.",
            )
        if self.with_evaluator and not self.num_validation_batches:
            raise PlanError("The evaluator has nothing to do.", attempt="--validation-batches 1, or more.")

    def _check_intervals(self) -> None:
        per_update = self.updates.steps_per_update
        for what, steps in (
            ("The number of steps", self.num_steps),
            ("The number of steps between evaluations", self.evaluate_every),
            ("The number of steps between checkpoints", self.checkpoint_every),
        ):
            if steps < 0 or steps % per_update:
                raise PlanError(
                    f"{what}, {steps}, is not a number of updates.",
                    why=f"One update has {per_update} steps.",
                    attempt=f"a multiple of {per_update}.",
                )

    def _check_clipping(self) -> None:
        """Local steps clip by themselves; what is summed on servers has a norm that no process knows."""
        if (
            self.plan.optimizer.max_gradient_norm is not None
            and self.updates.mode != "local"
            and self.num_parts > 1
        ):
            raise PlanError(
                "Gradients of parts of a batch cannot be clipped.",
                why=f"The norm is that of the sum of {self.num_parts} pushes, which no process knows.",
                attempt="--updates asynchronous, whose pushes are of whole batches, or no clipping.",
            )
