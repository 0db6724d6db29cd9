"""Refuses models that write buffers while they train: no server has them, and every worker would differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from outsize.errors import ModelError

__all__ = ["WrittenBuffers"]


class WrittenBuffers:
    """Compares the saved buffers of a module before and after one training pass, the first with values."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self._module, self._names = module, names
        self._is_checked = not names

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Run a training pass inside.

        Raises:
            ModelError: it wrote a buffer.
        """
        before = {} if self._is_checked else self._values()
        yield
        if before:
            self._is_checked = True
            after = self._values()
            written = [name for name, value in before.items() if not torch.equal(value, after[name])]
            if written:
                raise ModelError(
                    f"The model writes its buffer {written[0]} while it trains.",
                    why="Each worker of parameter servers would keep one of its own, and no server has it.",
                    attempt="another strategy, or a buffer that is not saved (persistent=False).",
                )

    def _values(self) -> dict[str, torch.Tensor]:
        """Return copies of the buffers; none before the first pass, which gives them their values."""
        buffers = dict(self._module.named_buffers(remove_duplicate=False))
        held = {name: buffers[name] for name in self._names}
        is_there = not any(buffer.is_meta for buffer in held.values())
        return {name: buffer.detach().clone() for name, buffer in held.items()} if is_there else {}
