"""Runs a block again in backward instead of keeping its activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["recomputed"]

_Place = tuple[dict[str, torch.Tensor | None], str]  # a module's table of buffers, and a name in it


def recomputed(block: nn.Module) -> Callable[..., Any]:
    """Return the block with only its inputs kept from forward to backward.

    Non-reentrant: right also where no input needs a gradient. Random masks are drawn as the first time, and
    buffers that the block writes (running statistics, counters) are written once.
    """
    written = _WrittenBuffers(block)
    return partial(checkpoint, block, use_reentrant=False, context_fn=written.contexts)


class _WrittenBuffers:
    """Remembers which buffers a block writes, from the first time that it runs."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._places: list[_Place] | None = None

    def contexts(self) -> tuple[_Forward, _Again]:
        """Return what one forward and its repetition run in."""
        forward = _Forward(self)
        return forward, _Again(forward)

    def places(self) -> list[_Place]:
        """Return the buffers that may be written: all of them, before the block has run once."""
        return list(_buffers_of(self._block)) if self._places is None else self._places

    def learn(self, written: list[_Place]) -> None:
        """Remember what was written."""
        if self._places is None:
            self._places = written


class _Forward:
    """Keeps the contents that written buffers had before."""

    def __init__(self, buffers: _WrittenBuffers) -> None:
        self._buffers = buffers
        self.before: list[tuple[_Place, torch.Tensor]] = []

    def __enter__(self) -> None:
        self._held = [
            (place, _at(place), _at(place)._version, _at(place).clone()) for place in self._buffers.places()
        ]

    def __exit__(self, *_: object) -> None:
        self.before = [
            (place, content)
            for place, tensor, version, content in self._held
            if _at(place) is not tensor or tensor._version != version
        ]
        del self._held
        self._buffers.learn([place for place, _ in self.before])


class _Again:
    """Lets the block see the contents of its forward, and puts the present ones back afterwards.

    It may be entered several times: a backward in two halves runs the block for each.
    """

    def __init__(self, forward: _Forward) -> None:
        self._forward = forward

    def __enter__(self) -> None:
        self._present = [(place, _at(place)) for place, _ in self._forward.before]
        for (table, name), content in self._forward.before:
            table[name] = content.clone()

    def __exit__(self, *_: object) -> None:
        for (table, name), tensor in self._present:
            table[name] = tensor
        del self._present


def _buffers_of(block: nn.Module) -> Iterator[_Place]:
    for part in block.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                yield part._buffers, name


def _at(place: _Place) -> torch.Tensor:
    table, name = place
    tensor = table[name]
    assert tensor is not None
    return tensor
