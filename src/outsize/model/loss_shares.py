"""Let the terms of a loss enter it with their share of the global batch.

    mse ──────────────▶ add ──▶ loss            mse ──▶ [share 0] ──▶ add ──▶ loss
    norm ─▶ mul 0.1 ────▲             becomes   norm ─▶ [share 1] ─▶ mul 0.1 ──▲

The path from the terms to the loss is computed a second time, from scaled terms. Whatever else uses a term
sees it as the model made it; what of the first path nothing uses any more is in no stage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outsize.model.in_place_writes import out_of_place_form
from outsize.model.program import Node, NodeKind, Program, Ref

__all__ = ["share_loss"]


def share_loss(program: Program) -> tuple[Program, list[int | None]]:
    """Return the program with scaled loss terms, and for each of its nodes the index that it had before.

    Nodes of kind ``LOSS_SHARE`` have none. Outputs that are terms are scaled too, so that they add up.
    """
    if program.loss_value is None or all(term.is_sum for term in program.loss_terms):
        return program, [*range(len(program.nodes))]
    return _Sharing(program).run()


class _Sharing:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.producers = program.producers
        self.nodes: list[Node] = []
        self.origins: list[int | None] = []
        self.specs, self.storages = dict(program.specs), dict(program.storages)
        self.scaled: dict[int, Any] = {}  # term -> reference to what it counts
        self.again: dict[int, int] = {}  # value on the path -> the one computed from scaled terms
        self._positions: dict[int, list[tuple[int, int | None]]] = {}  # value on the path -> edges
        for (value, position), term in program.loss_path.edges.items():
            self._positions.setdefault(value, []).append((position, term))

    def run(self) -> tuple[Program, list[int | None]]:
        made_at: dict[int, list[int]] = {}
        for position, term in enumerate(self.program.loss_terms):
            if term.value is not None and self._is_computed(term.value):
                made_at.setdefault(self.producers[term.value], []).append(position)
        for index, node in enumerate(self.program.nodes):
            self._append(node, index)
            for position in made_at.get(index, ()):
                self._scaled(position)
            for value in node.outputs:
                if value in self._positions:
                    self._repeat(node, value, index)
        return self._finished(), self.origins

    def _is_computed(self, value: int) -> bool:
        """Whether a value is scaled where it is made: later something may be written into its memory."""
        return self.program.nodes[self.producers[value]].kind in (NodeKind.MODULE, NodeKind.OPERATOR)

    def _append(self, node: Node, origin: int | None) -> None:
        self.nodes.append(node)
        self.origins.append(origin)

    def _new_value(self, like: int) -> int:
        value = max(self.specs) + 1
        self.specs[value] = self.program.specs[like]
        self.storages[value] = min(0, *self.storages.values()) - 1  # of its own
        return value

    def _scaled(self, index: int) -> Any:
        """Return a reference to a term times its share, made now if it was not before."""
        if index not in self.scaled:
            term = self.program.loss_terms[index]
            assert term.value is not None
            if term.is_sum:
                self.scaled[index] = Ref(term.value)
            else:
                self.scaled[index] = Ref(self._share(index, Ref(term.value)))
        return self.scaled[index]

    def _share(self, term: int, argument: Any) -> int:
        like = argument.value if isinstance(argument, Ref) else self.program.loss_value
        assert like is not None
        made = self._new_value(like)
        self._append(
            Node(kind=NodeKind.LOSS_SHARE, target=str(term), outputs=(made,), arguments=(argument,)), None
        )
        return made

    def _repeat(self, node: Node, value: int, index: int) -> None:
        """Compute a value of the path again, from what its arguments count."""
        arguments = list(node.arguments)
        for position, term in self._positions[value]:
            argument = arguments[position]
            if not isinstance(argument, Ref):
                assert term is not None
                arguments[position] = Ref(self._share(term, argument))
            elif term is None:
                arguments[position] = Ref(self.again[argument.value])
            else:
                arguments[position] = self._scaled(term)
        self.again[value] = self._new_value(value)
        repeated = replace(
            node,
            target=out_of_place_form(node.target) or node.target,
            arguments=tuple(arguments),
            outputs=(self.again[value],),
            mutates=(),
        )
        self._append(repeated, index)

    def _finished(self) -> Program:
        counted = {
            term.value: self._scaled(index).value
            for index, term in enumerate(self.program.loss_terms)
            if term.value is not None
        } | self.again
        root = self.program.loss_path.root
        loss = self.program.loss_value
        assert loss is not None
        if root is not None:
            counted[loss] = self._scaled(root).value
        return replace(
            self.program,
            nodes=self.nodes,
            specs=self.specs,
            storages=self.storages,
            outputs=tuple(
                Ref(counted.get(leaf.value, leaf.value)) if isinstance(leaf, Ref) else leaf
                for leaf in self.program.outputs
            ),
            loss_value=counted[loss],
        )
