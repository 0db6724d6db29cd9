"""Brings up threads, code pages and connections once, so that a memory baseline holds them."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["warm_up"]


def warm_up(device: torch.device) -> None:
    """Run one tiny training step, and one collective where a process group is up.

    Starts the intra-op and autograd threads, maps the library code they use, and lets gloo or NCCL connect.
    """
    layer = torch.nn.Linear(64, 64, device=device)
    optimizer = torch.optim.AdamW(layer.parameters())
    for _ in range(2):
        logits = torch.nn.functional.layer_norm(layer(torch.ones(64, 64, device=device)), (64,))
        labels = torch.zeros(64, dtype=torch.int64, device=device)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1, device=device))
