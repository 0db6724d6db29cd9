"""Pipeline parallel: each device holds a stage of consecutive blocks, micro-batches flow through."""

from __future__ import annotations

from collections.abc import Iterator

from outsize.cost.layout import Job
from outsize.plan.plan import Mesh
from outsize.plan.reasons import Reason, ReasonCode
from outsize.strategies.base import Space, Strategy, world_sizes

__all__ = ["PipelineParallel", "max_stages"]


def max_stages(job: Job) -> int:
    """Return how many stages the model can be cut into."""
    return 1 + sum(1 for block in job.profile.blocks[1:] if block.cut_label)


class PipelineParallel(Strategy):
    """Splits the model between blocks; little traffic, some idle time while the pipeline fills."""

    name = "pipeline_parallel"
    reached_for = "only activations between stages are sent, so even slow links will do"
    right_when = (
        "blocks form a chain that balances, links are slow, and the batch gives about four "
        "micro-batches a stage"
    )
    splits_state = True

    def refusal(self, job: Job) -> Reason | None:
        """One device, or a model without a cut, has no stages."""
        if job.cluster.num_devices == 1:
            return Reason(ReasonCode.ONE_DEVICE, "one device makes one stage")
        if max_stages(job) == 1:
            return Reason(ReasonCode.NOT_A_CHAIN, "the model has no place where it can be cut")
        return None

    def meshes(self, job: Job, space: Space) -> Iterator[tuple[Mesh, str]]:  # noqa: ARG002
        """Yield 2 stages up to one a device or one a block."""
        most = min(job.cluster.num_devices, max_stages(job))
        for degree in world_sizes(most):
            if degree > 1:
                yield Mesh(pp=degree), "none"
