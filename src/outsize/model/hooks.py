"""Hooks on modules, which act on calls that a recording makes or leaves out."""

from __future__ import annotations

from torch import nn

from outsize.errors import RecordingError

__all__ = ["hook_warnings", "refuse_backward_hooks"]


def refuse_backward_hooks(module: nn.Module) -> None:
    """Refuse modules with hooks on their gradients.

    Torch puts an autograd function around such a module whose backward a recording would not have: all
    parameters before it would get no gradient.

    Raises:
        RecordingError: a module has backward hooks.
    """
    for name, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise RecordingError(
                f"module {name or 'at the top'} has backward hooks",
                why="gradients would not flow through it when blocks are called by themselves",
                attempt="hooks on its parameters, or an autograd function in its forward",
            )


def hook_warnings(module: nn.Module, blocks: set[str]) -> list[str]:
    """Warn of forward hooks on blocks: they run when the block is called, and were recorded around it too."""
    return [
        f"block {name} has forward hooks: what they change of its inputs or outputs is changed twice; "
        "put such changes into forward"
        for name in sorted(blocks)
        if module.get_submodule(name)._forward_hooks or module.get_submodule(name)._forward_pre_hooks
    ]
