"""Backward in two parts: input gradients first, the large products that make weight gradients later.

Nearly all of a weight gradient's time is in the products behind linear layers and convolutions. Only these
are put off; every other parameter's gradient (norms, biases, embeddings) comes with the input gradients, in
one ordinary pass of autograd that frees each activation as soon as it has been used:

    gradient ─▶ [ product ] ─▶ [ norm ] ─▶ ... ─▶ gradients of what was received     input_gradients()
                     │ input and output gradient, kept
                     ▼
             weight.grad += output gradientᵀ · input                                 WeightGradients.add()

A product whose saved tensors are not plainly there (a recomputed block's) is not put off, so that the block
runs again once and not for each of its weights.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

__all__ = [
    "Output",
    "PutOffProduct",
    "WeightGradients",
    "full_backward",
    "input_gradients",
    "products_put_off",
    "unpack_unchanged",
]

Output = torch.Tensor | GradientEdge  # an edge stands for a tensor that is not kept


@dataclass(frozen=True, slots=True)
class _ProductKind:
    """How autograd names a product, which of its inputs is the weight, where the other one is saved."""

    weight_position: int
    saved_input: str


_KINDS = {
    "MmBackward0": _ProductKind(1, "_saved_self"),
    "AddmmBackward0": _ProductKind(2, "_saved_mat1"),
    "ConvolutionBackward0": _ProductKind(1, "_saved_input"),
}


@dataclass(slots=True)
class WeightGradients:
    """The products put off by :func:`input_gradients`, each with its two factors."""

    _pending: list[Callable[[], None]] = field(default_factory=list)

    @torch.no_grad()
    def add(self) -> None:
        """Compute the products, add them to ``weight.grad`` and let go of their factors."""
        while self._pending:
            self._pending.pop()()


@dataclass(frozen=True, slots=True)
class PutOffProduct:
    """What a product keeps until its weight gradient is computed: its input and its output gradient."""

    received: torch.Tensor
    gradient_bytes: int


def products_put_off(outputs: Sequence[Output]) -> list[PutOffProduct]:
    """Return what :func:`input_gradients` would put off, without running it."""
    products, _ = _Graph(_nodes_of(outputs)).divide()
    return [
        PutOffProduct(_saved_input(node), _num_bytes(metadata))
        for node in products
        for metadata in node._input_metadata  # of what backward receives
    ]


def unpack_unchanged(tensor: torch.Tensor) -> torch.Tensor:
    """Return what was packed: for hooks that only look at what is saved, whose products are put off too."""
    return tensor


def input_gradients(outputs: Sequence[Output], gradients: Sequence[Any] | None) -> WeightGradients:
    """Run backward from ``outputs``, but put off the weight gradients that are products.

    ``gradients`` has one entry an output, or None for scalars. Gradients of everything else, the tensors
    received among it, are added to ``.grad`` as ``torch.autograd.backward`` does.
    """
    later = WeightGradients()
    _run(outputs, gradients, later._pending.append)
    return later


def full_backward(outputs: Sequence[Output], gradients: Sequence[Any] | None) -> None:
    """Run backward as ``torch.autograd.backward`` does, but add products straight to ``weight.grad``."""
    _run(outputs, gradients, lambda add: add())


def _run(
    outputs: Sequence[Output],
    gradients: Sequence[Any] | None,
    handle: Callable[[Callable[[], None]], None],
) -> None:
    products, leaves = _Graph(_nodes_of(outputs)).divide()
    if not leaves:
        return
    roots: Any = list(outputs)  # torch's types have no mixed sequences
    with _intercepted(products, handle):
        torch.autograd.backward(roots, gradients, inputs=leaves)


def _nodes_of(outputs: Sequence[Output]) -> list[Node]:
    edges = [each if isinstance(each, GradientEdge) else get_gradient_edge(each) for each in outputs]
    return [edge.node for edge in edges]


class _Graph:
    """The part of autograd's graph behind some outputs."""

    def __init__(self, roots: Sequence[Node]) -> None:
        self.parents: dict[Node, list[tuple[Node, int]]] = defaultdict(list)
        self.leaves: list[Any] = []  # nodes that add to `.grad`
        seen = set(roots)
        stack = list(seen)
        while stack:
            node = stack.pop()
            if type(node).__name__ == "AccumulateGrad":
                self.leaves.append(node)
                continue
            for position, (child, _) in enumerate(node.next_functions):
                if child is None:
                    continue
                self.parents[child].append((node, position))
                if child not in seen:
                    seen.add(child)
                    stack.append(child)

    def divide(self) -> tuple[dict[Node, torch.Tensor], list[torch.Tensor]]:
        """Return the products to intercept with their weights, and the leaves that autograd fills itself.

        A product is only reached by a pass that has a leaf behind its other input.
        """
        candidates = {leaf: found for leaf in self.leaves if (found := self._products_of(leaf))}
        leaves = [leaf for leaf in self.leaves if leaf not in candidates]
        reached: set[Node] = set()
        self._reach(leaves, reached)
        while unreached := [leaf for leaf, found in candidates.items() if not reached.issuperset(found)]:
            for leaf in unreached:
                del candidates[leaf]
            leaves += unreached
            self._reach(unreached, reached)
        weights = {node: leaf.variable for leaf, found in candidates.items() for node in found}
        return weights, [leaf.variable for leaf in leaves]

    def _reach(self, leaves: Sequence[Node], reached: set[Node]) -> None:
        """Add all nodes that lead to ``leaves``."""
        stack = list(leaves)
        while stack:
            for parent, _ in self.parents[stack.pop()]:
                if parent not in reached:
                    reached.add(parent)
                    stack.append(parent)

    def _products_of(self, leaf: Any) -> list[Node] | None:
        """Return the nodes that use a parameter, if all are products by it and its gradient is plain."""
        if leaf.variable.dim() < 2 or leaf.variable.is_complex() or _has_hooks(leaf.variable):
            return None
        products: list[Node] = []
        for user, position in self.parents[leaf]:
            is_transposed = type(user).__name__ == "TBackward0"
            for node, at in self.parents[user] if is_transposed else ((user, position),):
                if not _is_product(node, at):
                    return None
                products.append(node)
        return products


def _is_product(node: Any, position: int) -> bool:
    kind = _KINDS.get(type(node).__name__)
    if kind is None or kind.weight_position != position or getattr(node, "_saved_alpha", 1) != 1:
        return False
    return getattr(node, f"_raw{kind.saved_input}").unpack_hook in {None, unpack_unchanged}


def _saved_input(node: Any) -> torch.Tensor:
    saved: torch.Tensor = getattr(node, _KINDS[type(node).__name__].saved_input)
    return saved.detach()


def _num_bytes(metadata: Any) -> int:
    return int(math.prod(metadata.shape)) * int(metadata.dtype.itemsize)


def _has_hooks(parameter: Any) -> bool:
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)


@contextmanager
def _intercepted(
    products: dict[Node, torch.Tensor], handle: Callable[[Callable[[], None]], None]
) -> Iterator[None]:
    """Hand each product's weight gradient to ``handle`` when autograd comes to it."""

    def intercept(node: Any, weight: torch.Tensor) -> Callable[[Any], None]:
        def hook(gradients: Any) -> None:
            if gradients[0] is not None:
                handle(_weight_gradient(node, weight, gradients[0]))

        return hook

    handles = [node.register_prehook(intercept(node, weight)) for node, weight in products.items()]
    try:
        yield
    finally:
        for each in handles:
            each.remove()


def _weight_gradient(node: Any, weight: torch.Tensor, gradient: torch.Tensor) -> Callable[[], None]:
    """Return what adds the weight gradient; it keeps the factors and nothing else of the graph."""
    kind = _KINDS[type(node).__name__]
    received = _saved_input(node)
    if type(node).__name__ == "ConvolutionBackward0":
        return _convolution(node, weight, received, gradient)
    if type(node.next_functions[kind.weight_position][0]).__name__ == "TBackward0":
        return lambda: _add_product(weight, gradient.t(), received)
    return lambda: _add_product(weight, received.t(), gradient)


def _add_product(weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add while multiplying: a product of its own would be written, read and added."""
    if weight.grad is None:
        weight.grad = left @ right
    else:
        weight.grad.addmm_(left, right)


def _convolution(
    node: Any, weight: torch.Tensor, received: torch.Tensor, gradient: torch.Tensor
) -> Callable[[], None]:
    settings = (
        node._saved_stride,
        node._saved_padding,
        node._saved_dilation,
        node._saved_transposed,
        node._saved_output_padding,
        node._saved_groups,
    )

    def add() -> None:
        made = torch.ops.aten.convolution_backward(
            gradient, received, weight, None, *settings, [False, True, False]
        )[1]
        weight.grad = made if weight.grad is None else weight.grad.add_(made)

    return add
