"""How many elements each mean of the loss was taken over, counted from a batch alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from outsize.errors import RecordingError
from outsize.model.program import LossTerm, NodeKind, Program, Ref

__all__ = ["count_loss_elements", "evaluate_from_batch", "loss_scales"]


def count_loss_elements(program: Program, entries: Mapping[str, torch.Tensor]) -> list[int | float]:
    """Return the number of elements of each loss term for a batch of the recorded shapes.

    Terms over labels count those that are not ignored; sums over the batch count 1, and divided ones their
    divisor.

    Raises:
        RecordingError: labels that decide the count depend on a parameter.
    """
    return [_count(program, term, entries) for term in program.loss_terms]


def loss_scales(program: Program, counts: Sequence[float], total_counts: Sequence[float]) -> list[float]:
    """Return the factor of each loss term: its share of the global batch's elements (sums keep 1)."""
    return [
        1.0 if term.is_sum else count / total if total else 0.0
        for term, count, total in zip(program.loss_terms, counts, total_counts, strict=True)
    ]


def _count(program: Program, term: LossTerm, entries: Mapping[str, torch.Tensor]) -> int | float:
    if term.is_sum:
        return 1
    if term.divisor is not None:
        return evaluate_from_batch(program, term.divisor, entries).item()
    if term.target is None:
        assert term.count is not None
        return term.count
    assert term.ignore_index is not None
    labels = evaluate_from_batch(program, term.target, entries)
    return int(torch.ne(labels, term.ignore_index).sum())


@torch.no_grad()
def evaluate_from_batch(program: Program, value: int, entries: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Compute a value that depends on the batch alone; writes go to a copy of the batch."""
    needed, stack, producers = set[int](), [value], program.producers
    while stack:
        index = producers[stack.pop()]
        if index not in needed:
            needed.add(index)
            stack += program.nodes[index].inputs
    values: dict[int, torch.Tensor] = {}
    writes = any(program.nodes[index].mutates for index in needed)
    for index in sorted(needed):
        node = program.nodes[index]
        if node.kind is NodeKind.INPUT:
            entry = entries[str(node.target)]
            values[node.outputs[0]] = entry.clone() if writes else entry
        elif node.kind is NodeKind.CONSTANT:
            values[node.outputs[0]] = program.constants[str(node.target)]
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
    return values[value]
