"""Makes sure that all processes were given the same model."""

from __future__ import annotations

import torch
import torch.distributed as dist

from outsize.errors import ModelError
from outsize.model.deferred import DeferredModel
from outsize.model.factory_digest import digest_model

__all__ = ["check_same_model"]


def check_same_model(deferred: DeferredModel, device: torch.device) -> None:
    """Compare what the factory built with what it built on the other processes.

    Raises:
        ModelError: tensors, initial values or settings differ; raised on every process.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    own = torch.tensor(list(digest_model(deferred)), dtype=torch.uint8, device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    others = [rank for rank, digest in enumerate(gathered) if not torch.equal(digest, gathered[0])]
    if others:
        raise ModelError(
            f"the factory built another model on rank {others[0]} than on rank 0",
            why="shapes, initial values and settings have to be the same on every process",
            attempt="take random numbers, environment variables and global state out of the factory; "
            "outsize.record(factory, batch) names what differs from one call to the next",
        )
