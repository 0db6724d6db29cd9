"""Smaller shapes for trials, so that an operator on gigabytes is tried on kilobytes.

A rule speaks of dims, not of sizes, so any shapes with the same structure will do. Sizes that are equal
stay equal, sizes that divide one another still do, and a reshape keeps its groups of dims:

    [8, 2048, 4096] -> [8, 2048, 32, 128]    becomes    [4, 8, 64] -> [4, 8, 8, 8]

A guess is kept only if the operator accepts it on meta tensors and gives the expected output shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from outsize.model.operator_rules.signature import OperatorSignature
from outsize.model.program import TensorSpec

__all__ = ["Sizes", "TrialShapes", "shrink_signature"]

Sizes = dict[int, int]
_LARGEST_TRIAL = 2**14  # elements over all tensors
_KEPT = 8  # sizes up to this stay: they may be dims or counts
_VIEWS = {
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.reshape.default,
}


class TrialShapes:
    """A signature fit for trials and the sizes that were changed on the way to it."""

    def __init__(self, signature: OperatorSignature, sizes: Sizes | None = None) -> None:
        self.signature = signature
        self.sizes = sizes or {}

    def size(self, actual: int) -> int:
        """Return the size used in the trial for a size of the actual operator."""
        return self.sizes.get(actual, actual)


def shrink_signature(
    signature: OperatorSignature, degree: int, segments: tuple[tuple[int, ...], ...] = ()
) -> TrialShapes | None:
    """Return shapes for trials on up to ``degree`` shards, or None where no small ones are found."""
    if _num_elements(signature) <= _LARGEST_TRIAL:
        return TrialShapes(signature)
    if signature.target in _VIEWS and not segments:
        return TrialShapes(_shrink_view(signature, degree))
    for sizes in _guesses(signature, degree, segments):
        smaller = _with_sizes(signature, sizes)
        if _num_elements(smaller) <= _LARGEST_TRIAL * degree and _is_consistent(smaller):
            return TrialShapes(smaller, sizes)
    return shrink_signature(signature, degree) if segments else None


def _num_elements(signature: OperatorSignature) -> int:
    return sum(math.prod(spec.shape) for spec in (*signature.inputs, *signature.outputs))


def _all_sizes(signature: OperatorSignature, segments: tuple[tuple[int, ...], ...]) -> list[int]:
    sizes = {size for spec in (*signature.inputs, *signature.outputs) for size in spec.shape}
    sizes |= {size for pieces in segments for size in pieces}
    return sorted(size for size in sizes if size > _KEPT)


def _guesses(
    signature: OperatorSignature, degree: int, segments: tuple[tuple[int, ...], ...]
) -> Iterator[Sizes]:
    sizes = _all_sizes(signature, segments)
    yield _by_common_divisor(sizes, degree)
    yield _by_divisibility(sizes, degree)
    yield {size: degree * (index + 2) for index, size in enumerate(sizes)}
    large = [size for size in sizes if size >= 64]
    yield _by_common_divisor(large, degree)
    yield _by_divisibility(large, degree)


def _by_common_divisor(sizes: list[int], degree: int) -> Sizes:
    """Divide all sizes by one number: keeps sums, ratios and order."""
    divisor = math.gcd(*sizes) if sizes else 1
    return {size: size // divisor * degree for size in sizes}


def _by_divisibility(sizes: list[int], degree: int) -> Sizes:
    """Give each size a small multiple of the largest smaller size that divides it."""
    small: Sizes = {}
    for size in sizes:
        divisors = [other for other in small if size % other == 0]
        if divisors:
            ratio = size // divisors[-1]
            small[size] = small[divisors[-1]] * (ratio if ratio <= 4 else 2)
        else:
            small[size] = degree * (2 + len(small))
    return small


def _with_sizes(signature: OperatorSignature, sizes: Sizes) -> OperatorSignature:
    def changed(argument: Any) -> Any:
        if isinstance(argument, TensorSpec):
            return replace(argument, shape=tuple(sizes.get(size, size) for size in argument.shape))
        return sizes.get(argument, argument) if type(argument) is int else argument

    return replace(
        signature,
        arguments=tuple(changed(argument) for argument in signature.arguments),
        outputs=tuple(changed(spec) for spec in signature.outputs),
    )


def _is_consistent(signature: OperatorSignature) -> bool:
    tensors = [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in signature.inputs]
    try:
        with torch.no_grad():
            outputs = signature.call(tensors)
    except Exception:  # any refusal means that these shapes do not belong together
        return False
    return [tuple(output.shape) for output in outputs] == [spec.shape for spec in signature.outputs]


def _shrink_view(signature: OperatorSignature, degree: int) -> OperatorSignature:
    before, after = list(signature.inputs[0].shape), list(signature.outputs[0].shape)
    for left, right in _groups(before, after):
        if len(left) == 1:
            small = [_small_size(after[dim], degree) for dim in right]
            before[left[0]] = math.prod(small)
            after[right[0] : right[-1] + 1] = small
        elif len(right) == 1:
            small = [_small_size(before[dim], degree) for dim in left]
            after[right[0]] = math.prod(small)
            before[left[0] : left[-1] + 1] = small
    arguments = [replace(signature.inputs[0], shape=tuple(before)), *signature.arguments[1:]]
    for dim, size in enumerate(after):
        if arguments[dim + 1] != -1:
            arguments[dim + 1] = size
    outputs = (replace(signature.outputs[0], shape=tuple(after)),)
    return replace(signature, arguments=tuple(arguments), outputs=outputs)


def _groups(before: list[int], after: list[int]) -> list[tuple[list[int], list[int]]]:
    """Return the smallest runs of dims on both sides that hold the same number of elements."""
    groups: list[tuple[list[int], list[int]]] = []
    left = right = 0
    while left < len(before) and right < len(after):
        dims = ([left], [right])
        sizes = [before[left], after[right]]
        while sizes[0] != sizes[1]:
            side = 0 if sizes[0] < sizes[1] else 1
            shape = (before, after)[side]
            dims[side].append(dims[side][-1] + 1)
            if dims[side][-1] >= len(shape):
                return groups
            sizes[side] *= shape[dims[side][-1]]
        groups.append(dims)
        left, right = dims[0][-1] + 1, dims[1][-1] + 1
    return groups


def _small_size(size: int, degree: int) -> int:
    return size if size <= _KEPT else 2 * degree
