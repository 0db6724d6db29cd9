"""Runs a module's forward without leaving traces on the module's own objects, and tells what would stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from outsize.errors import RecordingError
from outsize.model.block_signature import PLAIN
from outsize.model.python_state import PythonState

__all__ = ["Changes", "kept_attributes"]


@dataclass(slots=True)
class Changes:
    """Full names of what a forward put in another's place on a module, and of the buffers that it wrote."""

    numbers: list[str] = field(default_factory=list)  # flags and texts too
    buffers: list[str] = field(default_factory=list)
    written_buffers: list[str] = field(default_factory=list)  # in place, or replaced
    has_new_hooks: bool = False  # the forward registered some on modules

    def check(self, blocks: Sequence[str]) -> list[str]:
        """Return warnings about numbers and flags set outside ``blocks``, which are recorded as they were.

        Raises:
            RecordingError: a buffer is replaced outside blocks, which a recording would not do again.
        """
        for name in self.buffers:
            if not _is_inside(name, blocks):
                raise RecordingError(
                    f"the forward puts another tensor in the place of buffer {name}",
                    why="outside blocks only operators are recorded, so it would keep its first value",
                    attempt="write it in place, such as with copy_ or add_",
                )
        return [
            f"the forward changes {name}, which the recording takes for constant"
            for name in self.numbers
            if not _is_inside(name, blocks)
        ]


def _is_inside(name: str, blocks: Sequence[str]) -> bool:
    return any(name.startswith(f"{block}.") for block in blocks)


@contextmanager
def kept_attributes(module: nn.Module) -> Iterator[Changes]:
    """Put back afterwards what code inside sets on ``module``, on any module in it, or in what these hold.

    A recording leaves tensors without values in caches, counts calls that were none, and sets flags after a
    first batch that there was not. What is yielded is filled at the end.
    """
    changes = Changes()
    parts = list(module.named_modules())
    before = [(path, part, dict(vars(part)), dict(part._buffers)) for path, part in parts]
    versions = {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}
    num_hooks = _count_hooks(module)
    state = PythonState()
    for _, part in reversed(parts):  # from the inside, so that each is looked into as deep as any
        state.keep(part)
    try:
        yield changes
    finally:
        for path, part, attributes, buffers in before:
            prefix = f"{path}." if path else ""
            changes.numbers += [prefix + name for name in _changed_settings(vars(part), attributes)]
            changes.buffers += [prefix + name for name in _replaced_tensors(part._buffers, buffers)]
        changes.has_new_hooks = _count_hooks(module) > num_hooks
        state.put_back()
        written = [name for name, (buffer, version) in versions.items() if buffer._version != version]
        changes.written_buffers = written + changes.buffers


def _count_hooks(module: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


def _changed_settings(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Return the names of numbers, flags and texts that are others than before."""
    return [
        name
        for name, value in before.items()
        if now.get(name) is not value
        and value is not None
        and isinstance(value, PLAIN)
        and now.get(name) != value
    ]


def _replaced_tensors(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    return [
        name
        for name, value in before.items()
        if isinstance(value, torch.Tensor) and now.get(name) is not value
    ]
