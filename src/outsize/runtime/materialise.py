"""Gives a process the initial values of its own part of the model, and of nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outsize.model.deferred import DeferredModel, Select, apply_materialised
from outsize.model.slice import Slice

__all__ = ["materialise_names", "names_used"]


def names_used(deferred: DeferredModel, parts: Sequence[Slice]) -> list[str]:
    """Return the full names of all parameters and buffers that the slices use, in order."""
    names: dict[str, None] = {}
    for part in parts:
        for path in part.modules:
            block = deferred.module.get_submodule(path)
            names |= dict.fromkeys(dict(block.named_parameters(path, remove_duplicate=False)))
            names |= dict.fromkeys(dict(block.named_buffers(path, remove_duplicate=False)))
        names |= dict.fromkeys((*part.parameters, *part.buffers))
    return list(names)


def materialise_names(
    deferred: DeferredModel,
    names: Sequence[str],
    *,
    device: torch.device,
    seed: int,
    select: Select | None = None,
) -> None:
    """Compute what ``deferred.module`` does not have yet of parameters and buffers; the rest stays meta.

    ``select(name, whole)`` keeps a shard; at most one whole tensor exists at a time.
    """
    missing = [name for name in names if deferred.is_missing(name)]
    tensors = deferred.materialise(missing, device=device, seed=seed, select=select)
    apply_materialised(deferred.module, tensors)
