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

__all__ = ["MicrobatchInputs", "OneProcessExecutor", "StageExecutor", "StageForMicrobatches"]


@dataclass(frozen=True, slots=True)
class MicrobatchInputs:
    """The entries of one micro-batch, and the factor of each loss term: its share of the global batch."""

    entries: Mapping[str, torch.Tensor]
    loss_scales: tuple[float, ...]


class StageExecutor(Protocol):
    """Runs the stages that this process holds on micro-batches of the shapes it was made for."""

    def train(self, microbatches: Sequence[MicrobatchInputs]) -> torch.Tensor:
        """Accumulate gradients; return the sum of the scaled losses, zero on ranks without the last stage."""

    def evaluate(self, microbatches: Sequence[MicrobatchInputs]) -> torch.Tensor:
        """Return the sum of the scaled losses, zero on ranks without the last stage."""


class StageForMicrobatches(nn.Module):
    """One stage for execution, with a recording for each micro-batch; they share blocks and parameters.

    Sends dense tensors of their own; the last stage returns the loss alone.
    """

    def __init__(self, by_microbatch: Sequence[StageModule]) -> None:
        super().__init__()
        distinct = list(dict.fromkeys(by_microbatch))
        self._stages = nn.ModuleList(distinct)
        self._by_microbatch = [distinct.index(stage) for stage in by_microbatch]
        self.is_last = distinct[0].part.is_last
        self._loss_positions = [_position_of_loss(stage.program) if self.is_last else 0 for stage in distinct]

    def stage_of(self, microbatch: int) -> StageModule:
        """Return the recording that a micro-batch runs."""
        stage = self._stages[self._by_microbatch[microbatch]]
        assert isinstance(stage, StageModule)
        return stage

    def forward(self, *received: torch.Tensor, microbatch: int, **kwargs: Any) -> Any:
        """Return the values to send, or the loss."""
        output = self.stage_of(microbatch)(*received, **kwargs)
        if self.is_last:
            return tree_flatten(output)[0][self._loss_positions[self._by_microbatch[microbatch]]]
        return tuple(_sendable(value) for value in output)


class OneProcessExecutor:
    """Runs a whole model, one micro-batch after another."""

    def __init__(self, stage: StageForMicrobatches, device: torch.device) -> None:
        self._stage = stage
        self._device = device

    def train(self, microbatches: Sequence[MicrobatchInputs]) -> torch.Tensor:
        """Accumulate gradients and return the sum of the scaled losses."""
        total = torch.zeros((), device=self._device)
        for index, inputs in enumerate(microbatches):
            loss = self._stage(microbatch=index, loss_scales=inputs.loss_scales, **inputs.entries)
            loss.backward()
            total = total + loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[MicrobatchInputs]) -> torch.Tensor:
        """Return the sum of the scaled losses."""
        total = torch.zeros((), device=self._device)
        for index, inputs in enumerate(microbatches):
            total = total + self._stage(microbatch=index, loss_scales=inputs.loss_scales, **inputs.entries)
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
