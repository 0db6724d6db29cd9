"""Buffers that a block writes and that something else uses too: both must lie in one stage.

    block 0 ──writes──▶ usage ◀──reads── loss        block 0 ─▶ norm ◀─ block 1 (one norm in both)

Every stage has its own copy of a buffer, so copies of one that is written would come to differ.
"""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from outsize.model.program import NodeKind, Program

__all__ = ["spans_of_shared_buffers"]


def spans_of_shared_buffers(program: Program, module: nn.Module) -> tuple[tuple[int, int], ...]:
    """Return the first and the last node that use each buffer which a block writes and others use too.

    A block alike one that was run writes what that one wrote: so buffers are told by their owner's class.
    """
    owners = dict(module.named_modules(remove_duplicate=False))
    kinds = {_kind_of(owners, name) for name in program.written_buffers}
    if not kinds:
        return ()
    users: dict[int, list[int]] = defaultdict(list)
    written_in_blocks: set[int] = set()
    named_by_value: dict[int, int] = {}
    for index, node in enumerate(program.nodes):
        target = str(node.target)
        for value in node.inputs:
            if value in named_by_value:
                users[named_by_value[value]].append(index)
        if node.kind is NodeKind.BUFFER:
            named_by_value[node.outputs[0]] = id(module.get_buffer(target))
        elif node.kind is NodeKind.MODULE:
            for name, buffer in module.get_submodule(target).named_buffers(prefix=target):
                users[id(buffer)].append(index)
                if _kind_of(owners, name) in kinds:
                    written_in_blocks.add(id(buffer))
    return tuple((found[0], found[-1]) for buffer, found in users.items() if buffer in written_in_blocks)


def _kind_of(owners: dict[str, nn.Module], name: str) -> tuple[type[nn.Module], str]:
    owner, _, leaf = name.rpartition(".")
    return type(owners[owner]), leaf
