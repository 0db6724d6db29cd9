"""What two operator calls must share to have the same rules: operator, shapes, dtypes and other arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from outsize.model.program import Node, NodeKind, Program, Ref, TensorSpec

__all__ = ["OperatorSignature", "signature_of"]


@dataclass(frozen=True, slots=True)
class OperatorSignature:
    """An operator call without values: a :class:`TensorSpec` stands wherever a tensor stood."""

    target: Any
    arguments: tuple[Any, ...]
    structure: TreeSpec
    output_positions: tuple[int, ...]
    outputs: tuple[TensorSpec, ...]
    is_random: bool = False

    @property
    def key(self) -> str:
        """Equal for calls with the same rules."""
        return f"{self.target}{self.arguments!r}"

    @property
    def input_positions(self) -> tuple[int, ...]:
        """Positions of the tensors among the flattened arguments."""
        return tuple(i for i, argument in enumerate(self.arguments) if isinstance(argument, TensorSpec))

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The tensors among the arguments, in order."""
        return tuple(argument for argument in self.arguments if isinstance(argument, TensorSpec))

    def call(
        self,
        tensors: Sequence[torch.Tensor],
        replaced: dict[int, Any] | None = None,
        target: Callable[..., Any] | None = None,
    ) -> list[torch.Tensor]:
        """Run the operator, or ``target`` in its place, on ``tensors``; return its output tensors.

        ``replaced`` gives other values for some arguments that are no tensors, by position.
        """
        arguments = list(self.arguments)
        for position, value in (replaced or {}).items():
            arguments[position] = value
        for position, tensor in zip(self.input_positions, tensors, strict=True):
            arguments[position] = tensor
        args, kwargs = tree_unflatten(arguments, self.structure)
        leaves, _ = tree_flatten((target or self.target)(*args, **kwargs))
        return [leaves[position] for position in self.output_positions]


def signature_of(program: Program, node: Node) -> OperatorSignature:
    """Return the signature of an operator node of ``program``."""
    if node.kind is not NodeKind.OPERATOR or node.structure is None:
        raise ValueError(f"{node.target} is no operator")

    def spec(value: int) -> TensorSpec:
        found = program.specs[value]
        needs_grad = found.requires_grad and node.grad_enabled
        return TensorSpec(found.shape, found.dtype, needs_grad)

    return OperatorSignature(
        target=node.target,
        arguments=tuple(spec(item.value) if isinstance(item, Ref) else item for item in node.arguments),
        structure=node.structure,
        output_positions=node.output_positions,
        outputs=tuple(program.specs[value] for value in node.outputs),
        is_random=node.is_random,
    )
