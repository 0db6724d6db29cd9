"""Sums gradients over replicas, in buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

__all__ = ["sum_gradients"]

BUCKET_BYTES = 25 * 2**20  # as DistributedDataParallel's default


def sum_gradients(parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Sum ``parameter.grad`` in place over ``group``; nothing to do without one.

    Losses are scaled by their share of the global batch beforehand, so this sum is the gradient of the global
    batch, whatever the replicas' shares are. A parameter with a gradient on some process has zeros on others
    that have none. Every process must hold the same parameters.
    """
    if group is None or not parameters:
        return
    _fill_missing(parameters, group)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for bucket in _buckets(gradients):
        _sum_bucket(bucket, group)


def _sum_bucket(gradients: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    if len(gradients) == 1 and gradients[0].is_contiguous():  # without a copy, which for a table is large
        dist.all_reduce(gradients[0], group=group)
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    summed = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, values in zip(gradients, summed, strict=True):
        gradient.copy_(values.view_as(gradient))


def _fill_missing(parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    """Give zeros to what others have a gradient for: a replica may have had no sample that counts."""
    has_gradient = torch.tensor(
        [parameter.grad is not None for parameter in parameters],
        dtype=torch.uint8,
        device=parameters[0].device,
    )
    dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX, group=group)
    for parameter, is_somewhere in zip(parameters, has_gradient.tolist(), strict=True):
        if is_somewhere and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group neighbours of one dtype into buckets of up to ``BUCKET_BYTES``."""
    bucket: list[torch.Tensor] = []
    num_bytes = 0
    for gradient in gradients:
        is_other_kind = bool(bucket) and gradient.dtype != bucket[0].dtype
        if bucket and (is_other_kind or num_bytes + gradient.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(gradient)
        num_bytes += gradient.nbytes
    if bucket:
        yield bucket
