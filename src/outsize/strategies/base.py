"""What every strategy is: a set of legal meshes, a rule for refusing, and words for people."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

from outsize.cost.layout import STATE_SHARDINGS, Job, Layout
from outsize.model.profile import ModelProfile
from outsize.plan.plan import Mesh
from outsize.plan.reasons import Reason

__all__ = ["ALL_LAYOUTS", "RUNNABLE", "Space", "Strategy", "layouts_on", "tensor_degrees", "world_sizes"]

MAX_MICROBATCH_SIZE = 64


@dataclass(frozen=True, slots=True)
class Space:
    """Which layouts may be chosen. A number of micro-batches, where given, is the caller's."""

    axes: tuple[str, ...]
    max_virtual_stages: int
    allows_recompute: bool
    state_shardings: tuple[str, ...]
    allows_sequence_parallel: bool
    schedule: str = "1f1b"
    num_microbatches: int | None = None


# What the runtime executes today, and everything that can be costed.
RUNNABLE = Space(("pp", "dp", "tp"), 1, False, ("none",), False)
ALL_LAYOUTS = Space(("pp", "dp", "fsdp", "cp", "tp", "ep"), 8, True, STATE_SHARDINGS, True)


class Strategy(ABC):
    """One way of using several devices. Stateless; one instance a strategy."""

    name: str
    reached_for: str  # for people: why one might want it
    right_when: str  # for people: the situation this strategy is made for
    splits_state: bool  # whether more devices leave each with less of the model

    def refusal(self, job: Job) -> Reason | None:  # noqa: ARG002
        """Why the strategy cannot be used on this cluster at all, before any question of memory."""
        return None

    @abstractmethod
    def meshes(self, job: Job, space: Space) -> Iterator[tuple[Mesh, str]]:
        """Yield legal meshes, each with its level of state sharding."""

    def layouts(self, job: Job, space: Space) -> Iterator[Layout]:
        """Yield every layout of this strategy."""
        for mesh, state_sharding in self.meshes(job, space):
            yield from layouts_on(job, mesh, state_sharding, space)


def layouts_on(job: Job, mesh: Mesh, state_sharding: str, space: Space) -> Iterator[Layout]:
    """Yield the layouts of one mesh: micro-batch sizes and virtual stages."""
    replicas = mesh.dp * mesh.fsdp * mesh.ep
    if job.global_batch % replicas:
        return
    per_replica = job.global_batch // replicas
    for microbatch_size in _microbatch_sizes(per_replica, space.num_microbatches):
        layout = Layout(
            mesh=mesh,
            microbatch_size=microbatch_size,
            num_microbatches=per_replica // microbatch_size,
            schedule=space.schedule,
            state_sharding=state_sharding,
            sequence_parallel=space.allows_sequence_parallel and mesh.tp > 1,
        )
        yield layout
        for virtual in range(2, space.max_virtual_stages + 1):
            if mesh.pp > 1 and layout.num_microbatches % mesh.pp == 0:
                yield replace(layout, schedule="interleaved_1f1b", num_virtual_stages=virtual)


def _microbatch_sizes(per_replica: int, num_microbatches: int | None) -> list[int]:
    if num_microbatches is not None:
        return [per_replica // num_microbatches] if per_replica % num_microbatches == 0 else []
    powers = [2**power for power in range(MAX_MICROBATCH_SIZE.bit_length())]
    sizes = {size for size in [*powers, *range(1, 33)] if per_replica % size == 0}
    return sorted(sizes | {per_replica} if per_replica <= MAX_MICROBATCH_SIZE else sizes)


def world_sizes(num_devices: int) -> list[int]:
    """Return numbers of devices worth considering, largest first: all small ones, halves of large ones."""
    sizes = set(range(1, min(num_devices, 16) + 1))
    while num_devices > 16:
        sizes.add(num_devices)
        num_devices = num_devices // 2
    return sorted(sizes, reverse=True)


def tensor_degrees(profile: ModelProfile, limit: int) -> list[int]:
    """Return degrees above 1 that the operators of at least one block can take."""
    most = {block.max_tensor_parallel_degree for block in profile.blocks}
    return [
        degree
        for degree in range(2, min(limit, max(most, default=1)) + 1)
        if any(each % degree == 0 for each in most if each > 1)
    ]
