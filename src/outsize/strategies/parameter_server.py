"""Parameter server: servers hold parameters and optimizer states, workers pull and push."""

from __future__ import annotations

from collections.abc import Iterator

from outsize.cost.layout import Job
from outsize.plan.plan import Mesh
from outsize.strategies.base import Space, Strategy, world_sizes

__all__ = ["ParameterServer"]


class ParameterServer(Strategy):
    """Workers compute whole passes, so each needs the dense parameters and gradients whole.

    One server a machine, in host memory; the optimizer's states live there.
    """

    name = "parameter_server"
    reached_for = "workers may come and go, and memory of the servers counts"
    right_when = (
        "embeddings dwarf the dense part and each batch touches few rows, or workers are uneven, "
        "preemptible or join late"
    )
    splits_state = False

    def meshes(self, job: Job, space: Space) -> Iterator[tuple[Mesh, str]]:  # noqa: ARG002
        """Yield 1 up to all devices as workers."""
        for degree in world_sizes(job.cluster.num_devices):
            yield Mesh(dp=degree), "servers"
