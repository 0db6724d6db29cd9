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

    paths: tuple[str, ...]  # of each leaf
    names: tuple[str, ...]  # the same; "" for a leaf that is no tensor
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

    @property
    def plain_constants(self) -> dict[str, Any]:
        """Numbers, texts and the like that are no tensors, by path: they are part of what is recorded."""
        return {
            path: constant
            for path, name, constant in zip(self.paths, self.names, self.constants, strict=True)
            if not name and isinstance(constant, bool | int | float | str | None)
        }


def flatten_batch(batch: Any) -> tuple[dict[str, torch.Tensor], BatchLayout]:
    """Return the tensors of a batch by name, such as ``input_ids`` or ``images/left``, and its layout.

    A mapping is passed to the model as keyword arguments, a tuple or list as positional ones, anything
    else as the only positional one (its tensors are named ``0``, ``1`` and so on).

    Raises:
        BatchError: the batch holds no tensor, an array that is none, or two entries of one name.
    """
    is_keywords = isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch)
    call = dict(batch) if is_keywords else tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    paths, structure = tree_flatten_with_path(call)
    leaves = {_path_name(path): leaf for path, leaf in paths}
    if len(leaves) < len(paths):
        raise BatchError(
            "two entries of the batch have one name",
            why=f"its entries are {', '.join(_path_name(path) for path, _ in paths)}",
            attempt="keys that differ as text, and without /",
        )
    entries = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    _refuse_arrays(leaves)
    if not entries:
        is_nested = isinstance(batch, Mapping | tuple | list)
        kinds = ", ".join(dict.fromkeys(type(leaf).__name__ for leaf in leaves.values()))
        raise BatchError(
            "the batch holds no tensor",
            why=f"it is a {type(batch).__name__}" + (f" of {kinds}" if is_nested and kinds else ""),
            attempt="give a dict of keyword tensors, a tuple of positional ones, or one tensor",
        )
    names = tuple(name if name in entries else "" for name in leaves)
    constants = tuple(None if name in entries else leaf for name, leaf in leaves.items())
    return entries, BatchLayout(tuple(leaves), names, constants, structure, is_keywords)


def _refuse_arrays(leaves: Mapping[str, Any]) -> None:
    """Refuse what only looks like data: it would be recorded as a setting, the same for all batches."""
    for name, leaf in leaves.items():
        has_values = hasattr(leaf, "__array__") and getattr(leaf, "shape", None)
        if has_values and not isinstance(leaf, torch.Tensor):
            raise BatchError(
                f"Batch entry {name!r} is a {type(leaf).__name__}, not a tensor.",
                why="Only tensors are cut into micro-batches.",
                attempt=f"torch.as_tensor(batch[{name!r}]).",
            )


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
