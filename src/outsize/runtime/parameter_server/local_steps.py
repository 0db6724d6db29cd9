"""Several steps on a worker's own copy before anything is pushed, as in local SGD and DiLoCo."""

from __future__ import annotations

from collections.abc import Callable

import torch

from outsize.runtime.parameter_server.client import Pulled
from outsize.runtime.parameter_server.worker import Gradients

__all__ = ["local_steps"]


def local_steps(
    local_step: Callable[[dict[str, torch.Tensor], int], None], num_steps: int, num_workers: int
) -> Callable[[Pulled], Gradients]:
    """Return a function for ``StepContext.update`` that pushes how far ``num_steps`` local steps moved.

    ``local_step(parameters, step)`` changes the parameters in place. What is pushed is
    ``(before - after) / num_workers``: with plain SGD at learning rate 1 and a synchronous policy the servers
    then average the workers' results (local SGD); with Nesterov momentum they run DiLoCo's outer optimizer
    (Douillard et al. 2023, algorithm 1).
    """

    def compute(pulled: Pulled) -> Gradients:
        local = {name: tensor.clone() for name, tensor in pulled.parameters.items()}
        for step in range(num_steps):
            local_step(local, step)
        return Gradients({name: (pulled.parameters[name] - local[name]) / num_workers for name in local})

    return compute
