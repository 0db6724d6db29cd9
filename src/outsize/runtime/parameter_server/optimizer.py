"""The optimizer on a server: torch.optim on the shards, also on single rows of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from outsize.errors import PlanError

__all__ = ["OptimizerSettings", "ShardOptimizer"]

_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
_STATES = {"sgd": ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq"), "adamw": ("exp_avg", "exp_avg_sq")}


@dataclass(frozen=True)
class OptimizerSettings:
    """An optimizer by name (sgd, adam or adamw) with torch.optim's own arguments."""

    name: str
    arguments: dict[str, Any]

    def __post_init__(self) -> None:
        if self.name not in _CLASSES:
            raise PlanError(
                f"servers have no optimizer {self.name!r}", attempt=f"use one of {', '.join(_CLASSES)}"
            )
        if self.arguments.get("amsgrad"):
            raise PlanError("servers do not run amsgrad", attempt="use adam or adamw without it")

    @property
    def state_names(self) -> tuple[str, ...]:
        """The optimizer's tensors of the parameter's own shape."""
        stateless = self.name == "sgd" and not self.arguments.get("momentum")
        return () if stateless else _STATES[self.name]

    def make(self, parameter: torch.Tensor) -> torch.optim.Optimizer:
        """Return the torch optimizer of one parameter."""
        return _CLASSES[self.name]([parameter], **self.arguments)


class ShardOptimizer:
    """Updates one tensor in place, whole or by rows.

    Elementwise optimizers do not care how a parameter is cut, so shards end up exactly where the whole would.
    A row update gathers the rows and their states, steps those, and puts them back: rows nobody pushed do not
    decay or drift (torch's SparseAdam is lazy in the same way), and cost nothing.
    """

    def __init__(self, settings: OptimizerSettings, tensor: torch.Tensor) -> None:
        self.settings = settings
        self.parameter = torch.nn.Parameter(tensor, requires_grad=False)
        self.optimizer = settings.make(self.parameter)
        self.step_count = torch.zeros((), dtype=torch.float32)
        self.states = {name: torch.zeros_like(tensor) for name in settings.state_names}
        self.optimizer.state[self.parameter] = self._state(self.states)

    def rebind(self, tensor: torch.Tensor) -> None:
        """Go on with another tensor of the same values."""
        self.parameter.data = tensor

    def step(self, gradient: torch.Tensor) -> None:
        """Apply a gradient of the whole tensor."""
        self.parameter.grad = gradient
        self.optimizer.step()
        self.parameter.grad = None
        self._count_sgd()

    def step_rows(self, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        """Apply a gradient of shape (len(rows), ...) to distinct rows."""
        part = torch.nn.Parameter(self.parameter[rows], requires_grad=False)
        states = {name: state[rows] for name, state in self.states.items()}
        optimizer = self.settings.make(part)
        optimizer.state[part] = self._state(states)
        part.grad = gradient
        optimizer.step()
        self.parameter[rows] = part.detach()
        for name, state in states.items():
            self.states[name][rows] = state
        self._count_sgd()

    def skip_step(self) -> None:
        """Count an update that touches no row here, so that the count does not depend on the cut."""
        self.step_count += 1

    def _count_sgd(self) -> None:
        if self.settings.name == "sgd":  # Adam counts by itself, in the shared tensor
            self.step_count += 1

    def _state(self, states: dict[str, torch.Tensor]) -> dict[str, Any]:
        counted = {} if self.settings.name == "sgd" else {"step": self.step_count}
        return counted | states
