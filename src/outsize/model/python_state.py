"""What Python objects held at one time, so that it can be put back: their attributes and containers."""

from __future__ import annotations

import operator
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["PythonState"]

_MAPPINGS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, deque)
_CONTAINERS = (*_MAPPINGS, *_SEQUENCES, set)
_PLAIN = frozenset((bool, int, float, str, type(None)))
_NOT_LOOKED_INTO = (
    torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType,
)  # fmt: skip

# Deeper and larger things are data, not what a forward notes for its next call.
_MAX_DEPTH = 4
_MAX_LOOKED_INTO = 1000


class PythonState:
    """Shallow copies of containers and attributes, reached from those that :meth:`keep` was given."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Any, Any]] = {}  # id -> container, copy

    def keep(self, value: Any, depth: int = 0) -> None:
        """Remember what ``value`` holds: a container, or an object by its attributes; and what is inside it.

        ``depth`` is how many of the levels that are looked into are above it already.
        """
        container = _container_of(value)
        if container is None or id(container) in self._held or depth > _MAX_DEPTH:
            return
        copy = container.copy()
        self._held[id(container)] = (container, copy)
        if len(copy) <= _MAX_LOOKED_INTO:
            for each in _items(copy):
                if type(each) not in _PLAIN:
                    self.keep(each, depth + 1)

    def put_back(self, holds: Callable[[Any], bool] | None = None) -> None:
        """Give containers their contents back; with ``holds`` those alone that have such an item now."""
        for container, copy in self._held.values():
            if not _is_same(container, copy) and (holds is None or any(map(holds, _items(container)))):
                _fill(container, copy)


def _container_of(value: Any) -> Any:
    if type(value) in _CONTAINERS:
        return value
    if isinstance(value, _NOT_LOOKED_INTO) or type(value).__module__.startswith("torch._"):
        return None
    attributes = getattr(value, "__dict__", None)
    return attributes if type(attributes) is dict else None


def _items(container: Any) -> Iterator[Any]:
    return iter(container.values() if isinstance(container, dict) else container)


def _is_same(container: Any, copy: Any) -> bool:
    """Tell whether a container holds the very objects of its copy."""
    if len(container) != len(copy):
        return False
    if isinstance(container, set):
        return bool(container == copy)
    is_same = all(map(operator.is_, _items(container), _items(copy)))
    return is_same and (not isinstance(container, dict) or list(container) == list(copy))


def _fill(container: Any, copy: Any) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(copy)
    else:
        container.extend(copy)
