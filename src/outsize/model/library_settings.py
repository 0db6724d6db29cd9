"""What recording has to change in model libraries for its duration."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["constants_readable", "training_settings"]


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


@contextmanager
def constants_readable(is_constant: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Let Hugging Face models look at values that are the same for every batch while inside.

    They ask whether positions are consecutive, and if so leave the causal mask to the attention kernel; of
    tensors without values they do not ask, and make a mask of all pairs of positions.
    """
    library = sys.modules.get("transformers.utils.import_utils")
    original = getattr(library, "is_fake_tensor", None)
    if library is None or original is None:
        yield
        return

    def is_fake_tensor(tensor: Any) -> bool:
        return bool(original(tensor)) and not is_constant(tensor)

    library.is_fake_tensor = is_fake_tensor  # type: ignore[attr-defined]
    try:
        yield
    finally:
        library.is_fake_tensor = original  # type: ignore[attr-defined]
