"""What one process holds of a tensor in a checkpoint, in the terms of torch.distributed.checkpoint.

whole      │ q q q q │ k k │ v v │      a fused dim cut in three segments for two ranks:
rank 0     │ q q │ k │ v │              three chunks, each with its offset in the whole,
rank 1         │ q q │ k │ v │          so that any other plan can read its own part of it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from outsize.model.operator_rules.placement import Shard

__all__ = [
    "CheckpointEntry",
    "EntryLoadPlanner",
    "EntrySavePlanner",
    "rows_entry",
    "sharded_entry",
    "whole_entry",
]


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """A tensor of ``whole_shape``; ``chunks`` are views of the local tensor by their offset in the whole."""

    whole_shape: torch.Size
    chunks: dict[torch.Size, torch.Tensor]

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor, which loading compares with the saved one."""
        return self.whole_shape

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offset, sizes=chunk.size()),
                    properties=TensorProperties.create_from_tensor(chunk),
                    size=self.whole_shape,
                ),
            )
            for offset, chunk in self.chunks.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=offset, sizes=chunk.size()) for offset, chunk in self.chunks.items()
        ]


def whole_entry(tensor: torch.Tensor) -> CheckpointEntry:
    """Return the entry of a tensor held whole; a scalar is kept as one element."""
    values = tensor.detach()
    values = values.view(1) if values.dim() == 0 else values
    return CheckpointEntry(values.size(), {torch.Size([0] * values.dim()): values})


def sharded_entry(local: torch.Tensor, placement: Shard, degree: int, rank: int) -> CheckpointEntry:
    """Return the entry of the shard that ``rank`` of ``degree`` holds."""
    values, dim = local.detach(), placement.dim
    whole = list(values.shape)
    whole[dim] = sum(placement.segments) or whole[dim] * degree
    chunks: dict[torch.Size, torch.Tensor] = {}
    local_start = 0
    for start, length in placement.ranges(whole[dim], degree, rank):
        offset = [0] * values.dim()
        offset[dim] = start
        chunks[torch.Size(offset)] = values.narrow(dim, local_start, length)
        local_start += length
    return CheckpointEntry(torch.Size(whole), chunks)


def rows_entry(
    local: torch.Tensor, rows: slice, shape: torch.Size, placement: Shard | None, degree: int, rank: int
) -> CheckpointEntry:
    """Return the entry of some rows of a tensor, or of the shard of ``shape`` that ``rank`` holds.

    ```
    whole    │ q q q q │ k k │      cut in two segments over two ranks; of rank 0's rows the first two
    rank 0   │ q q     │ k   │      are in one chunk, the last two in two
    ```
    """
    values = local.detach()
    whole, dim = list(shape) or [1], 0 if placement is None else placement.dim
    if placement is None:
        ranges = [(0, whole[0])]
    else:
        whole[dim] = sum(placement.segments) or whole[dim] * degree
        ranges = placement.ranges(whole[dim], degree, rank)
    chunks: dict[torch.Size, torch.Tensor] = {}
    place = 0  # along the dim, in the shard
    for start, length in ranges:
        offset = [rows.start, *[0] * (values.dim() - 1)]
        if dim:
            offset[dim], chunk = start, values.narrow(dim, place, length)
        else:
            first, end = max(rows.start, place), min(rows.stop, place + length)
            offset[0], chunk = (
                start + first - place,
                values[max(first - rows.start, 0) : max(end - rows.start, 0)],
            )
        if chunk.numel():
            chunks[torch.Size(offset)] = chunk
        place += length
    return CheckpointEntry(torch.Size(whole), chunks)


class EntrySavePlanner(DefaultSavePlanner):
    """Finds chunks of entries when they are written; of copies the first process that holds one writes it.

    So what replicas hold is written by one machine, and a checkpoint is whole where machines share no folder.
    """

    def __init__(self) -> None:
        super().__init__(
            flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
        )

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """Return the chunk to write."""
        return _chunk(self.state_dict, index)


class EntryLoadPlanner(DefaultLoadPlanner):
    """Finds chunks of entries when they are filled."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the entries as they are: torch's planner would replace what is no tensor by None."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the chunk to fill."""
        return _chunk(self.state_dict, index)


def _chunk(entries: dict[str, Any], index: MetadataIndex) -> torch.Tensor:
    entry: CheckpointEntry = entries[index.fqn]
    assert index.offset is not None
    return entry.chunks[index.offset]
