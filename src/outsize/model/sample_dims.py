"""What of a program depends on the samples of the batch, and along which dims: seen from two recordings."""

from __future__ import annotations

from functools import cached_property

from outsize.model.program import NodeKind, Program

__all__ = ["SampleDims", "are_alike"]


class SampleDims:
    """Knows for each value of ``program`` whether samples go into it, and which of its dims count them.

    ``larger`` is a recording of the same steps with more samples; without one, dims are not known.
    """

    def __init__(self, program: Program, larger: Program | None) -> None:
        self.program, self.larger = program, larger

    @cached_property
    def _values_of_samples(self) -> set[int]:
        found: set[int] = set()
        storages: set[int] = set()
        for node in self.program.nodes:
            is_entry = node.kind is NodeKind.INPUT and node.target in self.program.sample_entries
            if is_entry or any(value in found or self._storage(value) in storages for value in node.inputs):
                found.update(node.outputs)
                storages.update(self._storage(value) for value in node.mutates)
        return found

    def _storage(self, value: int) -> int:
        return self.program.storages[value]

    def reads_samples(self, value: int) -> bool:
        """Whether a value depends on entries of the batch that are cut into micro-batches."""
        return value in self._values_of_samples

    def grown(self, value: int) -> set[int]:
        """Return the dims of a value that count samples, alone or together with others."""
        assert self.larger is not None, "dims that count samples are seen from two recordings"
        before, after = self.program.specs[value].shape, self.larger.specs[value].shape
        return {dim for dim, sizes in enumerate(zip(before, after, strict=True)) if len(set(sizes)) > 1}


def are_alike(program: Program, larger: Program) -> bool:
    """Tell whether two recordings have the same steps over the same values, whatever the sizes."""
    return (
        len(program.nodes) == len(larger.nodes)
        and program.loss_value == larger.loss_value
        and all(
            (first.target, first.inputs, first.outputs) == (second.target, second.inputs, second.outputs)
            and len(first.arguments) == len(second.arguments)
            for first, second in zip(program.nodes, larger.nodes, strict=True)
        )
        and all(len(spec.shape) == len(larger.specs[value].shape) for value, spec in program.specs.items())
    )
