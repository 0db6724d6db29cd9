"""A batch in short: two batches have the same digest if they have the same structure, shapes and values."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.utils._pytree import tree_flatten_with_path

from outsize.model.block_signature import PLAIN

__all__ = ["digest_batch"]


def digest_batch(batch: Any) -> bytes:
    """Return 32 bytes for any batch, also one that no model takes: this is no place to fail."""
    digest = hashlib.sha256()
    for path, leaf in tree_flatten_with_path(batch)[0]:
        is_plain = isinstance(leaf, PLAIN)
        description = repr(leaf) if is_plain else type(leaf).__qualname__
        digest.update(f"{path} {description} ".encode())
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{tuple(leaf.shape)} {leaf.dtype} ".encode())
            digest.update(_values(leaf))
    return digest.digest()


def _values(tensor: torch.Tensor) -> bytes | memoryview:
    if tensor.is_meta:
        return b""
    if tensor.layout is not torch.strided:
        return repr(tensor).encode()
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
    return dense.view(torch.uint8).numpy().data
