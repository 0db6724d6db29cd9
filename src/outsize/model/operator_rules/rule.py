"""One valid way to run an operator on shards."""

from __future__ import annotations

from dataclasses import dataclass

from outsize.model.operator_rules.placement import Placement, Replicate, Shard

__all__ = ["OperatorRule"]


@dataclass(frozen=True, slots=True)
class OperatorRule:
    """Placements of an operator's tensors, in the order of its references and its outputs.

    ``local_arguments`` are positions of integers in the node's flattened arguments that are sizes and
    become the local size. ``kernel`` names a function of :mod:`hand_rules` that runs instead of the
    operator, for the few operators that need a mask or a collective of their own.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    local_arguments: tuple[int, ...] = ()
    kernel: str = ""

    @property
    def is_split(self) -> bool:
        """Whether the ranks share the work, rather than all doing all of it."""
        return any(isinstance(placement, Shard) for placement in (*self.inputs, *self.outputs))

    def __str__(self) -> str:
        arrow = f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"
        return f"{arrow} ({self.kernel})" if self.kernel else arrow

    def divides(
        self, input_shapes: list[tuple[int, ...]], output_shapes: list[tuple[int, ...]], degree: int
    ) -> bool:
        """Tell whether every sharded dim divides evenly over ``degree`` ranks."""
        pairs = [*zip(self.inputs, input_shapes, strict=True), *zip(self.outputs, output_shapes, strict=True)]
        return all(
            placement.divides(shape, degree) for placement, shape in pairs if isinstance(placement, Shard)
        )

    @classmethod
    def replicated(cls, num_inputs: int, num_outputs: int, *, partial_gradient: bool = False) -> OperatorRule:
        """Return the rule under which every rank runs the whole operator.

        Backward is linear in the gradients of the outputs, so that this also holds with every gradient
        a share of its sum (``partial_gradient``).
        """
        placement = Replicate(partial_gradient)
        return cls((placement,) * num_inputs, (placement,) * num_outputs)
