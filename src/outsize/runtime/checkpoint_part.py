"""One process's part of a checkpoint, written without a process group, in the files that all strategies read.

Parameter servers come and go and are in no group together; each writes its own files into the folder. The
files are those of torch.distributed.checkpoint's safetensors storage: every tensor is a chunk of its whole
by an offset that stands in the file's header.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from outsize.runtime.checkpoint_entry import CheckpointEntry
from outsize.runtime.checkpoint_storage import MAX_FILE_BYTES

__all__ = ["write_part"]

_Chunk = tuple[str, list[int], torch.Tensor]


def write_part(folder: Path, prefix: str, entries: Mapping[str, CheckpointEntry]) -> None:
    """Write the chunks of all entries as ``<prefix>-00001.safetensors`` and so on, each of limited size."""
    for number, chunks in enumerate(_files(entries), start=1):
        tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, _, tensor in chunks}
        offsets = {name: {"saved_offsets": offset} for name, offset, _ in chunks}
        header = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
        save_file(tensors, folder / f"{prefix}-{number:05d}.safetensors", metadata=header)


def _files(entries: Mapping[str, CheckpointEntry]) -> Iterator[list[_Chunk]]:
    """Put chunks into files in order; no file holds a name twice or more than the limit (unless one row)."""
    chunks: list[_Chunk] = []
    num_bytes = 0
    for name, offset, tensor in _pieces(entries):
        if any(other == name for other, _, _ in chunks) or num_bytes + tensor.nbytes > MAX_FILE_BYTES:
            if chunks:
                yield chunks
            chunks, num_bytes = [], 0
        chunks.append((name, offset, tensor))
        num_bytes += tensor.nbytes
    if chunks:
        yield chunks


def _pieces(entries: Mapping[str, CheckpointEntry]) -> Iterator[_Chunk]:
    """Yield every chunk in pieces of whole rows that fit a file."""
    for name, entry in entries.items():
        for offset, chunk in entry.chunks.items():
            if not chunk.numel():
                continue
            rows = max(1, MAX_FILE_BYTES * chunk.shape[0] // chunk.nbytes)
            for first in range(0, chunk.shape[0], rows):
                yield name, [offset[0] + first, *offset[1:]], chunk[first : first + rows]
