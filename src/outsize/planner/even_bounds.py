"""Stages of equal numbers of layers, as most published runs have them."""

from __future__ import annotations

__all__ = ["even_bounds"]


def even_bounds(num_blocks: int, num_chunks: int) -> tuple[int, ...] | None:
    """Return bounds of chunks with equal numbers of layers between an embedding and a head.

    Where only all blocks divide, embedding and head count as layers; where neither does, the first and last
    chunk hold fewer. None if there are fewer blocks than chunks.
    """
    if num_blocks < num_chunks:
        return None
    num_layers = num_blocks - 2
    if num_layers % num_chunks and num_blocks % num_chunks == 0:
        return tuple(range(0, num_blocks + 1, num_blocks // num_chunks))
    short, extra = divmod(num_layers, num_chunks)
    counts = [short] * num_chunks
    order = sorted(range(num_chunks), key=lambda chunk: (chunk in {0, num_chunks - 1}, chunk))
    for chunk in order[:extra]:
        counts[chunk] += 1
    bounds, position = [0], 1
    for count in counts:
        position += count
        bounds.append(position)
    bounds[-1] += 1
    return tuple(bounds)
