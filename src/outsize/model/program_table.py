"""A recording as a table: blocks, how often they repeat, and what crosses the cuts between them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from rich.table import Table
from torch import nn

from outsize.model.block_signature import slice_signature
from outsize.model.cuts import cut_points
from outsize.model.program import Program
from outsize.model.slice import Slice, slice_program
from outsize.units import format_bytes, format_count

__all__ = ["BlockRow", "block_rows", "program_table"]


@dataclass(frozen=True, slots=True)
class BlockRow:
    """Blocks in sequence that are the same; ``cut_bytes`` are sent by the batch recorded, before each."""

    first: str
    last: str
    num_blocks: int
    classes: str
    num_parameters: int  # of each
    num_operators: int  # of each, between its modules
    cut_bytes: int | None  # None before the first block, where nothing is cut


def block_rows(program: Program, module: nn.Module) -> list[BlockRow]:
    """Return the blocks between all legal cuts, in order, repeated ones once."""
    cuts = cut_points(program)
    slices = slice_program(program, [cut.node_index for cut in cuts])
    labels = ["start", *(cut.label for cut in cuts)]
    sent = [None, *(cut.num_bytes for cut in cuts)]
    keys = [(slice_signature(program, part, module), sent[at]) for at, part in enumerate(slices)]
    rows = []
    for _, group in groupby(range(len(slices)), key=lambda at: keys[at]):
        members = list(group)
        part = slices[members[0]]
        rows.append(
            BlockRow(
                first=labels[members[0]],
                last=labels[members[-1]],
                num_blocks=len(members),
                classes=" ".join(type(module.get_submodule(name)).__name__ for name in part.modules),
                num_parameters=_num_parameters(part, module),
                num_operators=sum(callable(program.nodes[index].target) for index in part.nodes),
                cut_bytes=sent[members[0]],
            )
        )
    return rows


def _num_parameters(part: Slice, module: nn.Module) -> int:
    held = [module.get_parameter(name) for name in part.parameters]
    for name in part.modules:
        held += module.get_submodule(name).parameters()
    return sum(parameter.numel() for parameter in {id(p): p for p in held}.values())


def program_table(program: Program, module: nn.Module) -> Table:
    """Return :func:`block_rows` as a table for the terminal."""
    table = Table(title=f"recorded on {str(program.rung).replace('_', ' ')}", title_justify="left")
    table.add_column("blocks")
    table.add_column("times", justify="right")
    table.add_column("modules")
    table.add_column("parameters", justify="right")
    table.add_column("operators", justify="right")
    table.add_column("sent at a cut before it", justify="right")
    for row in block_rows(program, module):
        table.add_row(
            row.first if row.num_blocks == 1 else f"{row.first} … {row.last}",
            str(row.num_blocks),
            row.classes,
            format_count(row.num_parameters),
            str(row.num_operators),
            "–" if row.cut_bytes is None else format_bytes(row.cut_bytes),
        )
    return table
