"""Cuts the blocks into stages by dynamic programming over boundaries.

A stage from boundary i to boundary j costs C_s[i, j] seconds a micro-batch (infinite where it does not fit
rank s, or where no cut is legal); what it must recompute to fit is part of the cost. Of all ways to walk
from boundary 0 to n in p steps we want the least

    m · max C  +  k (Σ C - max C)  +  tail of the first stage      see `outsize.cost.step`

so: find the least possible maximum, then the least sum under that maximum, then try looser maxima as long
as they could still win. This is exact, for any chain of blocks and unequal devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from outsize.cost.blocks import BlockCosts
from outsize.cost.idle_share import idle_share
from outsize.cost.layout import RECOMPUTE_MODES, Assignment, Job, Layout
from outsize.cost.memory import estimate_memory
from outsize.cost.replicas import gather_wait_s, optimizer_s, reduce_wait_s
from outsize.cost.state import HeldParameters, StateBytes, estimate_state
from outsize.cost.step import sent_parts, stage_devices, stage_link
from outsize.model.profile import ModelProfile
from outsize.plan.stage_cuts import check_cuts
from outsize.planner.boundary_walk import best_walk, least_maximum, least_sum

__all__ = ["StageCuts", "cut_stages", "legal_boundaries", "pinned_bounds"]

Array = NDArray[np.float64]

_BALANCE = 1e-11  # of walks that take equally long, the one with the least squares: even stages, even memory


@dataclass(frozen=True, slots=True)
class StageCuts:
    """The cuts found; ``fits`` is False where even recomputing everything exceeds a device."""

    assignment: Assignment
    fits: bool


def legal_boundaries(profile: ModelProfile) -> list[int]:
    """Return the indices of blocks before which a cut is legal, 0 and the end included."""
    inner = [index for index, block in enumerate(profile.blocks) if index and block.cut_label]
    return [0, *inner, len(profile.blocks)]


def pinned_bounds(profile: ModelProfile, cuts: Sequence[str]) -> tuple[int, ...]:
    """Return the bounds of stages that begin at the blocks whose cuts are labelled ``cuts``.

    Raises:
        PlanError: a label is no legal cut, is there twice, or is not in the order of the model.
    """
    labels = {profile.blocks[index].cut_label: index for index in legal_boundaries(profile)[1:-1]}
    check_cuts(cuts, list(labels))
    return (0, *(labels[cut] for cut in cuts), len(profile.blocks))


def cut_stages(
    job: Job,
    layout: Layout,
    costs: BlockCosts,
    *,
    recompute: bool = True,
    bounds: tuple[int, ...] | None = None,
) -> StageCuts | None:
    """Return the best cuts for ``layout``; None where there are fewer blocks than chunks, or other bounds.

    ``recompute`` allows recomputation to save memory; ``bounds`` pins the cuts, and with them the number of
    chunks: there are none for a layout with another.
    """
    if bounds is not None and len(bounds) - 1 != layout.num_chunks:
        return None
    legal = legal_boundaries(job.profile)
    if bounds is None and len(legal) - 1 < layout.num_chunks:
        return None
    if bounds is None and layout.num_chunks == 1:
        bounds = (0, legal[-1])
    if bounds is None and layout.num_virtual_stages > 1:
        bounds = _balanced_bounds(costs, tuple(legal), layout.num_chunks)
    if bounds is None:
        tables = _StageTables(job, layout, costs, recompute=recompute)
        idle = idle_share(layout, costs.weight_share, ends_together=job.software.ends_together)
        bounds = best_walk(tables.cost(legal), tables.tail_s(legal), layout.num_microbatches, idle, legal)
        if bounds is None:  # does not fit: show the cuts that come nearest
            bounds = _balanced_bounds(costs, tuple(legal), layout.num_chunks)
    return _fill(job, layout, costs, bounds, recompute=recompute)


class _StageTables:
    """Cost of every range of blocks on every rank, by prefix sums."""

    def __init__(self, job: Job, layout: Layout, costs: BlockCosts, *, recompute: bool) -> None:
        self.job, self.layout, self.costs, self.recompute = job, layout, costs, recompute
        self.per = job.state

    def cost(self, legal: list[int]) -> Array:
        """Array (ranks, boundaries, boundaries) of seconds, infinite where a stage cannot be."""
        layout, job, costs = self.layout, self.job, self.costs
        pick = np.ix_(legal, legal)
        extra = costs.again_by_mode[RECOMPUTE_MODES.index(layout.base_recompute)]
        compute = _ranges(costs.forward_s + costs.backward_s + extra)[pick]
        held, trained = (table[pick] for table in self._held())
        other = _ranges(costs.exchange_s)[pick] + self._send_s()[pick]
        full_s = _ranges(costs.full_s - extra)[pick]
        state, buffers = self._state(), self._buffer_bytes()
        beside_working = (state.total + state.in_backward + buffers)[pick]
        after_backward = (state.total + state.after_backward + buffers)[pick]
        kept = _ranges(self._base_saved())[pick]
        later = _ranges(costs.weight_gradient_bytes)[pick]
        least = _ranges(np.minimum(costs.full_saved_bytes, self._base_saved()))[pick]
        temporary, recomputed_temporary = (table[pick] for table in self._temporaries())
        order = np.subtract.outer(np.arange(len(legal)), np.arange(len(legal))) >= 0
        result = np.empty((layout.mesh.pp, len(legal), len(legal)))
        reference = job.cluster.weakest_device().rate(job.precision)
        forward, backward = _ranges(costs.forward_s)[pick], _ranges(costs.backward_s)[pick]
        saves = (self._base_saved() > costs.full_saved_bytes).astype(float)
        num_saving = np.maximum(_ranges(saves)[pick], 1)
        times: dict[float, Array] = {}
        for stage, device in enumerate(stage_devices(job, layout)):
            room = device.memory_bytes - job.cluster.weakest_device().reserve_bytes
            cannot = order | (after_backward > room)
            (in_flight,) = layout.in_flight(stage)
            slower = reference / device.rate(job.precision)
            if slower not in times:
                waits = gather_wait_s(
                    job,
                    layout,
                    parameters=held,
                    trainable=trained,
                    forward_s=forward * slower,
                    backward_s=backward * slower,
                )
                times[slower] = compute * slower + other + waits
            time = times[slower]
            held_back = layout.held_back_by_chunk[stage]
            short = kept * in_flight + later * held_back + temporary + beside_working - room
            result[stage] = np.where(cannot | (short > 0), np.inf, time)
            if not self.recompute:
                continue
            can_save = (kept - least) * in_flight + later * held_back
            again = short + recomputed_temporary - temporary
            helped = (short > 0) & ~cannot & (can_save > 0) & (again <= can_save)
            share = _whole_blocks(again[helped] / can_save[helped], num_saving[helped])
            result[stage][helped] = time[helped] + share * full_s[helped] * slower
        longest_s = result.max(where=np.isfinite(result), initial=0.0)
        return result + _BALANCE * result**2 / longest_s if longest_s else result

    def _base_saved(self) -> Array:
        base: Array = self.costs.saved_by_mode[RECOMPUTE_MODES.index(self.layout.base_recompute)]
        return base

    def _send_s(self) -> Array:
        """Seconds a stage takes to receive its input and send back its gradient, by first block."""
        size = len(self.costs.blocks) + 1
        sends = np.zeros((size, size))
        if self.layout.mesh.pp > 1:
            link = stage_link(self.job, self.layout)
            parts = sent_parts(self.job, self.layout)
            received = self.costs.output_bytes[:-1] / parts / link.bandwidth_bytes_per_s + link.latency_s
            sends[1:-1, :] = 2 * received[:, None]
        return sends

    def _state(self) -> StateBytes:
        """State of each range, and what stands beside it for a moment."""
        costs = self.costs
        held, trained = self._held()
        largest, largest_block = _range_max(costs.largest_parameter), _range_max(costs.parameters)
        return estimate_state(HeldParameters(held, trained, largest_block, largest), self.layout, self.per)

    def _buffer_bytes(self) -> Array:
        """The model's buffers, and those of communication between stages, of each range."""
        costs = self.costs
        crossing = np.concatenate([[0.0], costs.output_bytes[:-1], [0.0]])
        buffers: Array = _ranges(costs.buffer_bytes) + 2 * (crossing[:, None] + crossing[None, :])
        return buffers + self.job.software.bucket_bytes

    def tail_s(self, legal: list[int]) -> Array:
        """Seconds a step ends later for the first stage's replicas and optimizer, by its last boundary."""
        job, layout, costs = self.job, self.layout, self.costs
        held, trained = (table[0, legal] for table in self._held())
        slower = job.cluster.weakest_device().rate(job.precision) / stage_devices(job, layout)[0].rate(
            job.precision
        )
        backward = (
            _ranges(costs.backward_s)[0, legal] * slower + _ranges(costs.backward_communication_s)[0, legal]
        )
        experts = _ranges(costs.expert_parameters)[0, legal]
        reduce = reduce_wait_s(
            job,
            layout,
            parameters=held,
            trainable=trained,
            backward_s=backward,
            expert_parameters=experts,
        )
        tail: Array = reduce + optimizer_s(job, layout, trained)
        return tail

    def _held(self) -> tuple[Array, Array]:
        """Parameters and trainable parameters of each range, tied ones of other stages included."""
        tied = self._tied()
        return _ranges(self.costs.parameters) + tied, _ranges(self.costs.trainable) + tied

    def _tied(self) -> Array:
        size = len(self.costs.blocks) + 1
        extra = np.zeros((size, size))
        for block, owner in enumerate(self.costs.owners):
            if owner != block:
                extra[owner + 1 : block + 1, block + 1 :] += self.costs.tied_parameters[block]
        return extra

    def _temporaries(self) -> tuple[Array, Array]:
        """Highest temporary memory of each range, without and with full recomputation."""
        base = self.costs.temporary_bytes + np.maximum(self.costs.saved_bytes - self._base_saved(), 0)
        again = self.costs.temporary_bytes + np.maximum(
            self.costs.saved_bytes - self.costs.full_saved_bytes, 0
        )
        return _range_max(base), _range_max(np.maximum(base, again))


def _whole_blocks(share: Array, num_saving: Array) -> Array:
    """Round shares of recomputed blocks up to whole numbers of the blocks that save anything."""
    rounded: Array = np.minimum(np.ceil(share * num_saving - 1e-9) / num_saving, 2)
    return rounded


def _ranges(values: Array) -> Array:
    """Array whose [i, j] is the sum of values i up to j."""
    prefix = np.concatenate([[0.0], np.cumsum(values)])
    sums: Array = prefix[None, :] - prefix[:, None]
    return sums


def _range_max(values: Array) -> Array:
    """Array whose [i, j] is the largest of values i up to j."""
    size = len(values)
    result = np.zeros((size + 1, size + 1))
    for first in range(size):
        result[first, first + 1 :] = np.maximum.accumulate(values[first:])
    return result


@lru_cache(maxsize=1024)
def _balanced_bounds(costs: BlockCosts, legal: tuple[int, ...], num_chunks: int) -> tuple[int, ...]:
    """Bounds that balance time over the chunks, whatever the memory."""
    times = _ranges(costs.step_s)[np.ix_(legal, legal)]
    times[np.tril_indices(len(legal))] = np.inf
    tables = np.broadcast_to(times, (num_chunks, *times.shape))
    path = least_sum(tables, np.zeros(len(legal)), least_maximum(tables))[1]
    return tuple(legal[index] for index in path)


def _fill(
    job: Job, layout: Layout, costs: BlockCosts, bounds: tuple[int, ...], *, recompute: bool
) -> StageCuts:
    """Choose what each rank recomputes: as little time as frees enough memory."""
    mode = RECOMPUTE_MODES.index(layout.base_recompute)
    modes = np.full(len(costs.blocks), mode)
    base = Assignment(bounds, (layout.base_recompute,) * len(modes))
    memory = estimate_memory(job, layout, costs, base)
    available = np.array([device.memory_bytes for device in stage_devices(job, layout)])
    missing = sum(memory.values()) - available
    sizes = np.diff(bounds)
    saving = np.repeat(layout.in_flight_by_chunk, sizes) * (
        costs.saved_by_mode[mode] - costs.full_saved_bytes
    )
    saving += np.repeat(layout.held_back_by_chunk, sizes) * costs.weight_gradient_by_mode[mode]
    rank_of_block = np.repeat(layout.rank_of_chunk, sizes)
    for stage in np.flatnonzero(missing > 0):
        useful = np.flatnonzero((rank_of_block == stage) & (saving > 0)) if recompute else np.array([], int)
        order = useful[
            np.argsort(costs.full_s[useful] / saving[useful], kind="stable")
        ]  # cheapest byte first
        held = memory["temporaries"][stage]
        temporary = np.maximum(np.maximum.accumulate(costs.temporary_by_mode[-1, order]), held)
        left = missing[stage] + temporary - held - np.cumsum(saving[order])
        enough = np.flatnonzero(left <= 0)
        count = int(enough[0]) + 1 if enough.size else len(order)
        modes[order[:count]] = len(RECOMPUTE_MODES) - 1
    chosen = Assignment(bounds, tuple(RECOMPUTE_MODES[index] for index in modes))
    if missing.max() > 0:  # what freed activations leave may be needed after backward
        missing = sum(estimate_memory(job, layout, costs, chosen).values()) - available
    return StageCuts(chosen, fits=bool(missing.max() < 1))
