"""Undo the flattening of batch dims around matrix products, so that each of these dims can be split.

torch records a product of four-dimensional tensors as three-dimensional ones, which hides the heads, and a
product with a weight as a two-dimensional one, which hides samples and tokens from each other:

    q (b, h, s, d) ──view──▶ (b h, s, d) ──┐
                                           bmm ──▶ (b h, s, s) ──view──▶ (b, h, s, s)
    k (b, h, d, s) ──view──▶ (b h, d, s) ──┘
        becomes                                   q, k ──matmul──▶ (b, h, s, s)

    x (b, s, n) ──view──▶ (b s, n) ──┐
                                     mm or addmm ──▶ (b s, m) ──view──▶ (b, s, m)
              w (m, n) ──t──▶ (n, m) ┘
        becomes                                   x, w ──linear──▶ (b, s, m)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from outsize.model.program import Node, NodeKind, Program, Ref

__all__ = ["unflatten_batched_products"]

aten = torch.ops.aten
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_STRUCTURES = {count: tree_flatten((tuple([0] * count), {}))[1] for count in (1, 2, 3)}


def unflatten_batched_products(program: Program) -> Program:
    """Return the program with a ``matmul`` or ``linear`` in the place of the view after each such product.

    Every node keeps its index; the views and the products that nothing reads any more stay where they are.
    """
    return _Unflattening(program).run()


class _Unflattening:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.nodes = list(program.nodes)
        self.specs, self.storages = dict(program.specs), dict(program.storages)
        self.producers = program.producers
        self.num_readers = Counter(value for node in program.nodes for value in node.inputs)

    def run(self) -> Program:
        for index, node in enumerate(self.program.nodes):
            if node.kind is not NodeKind.OPERATOR or node.target not in _VIEWS:
                continue
            at = self.producers[node.inputs[0]]
            product = self.program.nodes[at]
            if product.target is aten.bmm.default:
                self._unflatten_batched(index, at)
            elif product.target in (aten.mm.default, aten.addmm.default):
                self._unflatten_weighted(index, at)
        return replace(self.program, nodes=self.nodes, specs=self.specs, storages=self.storages)

    def _unflatten_batched(self, index: int, at: int) -> None:
        node, product = self.program.nodes[index], self.program.nodes[at]
        if len(set(product.inputs)) < 2:
            return
        left, right = (self._viewed(value, kept_dims=2) for value in product.inputs)
        shape = self._shape(node.outputs[0])
        if any(self._shape(source)[:-2] != shape[:-2] for source in (left, right)):
            return
        is_same = shape[-2:] == self._shape(product.outputs[0])[1:]
        if is_same and not self._is_written({left, right}, at, index):
            self.nodes[index] = _call(product, aten.matmul.default, (left, right), node.outputs)

    def _unflatten_weighted(self, index: int, at: int) -> None:
        """The product becomes the transposed weight where the program has none (a weight kept as n x m)."""
        node, product = self.program.nodes[index], self.program.nodes[at]
        if len(product.inputs) != len(product.arguments):  # addmm with factors
            return
        *bias, flat, weight = product.inputs
        source = self._viewed(flat, kept_dims=1)
        before, after = self._shape(source), self._shape(node.outputs[0])
        is_same = before[:-1] == after[:-1] and after[-1:] == self._shape(weight)[1:]
        has_plain_bias = all(self._shape(value) == after[-1:] for value in bias)
        is_alone = self.num_readers[product.outputs[0]] == 1
        if len(before) < 3 or not (is_same and has_plain_bias and is_alone):
            return
        if self._is_written({source, weight, *bias}, at, index):
            return
        transposed = self._untransposed(weight)
        if transposed is None:
            transposed = product.outputs[0]
            self.nodes[at] = _call(product, aten.t.default, (weight,), product.outputs)
            spec = self.specs[weight]
            self.specs[transposed] = replace(spec, shape=spec.shape[::-1])
            self.storages[transposed] = self.storages[weight]
        self.nodes[index] = _call(product, aten.linear.default, (source, transposed, *bias), node.outputs)

    def _untransposed(self, weight: int) -> int | None:
        """Return what ``weight`` is the transpose of, where the program says so."""
        node = self.program.nodes[self.producers[weight]]
        is_transpose = node.kind is NodeKind.OPERATOR and node.target is aten.t.default
        return node.inputs[0] if is_transpose else None

    def _viewed(self, value: int, *, kept_dims: int) -> int:
        """Return what ``value`` is a view of, if that has more dims before the same last ones."""
        node = self.program.nodes[self.producers[value]]
        if node.kind is not NodeKind.OPERATOR or node.target not in _VIEWS:
            return value
        before, after = self._shape(node.inputs[0]), self._shape(value)
        is_flattened = (
            len(before) > kept_dims + 1
            and before[-kept_dims:] == after[-kept_dims:]
            and (math.prod(before[:-kept_dims]),) == after[:-kept_dims]
        )
        return node.inputs[0] if is_flattened else value

    def _is_written(self, values: set[int], after: int, before: int) -> bool:
        """Whether one of the values is written in place between two nodes."""
        written = {self.storages[v] for node in self.program.nodes[after:before] for v in node.mutates}
        return bool(written & {self.storages[value] for value in values})

    def _shape(self, value: int) -> tuple[int, ...]:
        return self.program.specs[value].shape


def _call(like: Node, target: Callable[..., Any], inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Node:
    """Return a node in the place ``like`` has in the model that calls an operator on tensors alone."""
    arguments = tuple(map(Ref, inputs))
    structure = _STRUCTURES[len(inputs)]
    return replace(like, target=target, arguments=arguments, structure=structure, outputs=outputs)
