"""Checkpoint files: safetensors, so that reading one never runs code that is in it; small, to save memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["reader", "writer"]

# torch builds each file in memory before it writes it.
MAX_FILE_BYTES = 16 * 2**20


class _Writer(HuggingFaceStorageWriter):
    """Puts a process's chunks into files of limited size, in which no name comes twice."""

    def _split_by_storage_plan(
        self, storage_plan: dict[str, int] | None, items: list[WriteItem]
    ) -> dict[int, list[WriteItem]]:
        del storage_plan
        files: dict[tuple[int, int], list[WriteItem]] = {}
        seen: Counter[str] = Counter()
        num_bytes: Counter[int] = Counter()
        for item in items:
            layer = seen[item.index.fqn]  # first, second, ... chunk of its name
            seen[item.index.fqn] += 1
            num_bytes[layer] += _num_bytes(item)
            files.setdefault((layer, num_bytes[layer] // MAX_FILE_BYTES), []).append(item)
        return dict(enumerate(files.values(), start=1))


def writer(folder: Path) -> HuggingFaceStorageWriter:
    """Return the writer of every process's own chunks below ``folder``."""
    return _Writer(str(folder), save_distributed=True)


def reader(folder: Path) -> HuggingFaceStorageReader:
    """Return the reader of all chunks below ``folder``."""
    return HuggingFaceStorageReader(str(folder))


def _num_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    assert data is not None
    assert data.chunk is not None
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize
