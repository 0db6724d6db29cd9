"""Buffers that a forward writes: each write is done once, by the stage where it belongs."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from model.tiny_models import build
from outsize.model.batch_norm import batch_norm_warnings
from outsize.model.cuts import cut_points
from outsize.model.record import record_module
from outsize.model.recording import record
from outsize.model.written_buffers import written_buffer_warnings
from sliced_run import run_sliced, run_whole, worst_relative_error

X = torch.linspace(-1, 1, 48, dtype=torch.float64).view(6, 8).sin()


class Between(nn.Module):
    """Batch norm without parameters between blocks: its running statistics do not reach the output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(8, affine=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block, norm in zip(self.blocks, self.norms, strict=False):
            x = norm(block(x))
        return self.blocks[-1](x).square().mean()


class Reused(Between):
    """One norm for two places."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([self.norms[0]] * 2)


class Averaging(nn.Module):
    """A norm inside a block that averages over all steps, and asks its counter for a number to do so."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("make", [Between, Averaging])
def test_running_statistics_move_as_in_the_whole_model(make: type[nn.Module]) -> None:
    """Row B193, at every cut: means, variances and counters after two passes, and gradients."""
    module = build(make)
    program = record_module(module, (X,))
    assert len(cut_points(program)) == 2
    for cut in cut_points(program):
        whole, sliced = copy.deepcopy(module), copy.deepcopy(module)
        for factor in (1, 2):
            loss, expected = run_whole(whole, (X * factor,))
            found_loss, found, _ = run_sliced(program, [cut.node_index], sliced, (X * factor,))
            assert found_loss == pytest.approx(loss, rel=1e-12)
            assert worst_relative_error(found, expected) < 1e-12
        for name, buffer in whole.named_buffers():
            assert torch.equal(sliced.get_buffer(name), buffer), name


def test_a_written_buffer_is_not_cut_from_its_other_uses() -> None:
    """Two stages would each write a copy of their own; the cut between the two uses is not offered."""
    labels = [cut.label for cut in cut_points(record_module(build(Reused), (X,)))]
    assert labels == ["blocks.2"]


def test_batch_norm_is_said_when_a_model_is_recorded() -> None:
    """Row B193: the first layer by name and how many more; nothing in evaluation mode or without any."""
    module = build(Averaging)
    program = record(module, (X,))
    (warning,) = program.warnings
    assert warning.startswith("batch norm in blocks.0.1 and 2 more takes statistics over one micro-batch")
    assert batch_norm_warnings(module.eval()) == []
    assert batch_norm_warnings(nn.Linear(2, 2)) == []


class Centred(nn.Module):
    """Blocks with a running mean of their own, written in place or replaced."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.mean: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            if self.in_place:
                self.mean.copy_(mean)
            else:
                self.mean = mean
        output: torch.Tensor = self.linear(x - self.mean)
        return output


class Chain(nn.Module):
    """Two blocks of one kind."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Centred(in_place=True), "of blocks.0 writes its buffer mean (1 more"),
        (lambda: Centred(in_place=False), "of blocks.0 writes its buffer mean (1 more"),
        (spectral, "of blocks.0.parametrizations.weight.0 writes its buffer _u (3 more"),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), None),
        (lambda: nn.Linear(8, 8), None),
    ],
    ids=["in place", "replaced", "spectral norm", "batch norm", "nothing written"],
)
def test_buffers_that_blocks_write_are_said(make: Callable[[], nn.Module], expected: str | None) -> None:
    """Whatever the module, in training mode alone; batch norm has its own sentence."""

    module = Chain(make)
    program = record(module, (X.float(),))
    found = written_buffer_warnings(program, module)
    assert len(found) == (expected is not None)
    assert expected is None or expected in found[0]
    assert all(warning in program.warnings for warning in found)
    assert written_buffer_warnings(record(module.eval(), (X.float(),)), module) == []
