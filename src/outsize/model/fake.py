"""A module and a batch on fake tensors: shapes and dtypes without memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["DEVICE_QUERY", "device_of", "fake_tensor_like", "fake_tensors_in"]

# Autograd asks for the device of every tensor, and for a fake tensor each question goes through all modes:
# half of what is dispatched in a backward. Modes answer it first.
DEVICE_QUERY = torch.ops.prim.device.default


def device_of(tensor: torch.Tensor) -> torch.device:
    """Return the device that a tensor says it is on, for a mode that is asked :data:`DEVICE_QUERY`."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def fake_tensor_like(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """Return a fake tensor on the CPU with the shape, strides, dtype and gradient flag of ``tensor``."""
    if isinstance(tensor, FakeTensor):
        return tensor
    with _disable_current_modes():
        return _make_fake(tensor, mode)


def _make_fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """Make a fake tensor without the dispatcher, which would cost more than all else for large models."""
    shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    fake = FakeTensor(mode, shape, torch.device("cpu"))
    if isinstance(tensor, nn.Parameter):
        fake._is_param = True  # as nn.Parameter does for subclasses of tensors
    return fake.requires_grad_(tensor.requires_grad)


@contextmanager
def fake_tensors_in(module: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Hold fake parameters and buffers in ``module`` while inside; ties stay ties; all is restored after."""
    fakes: dict[int, torch.Tensor] = {}
    saved: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = []
    with _disable_current_modes():
        for owner in module.modules():
            for table in (owner._parameters, owner._buffers):
                for name, tensor in list(table.items()):
                    if tensor is None:
                        continue
                    saved.append((table, name, tensor))  # type: ignore[arg-type]
                    if id(tensor) not in fakes:
                        fakes[id(tensor)] = _make_fake(tensor, mode)
                    table[name] = fakes[id(tensor)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for table, name, tensor in saved:
            table[name] = tensor
