"""Find dims made of pieces that belong to different things, such as a fused query-key-value projection."""

from __future__ import annotations

import itertools
from collections import defaultdict

import torch

from outsize.model.program import Node, NodeKind, Program

__all__ = ["fused_segments"]

aten = torch.ops.aten


def fused_segments(program: Program) -> tuple[tuple[int, ...], ...]:
    """Return the sizes of the pieces of dims that the program takes apart or puts together.

    Only dims as long as a dim of some parameter matrix count, since only there a cut by pieces pays.
    """
    widths = {
        size
        for _, node in program.nodes_of_kind(NodeKind.PARAMETER)
        for size in program.specs[node.outputs[0]].shape
        if len(program.specs[node.outputs[0]].shape) > 1
    }
    found = {
        *(_pieces_of_split(program, node) for _, node in program.nodes_of_kind(NodeKind.OPERATOR)),
        *_pieces_of_slices(program),
    }
    return tuple(sorted(pieces for pieces in found if len(pieces) > 1 and sum(pieces) in widths))


def _pieces_of_split(program: Program, node: Node) -> tuple[int, ...]:
    """The pieces of a split or of a concatenation, along the dim where shapes differ from the whole."""
    if len(node.outputs) > 1 and len(node.inputs) == 1:
        whole, parts = node.inputs[0], node.outputs
    elif node.target is aten.cat.default and len(node.outputs) == 1:
        whole, parts = node.outputs[0], node.inputs
    else:
        return ()
    if not program.specs[whole].dtype.is_floating_point:
        return ()
    shapes = [program.specs[value].shape for value in parts]
    target = program.specs[whole].shape
    if any(len(shape) != len(target) for shape in shapes):
        return ()
    for dim, size in enumerate(target):
        pieces = tuple(shape[dim] for shape in shapes)
        if sum(pieces) == size and all(pieces):
            return pieces
    return ()


def _pieces_of_slices(program: Program) -> set[tuple[int, ...]]:
    """The pieces between all borders at which one value is sliced along one dim."""
    borders: dict[tuple[int, int], set[int]] = defaultdict(set)
    for _, node in program.nodes_of_kind(NodeKind.OPERATOR):
        if node.target is not aten.slice.Tensor or len(node.arguments) < 4:
            continue
        shape = program.specs[node.inputs[0]].shape
        if not program.specs[node.inputs[0]].dtype.is_floating_point:
            continue
        dim = node.arguments[1] % len(shape)
        ends = (node.arguments[2] or 0, shape[dim] if node.arguments[3] is None else node.arguments[3])
        at = {min(end % shape[dim] if end < 0 else end, shape[dim]) for end in ends if shape[dim]}
        borders[node.inputs[0], dim] |= at | {0, shape[dim]}
    ordered = (sorted(at) for at in borders.values())
    return {tuple(b - a for a, b in itertools.pairwise(at)) for at in ordered}
