"""How operators run while they are recorded: on shapes, or on real tensors where shapes are not enough."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from outsize.errors import RecordingError
from outsize.model.fake import fake_tensor_like, fake_tensors_in
from outsize.model.known_values import KnownValues
from outsize.model.program import Rung
from outsize.model.raising_checks import passing_answer
from outsize.model.shapes import DATA_DEPENDENT, Shapes, shapes_only
from outsize.model.user_frame import user_frame

__all__ = ["Execution", "has_mask", "on_shapes", "on_values"]


class Execution(Protocol):
    """Runs operators for a recorder; ``entries`` is the batch as the module is called with it."""

    entries: dict[str, torch.Tensor]
    rung: Rung

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, inside_leaf: bool
    ) -> tuple[Any, bool]:
        """Return the result, and whether it was decided by values that another batch may have otherwise."""

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Tell whether the values of a tensor are known, and the same for every batch."""

    def count_selected(self, masks: list[torch.Tensor]) -> list[int]:
        """Return the number of true elements of known masks."""


class _OnShapes:
    rung = Rung.FAKE_TENSORS

    def __init__(self, entries: Mapping[str, torch.Tensor], shapes: Shapes) -> None:
        self.shapes = shapes
        self.entries = {name: fake_tensor_like(tensor, shapes.mode) for name, tensor in entries.items()}
        self.known = KnownValues(entries, self.entries)

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, inside_leaf: bool
    ) -> tuple[Any, bool]:
        """Run on shapes, and on values too where they follow from the batch."""
        leaves, structure = tree_flatten((args, kwargs))
        if has_mask(func, args):
            return self._select(func, args, inside_leaf)
        if func in DATA_DEPENDENT:
            real = self.known.compute(func, leaves, structure)
            if real is not None:
                result = tree_map(self._without_values, real)
                self.known.remember(leaves, result, real)
                return result, self.known.depend_on_batch(leaves)
            self.shapes.may_guess = inside_leaf
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            answer = passing_answer() if _is_truth_value(func, args) else None
            if answer is not None:
                return answer, False
            raise _depends_on_values(func) from error
        finally:
            self.shapes.may_guess = False
        self.known.follow(func, leaves, structure, result)
        return result, False

    def _select(self, func: Any, args: tuple[Any, ...], inside_leaf: bool) -> tuple[Any, bool]:
        """Select by masks: the size of the result is the number of their true elements."""
        masks = [index for index in args[1] if index is not None and index.dtype is torch.bool]
        known = [self.known.value_of(mask) for mask in masks]
        if any(mask is None for mask in known) and not inside_leaf:
            raise _depends_on_values(func)
        indices: list[Any] = []
        for index in args[1]:
            if index is None or index.dtype is not torch.bool:
                indices.append(index)
                continue
            mask = self.known.value_of(index)
            count = index.numel() // 2 if mask is None else _count(mask)
            indices += [index.new_empty(count, dtype=torch.long) for _ in range(index.dim())]
        return func(args[0], indices), self.known.depend_on_batch(masks)

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Tell whether the values of a tensor are known, and the same for every batch."""
        return self.known.value_of(tensor) is not None and not self.known.depend_on_batch([tensor])

    def count_selected(self, masks: list[torch.Tensor]) -> list[int]:
        """Return the number of true elements of known masks."""
        return [_count(self.known.value_of(mask)) for mask in masks]

    def _without_values(self, leaf: Any) -> Any:
        return fake_tensor_like(leaf, self.shapes.mode) if isinstance(leaf, torch.Tensor) else leaf


class _OnValues:
    rung = Rung.REAL_TENSORS

    def __init__(self, entries: Mapping[str, torch.Tensor]) -> None:
        self.entries = dict(entries)

    def run(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        inside_leaf: bool,  # noqa: ARG002 - everything has values, inside too
    ) -> tuple[Any, bool]:
        """Run for real."""
        return func(*args, **kwargs), func in DATA_DEPENDENT or has_mask(func, args)

    def is_constant(self, tensor: torch.Tensor) -> bool:  # noqa: ARG002 - values are not told apart
        """Nothing is known to be constant."""
        return False

    def count_selected(self, masks: list[torch.Tensor]) -> list[int]:
        """Return the number of true elements of masks."""
        return [_count(mask) for mask in masks]


def _is_truth_value(func: Any, args: tuple[Any, ...]) -> bool:
    return func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool


def _count(mask: torch.Tensor | None) -> int:
    assert mask is not None
    with _disable_current_modes():
        return int(mask.count_nonzero())


def has_mask(func: Any, args: tuple[Any, ...]) -> bool:
    """Tell whether an operator selects by a boolean mask."""
    return func is torch.ops.aten.index.Tensor and any(
        index is not None and index.dtype is torch.bool for index in args[1]
    )


@contextmanager
def on_shapes(module: nn.Module, entries: Mapping[str, torch.Tensor]) -> Iterator[Execution]:
    """Run without memory while inside."""
    with shapes_only() as shapes, fake_tensors_in(module, shapes.mode):
        yield _OnShapes(entries, shapes)


@contextmanager
def on_values(module: nn.Module, entries: Mapping[str, torch.Tensor]) -> Iterator[Execution]:
    """Run for real while inside; buffers and random numbers are as before afterwards."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with torch.random.fork_rng():
        yield _OnValues(entries)
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])


def _depends_on_values(func: Any) -> RecordingError:
    return RecordingError(
        f"the forward takes a number from a tensor at {user_frame()}",
        why=f"{func} needs values that depend on parameters, on random numbers or on a batch without values",
        attempt="give a sample batch with values; keep such numbers inside a block, or compute with tensors",
    )
