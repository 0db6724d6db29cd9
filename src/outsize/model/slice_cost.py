"""What one slice of a program costs, by running it forward and backward on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from outsize.model.cost_meter import CostMeter
from outsize.model.program import Node, Program
from outsize.model.slice import Slice
from outsize.model.split_backward import products_put_off, unpack_unchanged
from outsize.model.stage_module import StageModule

__all__ = ["SavedValue", "SliceCost", "estimate_slice_cost"]


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A value of the program kept for backward: output ``output`` of the slice's node at ``position``.

    Position -1 stands for the values received. Neighbouring slices may keep the same value; it is held once.
    """

    position: int
    output: int
    num_bytes: int

    def in_slice(self, program: Program, part: Slice) -> int:
        """Return the value that this is in a slice."""
        if self.position < 0:
            return part.received[self.output]
        return program.nodes[part.nodes[self.position]].outputs[self.output]


@dataclass(frozen=True, slots=True)
class SliceCost:
    """Costs of one slice for one number of samples. FLOPs count two for a multiplication with addition."""

    forward_flops: float
    backward_flops: float
    bytes_moved: float  # of the forward
    saved_inside_bytes: int  # kept from forward to backward inside modules, each storage once
    saved_values: tuple[SavedValue, ...]  # kept besides
    weight_inside_bytes: int  # kept from input gradients to weight gradients, output gradients included
    weight_values: tuple[SavedValue, ...]  # kept besides
    temporary_bytes: int  # highest extra memory, forward or backward; gradients of parameters left out


class _WatchedStage(StageModule):
    """Writes down which storage each value of the program has."""

    def __init__(self, program: Program, part: Slice, module: nn.Module, meter: CostMeter) -> None:
        super().__init__(program, part, module)
        self.meter = meter
        self.value_at: dict[int, tuple[int, int]] = {}  # number of a storage -> position and output
        self._position = 0

    def bytes_inside(self, storages: Mapping[int, int]) -> int:
        """Return the bytes of storages, given by their number, that are not values of the program."""
        return sum(size for number, size in storages.items() if number not in self.value_at)

    def values_among(self, storages: Mapping[int, int]) -> tuple[SavedValue, ...]:
        """Return the others."""
        return tuple(
            SavedValue(*self.value_at[number], size)
            for number, size in storages.items()
            if number in self.value_at
        )

    def _run_step(
        self, node: Node, callee: Any, values: dict[int, Any], batch_entries: Mapping[str, torch.Tensor]
    ) -> None:
        super()._run_step(node, callee, values, batch_entries)
        for output, value in enumerate(node.outputs):
            number = self.meter.number_of(values[value])
            self.value_at.setdefault(number, (self._position, output))
        self._position += 1


def estimate_slice_cost(
    program: Program, part: Slice, module: nn.Module, entries: Mapping[str, torch.Tensor]
) -> SliceCost:
    """Run ``part`` with ``module`` and the batch on fake tensors, inside an active fake tensor mode."""
    meter = CostMeter()
    stage = _WatchedStage(program, part, module, meter)
    held = {meter.number_of(tensor) for tensor in (*stage.parameters(), *stage.buffers())}
    received = [_received(program, value) for value in part.received]
    for at, tensor in enumerate(received):
        stage.value_at[meter.number_of(tensor)] = (-1, at)
    saved: dict[int, int] = {}
    with meter, _recording_saved(saved, meter):
        # an alias, because a leaf that requires gradient may not be written in place
        output = stage(
            *(torch.ops.aten.alias(tensor) for tensor in received),
            **{name: entries[name] for name in part.batch_entries},
        )
    saved = {number: size for number, size in saved.items() if number not in held}
    own = sum(size for number, size in saved.items() if stage.value_at.get(number, (0, 0))[0] >= 0)
    forward_flops, bytes_moved, forward_peak = meter.flops, meter.bytes_moved, meter.peak_bytes
    outputs = _differentiable(program, part, output)
    del output
    products = products_put_off(outputs)
    factors = {meter.number_of(each.received): each.received.untyped_storage().nbytes() for each in products}
    gradient_bytes = sum(each.gradient_bytes for each in products)
    del products
    backward_peak = _run_backward(meter, stage, outputs)
    return SliceCost(
        forward_flops=forward_flops,
        backward_flops=meter.flops - forward_flops,
        bytes_moved=bytes_moved,
        saved_inside_bytes=stage.bytes_inside(saved),
        saved_values=stage.values_among(saved),
        weight_inside_bytes=stage.bytes_inside(factors) + gradient_bytes,
        weight_values=stage.values_among(factors),
        temporary_bytes=max(forward_peak - own, backward_peak, 0),
    )


def _received(program: Program, value: int) -> torch.Tensor:
    spec = program.specs[value]
    return torch.empty(spec.shape, dtype=spec.dtype, device="cpu").requires_grad_(spec.requires_grad)


@contextmanager
def _recording_saved(saved: dict[int, int], meter: CostMeter) -> Iterator[None]:
    """Write down the storages that autograd keeps, by their number."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[meter.number_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack_unchanged):
        yield


def _differentiable(program: Program, part: Slice, output: Any) -> list[torch.Tensor]:
    """Return the outputs that backward starts from: the loss, or all that depend on parameters."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not part.is_last or program.loss_value is None:
        return [leaf for leaf in leaves if leaf.grad_fn is not None]
    shape = program.specs[program.loss_value].shape
    return [leaf for leaf in leaves if tuple(leaf.shape) == shape][:1]


class _Ending(torch.autograd.Function):
    """Turns outputs into one scalar whose backward makes a gradient for each, held by nobody else."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        """Return a scalar; only shapes are kept."""
        ctx.layouts = [(output.shape, output.dtype) for output in outputs]
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return a gradient for each output."""
        return tuple(torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in ctx.layouts)


def _run_backward(meter: CostMeter, stage: nn.Module, outputs: list[torch.Tensor]) -> int:
    """Run backward; return its peak above what forward left. Gradients of parameters are freed at once."""
    if not outputs:
        return 0

    def free_gradient(parameter: torch.Tensor) -> None:
        parameter.grad = None

    handles = [
        parameter.register_post_accumulate_grad_hook(free_gradient)  # type: ignore[no-untyped-call]
        for parameter in stage.parameters()
        if parameter.requires_grad
    ]
    ending = _Ending.apply(*outputs)  # type: ignore[no-untyped-call]
    gradient = torch.zeros_like(ending)
    del outputs
    with meter:
        start = meter.live_bytes
        meter.restart_peak()
        torch.autograd.backward([ending], [gradient])
    for handle in handles:
        handle.remove()
    return meter.peak_bytes - start
