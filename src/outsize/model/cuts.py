"""Where a program may be cut, and what would be sent there."""

from __future__ import annotations

from collections.abc import Sequence

from outsize.errors import PlanError
from outsize.model.liveness import buffer_writers
from outsize.model.program import CutPoint, NodeKind, Program
from outsize.model.slice import slice_program, tainted_nodes

__all__ = ["cut_points", "find_cut", "parts_writes"]


def cut_points(program: Program, labels: list[str] | None = None) -> list[CutPoint]:
    """Return the cuts just before each block, in order, that leave parameters on both sides.

    A buffer that is written from what parameters made, or by a block, stays on one side with all that uses
    it: copies of it would come to differ. No cut comes between a value and a later write into its memory: a
    stage would write into its own copy.

    ``labels`` names the blocks for a recording of operators, which has no blocks of its own: pass the labels
    of the recording of blocks.
    """
    if labels is None:
        labels = [label for label, _ in _block_calls(program)]
    found = []
    spans = _spans_of_writing(program)
    for label in labels:
        index = find_cut(program, label)
        if index == 0 or _is_within(index, spans):
            continue
        before, after = slice_program(program, [index])
        if before.sent and (before.modules or before.parameters) and (after.modules or after.parameters):
            num_bytes = sum(program.specs[value].num_bytes for value in before.sent)
            found.append(CutPoint(index, label, before.sent, num_bytes))
    return found


def parts_writes(program: Program, cuts: Sequence[int]) -> bool:
    """Tell whether a cut comes between memory and a later write into it, which makes it illegal."""
    spans = _spans_of_writing(program)
    return any(_is_within(index, spans) for index in cuts)


def _is_within(index: int, spans: Sequence[tuple[int, int]]) -> bool:
    return any(first < index <= last for first, last in spans)


def _spans_of_writing(program: Program) -> list[tuple[int, int]]:
    tainted = tainted_nodes(program)
    spans = _spans_of_buffers(program, tainted) + _spans_of_writes(program, tainted)
    return [*spans, *program.shared_buffer_spans]


def find_cut(program: Program, label: str) -> int:
    """Return the node index of the cut named ``label``, in a recording of either granularity.

    Raises:
        PlanError: the program has no such block.
    """
    for name, index in _block_calls(program):
        if name == label:
            return index
    name, _, call = label.partition("#")
    entered = _entries_into(program, name)
    position = int(call or 1) - 1
    if position < len(entered):
        return entered[position]
    raise PlanError(
        f"the program has no block named {label}",
        why="the plan names a cut there, but the recording has no such module",
        attempt="plan again for this model",
    )


def _spans_of_buffers(program: Program, tainted: Sequence[bool]) -> list[tuple[int, int]]:
    """Return the first and the last node that uses each buffer which a node that is computed once writes."""
    writers = buffer_writers(program)
    written = {storage for index, storages in writers.items() if tainted[index] for storage in storages}
    uses: dict[int, list[int]] = {}
    for index, node in enumerate(program.nodes if written else ()):
        for storage in {program.storages[value] for value in node.inputs} & written:
            uses.setdefault(storage, []).append(index)
    return [(found[0], found[-1]) for found in uses.values()]


def _spans_of_writes(program: Program, tainted: Sequence[bool]) -> list[tuple[int, int]]:
    """Return where each memory that is written in place is first made, and the last node that writes it."""
    made_at: dict[int, int] = {}
    for value, index in sorted(program.producers.items(), key=lambda item: item[1]):
        if tainted[index] and program.nodes[index].kind in (NodeKind.MODULE, NodeKind.OPERATOR):
            made_at.setdefault(program.storages[value], index)
    last: dict[int, int] = {}
    for index, node in enumerate(program.nodes):
        last.update({program.storages[value]: index for value in node.mutates})
    return [(made_at[storage], index) for storage, index in last.items() if storage in made_at]


def _block_calls(program: Program) -> list[tuple[str, int]]:
    """Return ``(label, node index)`` for each call of a block; its second call is ``name#2`` and so on."""
    calls: dict[str, int] = {}
    labelled = []
    for index, node in program.nodes_of_kind(NodeKind.MODULE):
        name = str(node.target)
        calls[name] = calls.get(name, 0) + 1
        labelled.append((name if calls[name] == 1 else f"{name}#{calls[name]}", index))
    return labelled


def _entries_into(program: Program, name: str) -> list[int]:
    """Return the first node index of every run of nodes recorded inside module ``name``."""
    entered = []
    was_inside = False
    for index, node in enumerate(program.nodes):
        is_inside = node.module_path == name or node.module_path.startswith(f"{name}.")
        if is_inside and not was_inside:
            entered.append(index)
        was_inside = is_inside
    return entered
