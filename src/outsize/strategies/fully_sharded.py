"""Fully sharded: parameters, gradients and optimizer states divided over the replicas."""

from __future__ import annotations

from collections.abc import Iterator

from outsize.cost.layout import Job
from outsize.plan.plan import Mesh
from outsize.plan.reasons import Reason, ReasonCode
from outsize.strategies.base import Space, Strategy, world_sizes

__all__ = ["FullySharded"]


class FullySharded(Strategy):
    """Each device keeps a shard and gathers one block at a time; activations are not divided."""

    name = "fully_sharded"
    reached_for = "the model's code stays as it is, and state shrinks with every device added"
    right_when = (
        "the state exceeds a device, but a shard of it, the largest block and the activations of a "
        "micro-batch fit, and links are fast enough to gather every block twice a pass"
    )
    splits_state = True

    def refusal(self, job: Job) -> Reason | None:
        """One device has nobody to share with."""
        if job.cluster.num_devices == 1:
            return Reason(ReasonCode.ONE_DEVICE, "one device has no other to share its state with")
        return None

    def meshes(self, job: Job, space: Space) -> Iterator[tuple[Mesh, str]]:
        """Yield sharding over all devices, and inside a machine with replicas across (hybrid).

        Of all state, or, where that is faster, of gradients and optimizer states or of the latter alone.
        """
        per_machine = len(job.cluster.machines[0].devices)
        for degree in world_sizes(job.cluster.num_devices):
            for level in reversed(space.state_shardings[1:]):
                if degree > 1:
                    yield Mesh(fsdp=degree), level
                if degree > per_machine > 1 and degree % per_machine == 0:
                    yield Mesh(dp=degree // per_machine, fsdp=per_machine), level
