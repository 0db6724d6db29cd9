"""What every way of running stages offers: micro-batches in, gradients accumulated, the loss out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from outsize.model.program import Program, Ref
from outsize.model.stage_module import StageModule

__all__ = ["Microbatch", "OneProcessExecutor", "StageExecutor", "StageWithLoss"]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The entries of one micro-batch, and the factor of each loss term: its share of the global batch."""

    entries: Mapping[str, torch.Tensor]
    loss_scales: tuple[float, ...]


class StageExecutor(Protocol):
    """Runs the stages that this process holds."""

    def train(self, microbatches: Sequence[Microbatch]) -> torch.Tensor:
        """Accumulate gradients; return the sum of the scaled losses, zero on ranks without the last stage."""

    def evaluate(self, microbatches: Sequence[Microbatch]) -> torch.Tensor:
        """Return the sum of the scaled losses, zero on ranks without the last stage."""


class StageWithLoss(nn.Module):
    """A stage for execution: sends dense tensors of their own, and the last stage returns the loss alone."""

    def __init__(self, stage: StageModule) -> None:
        super().__init__()
        self.stage = stage
        self._loss_index = _position_of_loss(stage.program) if stage.part.is_last else None

    def forward(self, *received: torch.Tensor, **kwargs: Any) -> Any:
        """Return the values to send, or the loss."""
        output = self.stage(*received, **kwargs)
        if self._loss_index is not None:
            return tree_flatten(output)[0][self._loss_index]
        return tuple(_sendable(value) for value in output)


class OneProcessExecutor:
    """Runs a whole model, one micro-batch after another."""

    def __init__(self, stage: StageModule, device: torch.device) -> None:
        self._stage = StageWithLoss(stage)
        self._device = device

    def train(self, microbatches: Sequence[Microbatch]) -> torch.Tensor:
        """Accumulate gradients and return the sum of the scaled losses."""
        total = torch.zeros((), device=self._device)
        for microbatch in microbatches:
            loss = self._stage(loss_scales=microbatch.loss_scales, **microbatch.entries)
            loss.backward()
            total = total + loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> torch.Tensor:
        """Return the sum of the scaled losses."""
        total = torch.zeros((), device=self._device)
        for microbatch in microbatches:
            total = total + self._stage(loss_scales=microbatch.loss_scales, **microbatch.entries)
        return total


def _position_of_loss(program: Program) -> int:
    for position, leaf in enumerate(program.outputs):
        if isinstance(leaf, Ref) and leaf.value == program.loss_value:
            return position
    raise AssertionError("a program to train has a loss among its outputs")


def _sendable(value: torch.Tensor) -> torch.Tensor:
    """Return the value dense, as communication needs it, and no view, as split backwards need it."""
    dense = value.contiguous()
    return dense.clone() if dense._is_view() else dense
