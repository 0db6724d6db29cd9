"""A batch of any nesting as named tensors, and back into the call the model expects."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_unflatten

from outsize.errors import BatchError

__all__ = ["BatchLayout", "count_samples", "flatten_batch", "sample_entries"]


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """How named tensors form the model's arguments: mappings are keywords, tuples are positional."""

    names: tuple[str, ...]  # name of each leaf; "" for a leaf that is no tensor
    constants: tuple[Any, ...]  # leaf by position, None where a tensor belongs
    structure: TreeSpec
    is_keywords: bool

    def restore(self, entries: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return ``(args, kwargs)`` for the model's forward."""
        leaves = [
            entries[name] if name else constant
            for name, constant in zip(self.names, self.constants, strict=True)
        ]
        batch = tree_unflatten(leaves, self.structure)
        return ((), batch) if self.is_keywords else (tuple(batch), {})


def flatten_batch(batch: Any) -> tuple[dict[str, torch.Tensor], BatchLayout]:
    """Return the tensors of a batch by name, such as ``input_ids`` or ``images/left``, and its layout.

    A mapping is passed to the model as keyword arguments, a tuple or list as positional ones, anything
    else as the only positional one (its tensors are named ``0``, ``1`` and so on).

    Raises:
        BatchError: the batch holds no tensor.
    """
    is_keywords = isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch)
    call = dict(batch) if is_keywords else tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    paths, structure = tree_flatten_with_path(call)
    entries: dict[str, torch.Tensor] = {}
    names: list[str] = []
    constants: list[Any] = []
    for path, leaf in paths:
        is_tensor = isinstance(leaf, torch.Tensor)
        name = _path_name(path) if is_tensor else ""
        names.append(name)
        constants.append(None if is_tensor else leaf)
        if is_tensor:
            entries[name] = leaf
    if not entries:
        raise BatchError(
            "the batch holds no tensor",
            why=f"it is a {type(batch).__name__}",
            attempt="give a dict of keyword tensors, a tuple of positional ones, or one tensor",
        )
    return entries, BatchLayout(tuple(names), tuple(constants), structure, is_keywords)


def sample_entries(entries: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Return the entries that hold samples: those with as many rows as the first entry that has dims."""
    num_rows = next((tensor.shape[0] for tensor in entries.values() if tensor.dim()), None)
    return frozenset(name for name, each in entries.items() if each.dim() and each.shape[0] == num_rows)


def count_samples(entries: Mapping[str, torch.Tensor], with_samples: Collection[str]) -> int:
    """Return the rows of the entries that hold samples; 1 where none does."""
    return next((entries[name].shape[0] for name in with_samples), 1)


def _path_name(path: tuple[Any, ...]) -> str:
    parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", None)))) for key in path]
    return "/".join(parts) if all(part != "None" for part in parts) else keystr(path)
