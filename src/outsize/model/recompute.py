"""Runs a block again in backward instead of keeping its activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["buffers_unchanged", "recomputed"]


def recomputed(block: nn.Module, run: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return the block with only its inputs kept from forward to backward; ``run`` is what calls it.

    Non-reentrant: right also where no input needs a gradient. Random masks are drawn as the first time, and
    buffers that the block writes (running statistics, counters) are written once.
    """
    written = _WrittenBuffers(block)
    return partial(checkpoint, run or block, use_reentrant=False, context_fn=written.contexts)


@contextmanager
def buffers_unchanged(module: nn.Module) -> Iterator[None]:
    """Leave the module's buffers as they were, whatever is run inside."""
    held = _WrittenBuffers(module).snapshot()
    try:
        yield
    finally:
        with torch.no_grad():
            for each in held:
                each.table[each.name] = each.buffer
                each.buffer.copy_(each.content)


@dataclass(frozen=True, slots=True)
class _Held:
    """A buffer in a module's table, and a copy of what it held."""

    table: dict[str, torch.Tensor | None]
    name: str
    buffer: torch.Tensor
    content: torch.Tensor

    def is_changed(self) -> bool:
        """Compare contents: the kernels of batch norm write without raising the version."""
        return self.table[self.name] is not self.buffer or not torch.equal(self.buffer, self.content)


class _WrittenBuffers:
    """Remembers which modules of a block write their buffers, from the first time that it runs."""

    def __init__(self, block: nn.Module) -> None:
        self._tables = [part._buffers for part in block.modules() if part._buffers]
        self._is_known = False

    def contexts(self) -> tuple[_Forward, _Again]:
        """Return what one forward and its repetition run in."""
        forward = _Forward(self)
        return forward, _Again(forward)

    def snapshot(self) -> list[_Held]:
        """Return the contents of the buffers that may be written: of all, before the block has run once."""
        return [
            _Held(table, name, buffer, buffer.clone())
            for table in self._tables
            for name, buffer in table.items()
            if buffer is not None
        ]

    def written(self, held: list[_Held]) -> list[_Held]:
        """Return those of modules that wrote a buffer; not all of theirs need have changed the first time."""
        if not self._is_known:
            tables = {id(each.table) for each in held if each.is_changed()}
            self._tables = [table for table in self._tables if id(table) in tables]
            self._is_known = True
        return [each for each in held if any(each.table is table for table in self._tables)]


class _Forward:
    """Keeps the contents that written buffers had before."""

    def __init__(self, buffers: _WrittenBuffers) -> None:
        self._buffers = buffers
        self.before: list[_Held] = []

    def __enter__(self) -> None:
        self.before = self._buffers.snapshot()

    def __exit__(self, *_: object) -> None:
        self.before = self._buffers.written(self.before)


class _Again:
    """Lets the block see the contents of its forward, and puts the present ones back afterwards.

    It may be entered several times: a backward in two halves runs the block for each.
    """

    def __init__(self, forward: _Forward) -> None:
        self._forward = forward

    def __enter__(self) -> None:
        self._present = [each.table[each.name] for each in self._forward.before]
        for each in self._forward.before:
            each.table[each.name] = each.content.clone()

    def __exit__(self, *_: object) -> None:
        for each, tensor in zip(self._forward.before, self._present, strict=True):
            each.table[each.name] = tensor
        del self._present
