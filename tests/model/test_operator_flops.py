"""FLOPs of operators."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from outsize.model.cost_meter import CostMeter


def test_attention_of_the_cpu_kernel_counts_as_torch_counts_the_others() -> None:
    """Two products forward and five backward, for every head (torch.utils.flop_counter, sdpa)."""
    shape = (2, 4, 6, 8)  # batch, heads, tokens, width
    query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
    meter = CostMeter()
    with meter:
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        forward = meter.flops
        output.backward(torch.ones(shape))
    assert forward == sdpa_flop_count(shape, shape, shape) == 2 * 2 * 4 * 6 * 6 * (8 + 8)
    assert meter.flops - forward == sdpa_backward_flop_count(shape, shape, shape, shape)


@pytest.mark.parametrize("rows", [1, 5])
def test_products_count_two_for_a_multiplication_with_addition(rows: int) -> None:
    """M x K times K x N: 2 M K N."""
    meter = CostMeter()
    with meter:
        torch.ones(rows, 3) @ torch.ones(3, 7)
    assert meter.flops == 2 * rows * 3 * 7
