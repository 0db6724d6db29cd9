"""Find the splits of an operator by running it on shards.

For every combination of input placements (replicated, cut along a dim, a partial sum) the operator runs
on two shards; if its outputs make up the whole ones by concatenation, sum or equality, and its gradients
do too, the combination is a rule. Every rule is then checked on fresh values at the degree asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from outsize.model.operator_rules.guard import Attempt, run_guarded
from outsize.model.operator_rules.hand_rules import hand_rules
from outsize.model.operator_rules.placement import Partial, Placement, Replicate, Shard
from outsize.model.operator_rules.rule import OperatorRule
from outsize.model.operator_rules.rule_cache import RuleCache
from outsize.model.operator_rules.signature import OperatorSignature
from outsize.model.operator_rules.trial import Trial, TrialRefused
from outsize.model.operator_rules.trial_shapes import TrialShapes, shrink_signature
from outsize.model.operator_rules.uneven import largest_atom_count, with_atoms
from outsize.model.program import TensorSpec

__all__ = ["RANDOM_BY_ELEMENT", "RuleFinder", "discover_rules"]

_MANY_INPUTS = 4
RANDOM_BY_ELEMENT = {
    torch.ops.aten.native_dropout.default,
    torch.ops.aten.bernoulli_.float,
    torch.ops.aten.bernoulli.p,
    torch.ops.aten.rand_like.default,
    torch.ops.aten.randn_like.default,
}
_WITHOUT_CONTENT = {torch.ops.aten.empty_like.default}  # to be filled by the next operator
_UNCHECKED = {torch.ops.aten.native_batch_norm.default}  # writes beyond its inputs where they do not fit
Segments = tuple[tuple[int, ...], ...]


class RuleFinder:
    """Discovers rules once for each operator signature, at one degree; remembers them (:class:`RuleCache`).

    ``segments`` are the pieces in which some dims of the program are cut one by one (see :class:`Shard`).
    """

    def __init__(self, degree: int, segments: Segments = ()) -> None:
        self.degree = degree
        self.segments = segments
        self._cache = RuleCache(degree, segments)

    def rules(self, signature: OperatorSignature) -> tuple[OperatorRule, ...]:
        """Return the splits of an operator that divide evenly; empty if it has none."""
        shapes = _shapes(signature.inputs), _shapes(signature.outputs)
        even = (rule for rule in self.kinds(signature) if rule.divides(*shapes, self.degree))
        return tuple(replace(rule, only_even=False) for rule in even)

    def uneven_rules(
        self, signature: OperatorSignature, atoms: Mapping[int, Collection[int]] | None = None
    ) -> tuple[OperatorRule, ...]:
        """Return its splits that do not, cut in what ``atoms`` says for a size, else as finely as can be."""
        shapes = _shapes(signature.inputs), _shapes(signature.outputs)
        found: dict[OperatorRule, None] = {}
        for rule in self.kinds(signature):
            counts = {largest_atom_count(rule, signature)} if rule.is_split else set()
            if atoms is not None:
                counts = {count for size in rule.cut_sizes(*shapes) for count in atoms.get(size, ())}
            cuts = (rule.cut_in(count, *shapes, self.degree) for count in sorted(counts))
            found |= dict.fromkeys(cut for cut in cuts if cut is not None)
        return tuple(found)

    def kinds(self, signature: OperatorSignature) -> tuple[OperatorRule, ...]:
        """Return the splits of an operator whether or not its sizes divide by the degree."""
        found = self._cache.get(signature.key)
        if found is None:
            self.find_all([signature])
            found = self._cache.get(signature.key)
        return found or ()

    def find_all(self, signatures: Sequence[OperatorSignature]) -> None:
        """Discover the rules of many operators together, in a guarded process."""
        new = {s.key: s for s in signatures if self._cache.get(s.key) is None}
        if not new:
            return
        tasks = [partial(discover_rules, s, self.degree, self.segments) for s in new.values()]
        results = run_guarded(tasks)
        self._cache.add({key: tuple(rules) for key, rules in zip(new, results, strict=True)})


def discover_rules(
    signature: OperatorSignature, degree: int, segments: Segments, attempt: Attempt
) -> Iterator[OperatorRule]:
    """Yield the splits of an operator over ``degree`` ranks.

    ``attempt(n)`` is asked before combination ``n``: operators may read out of bounds or divide by zero on
    shards that do not fit them and crash the process, which :class:`RuleFinder` guards against.
    """
    if not signature.inputs or not signature.outputs or degree < 2:
        return
    if signature.target in _WITHOUT_CONTENT:
        yield from _element_wise_rules(signature, degree)
        return
    relevant = tuple(p for p in segments if sum(p) in _sizes(signature) and min(p) >= degree)
    shapes = shrink_signature(signature, degree, relevant)
    if shapes is None:
        return
    try:
        trials = Trial(shapes.signature, seed=1), Trial(shapes.signature, seed=2, has_ties=True)
    except (TrialRefused, RuntimeError, NotImplementedError):
        return
    if signature.is_random and not trials[0].is_repeatable:
        yield from _element_wise_rules(signature, degree)
    else:
        yield from _Search(signature, shapes, trials, degree).rules(relevant, attempt)


class _Search:
    def __init__(
        self, actual: OperatorSignature, shapes: TrialShapes, trials: tuple[Trial, Trial], degree: int
    ) -> None:
        self.actual, self.shapes, self.trials, self.degree = actual, shapes, trials, degree
        self.few = _smallest_factor(degree)

    def rules(self, segments: Segments, attempt: Attempt) -> Iterator[OperatorRule]:
        small_segments = {tuple(self.shapes.size(size) for size in pieces): pieces for pieces in segments}
        for rule in self._small_rules(tuple(small_segments), attempt):
            actual = _with_actual_segments(rule, small_segments)
            actual = replace(actual, only_even=rule.is_split and not self._holds_unevenly(rule))
            divides = actual.divides(_shapes(self.actual.inputs), _shapes(self.actual.outputs), self.degree)
            if divides or not actual.only_even:
                yield actual

    def _small_rules(self, segments: Segments, attempt: Attempt) -> Iterator[OperatorRule]:
        """Try every way of cutting the inputs, then the same with partial sums in place of whole inputs.

        A partial sum has the shape of the whole: where cuts are refused for their shapes, both are.
        """
        number = -1
        cuts_to_try = () if self.actual.target in _UNCHECKED else self._cuts(segments)
        for number, cuts in enumerate(cuts_to_try):
            if not attempt(number):
                continue
            rule, is_refused = self._try(cuts)
            candidates = [rule]
            if not is_refused:
                candidates += [self._try(inputs)[0] for inputs in self._with_partial_sums(cuts)]
            yield from (found for found in candidates if found is not None)
        if attempt(number + 1):
            written = (self.verified(rule) for rule in hand_rules(self.shapes.signature) if self._fits(rule))
            yield from (found for found in written if found is not None)

    def _cuts(self, segments: Segments) -> Iterator[tuple[Placement, ...]]:
        options = [self._options(spec, segments) for spec in self.shapes.signature.inputs]
        return itertools.product(*options) if len(options) <= _MANY_INPUTS else _alike_combinations(options)

    def _options(self, spec: TensorSpec, segments: Segments) -> list[Placement]:
        options: list[Placement] = [Replicate()]
        for dim, size in enumerate(spec.shape):
            plain = Shard(dim)
            if plain.divides(spec.shape, self.few):
                options.append(plain)
            cut = (Shard(dim, pieces) for pieces in segments if sum(pieces) == size)
            options += [shard for shard in cut if shard.divides(spec.shape, self.few)]
        return options

    def _with_partial_sums(self, cuts: tuple[Placement, ...]) -> Iterator[tuple[Placement, ...]]:
        options: list[tuple[Placement, ...]] = [
            (cut, Partial())
            if isinstance(cut, Replicate) and spec.dtype.is_floating_point and all(spec.shape)
            else (cut,)
            for cut, spec in zip(cuts, self.shapes.signature.inputs, strict=True)
        ]
        if len(cuts) > _MANY_INPUTS:
            sums = tuple(choices[-1] for choices in options)
            return iter([sums] if sums != cuts else [])
        return (combination for combination in itertools.product(*options) if combination != cuts)

    def _try(self, inputs: tuple[Placement, ...]) -> tuple[OperatorRule | None, bool]:
        """Return the rule for these inputs, if there is one, and whether the operator refused to run."""
        if all(isinstance(placement, Replicate) for placement in inputs):
            return None, False
        is_refused = True
        for positions in self._size_arguments(inputs):
            try:
                rule = self.trials[0].match(inputs, positions, self.few)
            except TrialRefused:
                continue
            is_refused = False
            if rule is not None and _shares_work(rule):
                return self.verified(rule), False
        return None, is_refused

    def verified(self, rule: OperatorRule) -> OperatorRule | None:
        """Return the rule with its gradients settled, or None where fresh values or the degree refute it."""
        settled = self._settle_gradients(rule)
        if settled is None or not self._divides_trial(settled):
            return settled
        return settled if self.trials[1].holds(settled, self.degree) else None

    def _holds_unevenly(self, rule: OperatorRule) -> bool:
        """Try the rule with one rank more than its share: three atoms over two ranks, for example."""
        signature, moved = with_atoms(self.shapes.signature, rule, self.few + 1)
        uneven = moved.cut_in(self.few + 1, _shapes(signature.inputs), _shapes(signature.outputs), self.few)
        try:
            trial = Trial(signature, seed=3)
        except (TrialRefused, RuntimeError, NotImplementedError):
            return False
        if uneven is None:
            return False
        return trial.holds(uneven, self.few) and (
            not trial.is_differentiable or trial.with_gradients(uneven, self.few) == uneven
        )

    def _fits(self, rule: OperatorRule) -> bool:
        signature = self.shapes.signature
        return rule.divides(_shapes(signature.inputs), _shapes(signature.outputs), self.few)

    def _divides_trial(self, rule: OperatorRule) -> bool:
        signature = self.shapes.signature
        return rule.divides(_shapes(signature.inputs), _shapes(signature.outputs), self.degree)

    def _settle_gradients(self, rule: OperatorRule) -> OperatorRule | None:
        first, second = self.trials
        if not first.is_differentiable:
            return rule if second.holds(rule, self.few) else None
        if _has_replicated_gradient(rule, first):
            return None
        settled = first.with_gradients(rule, self.few)
        return settled if settled == second.with_gradients(rule, self.few) else None

    def _size_arguments(self, inputs: Sequence[Placement]) -> Iterator[tuple[int, ...]]:
        """Which integer arguments may be sizes that become local: none, one, or all that are equal."""
        yield ()
        if not any(isinstance(placement, Shard) for placement in inputs):
            return
        arguments = self.shapes.signature.arguments
        positions = [
            index
            for index, argument in enumerate(arguments)
            if type(argument) is int and argument >= self.few and argument % self.few == 0
        ]
        yield from ((position,) for position in positions)
        for value in sorted({arguments[position] for position in positions}):
            equal = tuple(position for position in positions if arguments[position] == value)
            if len(equal) > 1:
                yield equal
        if len(positions) > 1 and any(isinstance(p, Shard) and p.segments for p in inputs):
            yield tuple(positions)
        elif len(positions) <= _MANY_INPUTS:
            yield from itertools.combinations(positions, 2)


def _element_wise_rules(signature: OperatorSignature, degree: int) -> Iterator[OperatorRule]:
    """An operator that treats elements alike, and whose values no trial can compare, splits along any dim."""
    shapes = {spec.shape for spec in (*signature.inputs, *signature.outputs)}
    if signature.target not in RANDOM_BY_ELEMENT | _WITHOUT_CONTENT or len(shapes) != 1:
        return
    for dim, size in enumerate(signature.inputs[0].shape):
        if size >= degree:
            yield OperatorRule((Shard(dim),) * len(signature.inputs), (Shard(dim),) * len(signature.outputs))


def _alike_combinations(options: list[list[Placement]]) -> Iterator[tuple[Placement, ...]]:
    """For many inputs: all placed the same, or one of them alone."""
    for placement in options[0]:
        if all(placement in other for other in options):
            yield (placement,) * len(options)
    for index, choices in enumerate(options):
        for placement in choices[1:]:
            yield (*(Replicate(),) * index, placement, *(Replicate(),) * (len(options) - index - 1))


def _shares_work(rule: OperatorRule) -> bool:
    """Whether what is cut or a sum in the inputs is so in the outputs.

    If not, the outputs do not depend on it, or do so seldom: whether any of many numbers is not zero.
    """
    kinds = {type(placement) for placement in rule.outputs}
    if any(isinstance(placement, Partial) for placement in rule.inputs):
        return Partial in kinds
    return bool(kinds & {Shard, Partial})


def _has_replicated_gradient(rule: OperatorRule, trial: Trial) -> bool:
    """An output that is equal on all ranks although the work was split has no clear gradient."""
    return any(
        isinstance(placement, Replicate) and gradient is not None
        for placement, gradient in zip(rule.outputs, trial.output_gradients, strict=True)
    )


def _with_actual_segments(rule: OperatorRule, actual: dict[tuple[int, ...], tuple[int, ...]]) -> OperatorRule:
    def translated(placement: Placement) -> Placement:
        if isinstance(placement, Shard) and placement.segments:
            return Shard(placement.dim, actual[placement.segments])
        return placement

    return replace(
        rule,
        inputs=tuple(map(translated, rule.inputs)),
        outputs=tuple(map(translated, rule.outputs)),
    )


def _shapes(specs: Sequence[TensorSpec]) -> list[tuple[int, ...]]:
    return [spec.shape for spec in specs]


def _sizes(signature: OperatorSignature) -> set[int]:
    return {size for spec in (*signature.inputs, *signature.outputs) for size in spec.shape}


def _smallest_factor(number: int) -> int:
    return next(factor for factor in range(2, number + 1) if number % factor == 0)
