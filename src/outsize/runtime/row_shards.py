"""Cuts parameters along their first dim: each rank holds a run of rows, the first ranks one row more.

5 rows      rank 0: rows 0 1     rank 1: rows 2 3     rank 2: row 4
a scalar    rank 0: its value    ranks 1, 2: nothing
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from outsize.model.operator_rules.placement import share_start

__all__ = ["RowShards"]


@dataclass(frozen=True, slots=True)
class RowShards:
    """The shards of ``degree`` ranks, of which this process is ``rank``."""

    degree: int
    rank: int

    def rows(self, shape: torch.Size, rank: int) -> slice:
        """Return the rows that a rank holds of a parameter of ``shape``."""
        num_rows = shape[0] if shape else 1
        first, end = (share_start(num_rows, self.degree, each) for each in (rank, rank + 1))
        return slice(first, end)

    def shape(self, shape: torch.Size, rank: int) -> torch.Size:
        """Return the shape of what a rank holds; of a scalar one element or none."""
        rows = self.rows(shape, rank)
        return torch.Size([rows.stop - rows.start, *shape[1:]])

    def num_elements(self, shape: torch.Size, rank: int) -> int:
        """Return how many elements a rank holds; no rank holds more than the first."""
        return math.prod(self.shape(shape, rank))

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the view of a whole parameter, or of its gradient, that a rank holds."""
        with_rows = whole.view(1) if whole.dim() == 0 else whole
        return with_rows[self.rows(whole.shape, rank)]

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the view that this process holds."""
        return self.part(whole, self.rank)
