"""Settings of model libraries that recording has to change for its duration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["training_settings"]


@contextmanager
def training_settings(module: nn.Module) -> Iterator[None]:
    """Turn off caches for generating text while inside.

    Hugging Face models fill such a cache by default, in training too: an object that every layer writes to,
    so that a layer could not be called again as it was recorded.
    """
    configs = {
        id(config): config
        for part in module.modules()
        if (config := getattr(part, "config", None)) is not None
        and getattr(config, "use_cache", False) is True
    }
    for config in configs.values():
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs.values():
            config.use_cache = True
