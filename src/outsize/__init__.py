"""outsize: train a PyTorch model that does not fit on one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outsize.model.recording import record
    from outsize.runtime.parallelize import parallelize

__version__ = "0.1.0"

__all__ = ["__version__", "parallelize", "record"]

_LAZY = {
    "parallelize": "outsize.runtime.parallelize",
    "record": "outsize.model.recording",
}  # modules that import torch


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'outsize' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
