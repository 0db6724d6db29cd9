"""Undo the flattening of batch dims around batched matrix products, so that each of them can be split.

torch records a product of four-dimensional tensors as three-dimensional ones, which hides the heads:

    q (b, h, s, d) ──view──▶ (b h, s, d) ──┐
                                           bmm ──▶ (b h, s, s) ──view──▶ (b, h, s, s)
    k (b, h, d, s) ──view──▶ (b h, d, s) ──┘
        becomes
    q, k ──matmul──▶ (b, h, s, s)
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.utils._pytree import tree_flatten

from outsize.model.program import Node, NodeKind, Program, Ref

__all__ = ["unflatten_batched_products"]

aten = torch.ops.aten
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_TWO_TENSORS = tree_flatten(((0, 0), {}))[1]


def unflatten_batched_products(program: Program) -> Program:
    """Return the program with a ``matmul`` in the place of the view after each such product.

    Every node keeps its index; the views and the product that nothing reads any more stay where they are.
    """
    producers = program.producers
    nodes = list(program.nodes)
    for index, node in enumerate(nodes):
        found = _product_before(program, producers, index)
        if found is not None:
            left, right, product = found
            nodes[index] = replace(
                product,
                target=aten.matmul.default,
                arguments=(Ref(left), Ref(right)),
                structure=_TWO_TENSORS,
                outputs=node.outputs,
            )
    return replace(program, nodes=nodes)


def _product_before(program: Program, producers: dict[int, int], index: int) -> tuple[int, int, Node] | None:
    """Return the two values multiplied, and the product, if node ``index`` views one as here."""
    node = program.nodes[index]
    if node.kind is not NodeKind.OPERATOR or node.target not in _VIEWS:
        return None
    at = producers[node.inputs[0]]
    product = program.nodes[at]
    if product.target is not aten.bmm.default or len(set(product.inputs)) < 2:
        return None
    sources = [_viewed(program, producers, value) for value in product.inputs]
    shape = program.specs[node.outputs[0]].shape
    if any(program.specs[source].shape[:-2] != shape[:-2] for source in sources):
        return None
    rows, columns = program.specs[product.outputs[0]].shape[1:]
    written = {program.storages[v] for later in program.nodes[at:index] for v in later.mutates}
    is_same = shape[-2:] == (rows, columns) and not written & {program.storages[s] for s in sources}
    return (sources[0], sources[1], product) if is_same else None


def _viewed(program: Program, producers: dict[int, int], value: int) -> int:
    """Return what ``value`` (n, r, c) is a view of, if that has more dims and the same last two."""
    node = program.nodes[producers[value]]
    if node.kind is not NodeKind.OPERATOR or node.target not in _VIEWS:
        return value
    before, after = program.specs[node.inputs[0]].shape, program.specs[value].shape
    is_flattened = len(before) > 3 and before[-2:] == after[-2:] and math.prod(before[:-2]) == after[0]
    return node.inputs[0] if is_flattened else value
