"""The few splits that need a mask or a collective of their own, and the functions that run them.

    embedding        table rows split: look up the own rows, zero elsewhere -> partial sum
    _log_softmax     classes split: maximum and sum over ranks, log-probabilities stay split
    nll_loss         classes split: pick where the label is one's own class -> partial sum
    mean             a dim it runs over split: the shares of all ranks add up -> partial sum
    other losses     the same, for losses that are a mean over elements
    _embedding_bag   table rows split, for sums: look up the own rows -> partial sum
    batch norm       channels split: running statistics stay whole, every rank learns those of the others
    attention        queries of a causal sequence split: keys up to a rank's own queries (split_attention)

Log-softmax and loss together are cross-entropy over a split vocabulary: logits are never gathered. Each
rule is verified by the same trial as the discovered ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_unflatten

from outsize.model.operator_rules.placement import Partial, Placement, Replicate, Shard
from outsize.model.operator_rules.rule import OperatorRule
from outsize.model.operator_rules.signature import OperatorSignature
from outsize.model.operator_rules.split_attention import attend_to_earlier_keys

__all__ = ["KERNELS", "Axis", "Part", "ThreadedAxis", "hand_rules"]

aten = torch.ops.aten
_MEAN, _SUM = 1, 2
_MEAN_LOSSES = {
    f"split_{operator.__name__.split('.')[0]}": operator
    for operator in (
        aten.mse_loss.default,
        aten.smooth_l1_loss.default,
        aten.huber_loss.default,
        aten.binary_cross_entropy.default,
        aten.binary_cross_entropy_with_logits.default,
    )
}


@dataclass(frozen=True, slots=True)
class Part:
    """The elements ``start`` to ``start + length`` of the ``whole`` that this rank has of the dim split."""

    start: int
    length: int
    whole: int

    @classmethod
    def of(cls, placement: Shard, shape: tuple[int, ...], degree: int, rank: int) -> Part:
        """Return what ``rank`` has of a value of ``shape``."""
        size = shape[placement.dim]
        return cls(*placement.ranges(size, degree, rank)[0], size)


class Axis(Protocol):
    """This rank's place on the mesh axis that an operator is split over."""

    rank: int
    degree: int

    def all_reduce(self, tensor: torch.Tensor, operation: str) -> torch.Tensor:
        """Return the "sum" or "max" over the ranks, outside autograd."""
        ...


class ThreadedAxis:
    """An axis whose ranks are threads of this process, for trials."""

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.degree = rank, len(shared)
        self._shared, self._barrier = shared, barrier

    def all_reduce(self, tensor: torch.Tensor, operation: str) -> torch.Tensor:
        """Return the reduction over all threads' tensors."""
        self._shared[self.rank] = tensor
        self._barrier.wait()
        stacked = torch.stack(self._shared)
        result = stacked.sum(0) if operation == "sum" else stacked.amax(0)
        self._barrier.wait()
        return result


def hand_rules(signature: OperatorSignature) -> Iterator[OperatorRule]:
    """Yield the rules written by hand that concern this operator; unverified."""
    yield from _table_rules(signature)
    yield from _loss_rules(signature)
    yield from _mean_rules(signature)
    yield from _attention_rules(signature)
    if signature.target is aten.native_batch_norm.default and signature.arguments[3] is not None:
        num_weights = sum(argument is not None for argument in signature.arguments[1:3])
        inputs: list[Placement] = [Shard(1), *[Shard(0)] * num_weights, Replicate(), Replicate()]
        outputs: list[Placement] = [Shard(1)]
        outputs += [Shard(0) if all(spec.shape) else Replicate() for spec in signature.outputs[1:]]
        yield OperatorRule(tuple(inputs), tuple(outputs), kernel="channel_split_batch_norm")


def _table_rules(signature: OperatorSignature) -> Iterator[OperatorRule]:
    if signature.target is aten.embedding.default and not any(signature.arguments[3:]):
        yield OperatorRule((Shard(0), Replicate()), (Partial(),), kernel="row_split_embedding")
    if signature.target is aten._embedding_bag.default and len(signature.inputs) == 3:
        is_sum = _argument(signature, "mode") == 0 and _argument(signature, "padding_idx") == -1
        if is_sum and not _argument(signature, "scale_grad_by_freq"):
            rows = (Shard(0), Replicate(), Replicate())
            sums = (Partial(), Replicate(), Replicate(), Replicate())
            yield OperatorRule(rows, sums, kernel="row_split_embedding_bag")


def _loss_rules(signature: OperatorSignature) -> Iterator[OperatorRule]:
    arguments, target = signature.arguments, signature.target
    if target is aten._log_softmax.default:
        shard = Shard(arguments[1] % len(signature.inputs[0].shape))
        yield OperatorRule((shard,), (shard,), kernel="class_split_log_softmax")
    if target is aten.nll_loss_forward.default and arguments[2] is None:
        outputs = (Partial(), Replicate())
        yield OperatorRule((Shard(1), Replicate()), outputs, kernel="class_split_nll_loss")
    for kernel, operator in _MEAN_LOSSES.items():
        if target is operator and len(signature.inputs) == 2 and _argument(signature, "reduction") == _MEAN:
            for dim in range(len(signature.inputs[0].shape)):
                yield OperatorRule((Shard(dim), Shard(dim)), (Partial(),), kernel=kernel)


def _attention_rules(signature: OperatorSignature) -> Iterator[OperatorRule]:
    """Without dropout: the masks of shards would be others."""
    if signature.target is not aten._scaled_dot_product_flash_attention_for_cpu.default:
        return
    query, key = (spec.shape for spec in signature.inputs[:2])
    is_plain = len(signature.inputs) == 3 and not _argument(signature, "dropout_p")
    if is_plain and _argument(signature, "is_causal") and query[2] == key[2]:
        queries = (Shard(2), Replicate(), Replicate())
        yield OperatorRule(queries, (Shard(2), Shard(2)), kernel="query_split_attention")


def _mean_rules(signature: OperatorSignature) -> Iterator[OperatorRule]:
    if signature.target not in (aten.mean.default, aten.mean.dim) or len(signature.inputs) != 1:
        return
    num_dims = len(signature.inputs[0].shape)
    is_over_some = signature.target is aten.mean.dim
    given = [a for a in signature.arguments[1:] if type(a) is int] if is_over_some else []
    for dim in sorted({dim % num_dims for dim in given}) if given else range(num_dims):
        yield OperatorRule((Shard(dim),), (Partial(),), kernel="split_mean")


def _argument(signature: OperatorSignature, name: str) -> Any:
    """Return an argument by its name in the operator's schema; where it was left out, its default."""
    args, kwargs = tree_unflatten(list(signature.arguments), signature.structure)
    schema = signature.target._schema.arguments
    position = [argument.name for argument in schema].index(name)
    return args[position] if position < len(args) else kwargs.get(name, schema[position].default_value)


def split_mean(_axis: Axis, part: Part, values: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The share of a mean that this rank's elements make up."""
    return torch.mean(values, *args, **kwargs) * (part.length / part.whole)


def _split_mean_loss(
    operator: Callable[..., torch.Tensor], _axis: Axis, part: Part, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """The share of a mean loss that this rank's elements make up."""
    return operator(*args, **kwargs) * (part.length / part.whole)


def row_split_embedding(
    _axis: Axis, part: Part, weight: torch.Tensor, indices: torch.Tensor, padding_idx: int = -1, *_: Any
) -> torch.Tensor:
    """Look up the rows this rank holds; rows of other ranks are zero."""
    local = indices - part.start
    is_foreign = (local < 0) | (local >= part.length)
    padding = padding_idx - part.start
    padding = padding if padding_idx >= 0 and 0 <= padding < part.length else -1
    found = aten.embedding.default(weight, local.masked_fill(is_foreign, 0), padding)
    masked: torch.Tensor = found.masked_fill(is_foreign.unsqueeze(-1), 0)
    return masked


def row_split_embedding_bag(
    _axis: Axis,
    part: Part,
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    _scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    *_: Any,
) -> Any:
    """Add up, in every bag, the rows this rank holds: rows of other ranks weigh nothing."""
    local = indices - part.start
    is_own = (local >= 0) & (local < part.length)
    local = local.masked_fill(~is_own, 0)
    return aten._embedding_bag.default(weight, local, offsets, False, mode, sparse, is_own.to(weight.dtype))


def channel_split_batch_norm(
    axis: Axis,
    part: Part,
    values: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_variance: torch.Tensor,
    training: bool,
    *settings: float,
) -> tuple[torch.Tensor, ...]:
    """Normalise the channels this rank holds, and keep the running statistics of all of them."""
    running = (running_mean, running_variance)
    own = [whole.narrow(0, part.start, part.length).clone() for whole in running]
    result: tuple[torch.Tensor, ...] = aten.native_batch_norm.default(
        values, weight, bias, *own, training, *settings
    )
    if not training:
        return result
    for whole, updated in zip(running, own, strict=True):
        share = torch.zeros_like(whole)
        share.narrow(0, part.start, part.length).copy_(updated)
        whole.copy_(axis.all_reduce(share, "sum"))
    return result


def query_split_attention(
    _axis: Axis,
    part: Part,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    scale: float | None = None,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the queries this rank holds."""
    return attend_to_earlier_keys(query, key, value, part.start, scale)


class _ClassSplitLogSoftmax(torch.autograd.Function):
    """Saves only its output, as the whole operator does."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        highest = axis.all_reduce(logits.amax(dim, keepdim=True), "max")
        shifted = logits - highest
        total = axis.all_reduce(shifted.exp().sum(dim, keepdim=True), "sum")
        output = shifted.sub_(total.log())
        ctx.save_for_backward(output)
        ctx.axis, ctx.dim = axis, dim
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (output,) = ctx.saved_tensors
        (gradient,) = gradients
        total = ctx.axis.all_reduce(gradient.sum(ctx.dim, keepdim=True), "sum")
        return gradient - output.exp() * total, None, None


def class_split_log_softmax(
    axis: Axis, _part: Part, logits: torch.Tensor, dim: int, half_to_float: bool = False
) -> torch.Tensor:
    """Log-probabilities of the classes this rank holds."""
    if half_to_float:
        logits = logits.float()
    result: torch.Tensor = _ClassSplitLogSoftmax.apply(logits, axis, dim)  # type: ignore[no-untyped-call]
    return result


def class_split_nll_loss(
    _axis: Axis,
    part: Part,
    log_probabilities: torch.Tensor,
    target: torch.Tensor,
    weight: None,
    reduction: int,
    ignore_index: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The share of the loss whose labels are classes of this rank, and the number of labels that count."""
    del weight  # the rule holds only without class weights
    counts = target != ignore_index
    local = target - part.start
    is_own = counts & (local >= 0) & (local < part.length)
    picked = log_probabilities.gather(1, local.masked_fill(~is_own, 0).unsqueeze(1)).squeeze(1)
    losses = -picked.masked_fill(~is_own, 0)
    total = counts.sum().to(losses.dtype)
    if reduction == _MEAN:
        return losses.sum() / total, total
    return (losses.sum() if reduction == _SUM else losses), total


KERNELS: dict[str, Callable[..., Any]] = {
    **{name: partial(_split_mean_loss, operator) for name, operator in _MEAN_LOSSES.items()},
    **{
        function.__name__: function
        for function in (
            split_mean,
            row_split_embedding,
            row_split_embedding_bag,
            class_split_log_softmax,
            class_split_nll_loss,
            channel_split_batch_norm,
            query_split_attention,
        )
    },
}
