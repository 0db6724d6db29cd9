"""Which nodes of a program its outputs depend on."""

from __future__ import annotations

from collections.abc import Iterable

from outsize.model.program import Node, NodeKind, Program, Ref

__all__ = ["buffer_writers", "live_nodes", "output_values", "wanted_values"]


def wanted_values(program: Program) -> tuple[int, ...]:
    """Return the values a program is run for: the loss where it has one, else every output."""
    if program.loss_value is not None:
        return (program.loss_value,)
    return output_values(program)


def output_values(program: Program) -> tuple[int, ...]:
    """Return the values that the program returns, each once."""
    return tuple(dict.fromkeys(leaf.value for leaf in program.outputs if isinstance(leaf, Ref)))


def buffer_writers(program: Program) -> dict[int, set[int]]:
    """Return the nodes that write buffers, such as running statistics between blocks, with those storages."""
    buffers = {
        program.storages[value]
        for _, node in program.nodes_of_kind(NodeKind.BUFFER)
        for value in node.outputs
    }
    found = {}
    for index, node in enumerate(program.nodes if buffers else ()):
        written = buffers & {program.storages[value] for value in _written(node)}
        if written:
            found[index] = written
    return found


def _written(node: Node) -> tuple[int, ...]:
    """Return the values that a node writes in place; batch norm in training does not declare it."""
    is_undeclared = "batch_norm" in str(node.target) and any(each is True for each in node.arguments)
    return node.inputs if is_undeclared and node.kind is NodeKind.OPERATOR else node.mutates


def live_nodes(program: Program, wanted: Iterable[int] | None = None) -> list[int]:
    """Return indices of the nodes that ``wanted`` values (:func:`wanted_values`) need, in order.

    In-place writes to a storage that is needed are needed too, and with them what they read; so are writes to
    buffers, which the next step may read.
    """
    producers = program.producers
    writers: dict[int, list[int]] = {}
    for index, node in enumerate(program.nodes):
        for value in node.mutates:
            writers.setdefault(program.storages[value], []).append(index)
    live: set[int] = set()
    wanted = wanted_values(program) if wanted is None else wanted
    stack = [producers[value] for value in wanted] + [*buffer_writers(program)]
    while stack:
        index = stack.pop()
        if index in live:
            continue
        live.add(index)
        node = program.nodes[index]
        stack += [producers[value] for value in node.inputs]
        for value in node.outputs:
            stack += writers.get(program.storages[value], ())
    return sorted(live)
