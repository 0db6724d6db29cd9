"""Seconds and bytes of every block under given degrees and micro-batch size, as arrays.

Identical blocks are costed once; sums over ranges of blocks are differences of prefix sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from outsize.cluster.topology import Span
from outsize.cost.collective import all_gather_s, all_reduce_s, all_to_all_s
from outsize.cost.compute import Conditions, Shards, efficiency_of, estimate_block_s
from outsize.cost.layout import Job, Layout
from outsize.cost.precision import element_bytes
from outsize.model.profile import Amount, BlockProfile
from outsize.plan.plan import AXES

__all__ = ["BlockCost", "BlockCosts", "estimate_block_costs", "splits"]

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BlockCost:
    """One block on one device, for one micro-batch. Times in seconds, sizes in bytes or parameters."""

    forward_s: float
    backward_s: float
    communication_s: float  # waited for in forward
    backward_communication_s: float  # waited for in backward, some may hide under weights' gradients
    weight_s: float  # of backward, computing weights' gradients
    selective_s: float  # added to backward by recomputing attention scores
    full_s: float  # added to backward by recomputing the block
    parameters: float
    trainable: float
    largest_parameter: float  # elements of the largest single one
    expert_parameters: float  # of these, divided over ``ep``; the others are the same on all its members
    tied_parameters: float  # needed once more when the owner is on another stage
    buffer_bytes: float
    saved_bytes: float
    selective_saved_bytes: float
    full_saved_bytes: float
    weight_gradient_bytes: float  # kept between the two parts of a backward
    temporary_bytes: float
    output_bytes: float


@dataclass(frozen=True, eq=False)
class BlockCosts:
    """The costs of all blocks in order; each field is one array. Compared and hashed by identity."""

    forward_s: Array
    backward_s: Array
    communication_s: Array
    backward_communication_s: Array
    weight_s: Array
    selective_s: Array
    full_s: Array
    parameters: Array
    trainable: Array
    largest_parameter: Array
    expert_parameters: Array
    tied_parameters: Array
    buffer_bytes: Array
    saved_bytes: Array
    selective_saved_bytes: Array
    full_saved_bytes: Array
    weight_gradient_bytes: Array
    temporary_bytes: Array
    output_bytes: Array
    blocks: tuple[BlockProfile, ...]

    @cached_property
    def step_s(self) -> Array:
        """Forward and backward with communication, nothing recomputed."""
        return self.forward_s + self.backward_s + self.exchange_s

    @cached_property
    def exchange_s(self) -> Array:
        """Communication that forward and backward wait for."""
        return self.communication_s + self.backward_communication_s

    @cached_property
    def weight_share(self) -> float:
        """Share of a micro-batch's time in which weights' gradients are computed."""
        return float(self.weight_s.sum()) / self.whole_step_s if self.whole_step_s else 0.0

    @cached_property
    def tied_blocks(self) -> list[tuple[int, int]]:
        """Blocks with tied parameters, each with the block that owns them."""
        return [(block, owner) for block, owner in enumerate(self.owners) if block != owner]

    @cached_property
    def saved_by_mode(self) -> Array:
        """Bytes kept for backward, by position in RECOMPUTE_MODES and block."""
        return np.stack([self.saved_bytes, self.selective_saved_bytes, self.full_saved_bytes])

    @cached_property
    def weight_gradient_by_mode(self) -> Array:
        """Bytes kept between the two parts of a backward; a block recomputed in full has one part only."""
        whole = self.weight_gradient_bytes
        return np.stack([whole, whole, np.zeros_like(whole)])

    @cached_property
    def temporary_by_mode(self) -> Array:
        """Highest extra memory while a block runs; a recomputed one holds its activations meanwhile."""
        return self.temporary_bytes + np.maximum(self.saved_bytes - self.saved_by_mode, 0.0)

    @cached_property
    def again_by_mode(self) -> Array:
        """Seconds that recomputing adds to a block's backward."""
        return np.stack([np.zeros_like(self.full_s), self.selective_s, self.full_s])

    @cached_property
    def whole_step_s(self) -> float:
        """Seconds of one micro-batch through all blocks."""
        return float(self.step_s.sum())

    @cached_property
    def most_repeated(self) -> tuple[int, float]:
        """How many blocks take exactly as long as the most common one, and how long that is."""
        times, counts = np.unique(self.step_s, return_counts=True)
        most = int(counts.argmax())
        return int(counts[most]), float(times[most])

    @cached_property
    def least_output_bytes(self) -> float:
        """Bytes that cross the cheapest cut."""
        return float(self.output_bytes[:-1].min(initial=np.inf)) if len(self.blocks) > 1 else 0.0

    @cached_property
    def whole_saved_bytes(self) -> float:
        """Bytes that one micro-batch keeps in all blocks, nothing recomputed."""
        return float(self.saved_bytes.sum())

    @cached_property
    def recompute_rate(self) -> tuple[float, float]:
        """Most bytes that recomputing can free, and the fewest seconds a byte of it takes."""
        saving = np.maximum(self.saved_bytes - self.full_saved_bytes, 0.0)
        scores = np.maximum(self.saved_bytes - self.selective_saved_bytes, 0.0)
        rates = [
            float((seconds[freed > 0] / freed[freed > 0]).min())
            for seconds, freed in ((self.full_s, saving), (self.selective_s, scores))
            if (freed > 0).any()
        ]
        return float(np.maximum(saving, scores).sum()), min(rates, default=0.0)

    @cached_property
    def has_scores(self) -> bool:
        """Whether recomputing attention scores alone frees memory."""
        return bool((self.selective_saved_bytes < self.saved_bytes).any())

    @cached_property
    def whole_forward_s(self) -> float:
        """Seconds of the forwards of all blocks."""
        return float(self.forward_s.sum())

    @cached_property
    def whole_backward_s(self) -> float:
        """Seconds of the backwards of all blocks."""
        return float(self.backward_s.sum())

    @cached_property
    def whole_parameters(self) -> float:
        """Parameters of all blocks on one device."""
        return float(self.parameters.sum())

    @cached_property
    def whole_trainable(self) -> float:
        """Trainable parameters of all blocks on one device."""
        return float(self.trainable.sum())

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """For each block the first block that holds its tied parameters (itself if none are tied)."""
        first: dict[str, int] = {}
        for index, block in enumerate(self.blocks):
            for name in block.parameter_names:
                first.setdefault(name, index)
        return tuple(
            min((first.get(name, 0) for name in block.tied_parameter_names), default=index)
            for index, block in enumerate(self.blocks)
        )


def splits(block: BlockProfile, degree: int) -> bool:
    """Whether the block's operators can be divided ``degree`` ways."""
    return degree > 1 and block.max_tensor_parallel_degree % degree == 0


def estimate_block_costs(job: Job, layout: Layout) -> BlockCosts:
    """Return the cost of each block under ``layout``'s degrees and micro-batch size."""
    by_kind: dict[tuple[str, int], BlockCost] = {}
    rows = []
    for block in job.profile.blocks:
        key = (block.kind or block.name, block.num_parameters)
        if key not in by_kind:
            by_kind[key] = _block_cost(block, job, layout)
        rows.append(by_kind[key])
    columns = {
        field.name: np.array([getattr(row, field.name) for row in rows]) for field in fields(BlockCost)
    }
    return BlockCosts(**columns, blocks=job.profile.blocks)


def _block_cost(block: BlockProfile, job: Job, layout: Layout) -> BlockCost:
    mesh, samples = layout.mesh, layout.microbatch_size
    tensor = mesh.tp if splits(block, mesh.tp) else 1
    shards = Shards(tensor, tensor if layout.sequence_parallel else 1, mesh.cp, mesh.ep)
    device = job.cluster.weakest_device()
    scale = element_bytes(job.precision) / job.profile.bytes_per_element
    conditions = Conditions(device, job.precision, samples, shards, scale, job.state.gradient)
    times = estimate_block_s(block, conditions)
    communication = _communication_s(block, job, layout, tensor, scale)
    hidden = times.weight_s if job.software.hides_tensor_parallel and tensor > 1 else 0.0
    backward_communication = max(communication - hidden, 0.0)
    if mesh.cp > 1:  # passing keys and values round hides under the attention they are for
        exchanged = block.context_exchange_bytes.of(samples) * scale / tensor
        ring = float(all_gather_s(axis_span(job, mesh_stride(layout, "cp"), mesh.cp), exchanged))
        communication += max(ring - times.forward_s, 0.0)
        backward_communication += max(ring - times.backward_s, 0.0)
    flops_s = 1 / (device.rate(job.precision) * efficiency_of(device).matmul)
    recomputed = block.selective_recompute_flops.of(samples) * flops_s
    recomputed += block.selective_recompute_bytes.of(samples) * scale / conditions.bandwidth
    return BlockCost(
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        communication_s=communication,
        backward_communication_s=backward_communication,
        weight_s=times.weight_s,
        selective_s=recomputed / tensor / mesh.cp,
        full_s=times.forward_s + communication,
        **_sizes(block, samples, shards, scale, job),
    )


def _sizes(block: BlockProfile, samples: int, shards: Shards, scale: float, job: Job) -> dict[str, float]:
    """Bytes and parameters held by one device."""
    tensor = shards.tensor
    dense = block.num_parameters - block.num_expert_parameters
    split = block.shardable_parameter_fraction / tensor + 1 - block.shardable_parameter_fraction
    parameters = dense * split + block.num_expert_parameters / (tensor * shards.expert)
    trainable = parameters * block.num_trainable_parameters / max(block.num_parameters, 1)
    whole = 1 - block.shardable_activation_fraction
    kept = (block.shardable_activation_fraction / tensor + whole / shards.sequence) / shards.context

    def amount(value: Amount, fraction: float) -> float:
        return value.of(samples) * scale * fraction

    selective = block.selective_saved_bytes
    narrow = 1 - block.matmul_input_fraction / 2 if job.precision == "fp8" else 1.0
    return {
        "parameters": parameters,
        "trainable": trainable,
        "largest_parameter": _largest_parameter(block, shards, parameters),
        "expert_parameters": block.num_expert_parameters / (tensor * shards.expert),
        "tied_parameters": block.num_tied_parameters / tensor,
        "buffer_bytes": float(block.buffer_bytes),
        "saved_bytes": amount(block.saved_activation_bytes, kept * narrow),
        "selective_saved_bytes": amount(selective or block.saved_activation_bytes, kept * narrow),
        "full_saved_bytes": amount(block.recompute_input_bytes, 1 / shards.sequence / shards.context),
        "weight_gradient_bytes": amount(block.weight_gradient_bytes, kept * narrow),
        "temporary_bytes": amount(block.temporary_bytes, kept) + _unadded_gradient_bytes(block, shards, job),
        "output_bytes": amount(block.output_bytes, 1 / shards.sequence / shards.context),
    }


def _unadded_gradient_bytes(block: BlockProfile, shards: Shards, job: Job) -> float:
    """Gradient of the largest weights, which exists once more until it is added to what is accumulated."""
    return 0.0 if job.software.fuses_gradients else _largest_weights(block, shards) * job.state.gradient


def _largest_weights(block: BlockProfile, shards: Shards) -> float:
    """Elements of the largest weights of a product on one device."""
    weights = (
        operator.inner * operator.columns * max(operator.num_experts / shards.expert, 1)
        for operator in block.operators
        if operator.kind == "matmul"
    )
    return max(weights, default=0.0) / shards.tensor


def _largest_parameter(block: BlockProfile, shards: Shards, on_device: float) -> float:
    """Elements of the largest parameter on one device; where it is not known, of the largest weights."""
    if block.num_largest_parameter:
        return on_device * block.num_largest_parameter / block.num_parameters
    return min(_largest_weights(block, shards) or on_device, on_device)


def _communication_s(block: BlockProfile, job: Job, layout: Layout, tensor: int, scale: float) -> float:
    """Seconds of the collectives inside the block's forward."""
    mesh, samples = layout.mesh, layout.microbatch_size
    time = 0.0
    if tensor > 1:
        message = block.all_reduce_bytes.of(samples) * scale / mesh.cp
        time += block.num_forward_all_reduces * all_reduce_s(
            axis_span(job, mesh_stride(layout, "tp"), tensor), message
        )
    if mesh.ep > 1 and block.num_expert_parameters:
        message = block.all_to_all_bytes.of(samples) * scale / mesh.cp
        message /= tensor if layout.sequence_parallel else 1  # each device sends its own tokens
        # Tokens leave in the precision of the computation and come back in 16 bits.
        message *= 0.75 if job.precision == "fp8" else 1.0
        span = axis_span(job, mesh_stride(layout, "ep"), mesh.ep)
        time += 2 * all_to_all_s(span, message, block.num_token_copies, block.max_machines_per_token)
    return time


def mesh_stride(layout: Layout, axis: str) -> int:
    """Distance in ranks between neighbours on ``axis``."""
    return math.prod(getattr(layout.mesh, inner) for inner in AXES[AXES.index(axis) + 1 :])


def axis_span(job: Job, stride: int, degree: int) -> Span:
    """How the groups of an axis lie on the cluster's machines."""
    return job.cluster.span(stride, degree)
