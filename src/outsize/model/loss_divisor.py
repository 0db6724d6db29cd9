"""A number by which a loss divides a sum over samples, and what of it adds up over micro-batches.

mask ──▶ sum ──▶ clamp 1 ──▶ divisor        the sum is the core: those of micro-batches add up;
        (core)                              what follows is done again to their total
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outsize.model.program import NodeKind, Program, Ref
from outsize.model.sample_dims import SampleDims

__all__ = ["AdditiveCore", "additive_core"]

aten = torch.ops.aten

_AFTERWARDS = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.alias.default,
    aten.clone.default, aten._to_copy.default, aten.squeeze.default, aten.unsqueeze.default,
    aten.detach.default, aten.clamp.default, aten.clamp_min.default, aten.clamp.Tensor,
    aten.clamp_min.Tensor, aten.maximum.default, aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor,
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar,
}  # fmt: skip
_SUMS = {aten.sum.default, aten.sum.dim_IntList, aten.count_nonzero.default, aten.count_nonzero.dim_IntList}


@dataclass(frozen=True, slots=True)
class AdditiveCore:
    """The value that adds up, and the nodes from it to the divisor, it included."""

    value: int
    nodes: frozenset[int]


def additive_core(program: Program, divisor: int, dims: SampleDims) -> AdditiveCore | None:
    """Return the core of a divisor, or None if it is none of this form or not decided by the batch alone.

    ``dims`` needs a recording with more samples.
    """
    producers = program.producers
    nodes: set[int] = set()
    value = divisor
    while True:
        index = producers[value]
        nodes.add(index)
        node = program.nodes[index]
        if node.kind is not NodeKind.OPERATOR or not dims.reads_samples(value):
            return None
        if node.target in _SUMS:
            break
        of_samples = [each for each in node.inputs if dims.reads_samples(each)]
        is_divided = not (isinstance(node.arguments[0], Ref) and node.arguments[0].value in of_samples)
        if node.target not in _AFTERWARDS or len(of_samples) != 1 or is_divided:
            return None
        (value,) = of_samples
    is_whole = dims.grown(node.inputs[0]) and not dims.grown(value)
    return AdditiveCore(value, frozenset(nodes)) if is_whole and not _is_tainted(program, divisor) else None


def _is_tainted(program: Program, value: int) -> bool:
    """Whether a parameter or randomness goes into a value."""
    producers, seen, stack = program.producers, set[int](), [value]
    while stack:
        index = producers[stack.pop()]
        node = program.nodes[index]
        if node.kind in (NodeKind.PARAMETER, NodeKind.BUFFER, NodeKind.MODULE) or node.is_random:
            return True
        if index not in seen:
            seen.add(index)
            stack += node.inputs
    return False
