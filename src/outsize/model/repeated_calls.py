"""Calls of alike blocks: the first is run, later ones get results of the same shapes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from outsize.model.block_signature import PLAIN, module_signature

__all__ = ["RepeatedCalls"]


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that a block made."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class _Passed:
    """An argument that a block returns as it is."""

    position: int


@dataclass(frozen=True, slots=True)
class _Result:
    leaves: tuple[Any, ...]
    structure: TreeSpec
    is_random: bool
    detached: tuple[int, ...]


class RepeatedCalls:
    """Remembers the shapes of results by block and arguments."""

    def __init__(self) -> None:
        self._results: dict[Hashable, _Result] = {}
        self._signatures: dict[int, Hashable] = {}

    def key(self, block: nn.Module, args: Any, kwargs: Any) -> Hashable | None:
        """Return what makes two calls alike, or None if a call cannot be compared."""
        leaves, structure = tree_flatten((args, kwargs))
        described: list[Hashable] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                described.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad))
            elif isinstance(leaf, PLAIN):
                described.append((type(leaf), leaf))
            else:
                return None
        if id(block) not in self._signatures:
            self._signatures[id(block)] = module_signature(block)
        return self._signatures[id(block)], tuple(described), str(structure), torch.is_grad_enabled()

    def remember(
        self,
        key: Hashable,
        args: Any,
        kwargs: Any,
        result: Any,
        is_random: bool,
        detached: tuple[int, ...],
    ) -> None:
        """Remember a result, unless it holds views of arguments or objects.

        ``detached`` are the positions of arguments that it gives no gradient to.
        """
        arguments = tree_flatten((args, kwargs))[0]
        positions = {id(leaf): at for at, leaf in enumerate(arguments) if isinstance(leaf, torch.Tensor)}
        storages = {_address(leaf) for leaf in arguments if isinstance(leaf, torch.Tensor)}
        leaves, structure = tree_flatten(result)
        kept: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, PLAIN):
                kept.append(leaf)
            elif id(leaf) in positions:
                kept.append(_Passed(positions[id(leaf)]))
            elif isinstance(leaf, torch.Tensor) and _address(leaf) not in storages:
                storages.add(_address(leaf))
                kept.append(_Made(leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad))
            else:
                return
        self._results[key] = _Result(tuple(kept), structure, is_random, detached)

    def result(self, key: Hashable, args: Any, kwargs: Any) -> tuple[Any, bool, tuple[int, ...]] | None:
        """Return a known result, made of new tensors, and what else was remembered of it."""
        found = self._results.get(key)
        if found is None:
            return None
        arguments = tree_flatten((args, kwargs))[0]
        leaves = [_make(leaf, arguments) for leaf in found.leaves]
        return tree_unflatten(leaves, found.structure), found.is_random, found.detached


def _make(leaf: Any, arguments: list[Any]) -> Any:
    if isinstance(leaf, _Passed):
        return arguments[leaf.position]
    if not isinstance(leaf, _Made):
        return leaf
    made = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="cpu")
    return made.requires_grad_().clone() if leaf.requires_grad else made


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
