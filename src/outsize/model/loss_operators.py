"""The operators that losses are made of."""

from __future__ import annotations

from typing import Any

import torch

from outsize.model.program import Node

__all__ = [
    "ADDITIONS",
    "JOINS",
    "MEANS",
    "PARTS",
    "PRODUCTS",
    "QUOTIENTS",
    "SUMS",
    "VIEWS",
    "is_mean",
    "is_mean_of_labels",
    "is_sum",
]

aten = torch.ops.aten

VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.alias.default,
    aten.clone.default, aten._to_copy.default, aten.squeeze.default, aten.squeeze.dim,
    aten.unsqueeze.default, aten.detach.default, aten.neg.default,
}  # fmt: skip
PARTS = {aten.select.int, aten.slice.Tensor}  # linear too, but of single samples where dims count these
JOINS = {aten.stack.default, aten.cat.default}
ADDITIONS = {
    aten.add.Tensor, aten.sub.Tensor, aten.add_.Tensor, aten.sub_.Tensor, aten.add.Scalar, aten.sub.Scalar,
    aten.rsub.Scalar, aten.rsub.Tensor,
}  # fmt: skip
PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar, aten.mul_.Tensor, aten.mul_.Scalar}
QUOTIENTS = {aten.div.Tensor, aten.div.Scalar, aten.div_.Tensor, aten.div_.Scalar}
SUMS = {aten.sum.default, aten.sum.dim_IntList}
MEANS = {aten.mean.default, aten.mean.dim}
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
LABEL_LOSSES = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}


def _reduction(node: Node) -> Any:
    position = _REDUCED_LOSSES.get(node.target)  # type: ignore[call-overload]
    if position is None:
        return None
    defaults = [argument.default_value for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return node.arguments[position] if position < len(node.arguments) else defaults[position]


def is_mean(node: Node) -> bool:
    """Whether the operator takes a mean over elements that count the same."""
    return node.target in MEANS or _reduction(node) == _MEAN


def is_sum(node: Node) -> bool:
    """Whether the operator adds up elements."""
    return (
        node.target in SUMS
        or _reduction(node) == _SUM
        or (node.target in LABEL_LOSSES and node.arguments[3] == _SUM)
    )


def is_mean_of_labels(node: Node) -> bool:
    """Whether the operator takes a mean over labels that it does not ignore, without weights of classes."""
    return node.target in LABEL_LOSSES and node.arguments[3] == _MEAN and node.arguments[2] is None
