"""The parts of a loss that have to be rescaled so that the losses of micro-batches add up.

    loss ◀── add ◀── mul 0.3 ◀── mse_loss      the path: operators linear in one value
              ▲                                 its ends: the terms, such as a mean over samples
              └── nll_loss

The loss is followed backwards through operators that are linear in one value. Where that ends is a term: a
mean, a sum over samples, a sum divided by a number that the batch decides, something that samples do not
change, or something unknown, which is weighted by its number of samples. Where plain numbers lie on the way,
a second recording with twice the samples tells whether they follow the number of samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from outsize.model.loss_divisor import additive_core
from outsize.model.loss_operators import (
    ADDITIONS,
    JOINS,
    MEANS,
    PARTS,
    PRODUCTS,
    QUOTIENTS,
    SUMS,
    VIEWS,
    is_mean,
    is_mean_of_labels,
    is_sum,
)
from outsize.model.matched_tails import match_tails
from outsize.model.mixed_samples import is_row_wise, mixing_nodes
from outsize.model.program import LossPath, LossTerm, Node, NodeKind, Program, Ref
from outsize.model.sample_dims import SampleDims, are_alike

__all__ = ["find_loss_terms"]

aten = torch.ops.aten

_RecordLarger = Callable[[int], Program | None]


class _NeedsLarger(Exception):  # noqa: N818 - a signal, not an error
    """Only a recording with more samples can tell."""


class _Unlike(Exception):  # noqa: N818 - a signal, not an error
    """The loss is no sum of terms that each have one share."""


def find_loss_terms(program: Program, record_larger: _RecordLarger) -> None:
    """Write the loss's terms, and its path to them, into the program; none if it has no loss.

    ``record_larger`` records the same with so many times the samples (None where that cannot be), and is
    called where that is needed. What may differ over several micro-batches adds a warning to the program.
    """
    if program.loss_value is None:
        return
    try:
        walk = _Walk(program, None)
        walk.run()
        walk.check_rows()
    except _NeedsLarger:
        walk = _followed_twice(program, record_larger)
    program.loss_terms = tuple(walk.terms)
    program.loss_path = LossPath(walk.root, walk.edges)
    program.warnings += list(dict.fromkeys(walk.warnings))


def _followed_twice(program: Program, record_larger: _RecordLarger) -> _Walk:
    larger, found = record_larger(2), None
    if larger is not None and are_alike(program, larger):
        found = _walk_of_both(program, larger)
    elif larger is not None:
        found = _followed_in_larger(program, larger, record_larger(4))
    if found is None:
        found = _Walk(program, larger)
        found.take_whole()
    return found


def _walk_of_both(program: Program, larger: Program) -> _Walk | None:
    walk = _Walk(program, larger)
    with suppress(_Unlike):
        walk.run()
        walk.warn_of_mixed_samples()
        return walk
    return None


def _followed_in_larger(program: Program, twice: Program, four_times: Program | None) -> _Walk | None:
    """Follow the loss of a larger batch, and name its terms as they are called in ``program``."""
    if four_times is None or not are_alike(twice, four_times):
        return None
    walk = _walk_of_both(twice, four_times)
    names = match_tails(program, twice)
    if walk is None or not walk.named_values() <= names.keys():
        return None
    walk.rename(names)
    return walk


class _Walk:
    """Follows the loss backwards. ``ratio``: how plain numbers on the way change with twice the samples."""

    def __init__(self, program: Program, larger: Program | None) -> None:
        self.program, self.larger = program, larger
        self.producers = program.producers
        self.dims = SampleDims(program, larger)
        self.terms: list[LossTerm] = []
        self.edges: dict[tuple[int, int], int | None] = {}
        self.root: int | None = None
        self.warnings: list[str] = []
        self._unknown_ends: set[int] = set()  # nodes that make unknown terms
        self._settled: set[int] = set()  # nodes inside terms that are quotients

    def run(self) -> None:
        """Follow the whole loss."""
        assert self.program.loss_value is not None
        self.root = self._follow(self.program.loss_value, 1.0)

    def check_rows(self) -> None:
        """Need the second recording unless each sample is clearly computed from itself alone."""
        if not all(is_row_wise(self.program, index, self.dims) for index in self.checked_nodes()):
            raise _NeedsLarger

    def checked_nodes(self) -> list[int]:
        """Return the operators that samples pass through before they reach a term."""
        values = [
            value for end in self._ends() - self._unknown_ends for value in self.program.nodes[end].inputs
        ]
        return sorted(self._ancestors(values) - self._on_path() - self._ends() - self._settled)

    def _on_path(self) -> set[int]:
        return {self.producers[value] for value, _ in self.edges}

    def _ends(self) -> set[int]:
        return {self.producers[term.value] for term in self.terms if term.value is not None}

    def warn_of_mixed_samples(self) -> None:
        """Warn of operators that make one value of several samples, other than terms."""
        for index in mixing_nodes(self.program, self.checked_nodes(), self.dims):
            node = self.program.nodes[index]
            self.warnings.append(
                f"{node.target} in {node.module_path or 'the model'} brings samples together: over several "
                "micro-batches it sees those of one micro-batch at a time, which may differ"
            )

    def _ancestors(self, values: list[int]) -> set[int]:
        found: set[int] = set()
        stack = list(values)
        while stack:
            index = self.producers[stack.pop()]
            if index not in found:
                found.add(index)
                stack += self.program.nodes[index].inputs
        return {index for index in found if self._is_operator_of_samples(index)}

    def _is_operator_of_samples(self, index: int) -> bool:
        node = self.program.nodes[index]
        return node.kind is NodeKind.OPERATOR and any(map(self.dims.reads_samples, node.outputs))

    # -- the path -------------------------------------------------------------------------------

    def _follow(self, value: int, ratio: float) -> int | None:
        """Return the term that a value is, or None if it lies on the path to terms."""
        if not self.dims.reads_samples(value):
            return self._add(LossTerm(value, count=self.program.num_samples), 1.0, ratio)
        index = self.producers[value]
        positions = self._linear_positions(self.program.nodes[index], value)
        if positions is None:
            return self._term(value, ratio)
        for position in positions:
            argument = self.program.nodes[index].arguments[position]
            found = (
                self._follow(argument.value, ratio * self._factor_ratio(index, position))
                if isinstance(argument, Ref)
                else self._add(LossTerm(None, count=self.program.num_samples), 1.0, ratio)
            )
            if self.edges.setdefault((value, position), found) != found:
                raise _Unlike  # on two ways to the loss, with another share on each
        return None

    def _linear_positions(self, node: Node, value: int) -> tuple[int, ...] | None:
        """Return the arguments that a node is linear in, if it is one of the path."""
        if node.kind is not NodeKind.OPERATOR:
            return None
        if node.target in PRODUCTS | QUOTIENTS:
            return self._linear_factor(node)
        if node.target in ADDITIONS and self._is_free_of_samples(value):
            if any(not isinstance(each, Ref) for each in node.arguments[:2]):
                self._need_larger()
            return (0, 1)
        if node.target in VIEWS and self._is_free_of_samples(node.inputs[0]):
            return (0,)
        return None if self.larger is None else self._linear_parts(node, value)

    def _linear_parts(self, node: Node, value: int) -> tuple[int, ...] | None:
        """Return the arguments of which a node takes a part, a sum or a mean, or which it joins."""
        if node.target in PARTS | SUMS | MEANS and self._is_free_of_samples(node.inputs[0]):
            return (0,)
        if node.target in JOINS and self._is_free_of_samples(value):
            return tuple(at for at, each in enumerate(node.arguments) if isinstance(each, Ref))
        return None

    def _linear_factor(self, node: Node) -> tuple[int, ...] | None:
        """Return the one factor that samples go into, where the others are the same for all micro-batches."""
        self._need_larger()
        of_samples = [
            at
            for at, each in enumerate(node.arguments[:2])
            if isinstance(each, Ref) and self.dims.reads_samples(each.value)
        ]
        if len(of_samples) != 1 or not all(map(self._is_free_of_samples, node.inputs)):
            return None
        is_divisor = node.target in QUOTIENTS and of_samples == [1]
        return None if is_divisor or self._guarded_divisor(node) is not None else tuple(of_samples)

    def _need_larger(self) -> None:
        if self.larger is None:
            raise _NeedsLarger

    def _is_free_of_samples(self, value: int) -> bool:
        """Whether no dim of a value counts samples; without a second recording, whether it is one number."""
        if self.larger is None:
            return math.prod(self.program.specs[value].shape) == 1
        return not self.dims.grown(value)

    def _factor_ratio(self, index: int, position: int) -> float:
        """Return how the factor that a node gives one of its arguments changes with twice the samples."""
        node = self.program.nodes[index]
        if self.larger is None or node.target not in PRODUCTS | QUOTIENTS:
            return 1.0
        before = _number(self.program, node.arguments[1 - position])
        after = _number(self.larger, self.larger.nodes[index].arguments[1 - position])
        if before is None or after is None or not before or not after:
            return 1.0
        return before / after if node.target in QUOTIENTS else after / before

    # -- the same in another recording ----------------------------------------------------------

    def named_values(self) -> set[int]:
        """Return the values that terms and path refer to."""
        of_terms = {
            value
            for term in self.terms
            for value in (term.value, term.target, term.divisor, term.divisor_core)
            if value is not None
        }
        return of_terms | {value for value, _ in self.edges}

    def rename(self, names: Mapping[int, int]) -> None:
        """Refer to values by other names, those of a recording with half the samples."""

        def named(value: int | None) -> int | None:
            return None if value is None else names[value]

        self.edges = {(names[value], position): term for (value, position), term in self.edges.items()}
        self.terms = [
            replace(
                term,
                value=named(term.value),
                count=None if term.count is None else term.count // 2,
                target=named(term.target),
                divisor=named(term.divisor),
                divisor_core=named(term.divisor_core),
            )
            for term in self.terms
        ]

    # -- the terms ------------------------------------------------------------------------------

    def _add(self, term: LossTerm, growth: float, ratio: float) -> int:
        """Add a term that grows so with twice the samples, where numbers on the way do as ``ratio`` says."""
        if not math.isclose(ratio, 1.0, rel_tol=1e-9):
            if math.isclose(growth * ratio, 1.0, rel_tol=1e-9) and term.is_sum:
                term = replace(term, is_sum=False, count=self.program.num_samples)
            elif math.isclose(growth * ratio, 2.0, rel_tol=1e-9) and term.count is not None:
                term = replace(term, is_sum=True, count=None)
            elif term.value is not None:
                return self._unknown(term.value)
        if term not in self.terms:
            self.terms.append(term)
        return self.terms.index(term)

    def take_whole(self) -> None:
        """Take the whole loss for one term, because it was no sum of terms or could not be recorded twice."""
        assert self.program.loss_value is not None
        self.root = self._unknown_term(self.program.loss_value)

    def _unknown_term(self, value: int) -> int:
        """Add a term that its number of samples weighs, with a warning."""
        node = self.program.nodes[self.producers[value]]
        self._unknown_ends.add(self.producers[value])
        self.warnings.append(
            f"loss term {node.target} in {node.module_path or 'the model'} is neither a mean nor a sum over "
            "the batch: over several micro-batches their sample-weighted mean is taken, which may differ"
        )
        term = LossTerm(value, count=self.program.num_samples)
        if term not in self.terms:
            self.terms.append(term)
        return self.terms.index(term)

    def _unknown(self, value: int) -> int:
        self._need_larger()
        return self._unknown_term(value)

    def _term(self, value: int, ratio: float) -> int:
        node = self.program.nodes[self.producers[value]]
        if is_mean_of_labels(node):
            target, ignored = node.arguments[1].value, int(node.arguments[4])
            return self._add(LossTerm(value, target=target, ignore_index=ignored), 1.0, ratio)
        if node.target in QUOTIENTS:
            return self._quotient(node, value, ratio)
        if not (is_mean(node) or is_sum(node)) or not self._reduces_samples(node, value):
            return self._unknown(value)
        if is_sum(node):
            self._need_larger()  # a sum is often divided by the number of samples
            return self._add(LossTerm(value, is_sum=True), 2.0, ratio)
        sizes = [math.prod(self.program.specs[each].shape) for each in (node.inputs[0], value)]
        return self._add(LossTerm(value, count=sizes[0] // sizes[1]), 1.0, ratio)

    def _reduces_samples(self, node: Node, value: int) -> bool:
        """Whether all dims that count samples are reduced, and every sample counts as much as any other."""
        if self.larger is None:
            return math.prod(self.program.specs[value].shape) == 1
        sizes = [math.prod(each.specs[node.inputs[0]].shape) for each in (self.program, self.larger)]
        return sizes[1] == 2 * sizes[0] and not self.dims.grown(value)

    def _quotient(self, node: Node, value: int, ratio: float) -> int:
        """Add a sum over samples that is divided by a number which the batch alone decides."""
        divisor = self._guarded_divisor(node)
        if divisor is None and isinstance(node.arguments[1], Ref):
            divisor = node.arguments[1].value
        numerator = _Walk(self.program, self.larger)
        numerator._follow(node.inputs[0], 1.0)
        core = None if divisor is None else additive_core(self.program, divisor, self.dims)
        if core is None or ratio != 1.0 or not all(term.is_sum for term in numerator.terms):
            return self._unknown(value)
        assert divisor is not None
        self._settled |= core.nodes | numerator._on_path() | numerator._ends() | numerator._settled
        return self._add(LossTerm(value, divisor=divisor, divisor_core=core.value), 1.0, 1.0)

    def _guarded_divisor(self, node: Node) -> int | None:
        """Return the value that a plain divisor was read from, where the batch decides it."""
        divisor = node.arguments[1]
        if node.target not in QUOTIENTS or isinstance(divisor, Ref) or self.larger is None:
            return None
        again = self.larger.nodes[self.producers[node.outputs[0]]].arguments[1]
        for guard, larger in zip(self.program.guards, self.larger.guards, strict=False):
            if guard.expected != divisor or isinstance(guard.expected, tuple):
                continue
            if larger.expected == again != divisor and self.dims.reads_samples(guard.value):
                return guard.value
            if divisor != 1:
                self.warnings.append(
                    f"the loss is divided by {divisor}, as was read from the batch at {guard.source}: "
                    "taken for a constant; divide by a tensor if it is none"
                )
        return None


def _number(program: Program, argument: Any) -> float | None:
    """Return a plain number, or that of a constant tensor with one element."""
    if isinstance(argument, int | float):
        return float(argument)
    if not isinstance(argument, Ref):
        return None
    node = program.nodes[program.producers[argument.value]]
    while node.kind is NodeKind.OPERATOR and node.target in VIEWS | {aten.lift_fresh.default}:
        node = program.nodes[program.producers[node.inputs[0]]]
    if node.kind is not NodeKind.CONSTANT:
        return None
    constant = program.constants[str(node.target)]
    return float(constant) if constant.numel() == 1 and not constant.is_complex() else None
