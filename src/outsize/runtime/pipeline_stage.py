"""One stage of a pipeline on its rank: what it receives, keeps and sends for each micro-batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import _derive_grad_metas, extract_tensor_metas
from torch.distributed.pipelining.stage import _RecvInfo

from outsize.model.split_backward import WeightGradients, full_backward, input_gradients
from outsize.model.stage_module import StageModule
from outsize.plan.actions import Schedule
from outsize.runtime.stage_executor import StageForMicrobatches

__all__ = ["StageOnRank"]

MAX_PENDING_SENDS = 2  # of a stage, on their way; the sender waits rather than keep more


class StageOnRank(PipelineStage):
    """torch's stage, but backward is outsize's, and each micro-batch has shapes and buffers of its own.

    torch makes buffers for all micro-batches at once and keeps them, which for many micro-batches outweighs
    the activations themselves; its backward in two parts costs more and keeps everything until the second.
    """

    def __init__(
        self,
        stage: StageForMicrobatches,
        index: int,
        schedule: Schedule,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        first = stage.stage_of(0)
        super().__init__(
            stage,
            index,
            schedule.num_stages,
            device,
            input_args=_described(first, first.part.received),
            output_args=() if stage.is_last else _described(first, first.part.sent),
            group=group,
        )
        self._to_send: dict[int, tuple[torch.Tensor, ...]] = {}
        self._pending_sends: deque[list[dist.Work]] = deque()
        self._recordings = [stage.stage_of(chunk) for chunk in range(schedule.num_microbatches)]
        self._weight_gradients: dict[int, WeightGradients] = {}

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        del has_backward
        for chunk in range(num_microbatches):
            recording = self._recordings[chunk]
            metas = extract_tensor_metas(_described(recording, recording.part.received))
            self.args_recv_info[chunk] = tuple(
                _RecvInfo(f"input {index}", self.stage_index - 1, None, meta)
                for index, meta in enumerate(metas or ())
            )

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        self.chunks = num_microbatches
        for chunk in range(num_microbatches):
            recording = self._recordings[chunk]
            sent = () if self.is_last else _described(recording, recording.part.sent)
            self.grad_recv_info[chunk] = tuple(
                _RecvInfo(f"output gradient {index}", self.stage_index + 1, None, meta)
                for index, meta in enumerate(_derive_grad_metas(extract_tensor_metas(sent) or ()))
            )

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run forward; what is sent is kept until it is sent, and of it only the way back after that."""
        output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        sent, inputs = self.fwd_cache[fwd_chunk_id]
        if not self.is_last:
            self._to_send[fwd_chunk_id] = () if self._next_is_here else sent
            sent = tuple(get_gradient_edge(value) if value.requires_grad else None for value in sent)
        self.fwd_cache[fwd_chunk_id] = (sent, inputs[: len(self.args_recv_info[fwd_chunk_id])])
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run backward, or its first part: leave the gradients of what was received to be sent."""
        del last_backward
        sent, received = self.fwd_cache.pop(bwd_chunk_id)
        if loss is None:
            later = _run_backward(sent, self._retrieve_recv_grads(bwd_chunk_id), full=full_backward)
        else:
            edge = get_gradient_edge(loss) if loss.requires_grad else None
            later = _run_backward((edge,), (torch.ones_like(loss),), full=full_backward)
            if not loss._is_view():
                loss.detach_()  # the runtime keeps it, and its graph would keep what was received
        if not full_backward:
            self._weight_gradients[bwd_chunk_id] = later
        if not self.is_first:
            self.bwd_cache[bwd_chunk_id] = tuple(_take_gradient(tensor) for tensor in received)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the second part."""
        del last_backward
        self._weight_gradients.pop(bwd_chunk_id).add()

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send at once and give torch nothing to do: it would hold all sent tensors until the step ends."""
        kept = self.fwd_cache[fwd_chunk_id]
        self.fwd_cache[fwd_chunk_id] = (self._to_send.pop(fwd_chunk_id), [])
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        self.fwd_cache[fwd_chunk_id] = kept
        self._add_pending(_start_all(self._tagged(operations, fwd_chunk_id)))
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send at once, as forwards do."""
        operations = super().get_bwd_send_ops(bwd_chunk_id)
        self._add_pending(_start_all(self._tagged(operations, bwd_chunk_id, is_backward=True)))
        return []

    @property
    def _next_is_here(self) -> bool:
        return self.stage_index_to_group_rank[self.stage_index + 1] == self.group_rank

    def _tagged(
        self, operations: list[dist.P2POp], chunk: int, *, sender: int = 0, is_backward: bool = False
    ) -> list[dist.P2POp]:
        """Name the message, so that receives may be posted in any order; ``sender`` is relative."""
        tag = ((self.stage_index + sender) * 2 + is_backward) * len(self._recordings) + chunk
        for operation in operations:
            operation.tag = tag
        return operations

    def _add_pending(self, works: list[dist.Work]) -> None:
        """Wait for the oldest sends beyond a few.

        No deadlock: torch places each receive so that nothing before it in the receiver's actions depends on
        anything after the send.
        """
        self._pending_sends.append(works)
        while len(self._pending_sends) > MAX_PENDING_SENDS:
            _wait_all(self._pending_sends.popleft())

    def wait_for_sends(self) -> None:
        """Wait until all that was sent has been received."""
        while self._pending_sends:
            _wait_all(self._pending_sends.popleft())

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of a micro-batch's inputs, into new buffers."""
        self._make_buffers(self.args_recv_info[fwd_chunk_id])
        return self._tagged(super().get_fwd_recv_ops(fwd_chunk_id), fwd_chunk_id, sender=-1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of a micro-batch's output gradients, into new buffers."""
        if self.has_backward:
            self._make_buffers(self.grad_recv_info[bwd_chunk_id])
        operations = super().get_bwd_recv_ops(bwd_chunk_id)
        return self._tagged(operations, bwd_chunk_id, sender=1, is_backward=True)

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int
    ) -> None:
        """Take the output gradients of a stage on the same rank; zeros where it has none."""
        infos = self.grad_recv_info[mb_index]
        without = [info for info, grad in zip(infos, next_stage_bwd_outputs, strict=True) if grad is None]
        self._make_buffers(without)  # torch fills these with zeros
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[torch.Tensor, ...]:
        received: tuple[torch.Tensor, ...] = super()._retrieve_recv_activations(fwd_chunk_id)
        _drop_buffers(self.args_recv_info[fwd_chunk_id])
        return received

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[torch.Tensor | None, ...]:
        received: tuple[torch.Tensor | None, ...] = super()._retrieve_recv_grads(bwd_chunk_id)
        _drop_buffers(self.grad_recv_info[bwd_chunk_id])
        return received

    def _make_buffers(self, infos: Sequence[_RecvInfo]) -> None:
        for info in infos:
            if info.tensor_meta is not None:
                meta = info.tensor_meta
                info.buffer = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)


def _run_backward(
    outputs: Sequence[GradientEdge | None], gradients: Sequence[torch.Tensor | None], *, full: bool
) -> WeightGradients:
    """Run backward from the outputs that have a gradient."""
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output is not None and gradient is not None
    ]
    roots, flowing = [output for output, _ in pairs], [gradient for _, gradient in pairs]
    if full:
        full_backward(roots, flowing)
        return WeightGradients()
    return input_gradients(roots, flowing)


def _take_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a received tensor, of zeros where this micro-batch has none.

    Left to torch, those zeros would have the shape of the first micro-batch's.
    """
    gradient, tensor.grad = tensor.grad, None
    return torch.zeros_like(tensor) if gradient is None and tensor.requires_grad else gradient


def _start_all(operations: Sequence[dist.P2POp]) -> list[dist.Work]:
    return [
        each.op(each.tensor, group=each.group, group_dst=each.group_peer, tag=each.tag) for each in operations
    ]


def _wait_all(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _drop_buffers(infos: Sequence[_RecvInfo]) -> None:
    for info in infos:
        info.buffer = None


def _described(stage: StageModule, values: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Return tensors without data of the recorded shapes and dtypes, and whether gradients come back."""
    specs, with_gradient = stage.program.specs, stage.part.with_gradient
    return tuple(
        torch.empty(
            specs[value].shape,
            dtype=specs[value].dtype,
            device="meta",
            requires_grad=value in with_gradient,
        )
        for value in values
    )
