"""Buffers that a block writes and something else uses lie in one stage, or their copies would differ."""

from __future__ import annotations

import torch
from torch import nn

from outsize.model.cuts import cut_points
from outsize.model.record import record_module


class Counting(nn.Module):
    """Remembers how large its inputs are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("usage", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.usage.add_(x.detach().mean(0))
        return self.linear(x)


class Blocks(nn.Module):
    """Four blocks of a linear layer and a norm, which may be one for all."""

    def __init__(self, norms: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), norm) for norm in norms)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Reading(nn.Module):
    """Four blocks of which the loss reads what the second one counts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x - self.blocks[1].usage).square().mean()


class Repeated(nn.Module):
    """One block that runs three times, between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(6, 6), Counting(), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.block(x)
        return self.last(x).square().mean()


def labels(module: nn.Module) -> list[str]:
    return [cut.label for cut in cut_points(record_module(module, torch.randn(4, 6)))]


def test_a_norm_that_many_blocks_share_keeps_them_together() -> None:
    """Its running statistics are one; with norms of their own, or without statistics, every cut is legal."""
    own = labels(Blocks([nn.BatchNorm1d(6) for _ in range(4)]))
    assert {"blocks.1", "blocks.2", "blocks.3"} <= set(own)
    assert labels(Blocks([nn.BatchNorm1d(6)] * 4)) == []
    assert {"blocks.1", "blocks.2", "blocks.3"} <= set(labels(Blocks([nn.LayerNorm(6)] * 4)))


def test_what_reads_a_buffer_lies_with_the_block_that_writes_it() -> None:
    """Only the first block can be cut off."""
    assert labels(Reading()) == ["blocks.1"]


def test_a_block_that_runs_several_times_is_not_cut_apart_if_it_counts() -> None:
    """Its calls stay together; in evaluation nothing is counted."""
    assert labels(Repeated()) == ["block", "last"]
    assert labels(Repeated().eval()) == ["block", "block#2", "block#3", "last"]
