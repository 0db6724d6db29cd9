"""The log of a factory that ran without memory: which operations created and filled each storage.

While the log is active every tensor is made on the meta device, whatever device was asked for, and code that
looks at the default device sees what it would see otherwise (some libraries skip initialisation under
``torch.device("meta")``). Views need no entry: a tensor is its storage plus a geometry. An entry either
creates storages or writes one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from outsize.errors import ModelError
from outsize.model.factory_reads import asking_values, refusing_to_save

__all__ = ["FactoryLog", "LoggedOperation", "View"]

aten = torch.ops.aten

_OVERWRITES = {
    aten.normal_.default, aten.uniform_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor,
    aten.copy_.default, aten.bernoulli_.float, aten.random_.default,
}  # fmt: skip

# Those of them that can be left out on the meta device: there is nothing to write, nothing to broadcast.
_FILLS_IN_PLACE = _OVERWRITES - {aten.copy_.default, aten.fill_.Tensor}

# How tensors written out in Python enter the dispatcher.
_LIFTS = {aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.lift.default}


@dataclass(frozen=True, slots=True)
class View:
    """A tensor: a storage and how it is looked at."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class LoggedOperation:
    """An operation of the factory, to be done again."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # flattened (args, kwargs) with View for meta tensors
    structure: TreeSpec
    reads: tuple[int, ...]  # storages
    creates: tuple[tuple[int, int], ...]  # (position in the flattened result, storage)
    writes: tuple[int, ...]  # storages
    default_dtype: torch.dtype  # that torch had then: some operations make tensors of it
    is_whole_write: bool  # the one storage written is filled as a whole, whatever it held


class FactoryLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Logs while active; afterwards :meth:`replay` computes a tensor with real values on the CPU."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = seed  # for numbers that the factory itself reads from random tensors
        self.names: dict[int, str] = {}  # storage -> full name of the parameter or buffer it became
        self._entries: list[LoggedOperation] = []
        self._touching: dict[int, list[int]] = {}  # storage -> entries that create or write it
        self._read: set[int] = set()  # random entries whose numbers the factory has seen: they stay these
        self._kept: list[torch.Tensor] = []  # a storage's id is unique while it lives

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on meta tensors and log it; answer reads of values by replaying."""
        kwargs = dict(kwargs or {})
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(_is_meta(tensor) for tensor in tensors):
            if _depends_on_values(func):
                return self._computed(func, leaves, structure)
            if func is aten._to_copy.default and torch.device(kwargs.get("device") or "meta").type != "meta":
                return self.read(args[0]).to(kwargs.get("dtype") or args[0].dtype)
            leaves = [self._without_memory(leaf) if _is_real_array(leaf) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(leaves, structure)
        elif not tensors and _takes_device(func) and not _makes_nothing(func, args):
            kwargs["device"] = torch.device("meta")
            leaves, structure = tree_flatten((args, kwargs))
        try:
            result = args[0] if func in _FILLS_IN_PLACE and _is_meta(args[0]) else func(*args, **kwargs)
        except NotImplementedError:  # no rule for shapes, as for some decompositions of matrices
            if func._schema.is_mutable or not tensors:
                raise
            return self._computed(func, leaves, structure)
        if (
            func in _LIFTS and result.numel() > 0 and not _is_meta(result)
        ):  # empty: asks for the default device
            return self._without_memory(result)
        self._log(func, leaves, structure, result)
        return result

    def _computed(self, func: Any, leaves: list[Any], structure: TreeSpec) -> Any:
        """Return the numbers, or tensors whose shapes follow from values, that an operation gives."""
        real = [
            self.read(leaf) if isinstance(leaf, torch.Tensor) and _is_meta(leaf) else leaf for leaf in leaves
        ]
        args, kwargs = tree_unflatten(real, structure)
        with torch.utils._python_dispatch._disable_current_modes():
            result = func(*args, **kwargs)
        return tree_map(lambda leaf: self._without_memory(leaf) if _is_real_array(leaf) else leaf, result)

    def _without_memory(self, real: torch.Tensor) -> torch.Tensor:
        """Return a meta tensor that stands for one with values, and log the values."""
        stand_in = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        leaves, structure = tree_flatten(((real,), {}))
        self._log(torch.clone, leaves, structure, stand_in)
        return stand_in

    def _log(self, func: Any, leaves: list[Any], structure: TreeSpec, result: Any) -> None:
        results = tree_flatten(result)[0]
        reads = {_storage(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and _is_meta(leaf)}
        creates = tuple(
            (position, _storage(leaf))
            for position, leaf in enumerate(results)
            if isinstance(leaf, torch.Tensor) and _is_meta(leaf) and _storage(leaf) not in reads
        )
        written = _written_positions(func, leaves, structure)
        writes = tuple(_storage(leaves[position]) for position in written if _is_meta(leaves[position]))
        if not creates and not writes:
            return
        arguments = tuple(self._argument(leaf) for leaf in leaves)
        entry = LoggedOperation(
            function=func,
            arguments=arguments,
            structure=structure,
            reads=tuple(reads),
            creates=creates,
            writes=writes,
            default_dtype=torch.get_default_dtype(),
            is_whole_write=_fills(func)
            and len(writes) == 1
            and _fills_its_storage(leaves[written[0]], leaves),
        )
        for storage in (*(storage for _, storage in creates), *writes):
            self._touching.setdefault(storage, []).append(len(self._entries))
        self._entries.append(entry)
        self._kept += [leaf for leaf in results if isinstance(leaf, torch.Tensor)]

    def _argument(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return _view(leaf) if _is_meta(leaf) else leaf.detach().clone()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Log while inside.

        Parts of ``torch.nn.init`` do nothing to tensors that say they are on the meta device, so they do not
        say so. The truncated normal draws again until all values are inside, so it is one entry.
        """
        original = torch.nn.init._no_grad_trunc_normal_

        def truncated_normal(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not _is_meta(tensor):
                return original(tensor, *args, **kwargs)
            self._log(original, *tree_flatten(((tensor, *args), kwargs)), tensor)
            return tensor

        torch.nn.init._no_grad_trunc_normal_ = truncated_normal
        torch.Tensor.is_meta = property(lambda _: False)  # type: ignore[assignment]
        try:
            with self, asking_values(self.read), refusing_to_save():
                yield
        finally:
            torch.nn.init._no_grad_trunc_normal_ = original
            del torch.Tensor.is_meta  # the property of the class below shows again

    # -- replay ---------------------------------------------------------------------------------

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of a tensor to the factory, which may make others from them."""
        self._read.update(self._needed_for(tensor))
        return self.replay(tensor, self.seed)

    def replay(self, tensor: torch.Tensor, seed: int) -> torch.Tensor:
        """Return the values of a tensor the factory made, on the CPU.

        Raises:
            ModelError: the tensor was made outside the factory.
        """
        view, needed = _view(tensor), self._needed_for(tensor)
        held: dict[int, torch.Tensor] = {}
        with (
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
            torch.utils._python_dispatch._disable_current_modes(),
        ):
            for index in needed:
                self._run(index, held, seed)
        return _look(held, view)

    def operations_behind(self, tensor: torch.Tensor) -> list[LoggedOperation]:
        """Return the operations that decide the values of a tensor the factory made, in order.

        Raises:
            ModelError: the tensor was made outside the factory.
        """
        return [self._entries[index] for index in self._needed_for(tensor)]

    def _needed_for(self, tensor: torch.Tensor) -> list[int]:
        storage = _storage(tensor)
        if storage not in self._touching:
            raise ModelError(
                f"a tensor of shape {tuple(tensor.shape)} has no recorded origin",
                why="it was made on the meta device outside the factory",
                attempt="create all parameters and buffers inside the factory",
            )
        needed: set[int] = set()
        storages, stack = {storage}, [storage]
        while stack:
            for index in self._deciding(stack.pop()):
                needed.add(index)
                entry = self._entries[index]
                for other in (*entry.reads, *entry.writes):
                    if other not in storages:
                        storages.add(other)
                        stack.append(other)
        return sorted(needed)

    def _deciding(self, storage: int) -> list[int]:
        """Return a storage's creation and its writes, without those that a later whole overwrite undoes."""
        creation, *writes = self._touching[storage]
        last = max((at for at, index in enumerate(writes) if self._entries[index].is_whole_write), default=0)
        return [creation, *writes[last:]]

    def _run(self, index: int, held: dict[int, torch.Tensor], seed: int) -> None:
        entry = self._entries[index]
        leaves = [_look(held, leaf) if isinstance(leaf, View) else leaf for leaf in entry.arguments]
        args, kwargs = tree_unflatten(leaves, entry.structure)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        if _is_random(entry.function):
            torch.manual_seed(self._stream(index, seed))
        with _default_dtype(entry.default_dtype):
            results = tree_flatten(entry.function(*args, **kwargs))[0]
        for position, storage in entry.creates:
            held[storage] = results[position]

    def _stream(self, index: int, seed: int) -> int:
        """Return the seed of one random operation: from the run's seed and the name of what it fills."""
        entry = self._entries[index]
        storage = entry.writes[0] if entry.writes else entry.creates[0][1]
        ordinal = self._touching[storage].index(index)
        name = self.names.get(storage, f"operation {index}")
        if index in self._read:
            seed, name = self.seed, f"operation {index}"
        digest = hashlib.sha256(f"{seed}/{name}/{ordinal}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1


def _fills(function: Callable[..., Any]) -> bool:
    return function in _OVERWRITES or not isinstance(function, torch._ops.OpOverload)


def _is_random(function: Callable[..., Any]) -> bool:
    if isinstance(function, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in function.tags
    return function is not torch.clone


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def _is_meta(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta"


def _is_real_array(leaf: Any) -> bool:
    """Tell whether a leaf has values that an operation on meta tensors could not take as they are."""
    return isinstance(leaf, torch.Tensor) and not _is_meta(leaf) and leaf.dim() > 0


def _takes_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _makes_nothing(func: Any, args: tuple[Any, ...]) -> bool:
    """Tell whether a tensor without elements is made, as for the storage of a file to be put into."""
    return func is aten.empty.memory_format and 0 in args[0]


def _depends_on_values(func: Any) -> bool:
    """Tell whether the result, or its shape, follows from values: a number, what is unique, ..."""
    is_plain = not any("Tensor" in str(returned.type) for returned in func._schema.returns)
    is_number = is_plain and bool(func._schema.returns)
    return is_number or torch.Tag.dynamic_output_shape in func.tags


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _view(tensor: torch.Tensor) -> View:
    return View(
        _storage(tensor), tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype
    )


def _look(held: dict[int, torch.Tensor], view: View) -> torch.Tensor:
    storage = held[view.storage].untyped_storage()
    return torch.empty(0, dtype=view.dtype).set_(storage, view.offset, view.shape, view.stride)


def _written_positions(func: Any, leaves: list[Any], structure: TreeSpec) -> list[int]:
    """Return which flattened arguments an operation writes in place, by its schema."""
    if not isinstance(func, torch._ops.OpOverload):
        return [] if func is torch.clone else [0]  # the truncated normal writes its first argument
    if not func._schema.is_mutable:
        return []
    written = {
        argument.name
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    args, kwargs = tree_unflatten(list(range(len(leaves))), structure)
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    positions = [position for name in written if name in named for position in tree_flatten(named[name])[0]]
    return [position for position in positions if isinstance(leaves[position], torch.Tensor)]


def _fills_its_storage(written: torch.Tensor, leaves: list[Any]) -> bool:
    is_whole = written.numel() * written.element_size() == written.untyped_storage().nbytes()
    readers = [
        leaf
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf is not written and _storage(leaf) == _storage(written)
    ]
    return is_whole and not readers
