"""The order in which one forward and its backward gather and reduce units: the same on every process.

A unit is gathered where it is first used and let go after its last use. Backward passes the same places the
other way round:

    forward     a first use, a last use, b first use, b last use
    backward    gather b, reduce b, gather a, reduce a

Which of these autograd asks for may differ between processes: a replica whose samples all count nothing has
no gradient for most blocks. So a process that comes to a place does first all that it skipped, and the rest
when its backward ends. Otherwise the others would wait for it for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outsize.runtime.parameter_unit import GatherInFlight, ParameterUnit, ReduceInFlight

__all__ = ["GatherOrder", "UnitUse"]


class UnitUse:
    """One use of a unit in one forward: its whole parameters, while they are needed."""

    def __init__(self, unit: ParameterUnit) -> None:
        self.unit = unit
        self.wholes: list[torch.Tensor] | None = None
        self.arriving: GatherInFlight | None = None
        self.is_gathered_again = False  # something of its backward was left to be gathered
        self.is_reduced = False

    def gather(self) -> list[torch.Tensor]:
        """Return the whole parameters, from a gather that has begun where there is one."""
        arriving, self.arriving = self.arriving or self.unit.start_gather(), None
        self.wholes = arriving.finish()
        return self.wholes


class GatherOrder:
    """Keeps the places of one forward, and walks them back."""

    def __init__(self) -> None:
        self._places: list[tuple[UnitUse, bool]] = []  # a use, and whether this is its last place
        self._reduces: list[ReduceInFlight] = []
        self._is_ending = False

    def add_first_use(self, use: UnitUse) -> None:
        """Note where a unit is gathered, and so where its gradients are complete."""
        self._places.append((use, False))

    def add_last_use(self, use: UnitUse) -> None:
        """Note where a unit is let go, and so where backward needs it again."""
        self._places.append((use, True))

    def gather_again(self, use: UnitUse) -> list[torch.Tensor]:
        """Return the whole parameters for a backward."""
        while use.wholes is None:
            if not self._places:
                raise RuntimeError("a backward used a block after its gradients were reduced")
            self._pass_last_place()
        return use.wholes

    def reduce(self, use: UnitUse, gradients: Sequence[torch.Tensor | None]) -> None:
        """Begin to add up the gradients of a unit; those of the unit before have arrived then."""
        while self._places and self._places[-1] != (use, False):
            self._pass_last_place()
        if not self._places:
            raise RuntimeError("a backward reduced the gradients of a block twice")
        self._start_reduce(use, gradients)

    def end_with(self, tensor: torch.Tensor) -> None:
        """Do what is left when the backward through ``tensor`` ends."""
        tensor.register_hook(self._will_end)  # type: ignore[no-untyped-call]

    def _will_end(self, _: torch.Tensor) -> None:
        if not self._is_ending:
            self._is_ending = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end)

    def _end(self) -> None:
        while self._places:
            self._pass_last_place()
        self._finish_reduces()

    def _pass_last_place(self) -> None:
        """Do what belongs to the last place that is left, without gradients of this process."""
        use, is_last_use = self._places[-1]
        if not is_last_use:
            self._start_reduce(use, [None] * len(use.unit.members))
            return
        self._places.pop()
        if use.is_gathered_again:
            use.gather()
            self._start_next_gather()

    def _start_next_gather(self) -> None:
        """Let the unit that backward needs next arrive during the computations of this one."""
        for use, is_last_use in reversed(self._places):
            if is_last_use and use.is_gathered_again:
                use.arriving = use.arriving or use.unit.start_gather()
                return

    def _start_reduce(self, use: UnitUse, gradients: Sequence[torch.Tensor | None]) -> None:
        self._places.pop()
        use.wholes = None
        if use.unit.is_trained and not use.is_reduced:
            self._finish_reduces()
            self._reduces = use.unit.start_reduce(gradients)
        use.is_reduced = True

    def _finish_reduces(self) -> None:
        for reduce in self._reduces:
            reduce.finish()
        self._reduces = []
