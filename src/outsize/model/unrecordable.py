"""Modules that cannot be recorded, told before the recording runs."""

from __future__ import annotations

import torch
from torch import nn

from outsize.errors import RecordingError

__all__ = ["refuse_parameter_hooks", "refuse_unrecordable"]


def refuse_unrecordable(module: nn.Module) -> None:
    """Refuse modules with hooks on their gradients, and modules that are compiled to TorchScript.

    Torch puts an autograd function around a module with backward hooks whose backward a recording would not
    have: all parameters before it would get no gradient. Operators inside a scripted module cannot be seen.

    Raises:
        RecordingError: a module is such a one.
    """
    for name, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise RecordingError(
                f"module {name or 'at the top'} has backward hooks",
                why="gradients would not flow through it when blocks are called by themselves",
                attempt="an autograd function in its forward",
            )
        if isinstance(part, torch.jit.ScriptModule):
            raise RecordingError(
                f"module {name or 'at the top'} is compiled to TorchScript",
                why="its operators cannot be seen, and it does not run without values",
                attempt="the module that was given to torch.jit.script",
            )


def refuse_parameter_hooks(module: nn.Module) -> None:
    """Refuse hooks on parameters' gradients: they would see those of single micro-batches, and of shards.

    Raises:
        RecordingError: a parameter has one.
    """
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise RecordingError(
                f"parameter {name} has a hook on its gradient",
                why="it would run for every micro-batch, and where parameters are split on a part of it",
                attempt="freeze with requires_grad_(False), or multiply by a mask in the forward",
            )
