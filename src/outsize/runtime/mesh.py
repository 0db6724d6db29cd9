"""Process groups, one for each axis of the plan's mesh that is longer than one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from outsize.errors import LaunchError
from outsize.plan.plan import AXES, Mesh

__all__ = ["ProcessMesh", "make_process_mesh"]


@dataclass(frozen=True, slots=True)
class ProcessMesh:
    """This process's place on the mesh, and the groups it talks to."""

    mesh: Mesh
    rank: int
    device: torch.device
    device_mesh: DeviceMesh | None = None  # axes longer than one; None for a single process
    replica_group: dist.ProcessGroup | None = None  # all that see other samples of a batch

    @property
    def coordinates(self) -> dict[str, int]:
        """This process's position along every axis."""
        return self.mesh.coordinates(self.rank)

    @property
    def replica(self) -> int:
        """Which part of a global batch this process sees, of ``dp`` x ``fsdp`` parts."""
        return self.coordinates["dp"] * self.mesh.fsdp + self.coordinates["fsdp"]

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the group along ``axis``, or None where the axis has length one."""
        if self.device_mesh is None or getattr(self.mesh, axis) == 1:
            return None
        return self.device_mesh.get_group(axis)

    def sum_over(self, axis: str, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` in place over the processes along ``axis``."""
        group = self.group(axis)
        if group is not None:
            dist.all_reduce(tensor, group=group)


def make_process_mesh(mesh: Mesh, device: torch.device) -> ProcessMesh:
    """Build the groups of ``mesh`` over the default process group; a mesh of one process needs none.

    Raises:
        LaunchError: the number of running processes is not the number that the mesh needs.
    """
    num_running = dist.get_world_size() if dist.is_initialized() else 1
    if num_running != mesh.world_size:
        raise LaunchError(
            f"The plan needs {mesh.world_size} processes, and {num_running} run.",
            why=" x ".join(f"{axis} {degree}" for axis, degree in mesh.degrees.items() if degree > 1),
            attempt=f"torchrun --nproc-per-node {mesh.world_size} (or outsize train, which starts them).",
        )
    rank = dist.get_rank() if dist.is_initialized() else 0
    axes = [axis for axis in AXES if getattr(mesh, axis) > 1]
    device_mesh = None
    if axes:
        shape = tuple(getattr(mesh, axis) for axis in axes)
        device_mesh = init_device_mesh(device.type, shape, mesh_dim_names=tuple(axes))
    return ProcessMesh(mesh, rank, device, device_mesh, _replica_group(mesh, device_mesh))


def _replica_group(mesh: Mesh, device_mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    axes = [axis for axis in ("dp", "fsdp") if getattr(mesh, axis) > 1]
    if device_mesh is None or not axes:
        return None
    if len(axes) == 1:
        return device_mesh.get_group(axes[0])
    return device_mesh["dp", "fsdp"]._flatten("replicas").get_group()
