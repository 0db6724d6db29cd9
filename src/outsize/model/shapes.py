"""Operators on shapes alone: torch's fake tensors, and rules where those give up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.utils._python_dispatch import TorchDispatchMode

from outsize.model.fake import DEVICE_QUERY, device_of

__all__ = ["DATA_DEPENDENT", "Shapes", "shapes_only"]

aten = torch.ops.aten

# Operators whose result, or its size, depends on the values of what they read.
DATA_DEPENDENT = {
    aten._local_scalar_dense.default, aten.equal.default, aten.masked_select.default, aten.nonzero.default,
    aten._unique2.default, aten.unique_consecutive.default, aten.repeat_interleave.Tensor,
    aten.bincount.default,
}  # fmt: skip


class Shapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lies above a fake tensor mode and answers for the operators that it refuses.

    While ``may_guess`` is set, results whose size depends on values get a share of the largest possible
    one, and numbers taken from tensors are one. That is for the inside of blocks, of which nothing is kept
    but the shapes of their results.
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
        """Apply a rule, or leave the operator to the mode below and guess if that fails."""
        if func is DEVICE_QUERY:
            return device_of(args[0])
        if func in _RULES:
            return _RULES[func](*args, **(kwargs or {}))
        try:
            return func(*args, **(kwargs or {}))
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not self.may_guess or func not in _GUESSES:
                raise
            self.num_guesses += 1
            return _GUESSES[func](self.guessed_share, *args)


@contextmanager
def shapes_only() -> Iterator[Shapes]:
    """Run operators on shapes alone while inside."""
    shapes = Shapes()
    with shapes.mode, shapes:
        yield shapes


def _grouped_product(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,  # noqa: ARG001 - changes no shape
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return an empty product with a dim of groups in neither, one or both operands.

    The kernels take more dtypes than torch's own rule allows.
    """
    rows, columns = left.shape[-2], right.shape[-1]
    groups = left.shape[0] if left.dim() == 3 else len(offs) if right.dim() == 2 and offs is not None else 0
    is_grouped = left.dim() == right.dim()
    shape = (groups, rows, columns) if is_grouped else (rows, columns)
    return left.new_empty(shape, dtype=out_dtype or left.dtype)


def _ctc_loss(log_probabilities: torch.Tensor, targets: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    """Return empty losses, one a sample, and the table of the algorithm as large as labels can make it."""
    num_steps, num_samples = log_probabilities.shape[:2]
    table = (num_samples, num_steps, 2 * targets.shape[-1] + 1)
    return log_probabilities.new_empty(num_samples), log_probabilities.new_empty(table)


def _view_by_kernel(view: Any) -> Callable[..., torch.Tensor]:
    """Return a rule that asks the kernel for the geometry of a view.

    Torch's rules for fake tensors allow for sizes that are symbols, and take up to a hundred times as long.
    """

    def rule(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
            return view(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        with in_kernel_invocation_manager(tensor.fake_mode):
            viewed = view(tensor, *args, **kwargs)
        return FakeTensor(tensor.fake_mode, viewed, tensor.fake_device)

    return rule


_VIEWS = (
    aten.view.default, aten._unsafe_view.default, aten.detach.default, aten.transpose.int, aten.t.default,
    aten.expand.default,
)  # fmt: skip

_RULES: dict[Any, Callable[..., Any]] = {
    aten._grouped_mm.default: _grouped_product,
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss.Tensor: _ctc_loss,
    **{view: _view_by_kernel(view) for view in _VIEWS},
}


def _guess_indices(share: float, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty((_share_of(tensor, share), tensor.dim()), dtype=torch.long)


def _guess_selected(share: float, tensor: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty((_share_of(tensor, share),))


def _guess_number(_: float, tensor: torch.Tensor) -> bool | int | float:
    if tensor.dtype is torch.bool:
        return False
    return 1.0 if tensor.is_floating_point() else 1


def _share_of(tensor: torch.Tensor, share: float) -> int:
    return max(1, int(tensor.numel() * share))


_GUESSES: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: _guess_indices,
    aten.masked_select.default: _guess_selected,
    aten._local_scalar_dense.default: _guess_number,
}
