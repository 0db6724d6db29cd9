"""What every node of a program may do under operator-level parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from outsize.errors import PlanError
from outsize.model.operator_rules.discover import RuleFinder
from outsize.model.operator_rules.placement import Placement, Replicate, Shard, parse_placement
from outsize.model.operator_rules.rule import OperatorRule
from outsize.model.operator_rules.signature import signature_of
from outsize.model.operator_rules.uneven import atom_counts
from outsize.model.program import Node, NodeKind, Program
from outsize.model.slice import tainted_nodes
from outsize.planner.sharding_overrides import decided_placements

__all__ = ["NodeOptions", "storages_written_between_reads"]


class NodeOptions:
    """The rules each of ``nodes`` may take; the first is always to run replicated.

    With ``held_as``, parameters have no choice: they are split as it says, or whole. ``decided`` are
    placements of parameters, and operators to run whole, by node.
    """

    def __init__(
        self,
        program: Program,
        nodes: Sequence[int],
        finder: RuleFinder,
        held_as: Mapping[str, str] | None = None,
        decided: Mapping[int, str] | None = None,
    ) -> None:
        self._decided = decided or {}
        self.program = program
        self.nodes = nodes
        self._finder = finder
        self._tainted = tainted_nodes(program)
        self._pinned = storages_written_between_reads(program, nodes)
        self._atoms: Mapping[int, set[int]] = {}
        self._of_parameter = self._parameter_placements()
        if held_as is not None:
            for _, node in program.nodes_of_kind(NodeKind.PARAMETER):
                placement = parse_placement(held_as.get(str(node.target), str(Replicate())))
                self._of_parameter[node.outputs[0]] = [placement]

    def of(self, index: int) -> list[OperatorRule]:
        """Return the options of a node."""
        node = self.program.nodes[index]
        if node.kind is NodeKind.PARAMETER:
            placements = self._of_parameter[node.outputs[0]]
            if index in self._decided:
                spec = self.program.specs[node.outputs[0]]
                text = self._decided[index]
                placements = decided_placements(
                    str(node.target), text, spec.shape, placements, self._finder.degree
                )
            return [OperatorRule((), (placement,)) for placement in placements]
        replicated = OperatorRule.replicated(len(node.inputs), len(node.outputs))
        if node.kind is not NodeKind.OPERATOR or not self._tainted[index] or self._is_pinned(node):
            return [replicated]
        options = [replicated]
        if any(self.program.specs[value].requires_grad for value in node.outputs):
            options.append(
                OperatorRule.replicated(len(node.inputs), len(node.outputs), partial_gradient=True)
            )
        if index not in self._decided:
            options += self._rules(node)
        return list(dict.fromkeys(self._without_idle_marks(node, option) for option in options))

    def _is_pinned(self, node: Node) -> bool:
        values = (*node.inputs, *node.outputs)
        return any(self.program.storages[value] in self._pinned for value in values)

    def _without_idle_marks(self, node: Node, rule: OperatorRule) -> OperatorRule:
        """A value without gradient has no partial gradient."""

        def plain(value: int, placement: Placement) -> Placement:
            needs_gradient = self.program.specs[value].requires_grad
            return placement if needs_gradient or not isinstance(placement, Replicate) else Replicate()

        inputs = tuple(plain(v, p) for v, p in zip(node.inputs, rule.inputs, strict=True))
        outputs = tuple(plain(v, p) for v, p in zip(node.outputs, rule.outputs, strict=True))
        return replace(rule, inputs=inputs, outputs=outputs)

    def _parameter_placements(self) -> dict[int, list[Placement]]:
        """A parameter may lie as one of its readers needs it."""
        found: dict[int, list[Placement]] = {}
        for index in self.nodes:
            node = self.program.nodes[index]
            if node.kind is NodeKind.MODULE:
                raise PlanError(
                    "Operator-level parallelism needs a recording of operators.",
                    why=f"{node.target} was recorded as a whole",
                    attempt="record with granularity='operators'",
                )
            if node.kind is NodeKind.PARAMETER:
                found[node.outputs[0]] = [Replicate()]
        self._find_all_rules()
        for index in self.nodes:
            node = self.program.nodes[index]
            for position, value in enumerate(node.inputs):
                if value in found and node.kind is NodeKind.OPERATOR and not self._is_pinned(node):
                    needed = (rule.inputs[position] for rule in self._rules(node))
                    new = dict.fromkeys(placement for placement in needed if isinstance(placement, Shard))
                    found[value] += [placement for placement in new if placement not in found[value]]
        return found

    def _rules(self, node: Node) -> tuple[OperatorRule, ...]:
        signature = signature_of(self.program, node)
        return (*self._finder.rules(signature), *self._finder.uneven_rules(signature, self._atoms))

    def _find_all_rules(self) -> None:
        """Find the rules of all operators, and with them how sizes that do not divide may be cut."""
        signatures = [
            signature_of(self.program, self.program.nodes[index])
            for index in self.nodes
            if self.program.nodes[index].kind is NodeKind.OPERATOR and self._tainted[index]
        ]
        self._finder.find_all(signatures)
        distinct = {signature.key: signature for signature in signatures}.values()
        rules = ((signature, rule) for signature in distinct for rule in self._finder.kinds(signature))
        self._atoms = atom_counts(rules, self._widths(), self._finder.degree)

    def _widths(self) -> set[int]:
        nodes = (node for _, node in self.program.nodes_of_kind(NodeKind.PARAMETER))
        return {size for node in nodes for size in self.program.specs[node.outputs[0]].shape}


def storages_written_between_reads(program: Program, nodes: Sequence[int]) -> set[int]:
    """Return storages written in place and read later through a value that is older than the write.

    Such values cannot be treated as new ones, so that everything on these storages stays as recorded.
    """
    producers = program.producers
    written: dict[int, int] = {}  # storage -> latest node that writes it
    found: set[int] = set()
    for index in nodes:
        node = program.nodes[index]
        for value in node.inputs:
            storage = program.storages[value]
            if storage in written and producers[value] < written[storage]:
                found.add(storage)
        for value in node.mutates:
            written[program.storages[value]] = index
    return found
