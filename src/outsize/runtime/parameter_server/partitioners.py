"""How many shards a variable gets, and the div rule that says which rows each shard holds.

The rules and their names are those of TensorFlow's ``sharded_variable`` partitioners.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from outsize.errors import PlanError
from outsize.units import parse_bytes

__all__ = [
    "FixedPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Partitioner",
    "checked_num_shards",
    "parse_partitioner",
    "row_counts",
    "shard_of_rows",
]

_FORMS = "fixed:4 (shards), min_size:256KiB:4 (bytes, most shards), max_size:1MiB (bytes)"


class Partitioner(Protocol):
    """Says how a variable is cut; only the first dim may be."""

    def __call__(self, shape: Sequence[int], dtype: torch.dtype, /) -> Sequence[int]:
        """Return the number of parts along each dim."""
        ...


@dataclass(frozen=True)
class FixedPartitioner:
    """``min(num_shards, rows)`` shards."""

    num_shards: int

    def __call__(self, shape: Sequence[int], _dtype: torch.dtype) -> Sequence[int]:
        """Return the number of parts along each dim."""
        return _first_dim(min(self.num_shards, shape[0]), shape)


@dataclass(frozen=True)
class MinSizePartitioner:
    """As many shards as keep each at ``min_shard_bytes`` or more, at most ``max_shards``."""

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> Sequence[int]:
        """Return the number of parts along each dim."""
        wanted = -(-math.prod(shape) * dtype.itemsize // self.min_shard_bytes)
        return _first_dim(max(1, min(wanted, shape[0], self.max_shards)), shape)


@dataclass(frozen=True)
class MaxSizePartitioner:
    """As few shards as keep each at ``max_shard_bytes`` or less, whole rows only, at most ``max_shards``."""

    max_shard_bytes: int
    max_shards: int | None = None

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> Sequence[int]:
        """Return the number of parts along each dim."""
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        rows_per_shard = max(1, self.max_shard_bytes // row_bytes)
        shards = max(1, -(-shape[0] // rows_per_shard))
        return _first_dim(min(shards, self.max_shards or shards), shape)


def parse_partitioner(text: str | None) -> Partitioner | None:
    """Return the partitioner that a text such as ``max_size:1MiB`` names; None keeps variables whole.

    Raises:
        PlanError: there is no such partitioner.
    """
    if text is None:
        return None
    name, _, rest = text.partition(":")
    numbers = rest.split(":")
    try:
        if name == "fixed" and len(numbers) == 1:
            return FixedPartitioner(_positive(numbers[0]))
        if name == "min_size" and len(numbers) == 2:
            return MinSizePartitioner(_positive_bytes(numbers[0]), _positive(numbers[1]))
        if name == "max_size" and len(numbers) == 1:
            return MaxSizePartitioner(_positive_bytes(numbers[0]))
    except ValueError as error:
        raise PlanError(f"{text!r} is not a partitioner.", why=str(error), attempt=_FORMS) from None
    raise PlanError(f"{text!r} is not a partitioner.", attempt=_FORMS)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a number of 1 or more.")
    return int(text)


def _positive_bytes(text: str) -> int:
    num_bytes = parse_bytes(text)
    if num_bytes < 1:
        raise ValueError(f"{text!r} holds nothing.")
    return num_bytes


def _first_dim(num_shards: int, shape: Sequence[int]) -> list[int]:
    return [num_shards, *[1] * (len(shape) - 1)]


def checked_num_shards(partitioner: Partitioner | None, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the number of shards of a variable; scalars and variables without a partitioner stay whole.

    Raises:
        PlanError: a partitioner cut another dim than the first, or asked for no or too many parts.
    """
    if partitioner is None or not shape or 0 in shape:
        return 1
    parts = list(partitioner(shape, dtype))
    if len(parts) != len(shape) or any(part != 1 for part in parts[1:]) or not 1 <= parts[0] <= shape[0]:
        raise PlanError(
            f"the partitioner cuts a variable of shape {tuple(shape)} into {parts}",
            why="only the first dim can be cut, into 1 to as many parts as it has rows",
        )
    return parts[0]


def row_counts(num_rows: int, num_shards: int) -> list[int]:
    """Return the rows of each shard by the div rule: the first ``num_rows % num_shards`` get one more."""
    base, extra = divmod(num_rows, num_shards)
    return [base + (shard < extra) for shard in range(num_shards)]


def shard_of_rows(rows: torch.Tensor, num_rows: int, num_shards: int) -> torch.Tensor:
    """Return the shard of each row: ``max(i // (base + 1), (i - extra) // base)``, base = rows // shards."""
    base, extra = divmod(num_rows, num_shards)
    longer = torch.div(rows, base + 1, rounding_mode="floor")
    shorter = torch.div(rows - extra, base, rounding_mode="floor") if base else longer
    return torch.maximum(longer, shorter)
