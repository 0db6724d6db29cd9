"""Tiny models in float64 for exactness tests, and the one-process training that splits are compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outsize.model.deferred import apply_materialised, build_deferred
from outsize.plan.plan import OptimizerSpec

__all__ = ["make_batch", "reference_model", "tied_llama", "train_reference", "untied_llama"]

VOCABULARY = 48


def untied_llama() -> nn.Module:
    """Return a Llama of four blocks with grouped-query attention."""
    return _llama(is_tied=False)


def tied_llama() -> nn.Module:
    """Return the same with one matrix for embedding and head."""
    return _llama(is_tied=True)


def _llama(*, is_tied: bool) -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=is_tied,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).double()
    model.loss_function = _loss_in_float64
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.__class__ = _NormInFloat64
    return model


class _NormInFloat64(LlamaRMSNorm):
    """The norm without a cast to float32 on the way."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


def _loss_in_float64(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    """Next-token loss without the cast to float32 of transformers' own, which costs eight digits."""
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )


def make_batch(num_samples: int, *, seed: int, length: int = 9) -> dict[str, torch.Tensor]:
    """Return random tokens with ragged labels: each sample hides another number of positions."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (num_samples, length), generator=generator)
    labels = tokens.clone()
    for row, hidden in enumerate(torch.randint(0, length - 2, (num_samples,), generator=generator)):
        labels[row, : int(hidden)] = -100
    return {"input_ids": tokens, "labels": labels}


def reference_model(factory: Any, *, seed: int = 0) -> nn.Module:
    """Return the whole model with the values that every split of it starts from."""
    deferred = build_deferred(factory, seed=seed)
    names = [name for name, _ in deferred.module.named_parameters()]
    names += [name for name, _ in deferred.module.named_buffers()]
    apply_materialised(deferred.module, deferred.materialise(names, seed=seed))
    return deferred.module


def train_reference(
    factory: Any, batches: list[Any], spec: OptimizerSpec
) -> tuple[list[float], list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train on one process: losses, norms, gradients of the first step, parameters at the end."""
    model = reference_model(factory)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=spec.learning_rate, betas=spec.betas, weight_decay=spec.weight_decay
    )
    losses, norms, gradients = [], [], {}
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        if not gradients:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        limit = spec.max_gradient_norm if spec.max_gradient_norm is not None else float("inf")
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, gradients, {name: p.detach().clone() for name, p in model.named_parameters()}
