"""A language model of eight small blocks in float64: quick to record, and to run under every schedule."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

__all__ = ["NUM_BLOCKS", "VOCABULARY", "CausalBlock", "TinyLanguageModel", "stage_labels", "token_batch"]

NUM_BLOCKS = 8
VOCABULARY = 17  # odd, so that nothing divides by chance
WIDTH = 6


class CausalBlock(nn.Module):
    """A residual block in which each position sees the mean of those before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        seen = torch.arange(1, hidden.shape[1] + 1, device=hidden.device).unsqueeze(-1)
        return hidden + self.down(torch.tanh(self.up(hidden.cumsum(1) / seen)))


class TinyLanguageModel(nn.Module):
    """Embedding, blocks and head; with labels it returns the next-token loss too."""

    def __init__(self, *, is_tied: bool, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(CausalBlock(WIDTH) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight
        self.double()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        if labels is None:
            return {"logits": logits}
        return {"loss": _next_token_loss(logits, labels), "logits": logits}


tied_model = partial(TinyLanguageModel, is_tied=True)
untied_model = partial(TinyLanguageModel, is_tied=False)


def _next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )


def stage_labels(num_stages: int, num_blocks: int = NUM_BLOCKS) -> tuple[str, ...]:
    """Return where each stage begins when the blocks are dealt out evenly; the embedding is in the first."""
    return ("", *(f"blocks.{stage * num_blocks // num_stages}" for stage in range(1, num_stages)))


def token_batch(num_samples: int, *, seed: int, length: int = 6, labels: str = "all") -> dict[str, Any]:
    """Return random tokens; ``labels`` is "all", or "ragged": rows hide other numbers, some rows hide all."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (num_samples, length), generator=generator)
    wanted = tokens.clone()
    if labels == "ragged":
        for row in range(num_samples):
            wanted[row, : (3 * row) % (length + 1)] = -100
    return {"input_ids": tokens, "labels": wanted}
