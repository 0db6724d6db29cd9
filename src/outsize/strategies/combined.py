"""Combined: products of the axes on one mesh."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from outsize.cost.layout import Job
from outsize.plan.plan import Mesh
from outsize.plan.reasons import Reason, ReasonCode
from outsize.strategies.base import MAX_EXPERT_DEGREE, Space, Strategy, tensor_degrees, world_sizes
from outsize.strategies.pipeline_parallel import max_stages

__all__ = ["LONG_SEQUENCE", "Combined"]

LONG_SEQUENCE = 8192  # tokens from which cutting the sequence over cp is considered


class Combined(Strategy):
    """Two or more axes at once, such as stages across machines and operators within them."""

    name = "combined"
    reached_for = "each axis can use the links that suit it"
    right_when = "no single strategy fits or is fast enough, and the devices factor into fast and slow links"
    splits_state = True

    def refusal(self, job: Job) -> Reason | None:
        """Two axes need four devices."""
        if job.cluster.num_devices < 4:
            return Reason(
                ReasonCode.ONE_DEVICE,
                f"a product of two strategies needs at least 4 devices, here are {job.cluster.num_devices}",
            )
        return None

    def meshes(self, job: Job, space: Space) -> Iterator[tuple[Mesh, str]]:
        """Yield every product of at least two axes; ``cp`` and ``ep`` have no strategy of their own."""
        for num_devices in world_sizes(job.cluster.num_devices):
            if space.num_devices not in {None, num_devices}:
                continue
            for mesh in _factorings(job, num_devices, space):
                split = sum(degree > 1 for degree in mesh.degrees.values())
                if split > 1 or mesh.cp > 1 or mesh.ep > 1:
                    yield from _sharded(mesh, job, space)


def _factorings(job: Job, num_devices: int, space: Space) -> Iterator[Mesh]:
    """Yield pp x dp x tp x ep of exactly ``num_devices``."""
    most_stages = max_stages(job)
    fast = max(len(machine.devices) for machine in job.cluster.machines)
    for tp in (1, *tensor_degrees(job.profile, min(num_devices, 2 * fast))):
        for ep in (1, *_expert_degrees(job, num_devices, space)):
            if num_devices % (tp * ep):
                continue
            for cp in _context_degrees(job, num_devices // (tp * ep), space):
                rest = num_devices // (tp * ep * cp)
                for pp in range(1, min(rest, most_stages) + 1):
                    if rest % pp == 0 and job.global_batch % (rest // pp * ep) == 0:
                        yield Mesh(pp=pp, dp=rest // pp, cp=cp, tp=tp, ep=ep)


def _context_degrees(job: Job, num_devices: int, space: Space) -> list[int]:
    """Ways of cutting the sequence: only long ones are worth it."""
    if "cp" not in space.axes or job.profile.tokens_per_sample < LONG_SEQUENCE:
        return [1]
    return [degree for degree in (1, 2, 4, 8) if num_devices % degree == 0]


def _expert_degrees(job: Job, num_devices: int, space: Space) -> list[int]:
    if "ep" not in space.axes or not any(block.num_expert_parameters for block in job.profile.blocks):
        return []
    powers = [2**power for power in range(1, MAX_EXPERT_DEGREE.bit_length())]
    return [degree for degree in powers if degree <= num_devices]


def _sharded(mesh: Mesh, job: Job, space: Space) -> Iterator[tuple[Mesh, str]]:
    """Yield ``mesh`` with each level of state sharding over all replicas or those of one machine."""
    yield mesh, "none"
    replicas = mesh.dp
    if replicas * mesh.cp == 1 or "fsdp" not in space.axes:
        return
    local = max(len(job.cluster.machines[0].devices) // (mesh.cp * mesh.tp * mesh.ep), 1)
    shards = {replicas} | ({local} if 1 < local < replicas and replicas % local == 0 else set())
    for degree in sorted(shards):
        divided = replace(mesh, dp=replicas // degree, fsdp=degree)
        for level in space.state_shardings[1:]:
            yield divided, level
