"""Counts what operators cost while it is active: FLOPs, bytes read and written, bytes alive."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outsize.model.fake import DEVICE_QUERY, device_of
from outsize.model.operator_flops import count_flops

__all__ = ["CostMeter"]


class CostMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Works on fake and on real tensors. FLOPs of a product of M x K and K x N are 2 M K N.

    ``live_bytes`` counts storages made while active and not freed yet; ``peak_bytes`` is its highest value
    since :meth:`restart_peak`. Views move and allocate nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0
        self.bytes_moved = 0.0
        self.live_bytes = 0
        self.peak_bytes = 0
        self._num_storages = 0
        self._numbers: dict[int, int] = {}  # address of a living storage -> its number

    def restart_peak(self) -> None:
        """Measure the peak from here on."""
        self.peak_bytes = self.live_bytes

    def number_of(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage; one met here first is not counted as allocated."""
        return self._numbers.setdefault(_address(tensor), self._next_number())

    def _next_number(self) -> int:
        self._num_storages += 1
        return self._num_storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and add up its costs."""
        if func is DEVICE_QUERY:
            return device_of(args[0])
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.flops += count_flops(func._overloadpacket, args, kwargs, result)
        self._count_memory(func, [leaf for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)], result)
        return result

    def _count_memory(self, func: Any, inputs: list[torch.Tensor], result: Any) -> None:
        read = {_address(tensor) for tensor in inputs}
        outputs = [leaf for leaf in tree_leaves(result) if _is_tensor(leaf)]
        made = [tensor for tensor in outputs if _address(tensor) not in read]
        if made or func._schema.is_mutable:
            self.bytes_moved += sum(_num_bytes(tensor) for tensor in (*inputs, *outputs))
        for tensor in made:
            self._allocate(tensor)

    def _allocate(self, tensor: torch.Tensor) -> None:
        address = _address(tensor)
        if address in self._numbers:
            return
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        self._numbers[address] = self._next_number()
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._free, address, num_bytes).atexit = False

    def _free(self, address: int, num_bytes: int) -> None:
        self._numbers.pop(address, None)
        self.live_bytes -= num_bytes


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
