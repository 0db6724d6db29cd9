"""A slice of a program as a module that can be trained."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_unflatten

from outsize.model.lasting_tensors import refuse_recorded
from outsize.model.prepared_call import prepare_call
from outsize.model.program import Node, NodeKind, Program, Ref
from outsize.model.recompute import recomputed
from outsize.model.slice import Slice
from outsize.model.zero_share import zero_share

__all__ = ["StageModule"]


class StageModule(nn.Module):
    """Executes one slice. ``forward(*received, **batch_entries)`` returns the values sent, as a tuple.

    The last stage returns the model's own output. Blocks are shared with the module the program was recorded
    from; parameters and buffers read between blocks are registered at the same place, so that every name in
    ``named_parameters()`` is the full name in the whole model.
    """

    def __init__(self, program: Program, part: Slice, module: nn.Module) -> None:
        super().__init__()
        self.program = program
        self.part = part
        self._constants = dict(program.constants)
        for name in part.modules:
            self._place_module(name, module.get_submodule(name))
        for name in part.parameters:
            owner, _, leaf = name.rpartition(".")
            self._container(owner)._parameters[leaf] = module.get_submodule(owner)._parameters[leaf]
        for name in part.buffers:
            owner, _, leaf = name.rpartition(".")
            self._container(owner)._buffers[leaf] = module.get_submodule(owner)._buffers[leaf]
        self._written_entries = _written_entries(program)
        self._steps = self._prepare_steps()

    def apply_recompute(self, blocks: Collection[str]) -> None:
        """Keep only the inputs of these blocks from forward to backward, and run them again there."""
        self._steps = [
            (node, prepare_call(node, recomputed(self._container(str(node.target)))), dropped)
            if node.kind is NodeKind.MODULE and node.target in blocks
            else (node, callee, dropped)
            for node, callee, dropped in self._steps
        ]

    def _container(self, path: str) -> nn.Module:
        """Return the module at ``path``, making empty ones on the way.

        Names are those of the user's model, and may be those of attributes of this class.
        """
        current: nn.Module = self
        for part in path.split(".") if path else ():
            if part not in current._modules:
                current._modules[part] = nn.Module()
            current = current._modules[part]  # type: ignore[assignment]
        return current

    def _place_module(self, path: str, module: nn.Module) -> None:
        owner, _, leaf = path.rpartition(".")
        self._container(owner)._modules[leaf] = module

    def _prepare_steps(self) -> list[tuple[Node, Any, tuple[int, ...]]]:
        """Return ``(node, what to call or look up, values to drop afterwards)`` for every node."""
        kept = set(self.part.sent) if not self.part.is_last else _references(self.program.outputs)
        last_use: dict[int, int] = {}
        nodes = [self.program.nodes[index] for index in self.part.nodes]
        for position, node in enumerate(nodes):
            for value in (*node.outputs, *node.inputs):
                last_use[value] = position
        dropped: dict[int, list[int]] = {}
        for value, position in last_use.items():
            if value not in kept:
                dropped.setdefault(position, []).append(value)
        return [(node, self._callee(node), tuple(dropped.get(at, ()))) for at, node in enumerate(nodes)]

    def _callee(self, node: Node) -> Any:
        if node.kind is NodeKind.MODULE:
            return prepare_call(node, self._container(str(node.target)))
        if node.kind in (NodeKind.PARAMETER, NodeKind.BUFFER):
            owner, _, leaf = str(node.target).rpartition(".")
            held = self._container(owner)
            return (held._parameters if node.kind is NodeKind.PARAMETER else held._buffers), leaf
        if node.kind in (NodeKind.INPUT, NodeKind.CONSTANT, NodeKind.LOSS_SHARE):
            return node.target
        assert callable(node.target)
        return prepare_call(node, node.target)

    def forward(
        self,
        *received: torch.Tensor,
        loss_scales: Sequence[float] | None = None,
        **batch_entries: torch.Tensor,
    ) -> Any:
        """Run the slice; ``loss_scales`` multiply the loss terms of a program from ``share_loss``."""
        values: dict[int, Any] = dict(zip(self.part.received, received, strict=True))
        for node, callee, dropped in self._steps:
            if node.kind is NodeKind.LOSS_SHARE:
                values[node.outputs[0]] = _share(node, values, loss_scales)
            else:
                self._run_step(node, callee, values, batch_entries)
            for value in dropped:
                values.pop(value, None)
        if not self.part.is_last:
            return tuple(values[value] for value in self.part.sent)
        leaves = [values[leaf.value] if isinstance(leaf, Ref) else leaf for leaf in self.program.outputs]
        return tree_unflatten(leaves, self.program.output_structure)

    def _run_step(
        self, node: Node, callee: Any, values: dict[int, Any], batch_entries: Mapping[str, torch.Tensor]
    ) -> None:
        if node.kind is NodeKind.INPUT:
            entry = batch_entries[callee]
            # several stages may do what the model writes into it: each to a copy of its own
            values[node.outputs[0]] = entry.clone() if callee in self._written_entries else entry
        elif node.kind in (NodeKind.PARAMETER, NodeKind.BUFFER):
            table, name = callee
            values[node.outputs[0]] = table[name]
        elif node.kind is NodeKind.CONSTANT:
            values[node.outputs[0]] = self._constants[callee]
        else:
            callee(values)
            if node.kind is NodeKind.MODULE:
                refuse_recorded(node, values)


def _share(node: Node, values: Mapping[int, Any], loss_scales: Sequence[float] | None) -> Any:
    """Return a loss term (or a number that the loss adds) times its share."""
    (argument,) = node.arguments
    term = values[argument.value] if isinstance(argument, Ref) else argument
    scale = 1.0 if loss_scales is None else loss_scales[int(str(node.target))]
    if scale == 1.0:
        return term
    return term * scale if scale or not isinstance(term, torch.Tensor) else zero_share(term)


def _references(outputs: Sequence[Any]) -> set[int]:
    return {leaf.value for leaf in outputs if isinstance(leaf, Ref)}


def _written_entries(program: Program) -> set[str]:
    """Return the entries of the batch that the program writes in place."""
    written = {program.storages[value] for node in program.nodes for value in node.mutates}
    return {
        str(node.target)
        for _, node in program.nodes_of_kind(NodeKind.INPUT)
        if program.storages[node.outputs[0]] in written
    }
