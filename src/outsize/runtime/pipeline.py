"""Runs a schedule's actions on pipeline stages through torch.distributed.pipelining's runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from outsize.plan.actions import Schedule
from outsize.runtime.early_receives import post_receives_early
from outsize.runtime.pipeline_stage import StageOnRank
from outsize.runtime.stage_executor import MicrobatchInputs, StageForMicrobatches

__all__ = ["PipelineExecutor"]

_FORWARD_KINDS = {_ComputationType.FORWARD, _ComputationType.SEND_F, _ComputationType.RECV_F}


class PipelineExecutor:
    """Executes one schedule on the stages of this rank; see :class:`StageExecutor`.

    ``stages`` are this rank's, by stage index; ``group`` holds the pipeline ranks in order. Every rank has
    the whole micro-batch, so inputs that several stages read (labels, masks) are not sent. Micro-batches may
    differ in shape.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, StageForMicrobatches],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._device = device
        self._num_microbatches = schedule.num_microbatches
        self._last_stage = stages.get(schedule.num_stages - 1)
        self._runtime = _Runtime(  # type: ignore[no-untyped-call]
            [StageOnRank(stage, index, schedule, group, device) for index, stage in sorted(stages.items())],
            schedule.num_microbatches,
            loss_fn=_Runtime._maybe_compute_loss,  # never called: torch asks only whether there is one
            scale_grads=False,  # losses are scaled instead, by their share of the global batch
        )
        self._runtime._prepare_schedule_with_comms(_as_torch_actions(schedule))
        self._all_actions = self._runtime.pipeline_order_with_comms
        if _backend_of(group, device) == dist.Backend.GLOO:  # others run receives and sends in order
            self._all_actions = {
                rank: post_receives_early(actions) for rank, actions in self._all_actions.items()
            }
        self._forward_actions = {
            rank: [action for action in actions if action.computation_type in _FORWARD_KINDS]
            for rank, actions in self._all_actions.items()
        }

    def train(self, microbatches: Sequence[MicrobatchInputs]) -> torch.Tensor:
        """Accumulate gradients; return the sum of the scaled losses, zero on ranks without the last stage."""
        self._runtime._has_backward = True
        self._runtime.pipeline_order_with_comms = self._all_actions
        return self._run(microbatches)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[MicrobatchInputs]) -> torch.Tensor:
        """Return the sum of the scaled losses, zero on ranks without the last stage."""
        self._runtime._has_backward = False
        self._runtime.pipeline_order_with_comms = self._forward_actions
        return self._run(microbatches)

    def predict(self, microbatches: Sequence[MicrobatchInputs]) -> list[list[Any]]:
        """Return the model's outputs by micro-batch, each as flat leaves; none without the last stage."""
        if self._last_stage is None:
            self.evaluate(microbatches)
            return []
        with self._last_stage.keep_outputs() as outputs:
            self.evaluate(microbatches)
        return [outputs[index] for index in range(len(microbatches))]

    def _run(self, microbatches: Sequence[MicrobatchInputs]) -> torch.Tensor:
        """Do what the runtime's ``step`` does, with micro-batches that are split already."""
        stages = self._runtime._stages
        losses: list[torch.Tensor] = []
        for stage in stages:
            stage.has_backward = self._runtime._has_backward
        self._runtime._step_microbatches(
            kwarg_mbs=[inputs.arguments(index) for index, inputs in enumerate(microbatches)],
            target_mbs=[None] * self._num_microbatches,
            losses=losses,
            return_outputs=False,
        )
        for stage in stages:
            assert isinstance(stage, StageOnRank)
            stage.wait_for_sends()
            stage.clear_runtime_states()
        if self._last_stage is None:
            return torch.zeros((), device=self._device)
        return torch.stack([loss.detach() for loss in losses]).sum()


class _Runtime(_PipelineScheduleRuntime):
    """torch's runtime, but the last stage may run micro-batches in any order."""

    def _maybe_compute_loss(
        self, stage: PipelineStage, output: torch.Tensor, target_mbs: Any, mb_index: int, *_: Any
    ) -> None:
        del target_mbs
        if stage.is_last:
            losses: list[Any] = self._internal_losses or [None] * self._n_microbatches
            losses[mb_index] = output  # it is the loss
            self._internal_losses = losses

    def _maybe_get_loss(self, stage: PipelineStage, mb_index: int) -> torch.Tensor | None:
        loss: torch.Tensor | None = self._internal_losses[mb_index] if stage.is_last else None
        return loss


def _backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend that sends this device's tensors; a group started without one has one a device."""
    return str(group._get_backend(device).name())


def _as_torch_actions(schedule: Schedule) -> dict[int, list[_Action | None]]:
    return {
        rank: [
            _Action(action.stage, _ComputationType(str(action.kind)), action.microbatch) for action in actions
        ]
        for rank, actions in enumerate(schedule.actions)
    }
