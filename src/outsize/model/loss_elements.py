"""How many elements each mean of the loss was taken over, counted from a batch alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from outsize.errors import RecordingError
from outsize.model.program import LossTerm, NodeKind, Program, Ref

__all__ = ["count_loss_elements", "evaluate_from_batch", "loss_scales", "needed_nodes"]


def count_loss_elements(program: Program, entries: Mapping[str, torch.Tensor]) -> list[int | float]:
    """Return the number of elements of each loss term for a batch of the recorded shapes.

    Terms over labels count those that are not ignored; sums over the batch count 1, and divided ones what of
    their divisor adds up.

    Raises:
        RecordingError: labels that decide the count depend on a parameter.
    """
    return [_count(program, term, entries) for term in program.loss_terms]


def loss_scales(program: Program, counts: Sequence[float], total_counts: Sequence[float]) -> list[float]:
    """Return the factor of each loss term: its share of the global batch's elements (sums keep 1)."""
    return [
        _share(program, term, count, total)
        for term, count, total in zip(program.loss_terms, counts, total_counts, strict=True)
    ]


def _share(program: Program, term: LossTerm, count: float, total: float) -> float:
    if term.is_sum:
        return 1.0
    if term.divisor is not None:
        count, total = (_divisor(program, term, each) for each in (count, total))
    return count / total if total else 0.0


def _divisor(program: Program, term: LossTerm, core: float) -> float:
    """Return what a sum is divided by, where what adds up of that is ``core``."""
    assert term.divisor is not None
    assert term.divisor_core is not None
    spec = program.specs[term.divisor_core]
    known = {term.divisor_core: torch.tensor(core, dtype=torch.float64).to(spec.dtype).reshape(spec.shape)}
    return float(evaluate_from_batch(program, term.divisor, {}, known=known).item())


def _count(program: Program, term: LossTerm, entries: Mapping[str, torch.Tensor]) -> int | float:
    if term.is_sum:
        return 1
    before = None if term.value is None else program.producers[term.value]
    if term.divisor_core is not None:
        return evaluate_from_batch(program, term.divisor_core, entries, before=before).item()
    if term.target is None:
        assert term.count is not None
        return term.count
    assert term.ignore_index is not None
    labels = evaluate_from_batch(program, term.target, entries, before=before)
    return int(torch.ne(labels, term.ignore_index).sum())


@torch.no_grad()
def evaluate_from_batch(
    program: Program,
    value: int,
    entries: Mapping[str, torch.Tensor],
    *,
    before: int | None = None,
    known: Mapping[int, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute a value that depends on the batch alone, as it is just ``before`` a node (None: at the end).

    Writes go to a copy of the batch. ``known`` are values that need not be computed.

    Raises:
        RecordingError: the value depends on a parameter.
    """
    values: dict[int, Any] = dict(known or {})
    needed = needed_nodes(program, value, len(program.nodes) if before is None else before, values)
    writes = any(program.nodes[index].mutates for index in needed)
    for index in needed:
        node = program.nodes[index]
        if node.kind is NodeKind.INPUT:
            entry = entries[str(node.target)]
            values[node.outputs[0]] = entry.clone() if writes else entry
        elif node.kind is NodeKind.CONSTANT:
            constant = program.constants[str(node.target)]
            values[node.outputs[0]] = constant.clone() if writes else constant
        elif node.kind is NodeKind.OPERATOR and node.structure is not None and callable(node.target):
            leaves = [values[leaf.value] if isinstance(leaf, Ref) else leaf for leaf in node.arguments]
            args, kwargs = tree_unflatten(leaves, node.structure)
            results = tree_flatten(node.target(*args, **kwargs))[0]
            values |= {out: results[at] for out, at in zip(node.outputs, node.output_positions, strict=True)}
        else:
            raise RecordingError(
                f"a number that the program needs depends on {node.target}",
                why="labels and guarded numbers have to follow from the batch alone",
                attempt="compute such values outside the model and pass them in the batch",
            )
    found: torch.Tensor = values[value]
    return found


def needed_nodes(program: Program, value: int, before: int, known: Mapping[int, object]) -> list[int]:
    """Return the nodes that make a value, and those that write into the memory of what they make."""
    producers = program.producers
    writers: dict[int, list[int]] = {}
    for index, node in enumerate(program.nodes[:before]):
        for written in node.mutates:
            writers.setdefault(program.storages[written], []).append(index)
    needed, stack = set[int](), [value]
    while stack:
        wanted = stack.pop()
        if wanted in known:
            continue
        for index in (producers[wanted], *writers.get(program.storages[wanted], ())):
            if index not in needed:
                needed.add(index)
                stack += program.nodes[index].inputs
    return sorted(needed)
