"""Finds batch norm layers, whose result depends on which samples share a micro-batch, and says so."""

from __future__ import annotations

from torch import nn

__all__ = ["batch_norm_warnings"]


def batch_norm_warnings(module: nn.Module) -> list[str]:
    """Return what to know of the module's batch norm layers in training mode; nothing without any."""
    names = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training
    ]
    if not names:
        return []
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [
        f"batch norm in {names[0]}{others} takes statistics over one micro-batch of one replica, so training "
        "depends on how many there are; synchronised batch norm takes them over all replicas"
    ]
