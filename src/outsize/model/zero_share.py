"""A share of zero in the loss: zero, and gradients of zero for all that the term was computed from."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["zero_share"]


def zero_share(term: torch.Tensor) -> torch.Tensor:
    """Return zero with the graph of ``term``, in which gradients are zero from the term's operator on.

    A mean over no elements is 0 / 0 and so is its gradient: zero times that would not be zero.
    """
    if term.grad_fn is not None:
        term.grad_fn.register_hook(_to_zeros)
    zero: torch.Tensor = _Zero.apply(term)  # type: ignore[no-untyped-call]
    return zero


class _Zero(torch.autograd.Function):
    """Zero, whatever is given."""

    @staticmethod
    def forward(ctx: Any, term: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - nothing is saved
        return torch.zeros_like(term)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - nothing was saved
        return torch.zeros_like(gradients[0])


def _to_zeros(inputs: tuple[Any, ...], _: tuple[Any, ...]) -> tuple[Any, ...]:
    """Take the place of an operator's gradients."""
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in inputs)
