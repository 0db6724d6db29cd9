"""Calls a node of a program with as little work as there can be: what is known before is done before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from outsize.errors import RecordingError
from outsize.model.program import Node, Ref

__all__ = ["PreparedCall", "prepare_call"]

Values = dict[int, Any]
PreparedCall = Callable[[Values], None]  # reads and writes values by their number


def prepare_call(node: Node, callee: Callable[..., Any]) -> PreparedCall:
    """Return a function that calls ``callee`` as ``node`` says and stores its results."""
    call = _with_arguments(node, callee)
    if not node.grad_enabled:
        call = torch.no_grad()(call)
    outputs = tuple(zip(node.outputs, node.output_positions, strict=True))
    only_output = node.outputs[0] if node.num_results == 1 and len(outputs) == 1 else None

    def run(values: Values) -> None:
        result = call(values)
        if only_output is not None and isinstance(result, torch.Tensor):
            values[only_output] = result
            return
        leaves = tree_flatten(result)[0]
        if len(leaves) != node.num_results:
            raise _other_path(node, len(leaves))
        for value, position in outputs:
            values[value] = leaves[position]

    return run


def _with_arguments(node: Node, callee: Callable[..., Any]) -> Callable[[Values], Any]:
    """Return a function that calls with the node's arguments; those that hold no tensor are made once."""
    assert node.structure is not None
    args, kwargs = tree_unflatten([_Leaf(leaf) for leaf in node.arguments], node.structure)
    references = [leaf.item.value for leaf in args if _is_reference(leaf)]
    is_plain = not kwargs and all(isinstance(leaf, _Leaf) for leaf in args)
    if is_plain and len(references) == len(args):
        return _with_values(callee, tuple(references))
    if is_plain:
        fixed = [None if _is_reference(leaf) else leaf.item for leaf in args]
        places = tuple((at, leaf.item.value) for at, leaf in enumerate(args) if _is_reference(leaf))

        def call(values: Values) -> Any:
            given = fixed.copy()
            for at, value in places:
                given[at] = values[value]
            return callee(*given)

        return call

    def call_nested(values: Values) -> Any:
        given = [values[leaf.value] if isinstance(leaf, Ref) else leaf for leaf in node.arguments]
        args, kwargs = tree_unflatten(given, node.structure)  # type: ignore[arg-type]
        return callee(*args, **kwargs)

    return call_nested


def _with_values(callee: Callable[..., Any], references: tuple[int, ...]) -> Callable[[Values], Any]:
    if len(references) == 1:
        (only,) = references
        return lambda values: callee(values[only])
    if len(references) == 2:
        left, right = references
        return lambda values: callee(values[left], values[right])
    return lambda values: callee(*[values[value] for value in references])


class _Leaf:
    """An argument, told apart from containers of arguments."""

    def __init__(self, item: Any) -> None:
        self.item = item


def _is_reference(leaf: Any) -> bool:
    return isinstance(leaf, _Leaf) and isinstance(leaf.item, Ref)


def _other_path(node: Node, num_results: int) -> RecordingError:
    return RecordingError(
        f"{node.target} returned {num_results} values, {node.num_results} when it was recorded",
        why="its forward takes another path than it did while it was recorded",
        attempt="make the forward independent of the values of tensors and of counters",
    )
