"""What a family is: a factory in float64 and a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

__all__ = ["VOCABULARY", "Family", "noise", "token_ids"]

VOCABULARY = 96


@dataclass(frozen=True, slots=True)
class Family:
    """A tiny model and a batch for it."""

    name: str
    factory: Callable[[], nn.Module]
    make_batch: Callable[[], Any]

    def build(self) -> nn.Module:
        """Return the model in float64 and training mode, always with the same values."""
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            torch.manual_seed(0)
            return self.factory().train()
        finally:
            torch.set_default_dtype(previous)

    def batch(self) -> Any:
        """Return a batch in float64."""
        return tree_map(_to_double, self.make_batch())


def _to_double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def token_ids(sequence: int = 10, seed: int = 0, num_samples: int = 4) -> torch.Tensor:
    """Return ids of shape (num_samples, sequence) that avoid the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (num_samples, sequence), generator=generator)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return normal values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
