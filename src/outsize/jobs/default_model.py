"""The default job's model: an unmodified Hugging Face Llama over bytes, and its batches.

Written as a user would write their own file; the model argument is ``outsize.jobs.default_model:build``.
"""

from __future__ import annotations

import torch
from torch import nn

from outsize.jobs.standard_library_text import sample_windows

__all__ = ["batch", "build"]

SEQUENCE = 64


def build() -> nn.Module:
    """Return a byte-level causal language model of 27 million parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=448,
        intermediate_size=1216,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batch(num_samples: int, *, step: int = 0, split: str = "train") -> dict[str, torch.Tensor]:
    """Return ``input_ids`` and ``labels`` of shape (num_samples, 64)."""
    windows = sample_windows(split, num_samples=num_samples, sequence=SEQUENCE, step=step)
    return {"input_ids": windows, "labels": windows}
