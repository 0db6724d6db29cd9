"""Random masks, such as dropout's: a stream of numbers for every step, pipeline rank and replica."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from outsize.runtime.collectives import set_axis_group
from outsize.runtime.mesh import ProcessMesh

__all__ = ["random_stream", "stream_seed"]


def stream_seed(seed: int, step: int, mesh: ProcessMesh) -> int:
    """Return the seed of this process's stream for one step; ranks that differ on ``tp`` alone share it."""
    place = {axis: position for axis, position in mesh.coordinates.items() if axis != "tp"}
    digest = hashlib.sha256(f"{seed}/{step}/{sorted(place.items())}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


@contextmanager
def random_stream(seed: int, step: int, mesh: ProcessMesh) -> Iterator[None]:
    """Draw from the stream of this step and place while inside; afterwards the caller's goes on as it was.

    Stages and replicas then have masks of their own, what is replicated in a tensor-parallel group has the
    same ones, and a run that goes on from a checkpoint has those that it would have had.
    """
    stream = stream_seed(seed, step, mesh)
    group = mesh.group("tp")
    if group is not None:
        set_axis_group("tp", group, stream)  # for masks that are split over the group
    is_cpu = mesh.device.type == "cpu"
    with torch.random.fork_rng([] if is_cpu else [mesh.device], device_type=mesh.device.type):
        torch.manual_seed(stream)
        yield
