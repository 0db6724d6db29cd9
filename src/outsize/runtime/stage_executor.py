"""What every way of running stages offers: micro-batches in, gradients accumulated, the loss out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from outsize.model.program import Program, Ref
from outsize.model.recompute import buffers_unchanged
from outsize.model.split_backward import full_backward
from outsize.model.stage_module import StageModule
from outsize.model.zero_share import zero_share

__all__ = ["MicrobatchInputs", "OneProcessExecutor", "StageExecutor", "StageForMicrobatches"]


@dataclass(frozen=True, slots=True)
class MicrobatchInputs:
    """The entries of one micro-batch, and the factor of each loss term: its share of the global batch.

    One without effect adds nothing to the loss, gradients of zero, and leaves buffers as they are.
    """

    entries: Mapping[str, torch.Tensor]
    loss_scales: tuple[float, ...]
    has_effect: bool = True

    def arguments(self, microbatch: int) -> dict[str, Any]:
        """Return what a stage is called with beside what it receives."""
        return {
            **self.entries,
            "loss_scales": self.loss_scales,
            "has_effect": self.has_effect,
            "microbatch": microbatch,
        }


class StageExecutor(Protocol):
    """Runs the stages that this process holds on micro-batches of the shapes it was made for."""

    def train(self, microbatches: Sequence[MicrobatchInputs]) -> torch.Tensor:
        """Accumulate gradients; return the sum of the scaled losses, zero on ranks without the last stage."""

    def evaluate(self, microbatches: Sequence[MicrobatchInputs]) -> torch.Tensor:
        """Return the sum of the scaled losses, zero on ranks without the last stage."""

    def predict(self, microbatches: Sequence[MicrobatchInputs]) -> list[list[Any]]:
        """Return the model's outputs by micro-batch, each as flat leaves; none without the last stage."""


class StageForMicrobatches(nn.Module):
    """One stage for execution, with a recording for each micro-batch; they share blocks and parameters.

    Sends dense tensors of their own; the last stage returns the loss alone (0 where the model has none).
    """

    def __init__(self, by_microbatch: Sequence[StageModule]) -> None:
        super().__init__()
        distinct = list(dict.fromkeys(by_microbatch))
        self._stages = nn.ModuleList(distinct)
        self._by_microbatch = [distinct.index(stage) for stage in by_microbatch]
        self.is_last = distinct[0].part.is_last
        self._loss_positions = [_position_of_loss(stage.program) for stage in distinct]
        self._kept_outputs: dict[int, list[Any]] | None = None

    def stage_of(self, microbatch: int) -> StageModule:
        """Return the recording that a micro-batch runs."""
        stage = self._stages[self._by_microbatch[microbatch]]
        assert isinstance(stage, StageModule)
        return stage

    def forward(self, *received: torch.Tensor, microbatch: int, has_effect: bool, **kwargs: Any) -> Any:
        """Return the values to send, or the loss."""
        stage = self.stage_of(microbatch)
        with nullcontext() if has_effect else buffers_unchanged(stage):
            output = stage(*received, **kwargs)
        if not self.is_last:
            return tuple(_sendable(value) for value in output)
        leaves = tree_flatten(output)[0]
        if self._kept_outputs is not None:
            self._kept_outputs[microbatch] = leaves
        position = self._loss_positions[self._by_microbatch[microbatch]]
        if position is None:
            return torch.zeros(())
        loss = leaves[position] if has_effect else zero_share(leaves[position])
        # not a view, which would keep what the stage received until the step ends
        return loss.sum() if loss.dim() else loss

    @contextmanager
    def keep_outputs(self) -> Iterator[dict[int, list[Any]]]:
        """Keep what the model returns while inside: flat leaves by micro-batch."""
        kept: dict[int, list[Any]] = {}
        self._kept_outputs = kept
        try:
            yield kept
        finally:
            self._kept_outputs = None


class OneProcessExecutor:
    """Runs a whole model, of one stage or several, one micro-batch after another.

    With nobody to wait for, no order of a schedule is faster; this one keeps one micro-batch in flight.
    """

    def __init__(self, stages: Sequence[StageForMicrobatches], device: torch.device) -> None:
        self._stages = stages
        self._device = device

    def train(self, microbatches: Sequence[MicrobatchInputs]) -> torch.Tensor:
        """Accumulate gradients and return the sum of the scaled losses."""
        total = torch.zeros((), device=self._device)
        for index, inputs in enumerate(microbatches):
            loss = self._forward(index, inputs)
            full_backward([loss], None)
            total = total + loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[MicrobatchInputs]) -> torch.Tensor:
        """Return the sum of the scaled losses."""
        total = torch.zeros((), device=self._device)
        for index, inputs in enumerate(microbatches):
            total = total + self._forward(index, inputs)
        return total

    def predict(self, microbatches: Sequence[MicrobatchInputs]) -> list[list[Any]]:
        """Return the model's outputs by micro-batch, each as flat leaves."""
        with self._stages[-1].keep_outputs() as outputs:
            self.evaluate(microbatches)
        return [outputs[index] for index in range(len(microbatches))]

    def _forward(self, index: int, inputs: MicrobatchInputs) -> torch.Tensor:
        values: Any = ()
        for stage in self._stages:
            values = stage(*values, **inputs.arguments(index))
        loss: torch.Tensor = values
        return loss


def _position_of_loss(program: Program) -> int | None:
    for position, leaf in enumerate(program.outputs):
        if isinstance(leaf, Ref) and leaf.value == program.loss_value:
            return position
    return None


def _sendable(value: torch.Tensor) -> torch.Tensor:
    """Return the value dense, as communication needs it, and no view, as split backwards need it."""
    dense = value.contiguous()
    return dense.clone() if dense._is_view() else dense
