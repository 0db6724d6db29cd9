"""Finds buffers that a forward writes, such as running statistics, and says what micro-batches do to them."""

from __future__ import annotations

from torch import nn

from outsize.model.program import Program

__all__ = ["written_buffer_warnings"]


def written_buffer_warnings(program: Program, module: nn.Module) -> list[str]:
    """Return what to know of the buffers that a training step writes several times; nothing without any.

    Those of batch norm layers have a warning of their own.
    """
    names = [name for name in program.written_buffers if not _is_of_batch_norm(module, name)]
    if not names:
        return []
    owner, _, buffer = names[0].rpartition(".")
    others = f" ({len(names) - 1} more are written like it)" if len(names) > 1 else ""
    return [
        f"the forward of {owner or 'the model'} writes its buffer {buffer}{others}: in each step once for "
        "every micro-batch, from that micro-batch alone, and on every replica a copy of its own; one process "
        "would write it once a step, from the whole batch. Training depends on how many micro-batches and "
        "replicas there are"
    ]


def _is_of_batch_norm(module: nn.Module, name: str) -> bool:
    return isinstance(module.get_submodule(name.rpartition(".")[0]), nn.modules.batchnorm._BatchNorm)
