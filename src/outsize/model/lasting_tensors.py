"""Tensors without values that would outlive a recording, in caches that the forward filled.

A table by length (rotary positions, a causal mask) is often kept in a dict or by ``functools.lru_cache``.
What a recording put there has no values, and the first real forward would find it. So it is taken out again.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from outsize.errors import RecordingError
from outsize.model.program import Node
from outsize.model.python_state import PythonState

__all__ = ["RecordedTensors", "caches_emptied", "refuse_recorded"]

_LRU_CACHE = type(functools.lru_cache(lambda: None))
_MAX_STEPS = 4  # from a tensor to what holds it: a tuple in a list in a dict


class RecordedTensors:
    """Knows the tensors of one recording, without keeping them."""

    def __init__(self) -> None:
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Add tensors that nobody should hold after the recording."""
        self._tensors += [weakref.ref(tensor) for tensor in tensors if isinstance(tensor, FakeTensor)]

    def alive(self) -> list[torch.Tensor]:
        """Return those that somebody still holds."""
        found = (each() for each in self._tensors)
        return [tensor for tensor in found if tensor is not None]


def refuse_recorded(node: Node, values: Mapping[int, Any]) -> None:
    """Check what a block returned in a run, before it is sent or added up.

    Raises:
        RecordingError: it has no values, though all that the block was given has.
    """
    if any(isinstance(values[value], FakeTensor) for value in node.outputs) and not any(
        isinstance(values[value], FakeTensor) for value in node.inputs
    ):
        raise RecordingError(
            f"module {node.target} computes with a tensor that has no values",
            why="its forward kept a tensor while it was recorded, in a place that was not found",
            attempt="keep it as a buffer (register_buffer), or in a dict on the module",
        )


@contextmanager
def caches_emptied(module: nn.Module) -> Iterator[RecordedTensors]:
    """Take tensors that are noted inside out of the caches where they are afterwards.

    Variables of the Python files behind ``module`` get their earlier contents back, other containers lose the
    entries, and functions with ``functools.lru_cache`` their results.
    """
    recorded = RecordedTensors()
    variables = PythonState()
    for table in _variables_behind(module):
        variables.keep(table, depth=2)
    try:
        yield recorded
    except BaseException:
        variables.put_back(_holds_recorded)
        _clear_all_function_caches()  # the traceback holds tensors too: who else does cannot be told
        raise
    if recorded.alive():
        variables.put_back(_holds_recorded)
        _take_out(recorded)


def _variables_behind(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the variables of the files that define the module's classes, and of the user's that they use."""
    classes = {base.__module__ for part in module.modules() for base in type(part).__mro__}
    defining = {name for name in classes if _may_hold_caches(name)}
    used = {_file_of(value) for name in defining for value in vars(sys.modules[name]).values()}
    for name in defining | {name for name in used if _may_hold_caches(name) and not _is_installed(name)}:
        yield vars(sys.modules[name])


def _file_of(value: Any) -> str:
    found = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return found if isinstance(found, str) else ""


def _may_hold_caches(name: str) -> bool:
    root = name.partition(".")[0]
    is_standard = root in sys.stdlib_module_names and root != "__main__"
    return name in sys.modules and not is_standard and root not in ("torch", "outsize", "numpy")


def _is_installed(name: str) -> bool:
    return "site-packages" in str(getattr(sys.modules[name], "__file__", ""))


def _holds_recorded(value: Any) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(value))


def _clear_all_function_caches() -> None:
    for each in gc.get_objects():
        if type(each) is _LRU_CACHE and any(_holds_recorded(item) for item in gc.get_referents(each)):
            each.cache_clear()


def _take_out(recorded: RecordedTensors) -> None:
    """Go from the tensors still alive to what holds them, and on through tuples and lists."""
    items: list[Any] = list(recorded.alive())
    for _ in range(_MAX_STEPS):
        if not items:
            return
        ids = {id(item) for item in items}
        holders = [each for each in gc.get_referrers(*items) if each is not items]
        items = [each for each in holders if isinstance(each, (tuple, list))]
        for holder in holders:
            _empty(holder, ids)


def _empty(holder: Any, ids: set[int]) -> None:
    """Let a cache, a dict, a closure or an object forget what has one of these ids."""
    if type(holder) is _LRU_CACHE:
        holder.cache_clear()
    elif isinstance(holder, types.CellType):
        holder.cell_contents = None
    elif isinstance(holder, dict):
        owner = _object_with_attributes(holder)
        for key in _keys_of(holder, ids):
            if owner is None:
                del holder[key]
            else:
                setattr(owner, key, None)
    elif type(attributes := getattr(holder, "__dict__", None)) is dict:
        for name in _keys_of(attributes, ids):
            setattr(holder, name, None)


def _keys_of(table: dict[Any, Any], ids: set[int]) -> list[Any]:
    return [key for key, value in table.items() if id(value) in ids]


def _object_with_attributes(table: dict[Any, Any]) -> Any:
    """Return the object, class or Python file whose attributes a dict has, or None for a plain dict."""
    for each in gc.get_referrers(table):
        if isinstance(each, type):
            if vars(each).keys() == table.keys():
                return each
        elif getattr(each, "__dict__", None) is table:
            return each
    return None
