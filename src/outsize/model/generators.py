"""Random generators that a forward draws from: the module's go on, one made in the forward starts anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from outsize.errors import RecordingError
from outsize.model.user_frame import user_frame

__all__ = ["ModuleGenerators"]


class ModuleGenerators:
    """Knows the generators that a module's attributes hold, and where each of them stood.

    They go by their address: operators are given other Python objects for the same generator.
    """

    def __init__(self, module: nn.Module) -> None:
        held = [leaf for part in module.modules() for leaf in tree_leaves(list(vars(part).values()))]
        self._held = {_address(each): each for each in held if isinstance(each, torch.Generator)}
        self._states = {address: _state(each) for address, each in self._held.items()}
        self._accepted = {_address(torch.default_generator)}

    def put_back(self) -> None:
        """Let the module's generators stand where they stood."""
        for address, generator in self._held.items():
            with _disable_current_modes():
                generator.set_state(self._states[address])

    def refuse_others(self, leaves: list[Any]) -> None:
        """Check what an operator between blocks draws from, by its flattened arguments.

        Raises:
            RecordingError: a generator that was made or seeded in the forward.
        """
        for leaf in leaves:
            if not isinstance(leaf, torch.Generator) or _address(leaf) in self._accepted:
                continue
            before = self._states.get(_address(leaf))
            if before is None or not _is_same(before, _state(leaf)):
                raise RecordingError(
                    f"the forward draws from a random generator that it makes or seeds, at {user_frame()}",
                    why="a recording would draw on from it, and not seed it again in every forward",
                    attempt="numbers drawn once and registered as a buffer, or a generator of the module's",
                )
            self._accepted.add(_address(leaf))


def _address(generator: torch.Generator) -> int:
    return int(getattr(generator, "_cdata"))  # noqa: B009 - torch's stubs do not have it


def _state(generator: torch.Generator) -> torch.Tensor:
    with _disable_current_modes():
        return generator.get_state()


def _is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    with _disable_current_modes():
        return torch.equal(left, right)
