"""Small pieces that tests of recordings and of runs build their models from."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Casting", "DoubledGradient"]


class Casting(nn.Module):
    """Computes in its own dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x.to(self.linear.weight.dtype)))


class DoubledGradient(torch.autograd.Function):
    """The identity, with twice the gradient."""

    @staticmethod
    def forward(_, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient
