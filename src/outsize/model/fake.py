"""A module and a batch on fake tensors: shapes and dtypes without memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DATA_DEPENDENT", "Shapes", "fake_tensor_like", "fake_tensors_in", "shapes_only"]


@contextmanager
def shapes_only() -> Iterator[Shapes]:
    """Run operators on shapes alone while inside; yields what knows the shapes."""
    shapes = Shapes()
    with shapes.mode, shapes:
        yield shapes


class Shapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives shapes to operators whose kernels take more than torch's own shape functions allow.

    A grouped product runs in other dtypes than bfloat16 too, but its shape function refuses them. While
    ``may_guess`` is set, results whose size depends on values get a share of the largest one
    (``guessed_share``), and numbers taken from tensors are zero. That is for the inside of blocks, of which
    only the shapes of their results are kept.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.may_guess = False
        self.guessed_share = 0.5
        self.num_guesses = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer for a grouped product; leave the rest to the mode below."""
        if func is torch.ops.aten._grouped_mm.default:
            return _grouped_product(*args, **(kwargs or {}))
        try:
            return func(*args, **(kwargs or {}))
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not self.may_guess or func not in _GUESSES:
                raise
            self.num_guesses += 1
            return _GUESSES[func](self.guessed_share, *args)


def _guess_indices(share: float, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty((_share_of(tensor, share), tensor.dim()), dtype=torch.long)


def _guess_selected(share: float, tensor: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty((_share_of(tensor, share),))


def _guess_number(_: float, tensor: torch.Tensor) -> bool | int | float:
    if tensor.dtype is torch.bool:
        return False
    return 0.0 if tensor.is_floating_point() else 0


def _share_of(tensor: torch.Tensor, share: float) -> int:
    return max(1, int(tensor.numel() * share))


# Operators whose result, or its size, depends on the values of what they read.
DATA_DEPENDENT = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.unique_consecutive.default,
    torch.ops.aten.repeat_interleave.Tensor,
    torch.ops.aten.bincount.default,
}

_GUESSES: dict[Any, Any] = {
    torch.ops.aten.nonzero.default: _guess_indices,
    torch.ops.aten.masked_select.default: _guess_selected,
    torch.ops.aten._local_scalar_dense.default: _guess_number,
}


def _grouped_product(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,  # noqa: ARG001 - changes no shape
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return an empty result: groups are a dim of neither, of one or of both operands."""
    rows, columns = left.shape[-2], right.shape[-1]
    groups = left.shape[0] if left.dim() == 3 else len(offs) if right.dim() == 2 and offs is not None else 0
    is_grouped = left.dim() == right.dim()
    shape = (groups, rows, columns) if is_grouped else (rows, columns)
    return left.new_empty(shape, dtype=out_dtype or left.dtype)


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
