"""Which values of a program the gradient of its loss comes back to.

    first ─▶ a ─▶ second ─▶ b ─▶ loss        to a and b, but not to c, which is only returned,
             └──▶ beside ─▶ c                and not to a where second takes a.detach()

Others have no gradient in PyTorch. A gradient of zero is not the same: weight decay and momentum move a
parameter that has one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

from outsize.model.program import Program, Ref

__all__ = ["ArgumentGradients", "values_with_gradient"]


def values_with_gradient(program: Program) -> frozenset[int]:
    """Return the values that the loss depends on and that need a gradient; none without a loss."""
    producers = program.producers
    writers: dict[int, list[int]] = {}  # storage -> nodes that write it in place
    for index, node in enumerate(program.nodes):
        for value in node.mutates:
            writers.setdefault(program.storages[value], []).append(index)
    found: set[int] = set()
    stack = [] if program.loss_value is None else [program.loss_value]
    while stack:
        value = stack.pop()
        if value in found or not program.specs[value].requires_grad:
            continue
        found.add(value)
        for index in (producers[value], *writers.get(program.storages[value], ())):
            node = program.nodes[index]
            stack += [
                argument.value
                for position, argument in enumerate(node.arguments)
                if isinstance(argument, Ref) and position not in node.detached
            ]
    return frozenset(found)


class ArgumentGradients:
    """Looks at the arguments of a call before it runs, and afterwards in autograd's graph for them."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self._arguments = {
            position: leaf
            for position, leaf in enumerate(tree_leaves((args, kwargs)))
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        }
        # a write in place gives a tensor another one
        self._edges = {position: (leaf.grad_fn, leaf.output_nr) for position, leaf in self._arguments.items()}

    def detached(self, result: Any) -> tuple[int, ...]:
        """Return the positions of arguments that need a gradient and get none from the result.

        None where the call has a backward written by hand: what that leads to is not in the graph.
        """
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        made = {(leaf.grad_fn, leaf.output_nr) for leaf in results if leaf.grad_fn is not None}
        edges = _edges_behind(made, stop_at={node for node, _ in self._edges.values() if node is not None})
        nodes = {node for node, _ in edges}
        if any(isinstance(node, BackwardCFunction) for node in nodes):
            return ()
        leaves = {id(node.variable) for node in nodes if hasattr(node, "variable")}
        leaves |= {id(leaf) for leaf in results}
        return tuple(
            position
            for position, argument in self._arguments.items()
            if self._edges[position] not in edges and id(argument) not in leaves
        )


def _edges_behind(made: set[tuple[Any, int]], stop_at: set[Any]) -> set[tuple[Any, int]]:
    """Return all edges that lead back from these, they included; what is behind ``stop_at`` is left out."""
    found, stack = set(made), list(made)
    while stack:
        node, _ = stack.pop()
        if node in stop_at:
            continue
        for edge in node.next_functions:
            if edge[0] is not None and edge not in found:
                found.add(edge)
                stack.append(edge)
    return found
