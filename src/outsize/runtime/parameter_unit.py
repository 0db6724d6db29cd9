"""The parameters of one block, gathered together before it is used and reduced together after its backward.

    rank 0  [ a: rows 0 1 | b: row 0 | - ]                  a, b whole, on every rank
    rank 1  [ a: row 2    | -        | - ]   all-gather ──▶

One collective moves a whole unit. Rank 0 holds most of every parameter, so all send as much as it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from outsize.runtime.collectives import all_gather_single, reduce_scatter_single
from outsize.runtime.row_shards import RowShards

__all__ = ["GatherInFlight", "Member", "ParameterUnit", "ReduceInFlight"]

_ALIGNMENT = 16  # bytes: of every dtype's elements a multiple


@dataclass(frozen=True, slots=True)
class Member:
    """One parameter of a unit: what is trained, what this process holds of it, and its shape as a whole.

    Where parameters are sharded ``held`` is ``trained``, a run of rows. Where gradients alone are, ``held``
    is the whole parameter and ``trained`` a view of some of its rows.
    """

    trained: nn.Parameter
    held: torch.Tensor
    shape: torch.Size


class ParameterUnit:
    """Gathers and reduces over ``group``, in which shards lie as ``shards`` says.

    With ``is_sharded`` False nothing is gathered: every process holds its parameters whole. Without a group
    nothing is reduced either.
    """

    def __init__(
        self,
        members: Sequence[Member],
        shards: RowShards,
        group: dist.ProcessGroup | None,
        *,
        is_sharded: bool,
    ) -> None:
        self.members, self.shards, self.group = list(members), shards, group
        self.is_gathered = is_sharded and group is not None
        self.is_trained = any(member.trained.requires_grad for member in members)

    def start_gather(self) -> GatherInFlight:
        """Send this process's shards, and receive those of the others."""
        return GatherInFlight(self)

    def block_layout(self, rank: int) -> tuple[list[int], int]:
        """Return where each member's bytes lie in a rank's message, and the bytes of all."""
        places, end = [], 0
        for member in self.members:
            places.append(end)
            num_bytes = self.shards.num_elements(member.shape, rank) * member.held.itemsize
            end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return places, end

    def views(self, message: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Return a rank's shards as they lie in its message."""
        found = []
        for member, place in zip(self.members, self.block_layout(rank)[0], strict=True):
            shape = self.shards.shape(member.shape, rank)
            end = place + shape.numel() * member.held.itemsize
            found.append(message[place:end].view(member.held.dtype).view(shape))
        return found

    def empty_wholes(self) -> list[torch.Tensor]:
        """Return room for all members."""
        return [
            torch.empty(member.shape, dtype=member.held.dtype, device=member.held.device)
            for member in self.members
        ]

    def start_reduce(self, gradients: Sequence[torch.Tensor | None]) -> list[ReduceInFlight]:
        """Add up gradients of whole parameters over the group, one collective for each dtype.

        None stands for zeros; members whose gradient is None on every rank get none.
        """
        positions: dict[torch.dtype, list[int]] = {}
        for position, member in enumerate(self.members):
            if member.trained.requires_grad:
                positions.setdefault(member.trained.dtype, []).append(position)
        return [
            ReduceInFlight(
                [self.members[at] for at in chosen], [gradients[at] for at in chosen], self.shards, self.group
            )
            for chosen in positions.values()
        ]


class GatherInFlight:
    """An all-gather that has begun."""

    def __init__(self, unit: ParameterUnit) -> None:
        self._unit = unit
        if not unit.is_gathered:
            return
        num_bytes = unit.block_layout(0)[1]
        device = unit.members[0].held.device
        own = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        for view, member in zip(unit.views(own, unit.shards.rank), unit.members, strict=True):
            view.copy_(member.held.detach())
        self._gathered = torch.empty(unit.shards.degree * num_bytes, dtype=torch.uint8, device=device)
        self._work = all_gather_single(self._gathered, own, group=unit.group, async_op=True)

    @torch.no_grad()
    def finish(self) -> list[torch.Tensor]:
        """Return the members whole."""
        if not self._unit.is_gathered:
            return [member.held.detach() for member in self._unit.members]
        wholes = self._unit.empty_wholes()
        self.finish_in(wholes)
        return wholes

    @torch.no_grad()
    def finish_in(self, wholes: Sequence[torch.Tensor]) -> None:
        """Write the members of a gathered unit where they are held whole."""
        unit = self._unit
        self._work.wait()
        for rank, message in enumerate(self._gathered.chunk(unit.shards.degree)):
            for whole, shard in zip(wholes, unit.views(message, rank), strict=True):
                unit.shards.part(whole, rank).copy_(shard)
        del self._gathered


class ReduceInFlight:
    """A reduce-scatter of gradients of one dtype that has begun.

    The message to each rank ends with one number a member: how many have a gradient for it.
    """

    @torch.no_grad()
    def __init__(
        self,
        members: Sequence[Member],
        gradients: Sequence[torch.Tensor | None],
        shards: RowShards,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._members, self._shards, self._group = members, shards, group
        if group is None:
            self._alone = list(gradients)
            return
        trained = members[0].trained
        length = sum(shards.num_elements(member.shape, 0) for member in members)
        length = length * (2 if trained.is_complex() else 1) + len(members)
        messages = torch.zeros(shards.degree, length, dtype=trained.dtype.to_real(), device=trained.device)
        for rank, message in enumerate(messages):
            self._fill(message, gradients, rank)
        self._own = messages.new_empty(length)
        self._work = reduce_scatter_single(self._own, messages.view(-1), group=group, async_op=True)

    def _fill(self, message: torch.Tensor, gradients: Sequence[torch.Tensor | None], rank: int) -> None:
        flags = message[message.numel() - len(gradients) :]
        for flag, gradient, view in zip(flags, gradients, self._views(message, rank), strict=True):
            if gradient is not None:
                view.copy_(self._shards.part(gradient, rank))
                flag.fill_(1)

    def _views(self, message: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Return where each member's gradient lies in the message to a rank."""
        found, place = [], 0
        for member in self._members:
            shape = self._shards.shape(member.shape, rank)
            if member.trained.is_complex():
                end = place + 2 * shape.numel()
                found.append(torch.view_as_complex(message[place:end].view(*shape, 2)))
            else:
                end = place + shape.numel()
                found.append(message[place:end].view(shape))
            place = end
        return found

    @torch.no_grad()
    def finish(self) -> None:
        """Add the sums to ``trained.grad``."""
        if self._group is None:
            for member, gradient in zip(self._members, self._alone, strict=True):
                if gradient is not None:
                    _add(member.trained, gradient.to(member.trained.dtype))
            return
        self._work.wait()
        counts = self._own[self._own.numel() - len(self._members) :].tolist()
        for member, view, count in zip(
            self._members, self._views(self._own, self._shards.rank), counts, strict=True
        ):
            if count:
                _add(member.trained, view)


def _add(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
