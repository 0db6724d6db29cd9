"""Builds the optimizer that a plan names."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from outsize.errors import PlanError
from outsize.plan.plan import OptimizerSpec

__all__ = ["build_optimizer"]


def build_optimizer(spec: OptimizerSpec, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer for the trainable ones of ``parameters``.

    Raises:
        PlanError: the plan names an optimizer that is not known.
    """
    # One group: it may be empty, where all that a process holds is frozen.
    trainable = [{"params": [parameter for parameter in parameters if parameter.requires_grad]}]
    rate, decay = spec.learning_rate, spec.weight_decay
    if spec.name == "adamw":
        return torch.optim.AdamW(trainable, lr=rate, betas=spec.betas, weight_decay=decay)
    if spec.name == "adam":
        return torch.optim.Adam(trainable, lr=rate, betas=spec.betas, weight_decay=decay)
    if spec.name == "sgd":
        return torch.optim.SGD(trainable, lr=rate, momentum=spec.momentum, weight_decay=decay)
    raise PlanError(
        f"The plan names the optimizer {spec.name!r}.",
        why="The optimizers are adamw, adam and sgd.",
        attempt="one of these in the plan.",
    )
