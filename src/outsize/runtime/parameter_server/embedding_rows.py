"""Embedding tables that a worker never holds: their modules ask the servers for the rows that they look up.

::

    indices ──unique──▶ rows that occur ──servers──▶ values ──embedding of positions──▶ output
                                                        ▲ .grad: pushed with the row numbers
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = ["EmbeddingRows"]

_Pull = Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]


@dataclass
class EmbeddingRows:
    """The tables of a module, by the full name of their weight.

    Outside ``pulling`` the modules are what they were, so that recordings see no difference.
    """

    tables: Mapping[str, nn.Embedding | nn.EmbeddingBag]
    _pull: _Pull | None = None
    _looked_up: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, module in self.tables.items():
            module.forward = self._forward_of(name, module)  # type: ignore[method-assign]

    @contextmanager
    def pulling(self, pull: _Pull) -> Iterator[None]:
        """Look rows up on the servers while inside; what was looked up before is forgotten."""
        self._pull, self._looked_up = pull, {}
        try:
            yield
        finally:
            self._pull = None

    def gradients(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return distinct rows and their gradients, by table, of everything looked up and differentiated."""
        found = {}
        for name, pieces in self._looked_up.items():
            used = [(rows, values.grad) for rows, values in pieces if values.grad is not None]
            if used:
                found[name] = _sum_equal_rows([rows for rows, _ in used], [grad for _, grad in used])
        return found

    def scale(self, factor: float) -> None:
        """Multiply the gradients by a factor."""
        for pieces in self._looked_up.values():
            for _, values in pieces:
                if values.grad is not None:
                    values.grad.mul_(factor)

    def _forward_of(self, name: str, module: nn.Embedding | nn.EmbeddingBag) -> Callable[..., torch.Tensor]:
        original: Callable[..., torch.Tensor] = module.forward

        def forward(indices: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
            if self._pull is None:
                return original(indices, *arguments, **named)
            rows, positions = torch.unique(indices.cpu(), return_inverse=True)
            values = self._pull({name: rows})[name].to(indices.device)
            values.requires_grad_(torch.is_grad_enabled())
            self._looked_up.setdefault(name, []).append((rows, values))
            padding = _position(rows, module.padding_idx)
            positions = positions.to(indices.device)
            if isinstance(module, nn.Embedding):
                return functional.embedding(positions, values, padding)
            return _bag(module, positions, values, padding, *arguments, **named)

        return forward


def _bag(
    module: nn.EmbeddingBag,
    positions: torch.Tensor,
    values: torch.Tensor,
    padding: int | None,
    offsets: torch.Tensor | None = None,
    per_sample_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    return functional.embedding_bag(
        positions,
        values,
        offsets,
        mode=module.mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=module.include_last_offset,
        padding_idx=padding,
    )


def _position(rows: torch.Tensor, padding_row: int | None) -> int | None:
    """Return where the row that counts as padding is among the distinct rows, if it occurs."""
    if padding_row is None:
        return None
    found = (rows == padding_row).nonzero()
    return int(found) if len(found) else None


def _sum_equal_rows(
    rows: list[torch.Tensor], gradients: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    distinct, inverse = torch.unique(torch.cat(rows), return_inverse=True)
    every = torch.cat([gradient.cpu() for gradient in gradients])
    return distinct, every.new_zeros(len(distinct), *every.shape[1:]).index_add_(0, inverse, every)
