"""Smaller shapes for trials, so that an operator on gigabytes is tried on kilobytes.

A rule speaks of dims, not of sizes, so any shapes with the same structure will do. Sizes that are equal
stay equal, sizes that divide one another still do, and a reshape keeps its groups of dims:

    [8, 2048, 4096] -> [8, 2048, 32, 128]    becomes    [4, 8, 64] -> [4, 8, 8, 8]

A guess is kept only if the operator accepts it on meta tensors and gives the expected output shapes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
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
    """Return shapes for trials on up to ``degree`` shards, or None where no small ones are found.

    Where a size is more than ``degree`` and does not divide by it, shapes are preferred where it does: what
    holds for even shards holds for dims cut in as many atoms (:mod:`uneven`).
    """
    is_small = _num_elements(signature) <= _LARGEST_TRIAL
    uneven = {size for size in _sizes_in(signature) if _is_uneven(size, degree)}
    if is_small and not uneven:
        return TrialShapes(signature)
    if signature.target in _VIEWS and not segments:
        return TrialShapes(_shrink_view(signature, degree))
    tried: list[Sizes] = []
    for sizes in _guesses(signature, degree, segments, uneven):
        if sizes in tried:
            continue
        tried.append(sizes)
        for is_argument in (lambda _: True, lambda size: size > _KEPT):
            smaller = _with_sizes(signature, sizes, is_argument)
            if _num_elements(smaller) <= _LARGEST_TRIAL * degree and _is_consistent(smaller):
                return TrialShapes(smaller, sizes)
    if segments:
        return shrink_signature(signature, degree)
    return TrialShapes(signature) if is_small else None


def _num_elements(signature: OperatorSignature) -> int:
    return sum(math.prod(spec.shape) for spec in (*signature.inputs, *signature.outputs))


def _is_uneven(size: int, degree: int) -> bool:
    return size > degree and size % degree != 0


def _sizes_in(signature: OperatorSignature) -> set[int]:
    return {size for spec in (*signature.inputs, *signature.outputs) for size in spec.shape}


def _all_sizes(
    signature: OperatorSignature, segments: tuple[tuple[int, ...], ...], changed: set[int]
) -> list[int]:
    sizes = _sizes_in(signature) | {size for pieces in segments for size in pieces}
    return sorted(size for size in sizes if size > _KEPT or size in changed)


def _guesses(
    signature: OperatorSignature, degree: int, segments: tuple[tuple[int, ...], ...], uneven: set[int]
) -> Iterator[Sizes]:
    """Yield small sizes: first those whose pieces still add up, and that keep what is a multiple of what.

    The first is needed to cut a dim by pieces, the second to cut query heads with their key heads.
    """
    guesses = [*_unordered_guesses(_all_sizes(signature, segments, uneven), degree)]
    if any(size <= _KEPT for size in uneven):
        guesses += _unordered_guesses(_all_sizes(signature, segments, set()), degree)
    guesses.append(_by_multiples(signature, degree))
    guesses += [_by_pieces(_all_sizes(signature, segments, uneven), pieces, degree) for pieces in segments]
    yield from sorted(
        guesses, key=lambda s: (not _keeps_sums(s, segments), not _keeps_multiples(signature, s))
    )


def _unordered_guesses(sizes: list[int], degree: int) -> Iterator[Sizes]:
    yield _by_common_divisor(sizes, degree)
    yield _by_divisibility(sizes, degree)
    yield {size: degree * (index + 2) for index, size in enumerate(sizes)}
    large = [size for size in sizes if size >= 64]
    yield _by_common_divisor(large, degree)
    yield _by_divisibility(large, degree)


def _by_pieces(sizes: list[int], pieces: tuple[int, ...], degree: int) -> Sizes:
    """Keep the ratios of the pieces of a dim and their sum; make the rest as small as it gets."""
    divisor = math.gcd(*pieces)
    related = {size: size // divisor * degree for size in (*pieces, sum(pieces))}
    others = (size for size in sizes if size not in related)
    return related | {size: degree * (index + 2) for index, size in enumerate(others)}


def _multiples(signature: OperatorSignature) -> set[tuple[int, int]]:
    """Sizes of one dim of two inputs of which one is a multiple of the other (query and key heads)."""
    shapes = [spec.shape for spec in signature.inputs]
    alike = [pair for pair in itertools.permutations(shapes, 2) if len(pair[0]) == len(pair[1])]
    sizes = {pair for left, right in alike for pair in zip(left, right, strict=True)}
    return {(large, small) for large, small in sizes if 1 < small < large and large % small == 0}


def _keeps_sums(sizes: Sizes, segments: tuple[tuple[int, ...], ...]) -> bool:
    return all(
        sum(sizes.get(piece, piece) for piece in pieces) == sizes.get(sum(pieces), sum(pieces))
        for pieces in segments
    )


def _keeps_multiples(signature: OperatorSignature, sizes: Sizes) -> bool:
    changed = [(sizes.get(large, large), sizes.get(small, small)) for large, small in _multiples(signature)]
    return all(large > small and large % small == 0 for large, small in changed)


def _by_multiples(signature: OperatorSignature, degree: int) -> Sizes:
    """Double what is a multiple of another size; make the rest as small as it gets."""
    multiples = dict(sorted(_multiples(signature)))
    sizes: Sizes = {}
    for size in sorted(size for size in _sizes_in(signature) if size > _KEPT):
        base = multiples.get(size)
        sizes[size] = degree * (2 + len(sizes)) if base is None else 2 * sizes.get(base, base)
    return sizes


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


def _with_sizes(
    signature: OperatorSignature, sizes: Sizes, is_argument: Callable[[int], bool]
) -> OperatorSignature:
    """Change sizes of tensors, and of the integers those that ``is_argument`` says may be sizes."""

    def changed(argument: Any) -> Any:
        if isinstance(argument, TensorSpec):
            return replace(argument, shape=tuple(sizes.get(size, size) for size in argument.shape))
        is_size = type(argument) is int and is_argument(argument)
        return sizes.get(argument, argument) if is_size else argument

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
    return size if size <= _KEPT and not _is_uneven(size, degree) else 2 * degree
