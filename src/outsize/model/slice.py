"""Cut a program into stages: what each computes, receives and sends.

nodes:    a  b  c │ d  e │ f  g        a stage holds its nodes, and again whatever they need that
stage:       0    │  1   │  2          depends on no parameter and no randomness (masks, positions);
                  ▼      ▼             everything else alive at a cut is sent over it.

Writes to buffers between blocks stay with their stage, also where nothing after them reads the buffer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from outsize.errors import PlanError
from outsize.model.gradient_flow import values_with_gradient
from outsize.model.liveness import buffer_writers
from outsize.model.program import NodeKind, Program, Ref

__all__ = ["Slice", "slice_program", "tainted_nodes"]


@dataclass(frozen=True, slots=True)
class Slice:
    """One stage of a program. ``sent`` is empty for the last stage, which returns the model's outputs.

    ``with_gradient`` are those of the values received and sent that the loss's gradient comes back to.
    """

    index: int
    num_slices: int
    nodes: tuple[int, ...]
    received: tuple[int, ...]
    sent: tuple[int, ...]
    with_gradient: frozenset[int]
    modules: tuple[str, ...]
    parameters: tuple[str, ...]  # read by operators of the slice itself
    buffers: tuple[str, ...]
    batch_entries: tuple[str, ...]

    @property
    def is_last(self) -> bool:
        """Whether this slice makes the model's outputs."""
        return self.index == self.num_slices - 1


def tainted_nodes(program: Program) -> list[bool]:
    """Tell for each node whether it depends on a parameter or on randomness: then it is computed once."""
    producers = program.producers
    tainted: list[bool] = []
    for node in program.nodes:
        own = node.kind in (NodeKind.PARAMETER, NodeKind.MODULE) or node.is_random
        tainted.append(own or any(tainted[producers[value]] for value in node.inputs))
    return tainted


def slice_program(program: Program, cuts: Sequence[int]) -> list[Slice]:
    """Cut ``program`` just before each node index in ``cuts`` (increasing).

    Raises:
        PlanError: the cuts are not increasing positions inside the program.
    """
    bounds = [0, *cuts, len(program.nodes)]
    if any(start >= end for start, end in itertools.pairwise(bounds)):
        raise PlanError(
            f"cuts {list(cuts)} do not divide {len(program.nodes)} nodes",
            why="they must increase and leave at least one node on each side",
            attempt="choose cuts from cut_points()",
        )
    slicer = _Slicer(program)
    needed = {argument.value for argument in program.outputs if isinstance(argument, Ref)}
    slices: list[Slice] = []
    for index in reversed(range(len(bounds) - 1)):
        is_last = index == len(bounds) - 2
        nodes, received = slicer.collect(needed, bounds[index], bounds[index + 1])
        sent = () if is_last else tuple(sorted(needed))
        slices.append(slicer.describe(index, len(bounds) - 1, nodes, received, sent))
        needed = set(received)
    return slices[::-1]


class _Slicer:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.producers = program.producers
        self.tainted = tainted_nodes(program)
        self.writers: dict[int, list[int]] = {}  # storage -> nodes that write it in place
        for index, node in enumerate(program.nodes):
            for value in node.mutates:
                self.writers.setdefault(program.storages[value], []).append(index)
        self.with_gradient = values_with_gradient(program)
        self.effects = set(buffer_writers(program))  # that no later stage runs

    def collect(self, needed: set[int], start: int, end: int) -> tuple[list[int], list[int]]:
        """Return the nodes to run for ``needed`` within a stage and the values it must receive.

        Call it for the last stage first.
        """
        nodes = {index for index in self.effects if start <= index < end}
        received: set[int] = set()
        seen: set[int] = set()
        stack = [*needed, *(value for index in nodes for value in self.program.nodes[index].inputs)]
        while stack:
            value = stack.pop()
            if value in seen:
                continue
            seen.add(value)
            index = self.producers[value]
            node = self.program.nodes[index]
            is_held = node.kind is NodeKind.PARAMETER
            if index < start and self.tainted[index] and not is_held:
                received.add(value)
                continue
            nodes.add(index)
            stack += node.inputs
            stack += self._writes_after(node.outputs, nodes, start, end, index)
        self.effects -= nodes
        return sorted(nodes), sorted(received)

    def _writes_after(
        self, outputs: tuple[int, ...], nodes: set[int], start: int, end: int, made_at: int
    ) -> list[int]:
        """Add the in-place writes to a value's storage that belong to this stage; return what they read."""
        read: list[int] = []
        for value in outputs:
            for writer in self.writers.get(self.program.storages[value], ()):
                belongs = start <= writer < end or (made_at < writer < end and not self.tainted[writer])
                if belongs and writer not in nodes:
                    nodes.add(writer)
                    read += self.program.nodes[writer].inputs
        return read

    def describe(
        self, index: int, num_slices: int, nodes: list[int], received: list[int], sent: tuple[int, ...]
    ) -> Slice:
        """Return the slice with the names of all it holds."""

        def names(kind: NodeKind) -> tuple[str, ...]:
            found = [self.program.nodes[node] for node in nodes]
            return tuple(dict.fromkeys(str(node.target) for node in found if node.kind is kind))

        return Slice(
            index=index,
            num_slices=num_slices,
            nodes=tuple(nodes),
            received=tuple(received),
            sent=sent,
            with_gradient=self.with_gradient.intersection((*received, *sent)),
            modules=names(NodeKind.MODULE),
            parameters=names(NodeKind.PARAMETER),
            buffers=names(NodeKind.BUFFER),
            batch_entries=names(NodeKind.INPUT),
        )
