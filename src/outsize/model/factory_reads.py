"""What a factory that runs without memory asks of values: answered from the log, or kept out of its way.

torch.tensor([...], device=w.device)    made with values: w says that it is on the meta device
w.numpy(), w.tolist()                   computed from the log
torch.save(module.state_dict(), f)      refused: there are no values to write
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from outsize.errors import ModelError

__all__ = ["asking_values", "refusing_to_save"]

Replay = Callable[[torch.Tensor], torch.Tensor]

_FROM_PYTHON = {torch.tensor, torch.as_tensor, torch.asarray}
_TO_PYTHON = {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__}


class _AskedValues(TorchFunctionMode):
    def __init__(self, replay: Replay) -> None:
        super().__init__()
        self._replay = replay

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make tensors of Python numbers with values, and Python numbers of tensors without."""
        kwargs = dict(kwargs or {})
        if func in _FROM_PYTHON and torch.device(kwargs.get("device") or "cpu").type == "meta":
            kwargs["device"] = "cpu"
        if func is torch.Tensor.new_tensor and _is_on_meta(args[0]):
            like, data, *_ = args
            kwargs = {"dtype": like.dtype, **kwargs, "device": "cpu"}
            return torch.tensor(data, **kwargs)
        if func in _TO_PYTHON and _is_on_meta(args[0]):
            real = self._replay(args[0])
            with _disable_current_modes():
                return func(real, *args[1:], **kwargs)
        return func(*args, **kwargs)


def asking_values(replay: Replay) -> TorchFunctionMode:
    """Return a mode under which values are made and read though tensors have no memory."""
    return _AskedValues(replay)


@contextmanager
def refusing_to_save() -> Iterator[None]:
    """Refuse ``torch.save`` while inside."""
    originals = torch.serialization._save, torch.serialization._legacy_save

    def refuse(*_: Any, **__: Any) -> None:
        raise ModelError(
            "the model factory saves tensors",
            why="it is run without memory, so that there are no values to write",
            attempt="copy.deepcopy or load_state_dict(other.state_dict()) in place of a file",
        )

    torch.serialization._save = torch.serialization._legacy_save = refuse
    try:
        yield
    finally:
        torch.serialization._save, torch.serialization._legacy_save = originals


def _is_on_meta(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta"
