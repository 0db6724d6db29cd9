"""outsize: train a PyTorch model that does not fit on one device."""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
