"""Plain figures of a model and its batch: bytes, element size, tokens in a sample, fingerprint."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from outsize.model.batch_entries import flatten_batch
from outsize.model.program import Node, Ref

__all__ = ["bytes_per_element", "model_fingerprint", "num_bytes", "tokens_per_sample"]


def tokens_per_sample(batch: Any) -> int:
    """Return the length of the first integer sequence in the batch, 1 if there is none."""
    for tensor in flatten_batch(batch)[0].values():
        if tensor.dim() == 2 and not tensor.is_floating_point():
            return int(tensor.shape[1])
    return 1


def bytes_per_element(module: nn.Module) -> int:
    """Return the element size of most parameters."""
    sizes = Counter[int]()
    for parameter in module.parameters():
        sizes[parameter.element_size()] += parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else torch.get_default_dtype().itemsize


def model_fingerprint(module: nn.Module, nodes: Sequence[Node]) -> str:
    """Return a digest of the parameters' names and shapes, and of the steps of the forward."""
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
    for node in nodes:
        inputs = [argument.value for argument in node.arguments if isinstance(argument, Ref)]
        digest.update(f"{node.kind} {node.target} {inputs} {node.outputs}\n".encode())
    return digest.hexdigest()[:16]


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors, the same one once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in {id(t): t for t in tensors}.values())
