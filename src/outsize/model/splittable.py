"""How far operator-level parallelism could divide a block, judged from its modules alone.

An estimate for planning before operators have been searched: weights of matrix products and embeddings are
divided, norms and biases of the width are not; of the activations, all that is wider than the block's input.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from outsize.model.slice import Slice

__all__ = ["splittable_figures"]

_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_head", "num_key_value_heads")
_WEIGHTS_OF_TWO_PRODUCTS = 4  # attention and an MLP have at least four: two sums over shards in forward


def splittable_figures(
    module: nn.Module, part: Slice, saved_bytes: float, input_bytes: float
) -> dict[str, Any]:
    """Return the tensor-parallel fields of a block's profile; zero where nothing can be divided."""
    blocks = [module.get_submodule(name) for name in part.modules]
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    weights = [parameter for parameter in parameters if parameter.dim() == 2]
    total = sum(parameter.numel() for parameter in parameters)
    if not weights:
        return {}
    num_sums = 2 if len(weights) >= _WEIGHTS_OF_TWO_PRODUCTS else 1
    whole_bytes = min(num_sums * input_bytes, saved_bytes)  # the input of a norm before each
    return {
        "shardable_parameter_fraction": sum(weight.numel() for weight in weights) / total,
        "shardable_activation_fraction": 1 - whole_bytes / saved_bytes if saved_bytes else 0.0,
        "shardable_flops_fraction": 1.0,
        "num_forward_all_reduces": num_sums,
        "max_tensor_parallel_degree": math.gcd(
            *(size for weight in weights for size in weight.shape), *_head_counts(blocks)
        ),
    }


def _head_counts(blocks: list[nn.Module]) -> list[int]:
    """Return the numbers of heads that the modules or their configurations name."""
    counts = []
    for block in blocks:
        for inner in block.modules():
            for holder in (inner, getattr(inner, "config", None)):
                values = [getattr(holder, name, None) for name in _HEAD_COUNTS]
                counts += [value for value in values if isinstance(value, int) and value > 0]
    return counts
