"""Multi-worker mirrored: a full replica on every device of several machines."""

from __future__ import annotations

from collections.abc import Iterator

from outsize.cost.layout import Job
from outsize.plan.plan import Mesh
from outsize.strategies.base import Space, Strategy, world_sizes

__all__ = ["MultiWorkerMirrored"]


class MultiWorkerMirrored(Strategy):
    """As mirrored, over machines: gradients cross the network in every step."""

    name = "multi_worker_mirrored"
    reached_for = "the same one line, and throughput grows with machines"
    right_when = (
        "the whole training state fits one device, and the network carries 2 (H-1)/H of the gradients "
        "in less time than a backward takes"
    )
    splits_state = False

    def meshes(self, job: Job, space: Space) -> Iterator[tuple[Mesh, str]]:  # noqa: ARG002
        """Yield whole machines first, then fewer devices."""
        for degree in world_sizes(job.cluster.num_devices):
            yield Mesh(dp=degree), "none"
