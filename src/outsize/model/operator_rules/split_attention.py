"""Causal attention with the queries of one rank: its share of a long sequence, keys and values being whole.

    keys      0 ............ start ........ stop ...... end
    query     ├── all of them ─┼─ no later ──┤ none

The keys before the rank's first query are attended to without a mask, those beside its queries with a causal
one; no mask is ever made. The two results are joined by their log-sums of exponentials, and a backward of
each with the joined ones gives its part of the gradient (Liu, Zaharia and Abbeel 2023, Ring Attention with
Blockwise Transformers, section 3; Dao 2023, FlashAttention-2, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["attend_to_earlier_keys"]

aten = torch.ops.aten
_forward = aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_Result = tuple[torch.Tensor, torch.Tensor]


def attend_to_earlier_keys(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, scale: float | None
) -> _Result:
    """Return the output and log-sum-exp of queries that begin at position ``start`` of the keys' sequence.

    ``query`` is (samples, heads, length, width), ``key`` and ``value`` (samples, key heads, whole, width).
    """
    result: _Result = _EarlierKeys.apply(query, key, value, start, scale)  # type: ignore[no-untyped-call]
    return result


class _EarlierKeys(torch.autograd.Function):
    """Saves what the whole operator saves, the log-sum-exp having no gradient either."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, scale: float | None
    ) -> _Result:
        results = [
            _forward(query, key[:, :, keys], value[:, :, keys], 0.0, is_causal, scale=scale)
            for keys, is_causal in _parts(start, query.shape[2])
        ]
        output, logsumexp = results[0] if len(results) == 1 else _joined(*results)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.mark_non_differentiable(logsumexp)
        ctx.start, ctx.scale = start, scale
        return output, logsumexp

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, logsumexp = ctx.saved_tensors
        of_query, of_key, of_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
        for keys, is_causal in _parts(ctx.start, query.shape[2]):
            found = _backward(
                gradients[0], query, key[:, :, keys], value[:, :, keys], output, logsumexp, 0.0, is_causal,
                scale=ctx.scale,
            )  # fmt: skip
            of_query += found[0]
            of_key[:, :, keys] += found[1]
            of_value[:, :, keys] += found[2]
        return of_query, of_key, of_value, None, None


def _parts(start: int, length: int) -> Iterator[tuple[slice, bool]]:
    """Yield which keys are attended to together, and whether with a causal mask."""
    if start:
        yield slice(0, start), False
    yield slice(start, start + length), True


def _joined(earlier: _Result, own: _Result) -> _Result:
    """Weigh two outputs by the sums of exponentials they were divided by."""
    logsumexp = torch.logaddexp(earlier[1], own[1])
    parts = [output * (own_sum - logsumexp).exp().unsqueeze(-1) for output, own_sum in (earlier, own)]
    return (parts[0] + parts[1]).to(own[0].dtype), logsumexp
