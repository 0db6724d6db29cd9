"""The model of the pipeline benchmark: eight Llama-like blocks, whole and as stages made by hand."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch's users know it

__all__ = ["NUM_BLOCKS", "Model", "block_names", "make_batch", "mean_square", "stage_by_hand"]

NUM_BLOCKS = 8
WIDTH = 384
HIDDEN_WIDTH = 1024
HEAD_WIDTH = 64
NUM_TOKENS = 96


class Block(nn.Module):
    """Norm, causal attention, norm, gated MLP; 1.8 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN_WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN_WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm_1(x))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attend(self, y: torch.Tensor) -> torch.Tensor:
        heads = (*y.shape[:2], -1, HEAD_WIDTH)
        query, key, value = (
            part(y).view(heads).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(y.shape))


class Model(nn.Module):
    """The blocks with their loss, as outsize takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return mean_square(x, target)


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target)


def block_names(num_stages: int) -> list[str]:
    """Return the first block of each stage, by its name in the model."""
    return [f"blocks.{stage * NUM_BLOCKS // num_stages}" for stage in range(num_stages)]


def stage_by_hand(stage: int, num_stages: int, parameters: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return the blocks of one stage in a row, with these values by full name."""
    size = NUM_BLOCKS // num_stages
    blocks = nn.Sequential(*(Block() for _ in range(size)))
    for name, parameter in blocks.named_parameters():
        index, _, leaf = name.partition(".")
        parameter.data.copy_(parameters[f"blocks.{stage * size + int(index)}.{leaf}"])
    return blocks


def make_batch(num_samples: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, target = (torch.randn(num_samples, NUM_TOKENS, WIDTH, generator=generator) for _ in range(2))
    return {"x": x, "target": target}
