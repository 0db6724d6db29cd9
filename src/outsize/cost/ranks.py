"""Sums over the blocks that each pipeline rank holds, as arrays over the ranks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outsize.cost.blocks import BlockCosts
from outsize.cost.layout import Assignment, Layout

__all__ = ["Ranks"]

Array = NDArray[np.float64]
Indices = NDArray[np.intp]


class Ranks:
    """Who holds what: blocks in chunks (virtual stages), chunks on pipeline ranks."""

    def __init__(self, layout: Layout, assignment: Assignment) -> None:
        self.layout = layout
        bounds = np.array(assignment.bounds)
        self.starts: Indices = bounds[:-1]
        self.ends: Indices = bounds[1:]
        self.rank_of_chunk: Indices = layout.rank_of_chunk

    def by_chunk(self, values: Array) -> Array:
        """Sums over the blocks of each chunk."""
        sums: Array = np.add.reduceat(values, self.starts)
        return sums

    def fold(self, by_chunk: Array) -> Array:
        """Sums over the chunks of each rank."""
        pp = self.layout.mesh.pp
        return np.bincount(self.rank_of_chunk, weights=by_chunk, minlength=pp).astype(np.float64)

    def total(self, values: Array) -> Array:
        """Sums over the blocks of each rank."""
        return self.fold(self.by_chunk(values))

    def total_in_flight(self, by_chunk: Array) -> Array:
        """Sums over the chunks of each rank, each times its micro-batches in flight."""
        return self.fold(by_chunk * self.layout.in_flight_by_chunk)

    def total_held_back(self, by_chunk: Array) -> Array:
        """Sums over the chunks of each rank, each times its micro-batches with weight gradients to come."""
        return self.fold(by_chunk * self.layout.held_back_by_chunk)

    def largest(self, values: Array) -> Array:
        """The largest value of the blocks of each rank."""
        result = np.zeros(self.layout.mesh.pp)
        np.maximum.at(result, self.rank_of_chunk, np.maximum.reduceat(values, self.starts))
        return result

    def tied_elsewhere(self, costs: BlockCosts) -> Array:
        """Parameters each rank holds once more because the block that owns them is on another rank."""
        extra = np.zeros(self.layout.mesh.pp)
        for block, owner in costs.tied_blocks:
            rank, home = (self._rank_of_block(each) for each in (block, owner))
            if rank != home:
                extra[rank] += costs.tied_parameters[block]
        return extra

    def _rank_of_block(self, block: int) -> int:
        chunk = int(np.searchsorted(self.ends, block, side="right"))
        return int(self.rank_of_chunk[chunk])

    def crossing_bytes(self, costs: BlockCosts) -> Array:
        """Bytes that each rank receives from and sends to other ranks, over all its chunks."""
        received = self.received_bytes(costs)
        is_local = np.concatenate([[True], self.rank_of_chunk[1:] == self.rank_of_chunk[:-1]])
        received[is_local] = 0.0
        return self.fold(received) + self.fold(np.concatenate([received[1:], [0.0]]))

    def received_bytes(self, costs: BlockCosts) -> Array:
        """Bytes that each chunk receives; none for the first."""
        received: Array = np.concatenate([[0.0], costs.output_bytes[self.starts[1:] - 1]])
        return received
