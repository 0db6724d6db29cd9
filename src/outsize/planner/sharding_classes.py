"""Find the repeated blocks of a program, so that their copies share one decision.

Nodes are grouped by the innermost numbered module they ran in (``model.layers.3``). Groups whose nodes and
inner wiring are the same are copies; the nodes at one position of all copies form a class.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outsize.model.operator_rules.signature import signature_of
from outsize.model.program import Node, NodeKind, Program

__all__ = ["NodeClass", "ValueGroup", "classify_nodes", "group_values"]

_NUMBERED = re.compile(r"^(.*\.)?\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class NodeClass:
    """Nodes that are decided as one; ``representative`` is the first of them."""

    index: int
    representative: int
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ValueGroup:
    """Values made by one class at one output position and read by the same consumers.

    ``consumers`` are (class index, which of its tensor inputs).
    """

    producer: int
    output: int
    consumers: tuple[tuple[int, int], ...]
    value: int  # one of them
    count: int


def classify_nodes(program: Program, nodes: Sequence[int], decided: Mapping[int, str]) -> list[NodeClass]:
    """Return the classes of ``nodes``, in the order of their representatives.

    ``decided`` are the nodes that the user has decided, in which copies of a block may differ.
    """
    by_key: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for block in _blocks(program, nodes):
        key = _block_key(program, block, decided)
        for position, index in enumerate(block):
            by_key[key, position].append(index)
    ordered = sorted(by_key.values(), key=lambda members: members[0])
    return [NodeClass(i, members[0], tuple(members)) for i, members in enumerate(ordered)]


def _blocks(program: Program, nodes: Sequence[int]) -> list[list[int]]:
    """Return runs of nodes by numbered module; nodes outside any stand alone."""
    blocks: dict[str, list[int]] = defaultdict(list)
    for index in nodes:
        found = _NUMBERED.match(program.nodes[index].module_path)
        blocks[found[0] if found else f"#{index}"].append(index)
    return list(blocks.values())


def _block_key(program: Program, block: list[int], decided: Mapping[int, str]) -> tuple[object, ...]:
    if len(block) == 1:
        return (block[0],)
    position = {
        v: (p, o) for p, index in enumerate(block) for o, v in enumerate(program.nodes[index].outputs)
    }
    outside: dict[int, int] = {}
    described: list[object] = []
    for index in block:
        node = program.nodes[index]
        wiring = tuple(position.get(v) or outside.setdefault(v, len(outside)) for v in node.inputs)
        described.append((_node_key(program, node), wiring, decided.get(index, "")))
    return tuple(described)


def _node_key(program: Program, node: Node) -> str:
    if node.kind is NodeKind.OPERATOR:
        return signature_of(program, node).key
    specs = [program.specs[value] for value in node.outputs]
    return f"{node.kind}{specs}"


def group_values(
    program: Program, classes: Sequence[NodeClass], nodes: Sequence[int], wanted: Sequence[int]
) -> list[ValueGroup]:
    """Group the values between ``nodes`` by who makes and who reads them.

    A wanted value has one more consumer, ``(-1, 0)``.
    """
    class_of = {index: found.index for found in classes for index in found.nodes}
    readers: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for index in nodes:
        for position, value in enumerate(program.nodes[index].inputs):
            readers[value].add((class_of[index], position))
    for value in wanted:
        readers[value].add((-1, 0))
    groups: dict[tuple[int, int, tuple[tuple[int, int], ...]], list[int]] = defaultdict(list)
    for index in nodes:
        for output, value in enumerate(program.nodes[index].outputs):
            if readers[value]:
                groups[class_of[index], output, tuple(sorted(readers[value]))].append(value)
    return [ValueGroup(*key, values[0], len(values)) for key, values in groups.items()]
