"""Runs a module's forward without leaving traces on the module's own objects, and tells what would stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from outsize.errors import RecordingError

__all__ = ["Changes", "kept_attributes"]


@dataclass(slots=True)
class Changes:
    """Full names of what a forward put in another's place on a module, and of the buffers that it wrote."""

    numbers: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    written_buffers: list[str] = field(default_factory=list)  # in place, or replaced

    def check(self, blocks: Sequence[str]) -> list[str]:
        """Return warnings about numbers set outside ``blocks``, which are recorded as they were.

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
    """Put back afterwards what code inside sets on ``module`` or on any module in it.

    A recording leaves tensors without values in caches, and counts calls that were none. Other objects stay:
    libraries note there what they have set up once. What is yielded is filled at the end.
    """
    changes = Changes()
    before = [(path, part, dict(vars(part)), dict(part._buffers)) for path, part in module.named_modules()]
    versions = {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}
    try:
        yield changes
    finally:
        for path, part, attributes, buffers in before:
            prefix = f"{path}." if path else ""
            changes.buffers += [prefix + name for name in _put_back(part._buffers, buffers)]
            changes.numbers += [prefix + name for name in _put_back(vars(part), attributes)]
        written = [name for name, (buffer, version) in versions.items() if buffer._version != version]
        changes.written_buffers = written + changes.buffers


def _put_back(held: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Restore numbers and tensors in a dictionary; return the names of those that were others before."""
    replaced = []
    for name, value in list(held.items()):
        old = before.get(name)
        if value is old or not (_is_number(old) or _holds_recorded_tensors(value)):
            continue
        if isinstance(old, torch.Tensor) or (_is_number(old) and value != old):
            replaced.append(name)
        if name in before:
            held[name] = old
        else:
            del held[name]
    return replaced


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _holds_recorded_tensors(value: Any) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(value))
