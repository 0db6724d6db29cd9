"""Cutting what a degree does not divide: in atoms, such as the six heads of a width of 384 over four ranks.

A rule that cuts several dims cuts all of them in equally many atoms. Which numbers of atoms are worth
offering follows from the rules: a view of a width as six heads asks for it to be cut in six, and so do then
the operators that read or make that width.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from outsize.model.operator_rules.placement import Placement, Shard
from outsize.model.operator_rules.rule import OperatorRule
from outsize.model.operator_rules.signature import OperatorSignature
from outsize.model.program import TensorSpec

__all__ = ["atom_counts", "largest_atom_count", "with_atoms"]


def largest_atom_count(rule: OperatorRule, signature: OperatorSignature) -> int:
    """Return in how many equal parts everything that the rule cuts can be cut, at most."""
    return math.gcd(*_cut_sizes(rule, signature))


def atom_counts(
    rules: Iterable[tuple[OperatorSignature, OperatorRule]], widths: set[int], degree: int
) -> Mapping[int, set[int]]:
    """Return for sizes that occur in which numbers of atoms, which ``degree`` does not divide, to cut them.

    Only what is linked by rules to the ``widths`` of parameters counts: cutting an odd number of samples or
    tokens would not divide what does not fit.
    """
    counts: dict[int, set[int]] = defaultdict(set)
    cuts: list[frozenset[int]] = []
    for signature, rule in rules:
        sizes = frozenset(_cut_sizes(rule, signature))
        if rule.only_even or not sizes:
            continue
        cuts.append(sizes)
        atoms = math.gcd(*sizes)
        if atoms > degree and atoms % degree and sizes & widths:
            for size in sizes:
                counts[size].add(atoms)
    _spread(counts, set(cuts))
    return counts


def _spread(counts: dict[int, set[int]], cuts: set[frozenset[int]]) -> None:
    """Offer what one size of a rule may be cut in to its other sizes, until nothing is new."""
    is_new = True
    while is_new:
        is_new = False
        for sizes in cuts:
            offered = {atoms for size in sizes for atoms in counts.get(size, ())}
            possible = {atoms for atoms in offered if not any(size % atoms for size in sizes)}
            for size in sizes:
                is_new |= not possible <= counts[size]
                counts[size] |= possible


def with_atoms(
    signature: OperatorSignature, rule: OperatorRule, atoms: int
) -> tuple[OperatorSignature, OperatorRule]:
    """Return the operator with every dim that the rule cuts made of ``atoms`` parts, and the rule for it."""
    before = largest_atom_count(rule, signature)

    def resized(size: int) -> int:
        return size // before * atoms

    def spec_of(spec: TensorSpec, placement: Placement) -> TensorSpec:
        if not isinstance(placement, Shard):
            return spec
        shape = list(spec.shape)
        shape[placement.dim] = resized(shape[placement.dim])
        return replace(spec, shape=tuple(shape))

    def placed(placement: Placement) -> Placement:
        if isinstance(placement, Shard) and placement.segments:
            return Shard(placement.dim, tuple(map(resized, placement.segments)))
        return placement

    arguments = list(signature.arguments)
    for position in rule.local_arguments:
        arguments[position] = resized(arguments[position])
    for position, spec, placement in zip(
        signature.input_positions, signature.inputs, rule.inputs, strict=True
    ):
        arguments[position] = spec_of(spec, placement)
    changed = replace(
        signature,
        arguments=tuple(arguments),
        outputs=tuple(map(spec_of, signature.outputs, rule.outputs)),
    )
    moved = replace(rule, inputs=tuple(map(placed, rule.inputs)), outputs=tuple(map(placed, rule.outputs)))
    return changed, moved


def _cut_sizes(rule: OperatorRule, signature: OperatorSignature) -> set[int]:
    return rule.cut_sizes([s.shape for s in signature.inputs], [s.shape for s in signature.outputs])
