"""A parameter-server training job as plain data, for every role."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outsize.plan.plan import Mesh, Plan
from outsize.runtime.parameter_server.updates import Updates

__all__ = ["ParameterServerJob"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterServerJob:
    """Everything a role needs to know. The plan's mesh counts workers; servers are beside them."""

    model: str  # model argument
    plan: Plan
    run_directory: str
    num_steps: int  # of the global batch, in all
    updates: Updates
    num_servers: int = 1
    partitioner: str | None = None
    row_wise: str | None = None  # names of tables to pull and push by rows, with wildcards, comma-separated
    sequence: int | None = None
    data: str | None = None
    evaluate_every: int = 0
    num_validation_batches: int = 0
    checkpoint_every: int = 0  # steps; 0: at the end alone
    checkpoint: str | None = None  # to go on from
    with_evaluator: bool = False

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self.plan.mesh.dp

    def plan_of_parts(self, num_parts: int) -> Plan:
        """Return the plan by which a global batch is cut into parts, each into the plan's micro-batches."""
        wanted = -(-self.plan.schedule.num_microbatches * self.num_workers // num_parts)
        most = max(1, self.plan.global_batch // num_parts)
        schedule = replace(self.plan.schedule, num_microbatches=min(wanted, most))
        return replace(self.plan, mesh=Mesh(dp=num_parts), schedule=schedule)
