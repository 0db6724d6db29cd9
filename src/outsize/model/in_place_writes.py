"""Turns writes in place into new values where nothing else sees the memory, so that cuts may come between.

h ──▶ block ──▶ add_(h, ·) ──▶ h        h ──▶ block ──▶ add(h, ·) ──▶ h'
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from outsize.model.program import Node, NodeKind, Program, Ref

__all__ = ["apply_out_of_place", "out_of_place_form"]


def apply_out_of_place(program: Program) -> None:
    """Replace operators that write in place by those that do not, where it makes no difference.

    That is where the memory was made by a block or an operator, and nothing reads it afterwards but through
    the operator's result. A write under `no_grad` leaves its value the history it had; a new value has none.
    """
    last_read = {value: at for at, node in enumerate(program.nodes) for value in node.inputs}
    last_read |= {leaf.value: len(program.nodes) for leaf in program.outputs if isinstance(leaf, Ref)}
    last_read |= {guard.value: len(program.nodes) for guard in program.guards}
    sharing: dict[int, list[int]] = {}
    for value, storage in program.storages.items():
        sharing.setdefault(storage, []).append(value)
    producers = program.producers
    for index, node in enumerate(program.nodes):
        replacement = _out_of_place(program, node)
        if replacement is None:
            continue
        (written,) = node.mutates
        before = [value for value in sharing[program.storages[written]] if producers[value] < index]
        is_seen = any(last_read.get(value, -1) > index for value in before)
        is_held = any(program.nodes[producers[value]].kind not in _COMPUTED for value in before)
        if is_seen or is_held:
            continue
        program.nodes[index] = replace(node, target=replacement, mutates=())
        _move(
            program, sharing, [value for value in sharing[program.storages[written]] if value not in before]
        )


_COMPUTED = (NodeKind.MODULE, NodeKind.OPERATOR)


def _out_of_place(program: Program, node: Node) -> Callable[..., Any] | None:
    """Return the operator that makes a new value in the place of one that writes its first argument."""
    if len(node.mutates) != 1 or len(node.outputs) != 1:
        return None
    dtypes = {program.specs[value].dtype for value in node.inputs}
    keeps_history = not node.grad_enabled and program.specs[node.mutates[0]].requires_grad
    is_plain = not node.is_random and not keeps_history and node.mutates == node.inputs[:1]
    return out_of_place_form(node.target) if is_plain and len(dtypes) == 1 else None


def out_of_place_form(target: object) -> Callable[..., Any] | None:
    """Return the operator that computes what ``target``, such as ``add_``, writes; None if there is none."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name = target._schema.name.removeprefix("aten::")
    if not name.endswith("_") or not hasattr(torch.ops.aten, name[:-1]):
        return None
    packet = getattr(torch.ops.aten, name[:-1])
    found = getattr(packet, target._overloadname, None)
    return None if found is None or found.is_view else found


def _move(program: Program, sharing: dict[int, list[int]], values: list[int]) -> None:
    """Give values, which were in the memory of others, memory of their own."""
    old, new = program.storages[values[0]], min(0, *program.storages.values()) - 1
    for value in values:
        program.storages[value] = new
    sharing[old] = [value for value in sharing[old] if value not in values]
    sharing[new] = values
