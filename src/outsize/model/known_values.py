"""Values that follow from the batch and from constants alone, computed beside the recording.

A recording has shapes but no values. Masks, positions and labels are the exception: no parameter goes into
them, they are small, and models do ask for numbers from them. So every operator whose inputs are all known
runs once more on real tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

__all__ = ["KnownValues"]

_MAX_ELEMENTS = 2**20  # larger results are forgotten: nobody asks them for single numbers
aten = torch.ops.aten
_WITHOUT_CONTENT = {  # what is in them is nobody's: the results of repeated blocks are made so as well
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


class KnownValues:
    """Real tensors beside recorded ones; ``entries`` is the batch, ``recorded`` the same without values."""

    def __init__(self, entries: Mapping[str, torch.Tensor], recorded: Mapping[str, torch.Tensor]) -> None:
        self._real: dict[int, torch.Tensor] = {}  # id of the recorded tensor -> real
        self._of_batch: set[int] = set()  # ids of those that depend on the batch
        self._lost: set[int] = set()  # addresses of storages that something unknown was written to
        self._kept: list[torch.Tensor] = []  # so that ids stay unique
        for name, tensor in entries.items():
            has_values = not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"
            if has_values and tensor.numel() <= _MAX_ELEMENTS:
                with _disable_current_modes():
                    self._know(recorded[name], tensor.detach().cpu().clone(), of_batch=True)

    def value_of(self, recorded: torch.Tensor) -> torch.Tensor | None:
        """Return the real tensor, if it is known."""
        if not isinstance(recorded, FakeTensor):
            return recorded
        if id(recorded) not in self._real and recorded.constant is not None:
            with _disable_current_modes():
                self._know(recorded, recorded.constant.detach().clone(), of_batch=False)
        real = self._real.get(id(recorded))
        return None if real is None or _address(real) in self._lost else real

    def depend_on_batch(self, leaves: list[Any]) -> bool:
        """Tell whether known values would be others for another batch of the same shapes."""
        return any(id(leaf) in self._of_batch for leaf in leaves)

    def compute(self, func: Any, leaves: list[Any], structure: TreeSpec) -> Any:
        """Return the real result of an operator, or None if an input is unknown or its result is open."""
        real = [self.value_of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        is_unknown = any(value is None and leaf is not None for value, leaf in zip(real, leaves, strict=True))
        is_open = func in _WITHOUT_CONTENT or torch.Tag.nondeterministic_seeded in func.tags
        if is_unknown or is_open:
            self.forget_written(func, leaves)
            return None
        args, kwargs = tree_unflatten(real, structure)
        with _disable_current_modes(), torch.no_grad():
            return func(*args, **kwargs)

    def follow(self, func: Any, leaves: list[Any], structure: TreeSpec, recorded: Any) -> None:
        """Compute and remember the real result of an operator beside the recorded one."""
        results = [leaf for leaf in tree_leaves(recorded) if isinstance(leaf, torch.Tensor)]
        if not results:
            return
        if any(result.numel() > _MAX_ELEMENTS for result in results):
            self.forget_written(func, leaves)
            return
        real = self.compute(func, leaves, structure)
        if real is not None:
            self.remember(leaves, recorded, real)

    def remember(self, leaves: list[Any], recorded: Any, real: Any) -> None:
        """Remember a real result, computed from ``leaves``."""
        of_batch = self.depend_on_batch(leaves)
        for left, right in zip(tree_leaves(recorded), tree_leaves(real), strict=True):
            if isinstance(left, FakeTensor) and isinstance(right, torch.Tensor):
                self._know(left, right, of_batch=of_batch)

    def forget_written(self, func: Any, leaves: list[Any]) -> None:
        """Forget everything that shares memory with what an operator writes."""
        if func._schema.is_mutable:
            known = [self._real.get(id(leaf)) for leaf in leaves]
            self._lost.update(_address(real) for real in known if real is not None)

    def _know(self, recorded: torch.Tensor, real: torch.Tensor, *, of_batch: bool) -> None:
        self._real[id(recorded)] = real
        self._kept.append(recorded)
        if of_batch:
            self._of_batch.add(id(recorded))


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
