"""A stage whose parameters are whole only while they are used.

A block's parameters stand in its modules from just before its forward to just after it. Parameters read
between blocks are gathered with their neighbours in the same listed module (such as ``layers.3``) and let
go after the last operator that reads them. What autograd saves of a gathered parameter is only its place: the
parameter is gathered again when backward comes there. Its gradient goes to the process that holds the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from outsize.model.prepared_call import Values, prepare_call
from outsize.model.program import Node, NodeKind, Program
from outsize.model.recompute import recomputed
from outsize.model.slice import Slice
from outsize.model.stage_module import StageModule
from outsize.runtime.gather_order import UnitUse
from outsize.runtime.gathered_pass import GatheredPass
from outsize.runtime.parameter_unit import ParameterUnit

__all__ = ["GatheredStage", "MakeUnit"]

# Makes a unit of full names and what the module holds by them; the same one for the same names.
MakeUnit = Callable[[Mapping[str, nn.Parameter]], ParameterUnit]
_Step = tuple[Node, Any, tuple[int, ...]]


class GatheredStage(StageModule):
    """Executes one slice."""

    def __init__(self, program: Program, part: Slice, module: nn.Module, make_unit: MakeUnit) -> None:
        super().__init__(program, part, module)
        self._make_unit = make_unit
        self._pass: GatheredPass | None = None
        self._units: list[ParameterUnit] = []  # in the order of their first use
        self._gather_blocks(recomputed_blocks=())

    def apply_recompute(self, blocks: Collection[str]) -> None:
        """Keep only the inputs of these blocks from forward to backward, and run them again there."""
        self._gather_blocks(recomputed_blocks=blocks)

    def forward(self, *received: torch.Tensor, **entries: Any) -> Any:
        """Run the slice; see :class:`StageModule`."""
        self._pass = running = GatheredPass(self._units)
        try:
            with running.saving_places():
                result = super().forward(*received, **entries)
        finally:
            self._pass = None
        running.end_with(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result

    def _gather_blocks(self, *, recomputed_blocks: Collection[str]) -> None:
        """Replace what the steps call and read."""
        steps = self._prepare_steps()
        between = {group.first: group for group in _groups_between_blocks(steps, self.program)}
        self._units = []
        tables: dict[str, _GatheredTable] = {}
        last_uses: dict[int, list[_GatheredTable]] = {}
        self._steps = []
        for at, (node, plain, dropped) in enumerate(steps):
            callee = plain
            if at in between:
                group = between[at]
                table = self._table_between(group)
                tables |= dict.fromkeys(group.names, table)
                last_uses.setdefault(group.last, []).append(table)
            if node.kind is NodeKind.MODULE:
                path = str(node.target)
                gathered = self._gathered_block(path, is_recomputed=path in recomputed_blocks)
                callee = prepare_call(node, gathered)
            elif node.kind is NodeKind.PARAMETER:
                callee = (tables[str(node.target)], str(node.target))
            self._steps.append((node, callee, dropped))
        for at, ending in last_uses.items():
            self._steps[at] = _with_last_uses(self._steps[at], ending)

    def _unit(self, parameters: Mapping[str, nn.Parameter]) -> ParameterUnit:
        unit = self._make_unit(parameters)
        self._units.append(unit)
        return unit

    def _table_between(self, group: _Group) -> _GatheredTable:
        parameters = {}
        for name in group.names:
            owner, _, leaf = name.rpartition(".")
            parameters[name] = self._container(owner)._parameters[leaf]
        unit = self._unit({name: each for name, each in parameters.items() if each is not None})
        return _GatheredTable(unit, group.names, self._running)

    def _running(self) -> GatheredPass:
        assert self._pass is not None, "parameters are read in a forward only"
        return self._pass

    def _gathered_block(self, path: str, *, is_recomputed: bool) -> Callable[..., Any]:
        block = self._container(path)
        named = {f"{path}.{name}": parameter for name, parameter in block.named_parameters()}
        if not named:
            return recomputed(block) if is_recomputed else block
        unit, seats = self._unit(named), _seats(block, list(named.values()))

        def run(running: GatheredPass, use: UnitUse, *args: Any, **kwargs: Any) -> Any:
            with _seated(seats, running.wholes(use)):
                return block(*args, **kwargs)

        call = recomputed(block, run) if is_recomputed else run

        def gathered(*args: Any, **kwargs: Any) -> Any:
            running = self._running()
            use = running.first_use(unit, is_recomputed=is_recomputed)
            result = call(running, use, *args, **kwargs)
            running.last_use(use)
            return result

        return gathered


class _Seat(NamedTuple):
    """Where a module of a block holds one of the unit's parameters."""

    part: nn.Module
    leaf: str
    position: int  # in the unit


def _seats(block: nn.Module, parameters: Sequence[nn.Parameter]) -> list[_Seat]:
    positions = {id(parameter): position for position, parameter in enumerate(parameters)}
    return [
        _Seat(part, leaf, positions[id(parameter)])
        for part in block.modules()
        for leaf, parameter in part._parameters.items()
        if parameter is not None
    ]


@contextmanager
def _seated(seats: Sequence[_Seat], wholes: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let the modules hold whole parameters while inside."""
    before = [seat.part._parameters[seat.leaf] for seat in seats]
    _take_seats(seats, [wholes[seat.position] for seat in seats])
    try:
        yield
    finally:
        _take_seats(seats, before)


def _take_seats(seats: Sequence[_Seat], tensors: Sequence[Any]) -> None:
    for seat, tensor in zip(seats, tensors, strict=True):
        seat.part._parameters[seat.leaf] = tensor
    for part in {id(seat.part): seat.part for seat in seats}.values():
        if isinstance(part, nn.RNNBase):  # it calls with a list of its own
            vars(part)["_flat_weights"] = [part._parameters[name] for name in part._flat_weights_names]


class _Group(NamedTuple):
    """Parameters read between blocks, with the positions of their first and of their last use."""

    names: tuple[str, ...]
    first: int
    last: int


def _groups_between_blocks(steps: Sequence[_Step], program: Program) -> list[_Group]:
    last_read: dict[int, int] = {}  # of each storage
    for at, (node, _, _) in enumerate(steps):
        for value in (*node.inputs, *node.outputs):
            last_read[program.storages[value]] = at
    groups: list[_Group] = []
    previous = ""
    for at, (node, _, _) in enumerate(steps):
        if node.kind is not NodeKind.PARAMETER:
            continue
        name, last = str(node.target), last_read[program.storages[node.outputs[0]]]
        if groups and _listed_module(name) == previous:
            group = groups[-1]
            groups[-1] = _Group((*group.names, name), group.first, max(group.last, last))
        else:
            groups.append(_Group((name,), at, last))
        previous = _listed_module(name)
    return groups


def _listed_module(name: str) -> str:
    """Return the outermost numbered module that a parameter is in, such as ``layers.3``, else its owner."""
    parts = name.split(".")[:-1]
    numbered = [at for at, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[0] + 1] if numbered else parts)


class _GatheredTable:
    """Stands in the place of a table of parameters, and gathers all of a group when the first is read."""

    def __init__(
        self, unit: ParameterUnit, names: Sequence[str], running: Callable[[], GatheredPass]
    ) -> None:
        self._unit, self._running = unit, running
        self._positions = {name: position for position, name in enumerate(names)}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._running().read(self._unit)[self._positions[name]]

    def let_go(self) -> None:
        """The last reader has run."""
        self._running().let_go(self._unit)


class _LastRead:
    """A table whose groups are let go once it is read: what is read goes out of the program as it is."""

    def __init__(self, table: _GatheredTable, ending: Sequence[_GatheredTable]) -> None:
        self._table, self._ending = table, ending

    def __getitem__(self, name: str) -> torch.Tensor:
        parameter = self._table[name]
        for table in self._ending:
            table.let_go()
        return parameter


def _with_last_uses(step: _Step, ending: Sequence[_GatheredTable]) -> _Step:
    """Let go of groups after a step."""
    node, callee, dropped = step
    if node.kind is NodeKind.PARAMETER:
        table, name = callee
        return node, (_LastRead(table, ending), name), dropped

    def run(values: Values) -> None:
        callee(values)
        for table in ending:
            table.let_go()

    return node, run, dropped
