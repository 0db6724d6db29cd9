"""The plan: how a job is split, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from outsize.plan.sharding import Sharding

__all__ = [
    "AXES",
    "MEMORY_CATEGORIES",
    "STRATEGIES",
    "Mesh",
    "OptimizerSpec",
    "Plan",
    "Prediction",
    "ScheduleSpec",
    "StageSpec",
    "Verdict",
]

STRATEGIES = (
    "mirrored",
    "multi_worker_mirrored",
    "parameter_server",
    "fully_sharded",
    "pipeline_parallel",
    "tensor_parallel",
    "combined",
)

# From the outermost to the innermost: neighbours on the last axis are neighbours in rank.
AXES = ("pp", "dp", "fsdp", "cp", "tp", "ep")

MEMORY_CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer_states",
    "activations",
    "temporaries",
    "communication_buffers",
    "reserve",
)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Degree of each mesh axis; rank = row-major position, ``pp`` slowest."""

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        """Number of processes, one for each device."""
        return self.pp * self.dp * self.fsdp * self.cp * self.tp * self.ep

    @property
    def degrees(self) -> dict[str, int]:
        """Degree by axis name, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of ``rank`` on each axis."""
        position: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, position[axis] = divmod(rank, getattr(self, axis))
        return {axis: position[axis] for axis in AXES}

    def ranks_along(self, axis: str, rank: int) -> list[int]:
        """Return the ranks that differ from ``rank`` on ``axis`` only, in order, ``rank`` included."""
        stride = 1
        for other in reversed(AXES[AXES.index(axis) + 1 :]):
            stride *= getattr(self, other)
        first = rank - self.coordinates(rank)[axis] * stride
        return [first + stride * index for index in range(getattr(self, axis))]


@dataclass(frozen=True, slots=True)
class StageSpec:
    """What one pipeline stage holds: from the cut named ``begins_at`` (empty: the start) to the next."""

    index: int
    begins_at: str
    blocks: tuple[str, ...] = ()
    num_parameters: int = 0
    recompute: tuple[str, ...] = ()  # blocks whose activations are recomputed in backward
    tied: tuple[str, ...] = ()  # parameters used here that an earlier stage owns: copies kept equal


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """Which schedule runs the micro-batches."""

    name: str = "1f1b"  # "gpipe" or "1f1b"
    num_microbatches: int = 1
    num_virtual_stages: int = 1


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """The optimizer and its settings; ``state_bytes_per_parameter`` is what planning needs of it."""

    name: str = "adamw"  # "adamw", "adam" or "sgd"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.0
    max_gradient_norm: float | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan is expected to cost on each device and per step."""

    peak_memory_bytes: int  # of the device that needs most
    memory_by_rank: tuple[dict[str, int], ...] = ()  # bytes by category; over 256 ranks: by stage
    step_time_s: float = 0.0
    time_by_part_s: dict[str, float] = field(default_factory=dict)
    tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer for one strategy on one cluster."""

    name: str
    fits: bool
    needed_bytes: int
    available_bytes: int
    by_category: dict[str, int]
    reason_code: str
    reason: str
    right_when: str
    smallest_change: str
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    mesh: Mesh | None = None  # the best legal mesh of this strategy, where there is one


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole job: model, batch, mesh, stages, placements, schedule, predictions and reasons."""

    strategy: str
    mesh: Mesh
    stages: tuple[StageSpec, ...]
    schedule: ScheduleSpec
    global_batch: int
    model: str = ""  # model argument, as given
    cluster: str = ""  # cluster argument, as given
    precision: str = "fp32"
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    gradient_accumulation_steps: int = 1
    state_sharding: str = "none"  # over dp x fsdp: "none", "optimizer_states", "gradients" or "full"
    sequence_parallel: bool = False  # activations between split operators divided over tp too
    # values needed two or more stages later: handed on by every stage in between
    skip_connections: Literal["passed_through"] = "passed_through"
    # statistics over one micro-batch of one replica, or of all replicas
    batch_norm: Literal["per_replica", "synchronised"] = "per_replica"
    # what a step's loss is divided by: all that counts in it, or the mean over replicas of their own means
    denominator: Literal["samples", "replicas"] = "samples"
    seed: int = 0
    device_memory_bytes: int | None = None  # enforced limit of emulated devices
    placements: dict[str, str] = field(default_factory=dict)  # parameter name -> how it is split
    sharding: Sharding | None = None  # how operators run, where the mesh has tp > 1
    prediction: Prediction | None = None
    verdicts: tuple[Verdict, ...] = ()
    model_fingerprint: str = ""
    cluster_fingerprint: str = ""
    rung: str = "fake_tensors"  # how the model was recorded; see cost.error_bands
    rung_reason: str = ""  # why no better rung was reached

    @property
    def microbatch_size(self) -> int:
        """Samples in one pipeline pass of one replica."""
        replicas = self.mesh.dp * self.mesh.fsdp * self.mesh.ep
        return self.global_batch // (
            replicas * self.gradient_accumulation_steps * self.schedule.num_microbatches
        )
