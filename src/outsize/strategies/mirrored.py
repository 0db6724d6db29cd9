"""Mirrored: a full replica on every device of one machine, gradients summed."""

from __future__ import annotations

from collections.abc import Iterator

from outsize.cost.layout import Job
from outsize.plan.plan import Mesh
from outsize.strategies.base import Space, Strategy, world_sizes

__all__ = ["Mirrored"]


class Mirrored(Strategy):
    """Every device holds the whole model, so more devices add speed and never room."""

    name = "mirrored"
    reached_for = "it is one line of code, and every device works all the time"
    right_when = (
        "the whole training state fits one device with room for activations, and the devices share a machine"
    )
    splits_state = False

    def meshes(self, job: Job, space: Space) -> Iterator[tuple[Mesh, str]]:  # noqa: ARG002
        """Yield 1 up to all devices of the first machine."""
        for degree in world_sizes(len(job.cluster.machines[0].devices)):
            yield Mesh(dp=degree), "none"
