"""Change how a value lies on the ranks of a mesh axis, with the gradient that belongs to it.

    before -> after    forward           backward
    R  -> R~           -                 all-reduce          (into a split region)
    P  -> R            all-reduce        -                   (out of a split region)
    S  -> R            all-gather        own shard
    S  -> R~           all-gather        reduce-scatter
    P  -> S            reduce-scatter    all-gather
    R  -> S            own shard         all-gather
    R~ -> S            own shard         zeros around it

Placements are explained in :mod:`outsize.model.operator_rules.placement`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from outsize.model.operator_rules.hand_rules import KERNELS, Part
from outsize.model.operator_rules.placement import Partial, Placement, Replicate, Shard
from outsize.model.operator_rules.shards import join_shards, shard_of

__all__ = [
    "AxisGroup",
    "Conversion",
    "OwnRandomStream",
    "SplitKernel",
    "all_gather_single",
    "axis_group",
    "reduce_scatter_single",
    "set_axis_group",
]


# Named *_single since torch 2.13.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(slots=True)
class AxisGroup:
    """This process's place on a mesh axis, and the group it reaches the others by."""

    group: ProcessGroup
    rank: int  # position on the axis
    degree: int  # length of the axis
    own_seed: int  # of the random stream of this rank alone
    random_states: dict[str, torch.Tensor] = field(default_factory=dict)  # of that stream, by device type

    def all_reduce(self, tensor: torch.Tensor, operation: str) -> torch.Tensor:
        """Return the "sum" or "max" over the ranks, outside autograd."""
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX, self.group)
        return result

    def all_gather(self, tensor: torch.Tensor, placement: Shard) -> torch.Tensor:
        """Return the whole of a sharded tensor."""
        local = tensor.detach().contiguous()
        if local.dtype == torch.bool:
            return self.all_gather(local.to(torch.uint8), placement).to(torch.bool)
        if placement.segments:
            return join_shards(self._gather_uneven(local, placement), placement)
        gathered = local.new_empty((self.degree * local.shape[0], *local.shape[1:]))
        all_gather_single(gathered, local, group=self.group)
        return gathered if placement.dim == 0 else join_shards(gathered.chunk(self.degree), placement)

    def _gather_uneven(self, local: torch.Tensor, placement: Shard) -> list[torch.Tensor]:
        """Return the shards of all ranks, sent as if all were as long as the longest."""
        size = sum(placement.segments)
        shapes = [
            (*local.shape[: placement.dim], length, *local.shape[placement.dim + 1 :])
            for length in (placement.length(size, self.degree, rank) for rank in range(self.degree))
        ]
        longest = max(map(math.prod, shapes))
        gathered = local.new_empty(self.degree * longest)
        all_gather_single(gathered, _padded(local, longest), group=self.group)
        rows = gathered.chunk(self.degree)
        return [row[: math.prod(shape)].view(shape) for row, shape in zip(rows, shapes, strict=True)]

    def reduce_scatter(self, tensor: torch.Tensor, placement: Shard) -> torch.Tensor:
        """Return this rank's shard of the sum over the ranks."""
        parts = [shard_of(tensor.detach(), placement, self.degree, rank) for rank in range(self.degree)]
        longest = max(part.numel() for part in parts)
        result = parts[0].new_empty(longest)
        reduce_scatter_single(result, torch.cat([_padded(part, longest) for part in parts]), group=self.group)
        own = parts[self.rank]
        return result[: own.numel()].view(own.shape)

    def shard(self, tensor: torch.Tensor, placement: Shard) -> torch.Tensor:
        """Return this rank's shard of a tensor that every rank holds."""
        return shard_of(tensor.detach(), placement, self.degree, self.rank).clone()

    def exchange(self, tensor: torch.Tensor, before: Shard, after: Shard) -> torch.Tensor:
        """Return this rank's shard along another dim."""
        return self.shard(self.all_gather(tensor, before), after)

    def pad(self, tensor: torch.Tensor, placement: Shard) -> torch.Tensor:
        """Return this rank's shard with zeros where the other ranks' shards are."""
        shape, dim = list(tensor.shape), placement.dim
        shape[dim] = sum(placement.segments) or shape[dim] * self.degree
        whole = tensor.new_zeros(shape)
        start = 0
        for first, length in placement.ranges(shape[dim], self.degree, self.rank):
            whole.narrow(dim, first, length).copy_(tensor.detach().narrow(dim, start, length))
            start += length
        return whole

    def keep_on_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the first rank and zeros on the others."""
        return tensor.detach().clone() if self.rank == 0 else torch.zeros_like(tensor)


def _padded(tensor: torch.Tensor, num_elements: int) -> torch.Tensor:
    """Return the elements in a row, with anything after them up to ``num_elements``."""
    row = tensor.reshape(-1)
    missing = num_elements - row.numel()
    return row if missing == 0 else torch.cat([row, row.new_zeros(missing)])


_GROUPS: dict[str, AxisGroup] = {}


def set_axis_group(axis: str, group: ProcessGroup, seed: int) -> None:
    """Say which process group serves a mesh axis in this process; ``seed`` is that of the shared stream."""
    rank = dist.get_rank(group)
    _GROUPS[axis] = AxisGroup(group, rank, dist.get_world_size(group), own_seed=seed * 1_000_003 + rank + 1)


def axis_group(axis: str) -> AxisGroup:
    """Return the group of a mesh axis.

    Raises:
        KeyError: :func:`set_axis_group` has not been called for it.
    """
    return _GROUPS[axis]


@dataclass(frozen=True, slots=True)
class Conversion:
    """Brings a value from one placement to another, and its gradient back."""

    before: Placement
    after: Placement
    axis: str = "tp"

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part under the placement ``after``."""
        here = axis_group(self.axis)
        forward, backward = _steps(here, self.before, self.after)
        result: torch.Tensor = _Converted.apply(tensor, forward, backward)  # type: ignore[no-untyped-call]
        return result

    def __str__(self) -> str:
        return f"{self.axis}[{self.before} -> {self.after}]"


@dataclass(frozen=True, slots=True)
class SplitKernel:
    """Runs a hand-written function in place of an operator, on this rank's shards."""

    name: str
    part: Part  # this rank's, of the dim that is split
    axis: str = "tp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function; see :mod:`outsize.model.operator_rules.hand_rules`."""
        return KERNELS[self.name](axis_group(self.axis), self.part, *args, **kwargs)

    def __str__(self) -> str:
        return f"{self.axis}[{self.name}]"


@dataclass(frozen=True, slots=True)
class OwnRandomStream:
    """Runs a random operator on shards with numbers of this rank alone.

    Replicated operators draw from the default generator, which is in the same state on all ranks of the
    axis; a split operator must neither repeat the same numbers on every rank nor disturb that state.
    """

    operator: Callable[..., Any]
    axis: str = "tp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator, then give the default generator its state back."""
        here = axis_group(self.axis)
        device = next(argument for argument in args if isinstance(argument, torch.Tensor)).device
        stream: Any = torch if device.type == "cpu" else torch.get_device_module(device)
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            if device.type in here.random_states:
                stream.set_rng_state(here.random_states[device.type])
            else:
                torch.manual_seed(here.own_seed)
            result = self.operator(*args, **kwargs)
            here.random_states[device.type] = stream.get_rng_state()
        return result

    def __str__(self) -> str:
        return f"{self.axis}[{self.operator}]"


class _Converted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forward: _Step, backward: _Step) -> torch.Tensor:
        ctx.step = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.step(gradients[0]), None, None


_Step = Callable[[torch.Tensor], torch.Tensor]


def _steps(here: AxisGroup, before: Placement, after: Placement) -> tuple[_Step, _Step]:
    """Return what to do in forward and in backward."""
    return _to(here, before, after), _to(here, _of_gradient(after), _of_gradient(before))


def _of_gradient(placement: Placement) -> Placement:
    """Return how the gradient of a value lies: that of a partial sum is whole on every rank."""
    match placement:
        case Replicate(partial_gradient=True):
            return Partial()
        case Partial():
            return Replicate()
        case _:
            return placement


def _to(here: AxisGroup, before: Placement, after: Placement) -> _Step:
    """Return the function that moves plain values; whether a gradient is partial does not matter here."""
    step: _Step
    match before, after:
        case Replicate(), Shard():
            step = partial(here.shard, placement=after)
        case Replicate(), Partial():
            step = here.keep_on_first
        case Shard(), Replicate():
            step = partial(here.all_gather, placement=before)
        case Shard(), Shard():
            step = partial(here.exchange, before=before, after=after)
        case Shard(), Partial():
            step = partial(here.pad, placement=before)
        case Partial(), Replicate():
            step = partial(here.all_reduce, operation="sum")
        case Partial(), Shard():
            step = partial(here.reduce_scatter, placement=after)
        case _:
            step = _same
    return step


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)
