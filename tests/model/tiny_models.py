"""Tiny models for tests of the recorder and what stands on it; each comes with a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["gpt2", "llama", "tanh_chain", "token_ids"]

VOCABULARY = 17

Made = tuple[nn.Module, dict[str, torch.Tensor]]


def token_ids(num_samples: int = 4, sequence: int = 10, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (num_samples, sequence), generator=generator)


def build(factory: Callable[[], nn.Module]) -> nn.Module:
    """Build in float64 with seed 0."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        return factory()
    finally:
        torch.set_default_dtype(previous)


def llama(num_samples: int = 4, **changes: Any) -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
    }
    config = LlamaConfig(**{**settings, **changes})
    ids = token_ids(num_samples)
    return build(lambda: LlamaForCausalLM(config)), {
        "input_ids": ids,
        "labels": token_ids(num_samples, seed=1),
    }


def gpt2(num_samples: int = 4, **changes: Any) -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {
        "vocab_size": VOCABULARY,
        "n_embd": 16,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 32,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
    }
    config = GPT2Config(**{**settings, **changes})
    ids = token_ids(num_samples)
    return build(lambda: GPT2LMHeadModel(config)), {
        "input_ids": ids,
        "labels": token_ids(num_samples, seed=1),
    }


class TanhChain(nn.Module):
    """Four times Linear(8, 8) and tanh, then the mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def tanh_chain(num_samples: int = 4) -> Made:
    return build(TanhChain), {"x": torch.linspace(-1, 1, num_samples * 8, dtype=torch.float64).view(-1, 8)}
