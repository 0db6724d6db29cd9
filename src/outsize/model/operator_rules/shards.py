"""Cut whole tensors into what each rank holds, and put them together again, in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outsize.model.operator_rules.placement import Partial, Placement, Replicate, Shard

__all__ = ["join_shards", "local_shape", "shard_of", "split_value"]


def shard_of(tensor: torch.Tensor, placement: Placement, degree: int, rank: int) -> torch.Tensor:
    """Return what ``rank`` of ``degree`` holds of a replicated or sharded tensor.

    Raises:
        TypeError: the placement is a partial sum, which no rank can derive on its own.
    """
    if isinstance(placement, Replicate):
        return tensor
    if isinstance(placement, Partial):
        raise TypeError("a partial sum has no shard of its own")
    dim = placement.dim
    mine = [tensor.narrow(dim, *span) for span in placement.ranges(tensor.shape[dim], degree, rank)]
    return mine[0].contiguous() if len(mine) == 1 else torch.cat(mine, dim)


def split_value(
    tensor: torch.Tensor, placement: Placement, degree: int, generator: torch.Generator
) -> list[torch.Tensor]:
    """Return what every rank holds; a partial sum is drawn at random so that it adds up to ``tensor``."""
    if not isinstance(placement, Partial):
        return [shard_of(tensor, placement, degree, rank) for rank in range(degree)]
    shares = [torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) for _ in range(degree - 1)]
    return [*shares, tensor - sum(shares)]


def join_shards(shards: Sequence[torch.Tensor], placement: Placement) -> torch.Tensor:
    """Return the whole tensor from what every rank holds."""
    if isinstance(placement, Replicate):
        return shards[0]
    if isinstance(placement, Partial):
        return torch.stack(list(shards)).sum(0)
    if len(placement.segments) < 2:
        return torch.cat(list(shards), placement.dim)
    parts = [
        torch.split(shard, [length for _, length in placement.ranges(0, len(shards), rank)], placement.dim)
        for rank, shard in enumerate(shards)
    ]
    ordered = [part[index] for index in range(len(placement.segments)) for part in parts]
    return torch.cat(ordered, placement.dim)


def local_shape(shape: tuple[int, ...], placement: Placement, degree: int, rank: int = 0) -> tuple[int, ...]:
    """Return the shape of what ``rank`` holds of a value of ``shape``; no rank holds more than the first."""
    if not isinstance(placement, Shard):
        return shape
    dim = placement.dim
    return (*shape[:dim], placement.length(shape[dim], degree, rank), *shape[dim + 1 :])
