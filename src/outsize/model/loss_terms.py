"""The means inside a loss: what has to be rescaled so that losses of micro-batches add up.

The loss is followed backwards through operators that are linear in one value (sums of terms, products with
plain numbers, views). What is found there is a term: a mean over a known number of elements, a sum, a sum
divided by a number that the batch decides (such as that of a mask's elements), or something unknown that is
weighted by its number of samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from outsize.model.program import LossTerm, Node, NodeKind, Program, Ref

__all__ = ["find_loss_terms", "settle_sums"]

aten = torch.ops.aten

_VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.alias.default,
    aten.clone.default, aten._to_copy.default, aten.squeeze.default, aten.squeeze.dim,
    aten.unsqueeze.default, aten.detach.default, aten.neg.default,
}  # fmt: skip
_ADDITIONS = {aten.add.Tensor, aten.sub.Tensor, aten.add_.Tensor, aten.sub_.Tensor}
_PRODUCTS = {
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.mul.Scalar,
    aten.div.Scalar,
    aten.mul_.Tensor,
    aten.div_.Tensor,
}
_BOUNDS = {
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp.Tensor,
    aten.clamp_min.Tensor,
    aten.maximum.default,
}
_ALL_SUMS = {aten.sum.default, aten.sum.dim_IntList}
_ALL_MEANS = {aten.mean.default, aten.mean.dim}
_MEAN = 1  # torch.nn._reduction.get_enum("mean")
_SUM = 2
# operator -> position of its reduction argument
_REDUCED_LOSSES = {
    aten.mse_loss.default: 2,
    aten.l1_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.huber_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4,
    aten.soft_margin_loss.default: 2,
}
_LABEL_LOSSES = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}


def find_loss_terms(program: Program, num_samples: int) -> tuple[LossTerm, ...]:
    """Return the terms the program's loss is linear in, in program order; none if it has no loss.

    ``num_samples`` is the number of samples in the recorded batch, which weighs terms that are neither a mean
    nor a sum over the batch; each of those adds a warning to the program.
    """
    if program.loss_value is None:
        return ()
    found = _Walk(program, num_samples).terms_of(program.loss_value, 1.0)
    terms = {term.value: term for term in found}
    return tuple(sorted(terms.values(), key=lambda term: term.node_index))


def settle_sums(program: Program, num_samples: int, other: Program, other_num_samples: int) -> None:
    """Tell sums from means that were written as a sum over the number of samples.

    ``other`` is a recording with another number of samples: where a plain number on the way from a sum to the
    loss went down as the samples went up, the two together are a mean over samples.
    """
    terms = []
    for term, again in zip(program.loss_terms, other.loss_terms, strict=True):
        is_mean = term.is_sum and math.isclose(
            term.factor * num_samples, again.factor * other_num_samples, rel_tol=1e-9
        )
        if is_mean:
            terms.append(replace(term, is_sum=False, count=num_samples))
            continue
        if term.is_sum and term.factor != again.factor:
            program.warnings.append(_not_additive(program.nodes[term.node_index]))
        terms.append(term)
    program.loss_terms = tuple(terms)


class _Walk:
    """Follows the loss backwards; ``factor`` is the product of plain numbers on the way."""

    def __init__(self, program: Program, num_samples: int) -> None:
        self.program, self.num_samples = program, num_samples
        self.producers = program.producers

    def terms_of(self, value: int, factor: float) -> list[LossTerm]:
        node = self.program.nodes[self.producers[value]]
        if not any(self.program.specs[out].requires_grad for out in node.outputs):
            return []
        if node.kind is NodeKind.OPERATOR and node.target in _VIEWS and self._is_scalar(node.inputs[0]):
            return self.terms_of(node.inputs[0], factor)
        if node.target in _ADDITIONS and self._has_scalars_only(node):
            return [term for value in node.inputs for term in self.terms_of(value, factor)]
        if node.target in _PRODUCTS and self._has_scalars_only(node):
            return self._terms_of_product(node, value, factor)
        return [self._term(value, factor)]

    def _terms_of_product(self, node: Node, value: int, factor: float) -> list[LossTerm]:
        varying = [each for each in node.inputs if self.program.specs[each].requires_grad]
        others = [argument for argument in node.arguments if argument != Ref(varying[0])]
        is_division = "div" in str(node.target)
        if len(varying) > 1 or (is_division and node.inputs[0] != varying[0]) or len(others) != 1:
            return [self._unknown(value)]
        (other,) = others
        if isinstance(other, int | float):
            divisor = self._guarded(other) if is_division else None
            if divisor is None:
                return self.terms_of(varying[0], factor / other if is_division else factor * other)
        elif not self._reads_samples(other.value):  # the same number for every micro-batch
            return self.terms_of(varying[0], factor)
        else:
            divisor = self._without_bound(other.value) if is_division else None
        return self._terms_of_quotient(value, varying[0], divisor)

    def _terms_of_quotient(self, value: int, numerator: int, divisor: int | None) -> list[LossTerm]:
        """Return the one term of a sum over the batch divided by a number that the batch alone decides."""
        parts = self.terms_of(numerator, 1.0)
        if divisor is None or not all(part.is_sum for part in parts) or self._is_tainted(divisor):
            return [self._unknown(value)]
        return [LossTerm(self.producers[value], value, divisor=divisor)]

    def _guarded(self, number: float) -> int | None:
        """Return the value that a plain number was read from, where it comes from samples of the batch."""
        return next(
            (
                guard.value
                for guard in self.program.guards
                if not isinstance(guard.expected, tuple)
                and guard.expected == number
                and self._reads_samples(guard.value)
            ),
            None,
        )

    def _without_bound(self, value: int) -> int:
        """Return the number before it was kept from being zero: a micro-batch may well have none."""
        node = self.program.nodes[self.producers[value]]
        if node.kind is NodeKind.OPERATOR and node.target in _BOUNDS | _VIEWS:
            return self._without_bound(node.inputs[0])
        return value

    def _is_tainted(self, value: int) -> bool:
        return any(
            self.program.nodes[index].kind in (NodeKind.PARAMETER, NodeKind.MODULE)
            or self.program.nodes[index].is_random
            for index in self._ancestors(self.producers[value])
        )

    def _is_scalar(self, value: int) -> bool:
        return math.prod(self.program.specs[value].shape) == 1

    def _has_scalars_only(self, node: Node) -> bool:
        return all(self._is_scalar(value) for value in node.inputs)

    def _term(self, value: int, factor: float) -> LossTerm:
        index = self.producers[value]
        node = self.program.nodes[index]
        if node.target in _LABEL_LOSSES and node.arguments[3] == _MEAN and node.arguments[2] is None:
            target = node.arguments[1].value
            return LossTerm(index, value, target=target, ignore_index=int(node.arguments[4]))
        if node.target in _ALL_MEANS or _reduction(node) == _MEAN:
            return LossTerm(index, value, count=math.prod(self.program.specs[node.inputs[0]].shape))
        if not self._reads_the_batch(index):  # the same in every micro-batch, such as a penalty on weights
            return LossTerm(index, value, count=self.num_samples)
        if node.target in _ALL_SUMS or _reduction(node) == _SUM or _is_summed_label_loss(node):
            return LossTerm(index, value, is_sum=True, factor=factor)
        return self._unknown(value)

    def _unknown(self, value: int) -> LossTerm:
        index = self.producers[value]
        self.program.warnings.append(_not_additive(self.program.nodes[index]))
        return LossTerm(index, value, count=self.num_samples)

    def _reads_the_batch(self, index: int) -> bool:
        return any(self.program.nodes[other].kind is NodeKind.INPUT for other in self._ancestors(index))

    def _reads_samples(self, value: int) -> bool:
        """Whether a value depends on entries of the batch that are cut into micro-batches."""
        nodes = (self.program.nodes[index] for index in self._ancestors(self.producers[value]))
        entries = [node.outputs[0] for node in nodes if node.kind is NodeKind.INPUT]
        return any(self.program.specs[entry].shape[:1] == (self.num_samples,) for entry in entries)

    def _ancestors(self, index: int) -> Iterator[int]:
        seen, stack = {index}, [index]
        while stack:
            current = stack.pop()
            yield current
            for value in self.program.nodes[current].inputs:
                if self.producers[value] not in seen:
                    seen.add(self.producers[value])
                    stack.append(self.producers[value])


def _not_additive(node: Node) -> str:
    return (
        f"loss term {node.target} in {node.module_path or 'the model'} is neither a mean nor a sum over the "
        "batch: over several micro-batches their sample-weighted mean is taken, which may differ"
    )


def _reduction(node: Node) -> Any:
    position = _REDUCED_LOSSES.get(node.target)  # type: ignore[call-overload]
    if position is None:
        return None
    defaults = [argument.default_value for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return node.arguments[position] if position < len(node.arguments) else defaults[position]


def _is_summed_label_loss(node: Node) -> bool:
    return node.target in _LABEL_LOSSES and node.arguments[3] == _SUM
