"""Gives a process the initial values of its own part of the model, and of nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outsize.model.deferred import DeferredModel, Select, apply_materialised
from outsize.model.slice import Slice

__all__ = ["held_names", "materialise_parts"]


def held_names(deferred: DeferredModel, parts: Sequence[Slice]) -> list[str]:
    """Return the full names of all parameters and buffers that the slices use, in order."""
    names: dict[str, None] = {}
    for part in parts:
        for path in part.modules:
            block = deferred.module.get_submodule(path)
            names |= dict.fromkeys(dict(block.named_parameters(path, remove_duplicate=False)))
            names |= dict.fromkeys(dict(block.named_buffers(path, remove_duplicate=False)))
        names |= dict.fromkeys((*part.parameters, *part.buffers))
    return list(names)


def materialise_parts(
    deferred: DeferredModel,
    parts: Sequence[Slice],
    *,
    device: torch.device,
    seed: int,
    select: Select | None = None,
) -> None:
    """Compute the values that ``parts`` use and ``deferred.module`` has not yet; the rest stays meta.

    ``select(name, whole)`` keeps a shard; at most one whole tensor exists at a time.
    """
    missing = [name for name in held_names(deferred, parts) if deferred.is_missing(name)]
    tensors = deferred.materialise(missing, device=device, seed=seed, select=select)
    apply_materialised(deferred.module, tensors)
