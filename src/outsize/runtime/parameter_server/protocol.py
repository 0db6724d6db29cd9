"""The messages between roles, and how rows of tables travel in one buffer."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, auto

import torch

from outsize.runtime.parameter_server.layout import Shard

__all__ = [
    "DROPPED",
    "WITH_DENSE",
    "Kind",
    "RowUpdate",
    "pack_rows",
    "pack_values",
    "unpack_rows",
    "unpack_values",
]

RowUpdate = tuple[torch.Tensor, torch.Tensor]
"""Row indices within a shard (int64, distinct) and their gradients."""

WITH_DENSE, DROPPED = 1, 2
"""Flags of a pull: wants the dense parameters; its last push was refused."""


class Kind(IntEnum):
    """What a message asks or answers. In brackets: its numbers, then data and buffers."""

    CONFIGURE = auto()  # data: settings
    SET_SHARD = auto()  # [position]; buffer: values
    GET_SHARD = auto()  # [position]
    PULL = auto()  # [minimum version, flags]; buffer: rows
    CLAIM = auto()  # [push id, version read]
    PUSH = auto()  # [push id, version read, ticket]; buffers: dense gradient, rows with gradients
    SAVE = auto()  # data: folder
    LOAD = auto()  # data: folder
    STATISTICS = auto()
    WATCH = auto()  # answered when the server stops in good order
    STOP = auto()
    RUN_STEP = auto()  # coordinator to worker: [push id]; data: step and argument
    DONE = auto()  # an answer: numbers, data and buffers of the request's kind
    STALE = auto()  # [smallest version that would be accepted]
    REPEATED = auto()  # [version]
    FAILED = auto()  # data: error text
    SERVER_LOST = auto()  # worker to coordinator: data: server name and reason


def pack_rows(rows: Sequence[torch.Tensor], values: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """Return one buffer: ``count of each shard | all indices | values of each shard``."""
    counts = torch.tensor([len(indices) for indices in rows], dtype=torch.int64)
    return torch.cat([counts.view(torch.uint8), _bytes(rows), pack_values(values)])


def unpack_rows(shards: Sequence[Shard], buffer: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the indices of each shard and the buffer of values that follows them."""
    start = 8 * len(shards)
    counts = buffer[:start].view(torch.int64).tolist()
    end = start + 8 * sum(counts)
    return list(torch.split(buffer[start:end].view(torch.int64), counts)), buffer[end:]


def pack_values(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one buffer with the values of each shard, each padded to eight bytes."""
    return _bytes(values)


def unpack_values(shards: Sequence[Shard], counts: Sequence[int], buffer: torch.Tensor) -> list[torch.Tensor]:
    """Return the values of each shard, of shape (count, ...)."""
    found, start = [], 0
    for shard, count in zip(shards, counts, strict=True):
        num_bytes = count * shard.variable.row_elements * shard.variable.dtype.itemsize
        piece = buffer[start : start + num_bytes].view(shard.variable.dtype)
        found.append(piece.view(count, *shard.variable.shape[1:]))
        start += -(-num_bytes // 8) * 8
    return found


def _bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    pieces = [torch.empty(0, dtype=torch.uint8)]
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        pieces += [flat, flat.new_zeros(-flat.numel() % 8)]
    return torch.cat(pieces)
