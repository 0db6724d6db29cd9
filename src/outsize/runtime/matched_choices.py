"""How the operators of a program are split that the plan was not made for, such as the model without labels.

Operators are compared module by module, in order. As long as they are those of the program that the plan was
made for, they run as there; where the two part, as they do at the loss, every rank runs the whole operator:

    planned for    embed  block.0: mm silu mm   head: mm   top: view log_softmax nll_loss
    this one       embed  block.0: mm silu mm   head: mm   top: view argmax
                   as planned                                        └─ whole
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from outsize.model.liveness import live_nodes
from outsize.model.program import Node, NodeKind, Program
from outsize.plan.sharding import REPLICATED, UNUSED

__all__ = ["matched_choices"]


def matched_choices(
    program: Program, planned_for: Program, choices: Sequence[int], wanted: Sequence[int]
) -> tuple[int, ...]:
    """Return a choice for each node of ``program``, of which the values ``wanted`` are.

    ``choices`` are those of ``planned_for``, another recording of the same model.
    """
    parameters = {
        str(node.target): choices[index] for index, node in planned_for.nodes_of_kind(NodeKind.PARAMETER)
    }
    planned = _Planned(planned_for, choices)
    live = set(live_nodes(program, wanted))
    found = []
    for index, node in enumerate(program.nodes):
        choice = REPLICATED
        if node.kind is NodeKind.PARAMETER:
            choice = parameters.get(str(node.target), REPLICATED)
        elif node.kind is NodeKind.OPERATOR:
            choice = planned.next_for(node)
        if index not in live:
            choice = UNUSED
        elif choice == UNUSED:  # nothing needed it there
            choice = REPLICATED
        found.append(choice)
    return tuple(found)


class _Planned:
    """The operators of each module that were planned, handed out in order until they differ."""

    def __init__(self, program: Program, choices: Sequence[int]) -> None:
        by_module: dict[str, list[tuple[Node, int]]] = defaultdict(list)
        for index, node in program.nodes_of_kind(NodeKind.OPERATOR):
            by_module[node.module_path].append((node, choices[index]))
        self._left: dict[str, Iterator[tuple[Node, int]]] = {
            module: iter(pairs) for module, pairs in by_module.items()
        }

    def next_for(self, node: Node) -> int:
        """Return the choice for the next operator of its module."""
        planned, choice = next(self._left.get(node.module_path, iter(())), (None, REPLICATED))
        if planned is not None and planned.target == node.target:
            return choice
        self._left.pop(node.module_path, None)
        return REPLICATED
