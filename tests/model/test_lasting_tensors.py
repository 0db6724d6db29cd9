"""Tables that a forward makes once and keeps: recorded, and afterwards as if nothing had been kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from model.tiny_models import build
from outsize.errors import RecordingError
from outsize.model.cuts import cut_points
from outsize.model.record import record_module
from sliced_run import run_sliced, run_whole, worst_relative_error

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
TOLERANCE = 1e-12

tables: dict[int, Any] = {}
latest: torch.Tensor | None = None
shared = SimpleNamespace(table=None)


def make(length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float64)


@functools.lru_cache
def by_lru_cache(length: int) -> torch.Tensor:
    return make(length)


@functools.cache
def pair_by_cache(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return make(length), make(length).neg()


def in_a_dict(_block: Table, length: int) -> torch.Tensor:
    if length not in tables:
        tables[length] = {"pair": (make(length), make(length))}
    return tables[length]["pair"][1]


def in_a_variable(_block: Table, length: int) -> torch.Tensor:
    global latest  # noqa: PLW0603 - this is the habit
    if latest is None:
        latest = make(length)
    return latest


def on_an_object(_block: Table, length: int) -> torch.Tensor:
    if shared.table is None:
        shared.table = make(length)
    return shared.table


def on_a_class(block: Table, length: int) -> torch.Tensor:
    if type(block).of_class is None:
        type(block).of_class = make(length)
    return type(block).of_class


def on_the_module(block: Table, length: int) -> torch.Tensor:
    if length not in block.kept:
        block.kept[length] = [make(length)]
    return block.kept[length][0]


def closing_over() -> Callable[[Table, int], torch.Tensor]:
    kept: torch.Tensor | None = None

    def in_a_closure(_block: Table, length: int) -> torch.Tensor:
        nonlocal kept
        if kept is None:
            kept = make(length)
        return kept

    return in_a_closure


HABITS: dict[str, Callable[[Any, int], torch.Tensor]] = {
    "lru_cache": lambda _, length: by_lru_cache(length),
    "cache of pairs": lambda _, length: pair_by_cache(length)[1],
    "dict of a file": in_a_dict,
    "variable of a file": in_a_variable,
    "object": on_an_object,
    "class": on_a_class,
    "dict of a module": on_the_module,
    "closure": closing_over(),
}


class Table(nn.Module):
    """Adds a table of its length, made at the first call."""

    of_class: Any = None

    def __init__(self, habit: Callable[[Any, int], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.habit = habit
        self.kept: dict[int, list[torch.Tensor]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.habit(self, x.shape[-1])


class Tables(nn.Module):
    """Two unlike blocks that use a table, and a table used between them."""

    def __init__(self, habit: Callable[[Any, int], torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Table(habit), nn.Sequential(Table(habit), nn.Tanh()), Table(habit)])
        self.kept: dict[int, list[torch.Tensor]] = {}
        self.habit = habit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (x * self.habit(self, 6)).square().mean()

    of_class = None


@pytest.mark.parametrize("name", HABITS)
def test_tables_kept_from_call_to_call_work(name: str) -> None:
    """After a recording the module computes with values, and so do its stages; twice, as caches fill."""
    module = build(lambda: Tables(HABITS[name]))
    program = record_module(module, X)
    loss, expected = run_whole(module, X)
    assert not isinstance(loss, FakeTensor)
    again = record_module(module, X)
    for each in (program, again):
        cuts = cut_points(each)
        assert cuts
        for cut in cuts:
            found_loss, found, _ = run_sliced(each, [cut.node_index], module, X)
            assert found_loss == pytest.approx(loss, rel=TOLERANCE)
            assert worst_relative_error(found, expected) < TOLERANCE


class Hidden:
    """Keeps a tensor where Python does not look: its contents are no attributes."""

    __slots__ = ("table",)

    def __init__(self) -> None:
        self.table: torch.Tensor | None = None


hidden = Hidden()


def in_slots(_block: Table, length: int) -> torch.Tensor:
    if hidden.table is None:
        hidden.table = make(length)
    return hidden.table


def test_a_run_that_meets_a_tensor_without_values_is_refused() -> None:
    """One message that names the block, in place of a loss of zero."""
    module = build(lambda: nn.Sequential(Table(in_slots), nn.Linear(6, 1)))
    program = record_module(module, X)
    with pytest.raises(RecordingError, match=r"module 0 computes with a tensor that has no values"):
        run_sliced(program, [cut_points(program)[0].node_index], module, X)
