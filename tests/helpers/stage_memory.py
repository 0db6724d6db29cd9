"""What one stage keeps and needs for each action, from shapes alone, and a rank's peak under a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from outsize.model.cost_meter import CostMeter
from outsize.model.fake import fake_tensor_like, fake_tensors_in
from outsize.model.program import Program
from outsize.model.shapes import shapes_only
from outsize.model.slice import Slice
from outsize.model.split_backward import full_backward, input_gradients
from outsize.model.stage_module import StageModule
from outsize.plan.actions import ActionKind, Schedule
from outsize.plan.schedule_memory import StageActivations

__all__ = ["StageMemory", "peak_bytes_by_rank", "stage_memory"]


@dataclass(frozen=True)
class StageMemory:
    """Kept between actions, the highest extra memory within each kind of action, and bytes of a message."""

    kept: StageActivations
    extra: Mapping[ActionKind, int]
    received_bytes: int
    sent_bytes: int


def stage_memory(
    program: Program, part: Slice, module: nn.Module, entries: Mapping[str, torch.Tensor]
) -> StageMemory:
    """Run a stage forward, backward, and backward in two parts, on fake tensors."""
    with shapes_only() as shapes, fake_tensors_in(module, shapes.mode):
        stage = StageModule(program, part, module)
        for parameter in stage.parameters():
            parameter.grad = torch.zeros_like(parameter)
        fakes = {name: fake_tensor_like(entries[name], shapes.mode) for name in part.batch_entries}
        whole, parts = (_Run(program, part, stage, fakes, in_parts=choice) for choice in (False, True))
        extra = {
            ActionKind.FORWARD: whole.forward_peak,
            ActionKind.FULL_BACKWARD: whole.backward_peak - whole.forward_kept,
            ActionKind.INPUT_GRADIENT: parts.backward_peak - parts.forward_kept,
            ActionKind.WEIGHT_GRADIENT: parts.weight_peak - parts.backward_kept,
        }
    received, sent = (
        sum(program.specs[value].num_bytes for value in values) for values in (part.received, part.sent)
    )
    return StageMemory(StageActivations(whole.forward_kept, parts.backward_kept), extra, received, sent)


class _Run:
    """One micro-batch through one stage, and what is alive on the way."""

    def __init__(
        self, program: Program, part: Slice, stage: StageModule, fakes: dict[str, Any], *, in_parts: bool
    ) -> None:
        meter = CostMeter()
        with meter:
            received = [
                torch.empty(program.specs[v].shape, requires_grad=program.specs[v].requires_grad)
                for v in part.received
            ]
            output = stage(*received, **fakes)
            outputs = output if isinstance(output, tuple) else (getattr(output, "loss", output),)
            edges = [get_gradient_edge(value) for value in outputs]
            shapes = [value.shape for value in outputs]
            self.forward_peak = meter.peak_bytes
            del output, outputs
            self.forward_kept = meter.live_bytes
            meter.restart_peak()
            gradients = [torch.empty(shape) for shape in shapes]
            later = input_gradients(edges, gradients) if in_parts else full_backward(edges, gradients)
            self.backward_peak = meter.peak_bytes
            del edges, gradients, received
            self.backward_kept = meter.live_bytes
            meter.restart_peak()
            if later is not None:
                later.add()
            self.weight_peak = meter.peak_bytes


def peak_bytes_by_rank(schedule: Schedule, stages: Sequence[StageMemory]) -> list[int]:
    """Return each rank's highest bytes: kept by its actions so far, the action's own, and posted receives."""
    return [_peak_of_rank(schedule, rank, stages) for rank in range(schedule.num_ranks)]


def _peak_of_rank(schedule: Schedule, rank: int, stages: Sequence[StageMemory]) -> int:
    kept = peak = 0
    for action in schedule.actions[rank]:
        stage = stages[action.stage]
        before, after = stage.kept.forward_bytes, stage.kept.weight_gradient_bytes
        change = {
            ActionKind.FORWARD: before,
            ActionKind.FULL_BACKWARD: -before,
            ActionKind.INPUT_GRADIENT: after - before,
            ActionKind.WEIGHT_GRADIENT: -after,
        }
        peak = max(peak, kept + stage.extra[action.kind])
        kept += change[action.kind]
    return peak + _posted_bytes(schedule, rank, stages)


def _posted_bytes(schedule: Schedule, rank: int, stages: Sequence[StageMemory]) -> int:
    """One receive for each stage and direction that comes from another rank is posted ahead."""
    holder = schedule.stage_to_rank
    total = 0
    for index in (stage for stage, held_by in enumerate(holder) if held_by == rank):
        if index > 0 and holder[index - 1] != rank:
            total += stages[index].received_bytes
        if index < len(holder) - 1 and holder[index + 1] != rank:
            total += stages[index].sent_bytes
    return total
