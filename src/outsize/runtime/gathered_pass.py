"""One forward of a stage with gathered parameters, and what its backward needs of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from outsize.runtime.gather_order import GatherOrder, UnitUse
from outsize.runtime.parameter_unit import ParameterUnit

__all__ = ["GatheredPass"]


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for a tensor that autograd saves of a gathered parameter."""

    use: UnitUse
    position: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class GatheredPass:
    """Gathers units as the forward comes to them, one ahead; ``units`` are in order of first use."""

    def __init__(self, units: Sequence[ParameterUnit]) -> None:
        self._units = units
        self._num_used = 0
        self._next: UnitUse | None = None
        self._order = GatherOrder() if torch.is_grad_enabled() else None
        self._reading: dict[ParameterUnit, tuple[UnitUse, Sequence[torch.Tensor]]] = {}
        self._gathered: dict[int, tuple[UnitUse, int]] = {}  # by address of a storage that is there now

    def first_use(self, unit: ParameterUnit, *, is_recomputed: bool = False) -> UnitUse:
        """Gather a unit, and let the one after it arrive meanwhile."""
        assert unit is self._units[self._num_used], "units are used in the order of the program"
        self._num_used += 1
        use = self._next or UnitUse(unit)
        wholes = use.gather()
        self._next = None
        if self._num_used < len(self._units):
            self._next = UnitUse(self._units[self._num_used])
            self._next.arriving = self._next.unit.start_gather()
        if self._order is not None:
            self._order.add_first_use(use)
            use.is_gathered_again = is_recomputed
            if unit.is_gathered:
                addresses = (whole.untyped_storage()._cdata for whole in wholes)
                self._gathered |= {address: (use, at) for at, address in enumerate(addresses)}
        return use

    def last_use(self, use: UnitUse) -> None:
        """Let go of a unit; what is saved from here on of its parameters stays."""
        for whole in use.wholes or ():
            self._gathered.pop(whole.untyped_storage()._cdata, None)
        use.wholes = None
        if self._order is not None:
            self._order.add_last_use(use)

    def wholes(self, use: UnitUse) -> Sequence[torch.Tensor]:
        """Return the parameters of a unit; in a block that runs again in backward they are gathered again."""
        if self._order is None:
            assert use.wholes is not None
            return use.wholes
        trained = [member.trained for member in use.unit.members]
        wholes: tuple[torch.Tensor, ...] = _Gathered.apply(self._order, use, *trained)  # type: ignore[no-untyped-call]
        return wholes

    def read(self, unit: ParameterUnit) -> Sequence[torch.Tensor]:
        """Return the parameters of a unit that is used between blocks, up to :meth:`let_go`."""
        if unit not in self._reading:
            use = self.first_use(unit)
            self._reading[unit] = (use, self.wholes(use))
        return self._reading[unit][1]

    def let_go(self, unit: ParameterUnit) -> None:
        """End what :meth:`read` began."""
        self.last_use(self._reading.pop(unit)[0])

    def saving_places(self) -> AbstractContextManager[Any]:
        """Let autograd save places instead of gathered parameters while inside."""
        if self._order is None or not any(unit.is_gathered for unit in self._units):
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._save, self._saved)

    def end_with(self, results: Iterable[torch.Tensor]) -> None:
        """Say what backward comes in by: it ends with whatever no gradient led to."""
        for result in results:
            if self._order is not None and result.requires_grad:
                self._order.end_with(result)

    def _save(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is torch.strided:
            found = self._gathered.get(tensor.untyped_storage()._cdata)
            if found is not None and tensor.dtype == found[0].unit.members[found[1]].held.dtype:
                found[0].is_gathered_again = True
                return _Place(*found, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return tensor.detach()  # as it is, an output would keep itself

    def _saved(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _Place):
            tensor: torch.Tensor = saved
            return tensor
        assert self._order is not None
        whole = self._order.gather_again(saved.use)[saved.position]
        return whole.detach().as_strided(saved.size, saved.stride, saved.offset)


class _Gathered(torch.autograd.Function):
    """The whole parameters of a unit; their gradients are added up and go to those that hold the rows."""

    @staticmethod
    def forward(ctx: Any, order: GatherOrder, use: UnitUse, *trained: torch.Tensor) -> Any:
        ctx.order, ctx.use = order, use
        ctx.set_materialize_grads(False)
        wholes = [whole.detach() for whole in use.wholes or order.gather_again(use)]
        frozen = [whole for whole, each in zip(wholes, trained, strict=True) if not each.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.order.reduce(ctx.use, gradients)
        return (None,) * (2 + len(gradients))
