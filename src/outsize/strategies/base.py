"""What every strategy is: a set of legal meshes, a rule for refusing, and words for people."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

from outsize.cost.layout import STATE_SHARDINGS, V_SHAPED, Job, Layout
from outsize.model.profile import ModelProfile
from outsize.plan.plan import Mesh
from outsize.plan.reasons import Reason

__all__ = ["ALL_LAYOUTS", "RUNNABLE", "Space", "Strategy", "layouts_on", "tensor_degrees", "world_sizes"]

MAX_MICROBATCH_SIZE = 64
MAX_EXPERT_DEGREE = 64


@dataclass(frozen=True, slots=True)
class Space:
    """Which layouts may be chosen. Numbers of micro-batches and devices, where given, are the caller's."""

    axes: tuple[str, ...]
    max_virtual_stages: int
    allows_recompute: bool
    state_shardings: tuple[str, ...]
    allows_sequence_parallel: bool
    schedules: tuple[str, ...] = ("1f1b",)  # of pipelines; interleaved 1F1B as far as virtual stages go
    num_microbatches: int | None = None
    num_virtual_stages: int | None = None  # exactly so many a rank; None: as many as is best
    num_devices: int | None = None  # exactly so many in use; None: as many as is best


# What the runtime executes today, and everything that can be costed.
RUNNABLE = Space(("pp", "dp", "fsdp", "tp"), 1, False, STATE_SHARDINGS, False)
ALL_LAYOUTS = Space(
    ("pp", "dp", "fsdp", "cp", "tp", "ep"),
    max_virtual_stages=24,
    allows_recompute=True,
    state_shardings=STATE_SHARDINGS,
    allows_sequence_parallel=True,
    schedules=("1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "v_half"),
)
_VIRTUAL_STAGES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24)


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
            if space.num_devices not in {None, mesh.world_size}:
                continue
            yield from layouts_on(job, mesh, state_sharding, space)


def layouts_on(job: Job, mesh: Mesh, state_sharding: str, space: Space) -> Iterator[Layout]:
    """Yield the layouts of one mesh: micro-batch sizes, schedules and virtual stages."""
    replicas = mesh.dp * mesh.fsdp * mesh.ep
    if job.global_batch % replicas:
        return
    per_replica = job.global_batch // replicas
    for microbatch_size in _microbatch_sizes(per_replica, space.num_microbatches):
        layout = Layout(
            mesh=mesh,
            microbatch_size=microbatch_size,
            num_microbatches=per_replica // microbatch_size,
            state_sharding=state_sharding,
            sequence_parallel=space.allows_sequence_parallel and mesh.tp > 1,
        )
        if mesh.pp == 1:
            yield layout
            continue
        for schedule, virtual in _pipelines(len(job.profile.blocks), layout, space):
            yield replace(layout, schedule=schedule, num_virtual_stages=virtual)


def _pipelines(num_blocks: int, layout: Layout, space: Space) -> Iterator[tuple[str, int]]:
    """Yield the schedules of a pipeline, each with its number of stages a rank."""
    most = min(space.max_virtual_stages, num_blocks // layout.mesh.pp)
    wanted = space.num_virtual_stages
    several = [count for count in ([wanted] if wanted else _VIRTUAL_STAGES) if 2 <= count <= most]
    for schedule in space.schedules:
        if schedule == "interleaved_1f1b":
            if layout.num_microbatches % layout.mesh.pp == 0:
                yield from ((schedule, virtual) for virtual in several)
        elif schedule in V_SHAPED:
            if 2 in several:
                yield schedule, 2
        elif wanted in {None, 1}:
            yield schedule, 1


def _microbatch_sizes(per_replica: int, num_microbatches: int | None) -> list[int]:
    if num_microbatches is not None:
        return [per_replica // num_microbatches] if per_replica % num_microbatches == 0 else []
    most = min(per_replica, MAX_MICROBATCH_SIZE)
    return [size for size in range(1, most + 1) if per_replica % size == 0]


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
