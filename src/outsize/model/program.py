"""The recorded program: one forward of a module as a list of nodes over values.

    input ─┐
    param ─┼─▶ module call / operator ─▶ value ─▶ module call ─▶ … ─▶ outputs
    const ─┘        (a node)            (an id)

A node is a *leaf module call* (a block called again exactly as it was called) or one ATen *operator*
between such calls; parameters, buffers, constants and batch entries that operators read are nodes of
their own. Values are numbered in the order they were made, so every list of nodes is in execution order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec

if TYPE_CHECKING:
    from rich.table import Table

    from outsize.model.stage_module import StageModule

__all__ = [
    "CutPoint",
    "Guard",
    "IndexRange",
    "LossPath",
    "LossTerm",
    "Node",
    "NodeKind",
    "Program",
    "Ref",
    "Rung",
    "TensorSpec",
]


class NodeKind(StrEnum):
    """What a node does."""

    INPUT = "input"  # target: path of the batch entry, e.g. "input_ids" or "images/left"
    PARAMETER = "parameter"  # target: full parameter name
    BUFFER = "buffer"  # target: full buffer name
    CONSTANT = "constant"  # target: key into Program.constants
    MODULE = "module"  # target: full name of the leaf module
    OPERATOR = "operator"  # target: the ATen overload, or a collective after lowering
    LOSS_SHARE = "loss_share"  # target: a loss term, by position; scales it by its share of the global batch


class Rung(StrEnum):
    """How the recording was made: the fallback ladder, best first."""

    FAKE_TENSORS = "fake_tensors"
    REAL_TENSORS = "real_tensors"
    PARAMETER_COUNTS = "parameter_counts"


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a value inside a node's flattened arguments or the program's outputs."""

    value: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What is known of a value before it exists."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of a dense tensor of this shape and dtype."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Node:
    """One step of the program.

    ``arguments`` is the flattened ``(args, kwargs)`` with a :class:`Ref` wherever a tensor stood and
    ``structure`` restores it. ``outputs[i]`` is the value found at ``output_positions[i]`` of the
    flattened result, which has ``num_results`` leaves. ``mutates`` are values written in place. ``detached``
    are positions of arguments that a block gives no gradient to, though they need one.
    """

    kind: NodeKind
    target: str | Callable[..., Any]
    outputs: tuple[int, ...]
    arguments: tuple[Any, ...] = ()
    structure: TreeSpec | None = None
    output_positions: tuple[int, ...] = (0,)
    num_results: int = 1
    mutates: tuple[int, ...] = ()
    detached: tuple[int, ...] = ()
    grad_enabled: bool = True
    is_random: bool = False
    module_path: str = ""  # the module whose forward was running
    source: str = ""  # file:line in the user's or library's code, where known

    @property
    def inputs(self) -> tuple[int, ...]:
        """Values this node reads, in order, with repeats."""
        return tuple(argument.value for argument in self.arguments if isinstance(argument, Ref))


@dataclass(frozen=True, slots=True)
class LossTerm:
    """A part that the loss is linear in, so that those of micro-batches can be added up exactly.

    ``value`` is its value (None: plain numbers that the loss adds). It is a mean over ``count`` elements, or,
    where that number depends on the labels (``ignore_index``), over the elements of value ``target`` that
    differ from ``ignore_index``. With ``is_sum`` it is a sum over the batch, which adds up as it is.
    ``divisor`` is a value by which a sum was divided, computed from ``divisor_core``, which adds up over
    micro-batches.
    """

    value: int | None
    count: int | None = None
    target: int | None = None
    ignore_index: int | None = None
    is_sum: bool = False
    divisor: int | None = None
    divisor_core: int | None = None


@dataclass(frozen=True, slots=True)
class LossPath:
    """How the loss comes from its terms: arguments of nodes that are linear in them.

    ``root`` is the term that the loss itself is, if it is one. ``edges`` has, by a node's output value and an
    argument's position, the term that the argument is, or None where it lies on the path itself.
    """

    root: int | None = None
    edges: Mapping[tuple[int, int], int | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Guard:
    """What the forward took from ``value``, which follows from the batch, before node ``at``.

    A number, a shape as a tuple, or of a mask the number of its true elements.
    """

    value: int
    expected: bool | int | float | tuple[int, ...]
    source: str  # file:line
    at: int


@dataclass(frozen=True, slots=True)
class IndexRange:
    """Before node ``at``, the numbers in ``value`` choose among ``size`` rows or classes.

    ``reason`` says of what; ``ignored`` is allowed too; ``entries`` are those of the batch behind the value.
    """

    value: int
    size: int
    reason: str
    at: int
    ignored: int | None = None
    entries: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CutPoint:
    """A place where the program may be cut: just before node ``node_index``.

    ``label`` names it for people and plan files, e.g. ``model.layers.4``; ``crossing`` are the values
    sent over it, ``num_bytes`` their size per recorded batch.
    """

    node_index: int
    label: str
    crossing: tuple[int, ...]
    num_bytes: int


@dataclass(slots=True)
class Program:
    """One recorded forward. See the module's docstring."""

    nodes: list[Node]
    specs: dict[int, TensorSpec]
    outputs: tuple[Any, ...]  # flattened model output with Ref for tensors
    output_structure: TreeSpec
    constants: dict[str, torch.Tensor]
    storages: dict[int, int]  # value -> id of its storage: equal ids alias
    loss_value: int | None = None  # the scalar that training differentiates
    loss_terms: tuple[LossTerm, ...] = ()
    loss_path: LossPath = field(default_factory=LossPath)
    num_samples: int = 1  # in the recorded batch
    sample_entries: frozenset[str] = frozenset()  # entries of the batch whose first dim counts samples
    guards: tuple[Guard, ...] = ()  # hold for the recorded batch; others are checked
    index_ranges: tuple[IndexRange, ...] = ()  # checked for every batch
    rung: Rung = Rung.FAKE_TENSORS
    written_buffers: tuple[str, ...] = ()  # by the forward, inside blocks too; of alike blocks by the first
    # first and last node that use a buffer which a block writes and others use too: no cut comes between
    shared_buffer_spans: tuple[tuple[int, int], ...] = ()
    warnings: list[str] = field(default_factory=list)
    module: nn.Module | None = None  # that was recorded, where stage modules are wanted

    @property
    def producers(self) -> dict[int, int]:
        """Index of the node that makes each value."""
        return {value: index for index, node in enumerate(self.nodes) for value in node.outputs}

    def cut_points(self) -> list[CutPoint]:
        """Return the places where the program may be cut, in order."""
        from outsize.model.cuts import cut_points

        return cut_points(self)

    def slice(self, cuts: Sequence[CutPoint | str | int]) -> list[StageModule]:
        """Cut the program before each of ``cuts`` (cut points, their labels or node indices).

        Returns one module a stage: ``forward(*received, **batch_entries)`` returns the tuple of values sent,
        and for the last stage the model's output. They share their parameters with the recorded module.

        Raises:
            PlanError: no such cut, or cuts out of order.
        """
        from outsize.model.cuts import find_cut
        from outsize.model.slice import slice_program
        from outsize.model.stage_module import StageModule

        assert self.module is not None, "stage modules need the module that was recorded"
        indices = [
            cut.node_index
            if isinstance(cut, CutPoint)
            else find_cut(self, cut)
            if isinstance(cut, str)
            else cut
            for cut in cuts
        ]
        return [StageModule(self, part, self.module) for part in slice_program(self, indices)]

    def table(self) -> Table:
        """Return the recording as a table to print: blocks, repeats, parameters, bytes sent at each cut."""
        from outsize.model.program_table import program_table

        assert self.module is not None, "the table needs the module that was recorded"
        return program_table(self, self.module)

    def nodes_of_kind(self, kind: NodeKind) -> Iterator[tuple[int, Node]]:
        """Yield ``(index, node)`` of one kind, in order."""
        return ((index, node) for index, node in enumerate(self.nodes) if node.kind is kind)
