"""Hooks in a module that is recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from outsize.errors import RecordingError
from outsize.model.recorder import Recorder
from outsize.model.user_frame import user_frame

__all__ = ["blocks_with_forward_hooks", "gradient_hooks_refused"]


def blocks_with_forward_hooks(module: nn.Module, blocks: Sequence[str]) -> set[str]:
    """Return the blocks that have forward hooks, on them or inside: no two of them are sure to be alike."""
    return {
        name
        for name in blocks
        if any(
            part._forward_hooks or part._forward_pre_hooks for part in module.get_submodule(name).modules()
        )
    }


@contextmanager
def gradient_hooks_refused(recorder: Recorder) -> Iterator[None]:
    """Refuse hooks on the gradients of tensors between blocks while inside: a recording would not have them.

    Raises:
        RecordingError: the forward registers one.
    """
    original = torch.Tensor.register_hook

    def register_hook(tensor: torch.Tensor, hook: Any) -> Any:
        if recorder.leaf is None:
            raise RecordingError(
                f"the forward registers a hook on a tensor's gradient at {user_frame()}",
                why="between blocks only operators are recorded, and the hook would not run",
                attempt="an autograd function, or the hook inside a block with parameters",
            )
        return original(tensor, hook)  # type: ignore[no-untyped-call]

    torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.register_hook = original  # type: ignore[method-assign]
