"""A module and a batch on fake tensors: shapes and dtypes without memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["fake_tensor_like", "fake_tensors_in"]


def fake_tensor_like(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """Return a fake tensor on the CPU with the shape, strides, dtype and gradient flag of ``tensor``."""
    if isinstance(tensor, FakeTensor):
        return tensor
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


@contextmanager
def fake_tensors_in(module: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Hold fake parameters and buffers in ``module`` while inside; ties stay ties; all is restored after."""
    fakes: dict[int, torch.Tensor] = {}
    saved: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = []
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers):
            for name, tensor in list(table.items()):
                if tensor is None:
                    continue
                saved.append((table, name, tensor))  # type: ignore[arg-type]
                if id(tensor) not in fakes:
                    fakes[id(tensor)] = fake_tensor_like(tensor, mode)
                table[name] = fakes[id(tensor)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for table, name, tensor in saved:
            table[name] = tensor
