"""The public form of recording: of a module, or of a factory, which must build the same model twice."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

from outsize.errors import ModelError, RecordingError
from outsize.model.batch_norm import batch_norm_warnings
from outsize.model.block_signature import PLAIN
from outsize.model.deferred import build_deferred
from outsize.model.factory_digest import first_difference
from outsize.model.program import Node, NodeKind, Program
from outsize.model.record import Granularity, record_module
from outsize.model.written_buffers import written_buffer_warnings

__all__ = ["record"]


def record(
    source: nn.Module | Callable[[], nn.Module], batch: Any, *, granularity: Granularity = "blocks"
) -> Program:
    """Record the forward of a module, or of what a factory builds without memory.

    A factory is called twice, and both recordings must be the same.

    Raises:
        ModelError: the factory fails, or builds another model the second time.
        RecordingError: the forward cannot be recorded.
    """
    if isinstance(source, nn.Module):
        module = source
        program = record_module(module, batch, granularity=granularity)
    else:
        first, second = build_deferred(source), build_deferred(source)
        difference = first_difference(first, second)
        if difference is not None:
            raise ModelError(
                f"the factory builds another model every time: {difference}",
                why="every process calls the factory, and all have to build the same model",
                attempt="take random numbers, counters and global state out of the factory",
            )
        module = first.module
        program = record_module(module, batch, granularity=granularity)
        _compare_steps(program, record_module(second.module, batch, granularity=granularity))
    program.module = module
    program.warnings += batch_norm_warnings(module) + written_buffer_warnings(program, module)
    return program


def _compare_steps(program: Program, again: Program) -> None:
    for first, second in zip(program.nodes, again.nodes, strict=False):
        if _step(first) != _step(second):
            raise RecordingError(
                f"two recordings differ: {first.target} in {first.module_path or 'the model'}, "
                f"then {second.target}",
                why="the forward depends on something that is neither the batch nor a parameter",
                attempt="take random choices and global state out of the forward",
            )
    if len(program.nodes) != len(again.nodes):
        raise RecordingError(
            f"two recordings have {len(program.nodes)} and {len(again.nodes)} steps",
            why="the forward depends on something that is neither the batch nor a parameter",
            attempt="take random choices and global state out of the forward",
        )


def _step(node: Node) -> Hashable:
    target = str(node.target) if node.kind is NodeKind.OPERATOR else node.target
    # as text: NaN is a setting too, and differs from itself
    settings = tuple(repr(argument) for argument in node.arguments if isinstance(argument, PLAIN))
    return node.kind, target, node.inputs, settings, node.outputs, node.module_path
