"""Tell which slices of a program are the same block again, so that each is costed once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from outsize.model.program import Node, NodeKind, Program, Ref
from outsize.model.slice import Slice

__all__ = ["PLAIN", "module_signature", "slice_signature"]

# Arguments and settings that compare by value.
PLAIN = (bool, int, float, str, type(None), torch.dtype)


def slice_signature(program: Program, part: Slice, module: nn.Module) -> Hashable:
    """Return what two slices have in common if they do the same on values of the same shapes."""
    local: dict[int, int] = {value: -1 - at for at, value in enumerate(part.received)}
    nodes = []
    for index in part.nodes:
        node = program.nodes[index]
        for value in node.outputs:
            local[value] = len(local)
        nodes.append(_node_signature(node, program, local, module))
    received = tuple(program.specs[value] for value in part.received)
    sent = tuple(local[value] for value in part.sent)
    return received, tuple(nodes), sent, part.is_last


def _node_signature(node: Node, program: Program, local: dict[int, int], module: nn.Module) -> Hashable:
    if node.kind is NodeKind.MODULE:
        target: Hashable = module_signature(module.get_submodule(str(node.target)))
    elif node.kind is NodeKind.OPERATOR:
        target = str(node.target)
    else:
        target = tuple(program.specs[value] for value in node.outputs)
    arguments = tuple(
        ("value", local.get(argument.value, argument.value))
        if isinstance(argument, Ref)
        else _literal(argument)
        for argument in node.arguments
    )
    return node.kind, target, arguments, node.grad_enabled


def _literal(argument: Any) -> Hashable:
    return argument if isinstance(argument, PLAIN) else type(argument).__qualname__


def module_signature(module: nn.Module) -> tuple[Hashable, ...]:
    """Return the classes, settings, and shapes of parameters and buffers of a module and all inside it.

    A module's own position (``layer_idx`` and the like) makes no difference.
    """
    return tuple(
        (
            name,
            _class_of(part),
            part.training,
            tuple(sorted(_settings(part))),
            tuple(_tensors(part)),
        )
        for name, part in module.named_modules()
    )


def _class_of(part: nn.Module) -> Hashable:
    """Return the class; torch makes one for each parametrised module, of which the one below counts."""
    return ("parametrised", type(part).__mro__[1]) if is_parametrized(part) else (type(part),)


def _settings(part: nn.Module) -> Iterator[tuple[str, str]]:
    for key, value in vars(part).items():
        if isinstance(value, PLAIN) and not key.startswith("_") and not key.endswith(("idx", "index")):
            yield key, str(value)


def _tensors(part: nn.Module) -> Iterator[Hashable]:
    for table in (part._parameters, part._buffers):
        for key, tensor in table.items():
            if tensor is not None:
                yield key, tuple(tensor.shape), tensor.dtype, tensor.requires_grad
