"""Makes sure that all processes were given the same model, and the same batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from outsize.errors import BatchError, ModelError
from outsize.model.batch_digest import digest_batch
from outsize.model.deferred import DeferredModel
from outsize.model.factory_digest import digest_model

__all__ = ["check_same_batch", "check_same_model"]

_MAX_NAMED = 8  # ranks in a message


def check_same_model(deferred: DeferredModel, device: torch.device) -> None:
    """Compare what the factory built with what it built on the other processes.

    Raises:
        ModelError: tensors, initial values or settings differ; raised on every process.
    """
    if not _has_others():
        return
    others = _ranks_that_differ(digest_model(deferred), device)
    if others:
        raise ModelError(
            f"the factory built another model on rank {others[0]} than on rank 0",
            why="shapes, initial values and settings have to be the same on every process",
            attempt="take random numbers, environment variables and global state out of the factory; "
            "outsize.record(factory, batch) names what differs from one call to the next",
        )


def check_same_batch(batch: Any, device: torch.device) -> None:
    """Compare a global batch with those of the other processes, whatever it is.

    Raises:
        BatchError: structure, shapes or values differ; raised on every process.
    """
    if not _has_others():
        return
    others = _ranks_that_differ(digest_batch(batch), device)
    if others:
        named = ", ".join(map(str, others[:_MAX_NAMED]))
        more = f" and {len(others) - _MAX_NAMED} more" if len(others) > _MAX_NAMED else ""
        raise BatchError(
            f"The batch on rank {named}{more} is not the one on rank 0.",
            why="Every process has to be given the same global batch, whole: each takes its own part of it.",
            attempt="no DistributedSampler, and the same seed on every process for what shuffles or changes "
            "samples at random.",
        )


def _has_others() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _ranks_that_differ(digest: bytes, device: torch.device) -> list[int]:
    """Return the ranks whose digest is not that of rank 0; digests have one length, so nothing can hang."""
    own = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return [rank for rank, each in enumerate(gathered) if not torch.equal(each, gathered[0])]
