"""Recording leaves a module's objects as they were, and says which state it cannot follow."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from model.tiny_models import build
from outsize.errors import RecordingError
from outsize.model.record import record_module

X = torch.ones(2, 4, dtype=torch.float64)


class Block(nn.Module):
    """Keeps what it saw last, counts, and notes that it was set up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls, self.is_ready = 0, False
        self.seen: torch.Tensor | None = None
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.is_ready = True
        self.seen = self.latest = x.detach()
        self.mean = self.mean * 0.9 + x.detach().mean(0)
        return self.linear(x) + self.mean


class Outer(nn.Module):
    """A block; what happens outside of it is up to a test."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.steps = 3
        self.register_buffer("total", torch.zeros(()))

    def outside(self) -> None:
        """Do nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.outside()
        return (self.block(x) * self.steps).sum() + self.total


class Counting(Outer):
    def outside(self) -> None:
        self.steps += 1


class Replacing(Outer):
    def outside(self) -> None:
        self.total = self.total + 1


class Adding(Outer):
    def outside(self) -> None:
        self.total += 1


def test_nothing_is_left_behind() -> None:
    """Caches hold no tensors without values, calls were not counted; a block's own state is no warning."""
    module = build(Outer)
    mean = module.block.mean
    program = record_module(module, (X,))
    assert program.warnings == []
    assert module.block.calls == 0
    assert module.block.seen is None
    assert not hasattr(module.block, "latest")
    assert module.block.mean is mean
    leaves = [value for part in module.modules() for value in vars(part).values()]
    assert not any(isinstance(value, FakeTensor) for value in leaves)


class Noting(Outer):
    """Notes what it has set up, in every kind of place."""

    def __init__(self) -> None:
        super().__init__()
        self.is_ready, self.mode, self.mask = False, "new", None
        self.cache: dict[int, torch.Tensor] = {}
        self.history: list[Any] = []
        self.nested = {"sizes": {1}}
        self.helper = SimpleNamespace(last=None)

    def outside(self) -> None:
        if not self.is_ready:
            self.block.register_forward_hook(lambda *_: None)
        self.is_ready, self.mode = True, "used"
        self.mask = self.cache[4] = self.helper.last = torch.ones(4)
        self.history.append(self.mask)
        self.nested["sizes"].add(2)
        self.__dict__["unheard"] = self.mask


def test_flags_containers_objects_and_hooks_are_put_back() -> None:
    """The module is as it was, so that what it does in its first forward, it does in the first real one."""
    module = build(Noting)
    program = record_module(module, (X,))
    assert (module.is_ready, module.mode, module.mask) == (False, "new", None)
    assert module.block.is_ready is False
    assert (module.cache, module.history, module.nested) == ({}, [], {"sizes": {1}})
    assert module.helper.last is None
    assert not module.block._forward_hooks
    assert not hasattr(module, "unheard")
    assert program.warnings == [
        f"the forward changes {name}, which the recording takes for constant" for name in ("is_ready", "mode")
    ]


def test_a_number_that_the_forward_changes_is_a_warning() -> None:
    """Between blocks it would stay as it was recorded; the message names it."""
    module = build(Counting)
    program = record_module(module, (X,))
    assert program.warnings == ["the forward changes steps, which the recording takes for constant"]
    assert module.steps == 3


def test_a_buffer_replaced_between_blocks_is_refused() -> None:
    """The recording has no step that would put the new one in its place; written in place it is recorded."""
    with pytest.raises(RecordingError, match="in the place of buffer total") as caught:
        record_module(build(Replacing).to("meta"), (X,))
    assert "copy_ or add_" in str(caught.value)
    assert record_module(build(Adding), (X,)).warnings == []
