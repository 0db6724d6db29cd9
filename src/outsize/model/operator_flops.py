"""FLOPs of one operator: torch's own counts, and those of kernels that torch does not count."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

__all__ = ["count_flops"]

aten = torch.ops.aten


def count_flops(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    """Return the FLOPs of an operator (an overload packet), two for a multiplication with addition.

    ``args`` and ``result`` hold tensors of any kind; shapes alone are read. 0 for what only moves memory.
    """
    own = _UNCOUNTED.get(packet)
    if own is not None:
        return own(*args)
    count = flop_registry.get(packet)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> float:
    """Scores and their product with the values; all scores, also where a causal mask leaves half of them."""
    return 2.0 * _num_scores(query, key) * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    _: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any
) -> float:
    """Scores once more, then the gradients of scores, queries, keys and values: five products for two."""
    return 2.0 * _num_scores(query, key) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _num_scores(query: torch.Tensor, key: torch.Tensor) -> int:
    return math.prod(query.shape[:-1]) * key.shape[-2]


_UNCOUNTED: dict[Any, Callable[..., float]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
