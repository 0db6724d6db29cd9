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

__all__ = ["blocks_with_forward_hooks", "unseen_changes_refused"]


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
def unseen_changes_refused(recorder: Recorder) -> Iterator[None]:
    """Refuse, while inside, what changes tensors between blocks and is no operator that is recorded.

    Hooks on their gradients, other data for them, and cutting them off from what they were made of.

    Raises:
        RecordingError: the forward does so.
    """
    refused = {
        "register_hook": "registers a hook on a tensor's gradient",
        "detach_": "detaches a tensor in place",
    }
    originals = {name: getattr(torch.Tensor, name) for name in refused}

    def refusing(name: str) -> Any:
        def method(tensor: torch.Tensor, *args: Any) -> Any:
            _refuse_between_blocks(recorder, refused[name])
            return originals[name](tensor, *args)

        return method

    def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
        _refuse_between_blocks(recorder, "gives a tensor other data")
        _DATA.__set__(tensor, data)

    for name in refused:
        setattr(torch.Tensor, name, refusing(name))
    torch.Tensor.data = property(_DATA.__get__, set_data)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.Tensor.register_hook = originals["register_hook"]  # type: ignore[method-assign]
        del torch.Tensor.detach_, torch.Tensor.data  # those of the class below show again


_DATA: Any = torch.Tensor.data


def _refuse_between_blocks(recorder: Recorder, what: str) -> None:
    if recorder.leaf is None:
        raise RecordingError(
            f"the forward {what} at {user_frame()}",
            why="between blocks only operators are recorded, and this is none",
            attempt="an autograd function, detach(), an operator that makes a new tensor, or a block with "
            "parameters to do it in",
        )
