"""How the outputs of micro-batches make those of the whole batch, seen from two recordings.

Sizes that grow with one sample more count samples. What is no tensor, or depends on no sample, has to be made
in the same way whatever the number of samples.
"""

from __future__ import annotations

from typing import Any, Literal

from outsize.errors import BatchError
from outsize.model.block_signature import PLAIN
from outsize.model.loss_elements import needed_nodes
from outsize.model.program import NodeKind, Program, Ref
from outsize.model.sample_dims import SampleDims

__all__ = ["Assembly", "find_assemblies"]

# How a tensor of the output comes from those of micro-batches: joined along a dim, added up, or any of them.
Assembly = int | Literal["sum", "any"]


def find_assemblies(recording: Program, larger: Program) -> dict[int, Assembly]:
    """Return how each tensor among the outputs is put together, by its position.

    ``larger`` is recorded with one sample more.

    Raises:
        BatchError: an output cannot be put together.
    """
    if recording.output_structure != larger.output_structure:
        raise _refusal("The structure of what the model returns", "follows the number of samples")
    summed = {recording.loss_value, *(term.value for term in recording.loss_terms)}
    dims = SampleDims(recording, None)
    found: dict[int, Assembly] = {}
    for position, (leaf, same) in enumerate(zip(recording.outputs, larger.outputs, strict=True)):
        name = f"Output {position} of the model"
        if not isinstance(leaf, Ref):
            if isinstance(leaf, PLAIN) and repr(leaf) != repr(same):
                raise _refusal(f"{name}, {leaf!r},", "follows the number of samples")
            continue
        before, after = recording.specs[leaf.value].shape, larger.specs[same.value].shape
        grown = [dim for dim, sizes in enumerate(zip(before, after, strict=True)) if len(set(sizes)) > 1]
        name += f", of shape {tuple(before)},"
        if leaf.value in summed:
            found[position] = "sum"
        elif len(grown) == 1:
            found[position] = grown[0]
        elif grown:
            raise _refusal(name, f"compares samples with one another (dims {grown})")
        elif dims.reads_samples(leaf.value):
            raise _refusal(name, "is one value for all samples")
        elif _steps(recording, leaf.value) != _steps(larger, same.value):
            raise _refusal(name, "follows the number of samples")
        else:
            found[position] = "any"
    return found


def _steps(program: Program, value: int) -> list[tuple[Any, ...]]:
    """Return what a value is computed by, with the plain numbers that go into it."""
    return [
        (
            node.kind,
            program.constants[str(node.target)].tolist() if node.kind is NodeKind.CONSTANT else node.target,
            [repr(argument) for argument in node.arguments if isinstance(argument, PLAIN)],
        )
        for node in (program.nodes[index] for index in needed_nodes(program, value, len(program.nodes), {}))
    ]


def _refusal(what: str, kind: str) -> BatchError:
    return BatchError(
        f"{what} {kind}.",
        why="Each micro-batch makes its own, and they cannot be put together.",
        attempt="a forward that returns one value for each sample, or a plan with one micro-batch.",
    )
