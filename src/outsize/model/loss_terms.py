"""The means inside a loss: what has to be rescaled so that losses of micro-batches add up.

The loss is followed backwards through operators that are linear in one value (sums of terms, products with
plain numbers, views). What is found there is a term: a mean over a known number of elements, a sum, or
something unknown that is weighted by its number of samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from outsize.model.program import LossTerm, Node, NodeKind, Program, Ref

__all__ = ["find_loss_terms"]

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
    producers = program.producers
    terms: dict[int, LossTerm] = {}
    stack = [program.loss_value]
    while stack:
        value = stack.pop()
        index = producers[value]
        node = program.nodes[index]
        linear_in = _linear_inputs(program, node)
        if linear_in:
            stack.extend(linear_in)
        elif value not in terms and _depends_on_anything(program, node):
            terms[value] = _term(program, index, value, num_samples)
    return tuple(sorted(terms.values(), key=lambda term: term.node_index))


def _linear_inputs(program: Program, node: Node) -> list[int]:
    """Return the scalars this node is linear in, jointly; none if it ends the walk."""
    if node.kind is not NodeKind.OPERATOR:
        return []
    if node.target in _VIEWS:
        return [node.inputs[0]] if _is_scalar(program, node.inputs[0]) else []
    if node.target in _ADDITIONS:
        return (
            [value for value in node.inputs if _is_scalar(program, value)]
            if _all_scalars(program, node)
            else []
        )
    if node.target in _PRODUCTS and _all_scalars(program, node):
        varying = [value for value in node.inputs if program.specs[value].requires_grad]
        is_divisor = len(node.inputs) > 1 and varying == [node.inputs[1]] and "div" in str(node.target)
        return varying if len(varying) == 1 and not is_divisor else []
    return []


def _is_scalar(program: Program, value: int) -> bool:
    return math.prod(program.specs[value].shape) == 1


def _all_scalars(program: Program, node: Node) -> bool:
    return all(_is_scalar(program, value) for value in node.inputs)


def _depends_on_anything(program: Program, node: Node) -> bool:
    return node.kind is not NodeKind.CONSTANT and any(
        program.specs[value].requires_grad for value in node.outputs
    )


def _term(program: Program, index: int, value: int, num_samples: int) -> LossTerm:
    node = program.nodes[index]
    if node.target in _LABEL_LOSSES and node.arguments[3] == _MEAN and node.arguments[2] is None:
        target = node.arguments[1].value
        return LossTerm(index, value, target=target, ignore_index=int(node.arguments[4]))
    if node.target in _ALL_MEANS or _reduction(node) == _MEAN:
        return LossTerm(index, value, count=math.prod(program.specs[node.inputs[0]].shape))
    is_sum = node.target in _ALL_SUMS or _reduction(node) == _SUM
    if (is_sum or _is_summed_label_loss(node)) and _reads_the_batch(program, index):
        return LossTerm(index, value, is_sum=True)
    program.warnings.append(
        f"loss term {node.target} in {node.module_path or 'the model'} is neither a mean nor a sum over the "
        "batch: over several micro-batches their sample-weighted mean is taken, which may differ"
    )
    return LossTerm(index, value, count=num_samples)


def _reduction(node: Node) -> Any:
    position = _REDUCED_LOSSES.get(node.target)  # type: ignore[call-overload]
    if position is None:
        return None
    defaults = [argument.default_value for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return node.arguments[position] if position < len(node.arguments) else defaults[position]


def _is_summed_label_loss(node: Node) -> bool:
    return node.target in _LABEL_LOSSES and node.arguments[3] == _SUM


def _reads_the_batch(program: Program, index: int) -> bool:
    return any(program.nodes[other].kind is NodeKind.INPUT for other in _ancestors(program, index))


def _ancestors(program: Program, index: int) -> Iterator[int]:
    producers, seen, stack = program.producers, {index}, [index]
    while stack:
        current = stack.pop()
        yield current
        for argument in program.nodes[current].arguments:
            if isinstance(argument, Ref) and producers[argument.value] not in seen:
                seen.add(producers[argument.value])
                stack.append(producers[argument.value])
