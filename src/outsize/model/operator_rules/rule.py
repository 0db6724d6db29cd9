"""One valid way to run an operator on shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from outsize.model.operator_rules.placement import Placement, Replicate, Shard, share_start

__all__ = ["OperatorRule", "Shapes"]

Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class OperatorRule:
    """Placements of an operator's tensors, in the order of its references and its outputs.

    ``local_arguments`` are positions of integers in the node's flattened arguments that are sizes and
    become the local size. ``kernel`` names a function of :mod:`hand_rules` that runs instead of the
    operator, for the few operators that need a mask or a collective of their own. ``only_even`` marks what
    did not hold on uneven shards.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    local_arguments: tuple[int, ...] = ()
    kernel: str = ""
    only_even: bool = False

    @property
    def is_split(self) -> bool:
        """Whether the ranks share the work, rather than all doing all of it."""
        return any(isinstance(placement, Shard) for placement in (*self.inputs, *self.outputs))

    def __str__(self) -> str:
        arrow = f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"
        return f"{arrow} ({self.kernel})" if self.kernel else arrow

    def divides(self, input_shapes: Shapes, output_shapes: Shapes, degree: int) -> bool:
        """Tell whether every sharded dim divides evenly over ``degree`` ranks."""
        return all(shard.divides(shape, degree) for shard, shape in self._shards(input_shapes, output_shapes))

    def cut_sizes(self, input_shapes: Shapes, output_shapes: Shapes) -> set[int]:
        """Return the sizes of all pieces that the rule cuts, of every input and output."""
        pairs = self._shards(input_shapes, output_shapes)
        return {piece for shard, shape in pairs for piece in shard.pieces(shape[shard.dim])}

    def cut_in(
        self, atoms: int, input_shapes: Shapes, output_shapes: Shapes, degree: int
    ) -> OperatorRule | None:
        """Return the rule with all it cuts cut in ``atoms`` parts, unevenly; None where it cannot be."""
        sizes = self.cut_sizes(input_shapes, output_shapes)
        is_possible = atoms > degree and atoms % degree and not any(size % atoms for size in sizes)
        if self.only_even or not is_possible:
            return None

        def uneven(placement: Placement, shape: tuple[int, ...]) -> Placement:
            if not isinstance(placement, Shard):
                return placement
            pieces = placement.pieces(shape[placement.dim])
            return Shard(placement.dim, pieces, 0 if set(pieces) == {atoms} else atoms)

        return replace(
            self,
            inputs=tuple(map(uneven, self.inputs, input_shapes)),
            outputs=tuple(map(uneven, self.outputs, output_shapes)),
        )

    def local_size(self, size: int, degree: int, rank: int) -> int | None:
        """Return what a size among the arguments is on ``rank``; None where the rule cannot divide it."""
        shards = [p for p in (*self.inputs, *self.outputs) if isinstance(p, Shard)]
        counts = {shard.atoms or shard.segments[0] for shard in shards if shard.segments}
        uneven = next((count for count in counts if count % degree), degree)
        if size % uneven:
            return None
        first, last = (share_start(uneven, degree, r) for r in (rank, rank + 1))
        return size // uneven * (last - first)

    def _shards(self, input_shapes: Shapes, output_shapes: Shapes) -> Iterator[tuple[Shard, tuple[int, ...]]]:
        pairs = [*zip(self.inputs, input_shapes, strict=True), *zip(self.outputs, output_shapes, strict=True)]
        return ((placement, shape) for placement, shape in pairs if isinstance(placement, Shard))

    @classmethod
    def replicated(cls, num_inputs: int, num_outputs: int, *, partial_gradient: bool = False) -> OperatorRule:
        """Return the rule under which every rank runs the whole operator.

        Backward is linear in the gradients of the outputs, so that this also holds with every gradient
        a share of its sum (``partial_gradient``).
        """
        placement = Replicate(partial_gradient)
        return cls((placement,) * num_inputs, (placement,) * num_outputs)
