"""What is to be costed: a job, and one way of laying it out over the devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from outsize.cluster.topology import Cluster
from outsize.cost.precision import BytesPerParameter, bytes_per_parameter
from outsize.cost.software import Software
from outsize.model.profile import ModelProfile
from outsize.plan.plan import Mesh, OptimizerSpec

__all__ = ["RECOMPUTE_MODES", "SCHEDULES", "STATE_SHARDINGS", "V_SHAPED", "Assignment", "Job", "Layout"]

RECOMPUTE_MODES = ("none", "selective", "full")
_MODE_INDEX = {mode: index for index, mode in enumerate(RECOMPUTE_MODES)}
STATE_SHARDINGS = ("none", "optimizer_states", "gradients", "full")
SCHEDULES = (
    "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_2p", "zb_v", "v_half", "vocabulary_1f1b",
)  # fmt: skip
V_SHAPED = {"zb_v", "v_half"}


@dataclass(frozen=True)
class Job:
    """A model, a cluster and a global batch (in samples)."""

    profile: ModelProfile
    cluster: Cluster
    global_batch: int
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    precision: str = "fp32"
    software: Software = field(default_factory=Software)

    @cached_property
    def state(self) -> BytesPerParameter:
        """Bytes of a parameter, its gradient and its optimizer state."""
        per = bytes_per_parameter(self.precision, self.optimizer)
        software = self.software
        return BytesPerParameter(
            software.parameter_bytes or per.parameter,
            software.gradient_bytes or per.gradient,
            per.optimizer_state,
            per.update,
        )


@dataclass(frozen=True)
class Layout:
    """Degrees, micro-batches, schedule and what is sharded.

    State is sharded over ``fsdp`` and ``cp`` as far as ``state_sharding`` says; "servers" leaves the
    optimizer's states to parameter servers, one a machine.

    ``num_microbatches`` counts all passes of one replica in a step, accumulation included.
    """

    mesh: Mesh
    microbatch_size: int
    num_microbatches: int
    schedule: str = "1f1b"
    num_virtual_stages: int = 1
    state_sharding: str = "none"
    sequence_parallel: bool = False
    base_recompute: str = "none"  # of blocks not recomputed in full

    @property
    def num_replicas(self) -> int:
        """Groups of devices that each see other samples; experts are spread over replicas too."""
        return self.mesh.dp * self.mesh.fsdp * self.mesh.ep

    @property
    def num_state_shards(self) -> int:
        """Devices that share one copy of what is sharded."""
        return 1 if self.state_sharding in {"none", "servers"} else self.mesh.fsdp * self.mesh.cp

    @property
    def num_chunks(self) -> int:
        """Pieces that the blocks are cut into: virtual stages over all pipeline ranks."""
        return self.mesh.pp * self.num_virtual_stages

    def chunks_of(self, stage: int) -> Sequence[int]:
        """Chunks that pipeline rank ``stage`` holds: every ``pp``-th, or down and up again (V-shaped)."""
        if self.schedule in V_SHAPED:
            return (stage, self.num_chunks - 1 - stage)
        return range(stage, self.num_chunks, self.mesh.pp)

    @cached_property
    def rank_of_chunk(self) -> NDArray[np.intp]:
        """Pipeline rank of each chunk."""
        chunks = np.arange(self.num_chunks)
        if self.schedule in V_SHAPED:
            return np.minimum(chunks, self.num_chunks - 1 - chunks)
        return chunks % self.mesh.pp

    @cached_property
    def in_flight_by_chunk(self) -> NDArray[np.float64]:
        """Micro-batches that each chunk keeps at its rank's peak."""
        counts = np.zeros(self.num_chunks)
        for stage in range(self.mesh.pp):
            counts[list(self.chunks_of(stage))] = self.in_flight(stage)
        return counts

    @cached_property
    def held_back_by_chunk(self) -> NDArray[np.float64]:
        """Micro-batches whose weight gradients each chunk still has to compute at its rank's peak.

        As many as the rank's number in ZB-H1, twice that in ZB-H2; V-shaped schedules have none then.
        """
        step = {"zb_h1": 1, "zb_h2": 2, "zb_2p": 2}.get(self.schedule, 0)
        left = self.num_microbatches - self.in_flight_by_chunk
        return np.minimum(step * self.rank_of_chunk, left).astype(np.float64)

    def in_flight(self, stage: int) -> tuple[int, ...]:
        """Micro-batches whose activations each chunk of rank ``stage`` keeps at the rank's peak.

        GPipe keeps all m; 1F1B min(p - i, m). Interleaved 1F1B keeps 2 (p-i-1) + (v-1) p + 1 chunks in
        all (Narayanan et al. 2021): p of each, of the last no more than are left. V-shaped schedules keep
        few of the chunk on the way up, which returns soon.
        """
        p, m, v = self.mesh.pp, self.num_microbatches, self.num_virtual_stages
        if self.schedule == "gpipe":
            counts = [m] * v
        elif self.schedule in {"1f1b", "zb_h1"}:
            counts = [p - stage]
        elif self.schedule == "vocabulary_1f1b":  # two more, for the passes over the spread vocabulary
            counts = [p - stage + 2]
        elif self.schedule == "zb_h2":
            counts = [2 * (p - stage) - 1]
        elif self.schedule == "zb_2p":
            counts = [2 * (p - stage)]
        elif self.schedule in V_SHAPED:
            total, up = (2 * p, stage + 1) if self.schedule == "zb_v" else (p + 2, stage // 2 + 1)
            counts = [total - up, up]
        else:
            begun = 2 * (p - stage - 1) + 1
            counts = [p + max(begun - p, 0), *[p] * (v - 2), min(begun, p)]
        return tuple(min(count, m) for count in counts)


@dataclass(frozen=True)
class Assignment:
    """Which blocks each chunk holds, and how each block's activations are kept.

    Chunk ``c`` holds blocks ``bounds[c]`` up to ``bounds[c + 1]``; ``recompute`` has one mode a block.
    """

    bounds: tuple[int, ...]
    recompute: tuple[str, ...]

    @cached_property
    def modes(self) -> NDArray[np.intp]:
        """Positions in RECOMPUTE_MODES, one a block."""
        return np.array([_MODE_INDEX[mode] for mode in self.recompute])

    def blocks_of(self, chunk: int) -> range:
        """Blocks of one chunk."""
        return range(self.bounds[chunk], self.bounds[chunk + 1])
