"""Search the placements of every operator and parameter of a program, once for each kind of block."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from outsize.errors import PlanError
from outsize.model.batched_products import unflatten_batched_products
from outsize.model.fingerprint import operator_fingerprint
from outsize.model.liveness import live_nodes, wanted_values
from outsize.model.operator_rules.discover import RuleFinder
from outsize.model.operator_rules.placement import Replicate, Shard
from outsize.model.operator_rules.rule import OperatorRule
from outsize.model.operator_rules.segments import fused_segments
from outsize.model.operator_rules.signature import signature_of
from outsize.model.program import Node, NodeKind, Program
from outsize.model.record import record_module
from outsize.plan.sharding import REPLICATED, UNUSED, Sharding, ShardingRule
from outsize.planner.sharding_classes import NodeClass, ValueGroup, classify_nodes, group_values
from outsize.planner.sharding_costs import ShardingCosts, forward_flops, is_sum_on_its_way, local_bytes
from outsize.planner.sharding_kept import kept_storages
from outsize.planner.sharding_options import NodeOptions
from outsize.planner.sharding_overrides import ShardingOverrides
from outsize.planner.sharding_problem import ChoiceProblem, Edge

__all__ = ["MemoryLimit", "plan_module_sharding", "plan_sharding"]

_WANTED = -1  # the class of a consumer that stands for the program's outputs


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What one rank may hold: parameters with their states, and what is kept for backward.

    ``states`` are the bytes held for each byte of a trained parameter (its own, gradient, moments);
    ``num_microbatches`` is how many keep their activations at a time.
    """

    available_bytes: float
    states: float = 4.0
    num_microbatches: float = 1.0


def plan_module_sharding(
    module: nn.Module,
    batch: Any,
    degree: int,
    *,
    costs: ShardingCosts | None = None,
    memory_limit: MemoryLimit | None = None,
    overrides: ShardingOverrides | None = None,
) -> Sharding:
    """Return the split of a module called with ``batch``, in its present mode and in evaluation mode.

    Raises:
        PlanError: nothing in the module can be split, or an override does not fit.
        LimitError: the memory limit is too small.
        RecordingError: the forward cannot be recorded.
    """
    modes = {part: part.training for part in module.modules()}
    try:
        program = record_module(module, batch, granularity="operators")
        sharding = plan_sharding(program, degree, costs=costs, memory_limit=memory_limit, overrides=overrides)
        evaluated = record_module(module.eval(), batch, granularity="operators")
    finally:
        for part, mode in modes.items():
            part.training = mode
    if operator_fingerprint(unflatten_batched_products(evaluated)) == sharding.fingerprint:
        return sharding
    evaluation = plan_sharding(
        evaluated, degree, costs=costs, held_as=sharding.parameters, overrides=overrides
    )
    return replace(sharding, evaluation=evaluation)


def plan_sharding(
    program: Program,
    degree: int,
    *,
    costs: ShardingCosts | None = None,
    memory_limit: MemoryLimit | None = None,
    held_as: Mapping[str, str] | None = None,
    overrides: ShardingOverrides | None = None,
) -> Sharding:
    """Return the split of a recording of operators over ``degree`` ranks with the least cost.

    ``memory_limit`` is a hard limit on what one rank holds for the whole program.
    ``held_as`` gives the placements of parameters that are split already; the others are then whole.
    ``overrides`` is what the user decides instead of the search.

    Raises:
        PlanError: the program records whole blocks, nothing in it can be split, or an override names nothing
            or cannot be.
        LimitError: the memory limit is too small.
    """
    program = unflatten_batched_products(program)
    search = _Search(program, degree, costs or ShardingCosts(degree), held_as, overrides)
    chosen = search.solve(memory_limit)
    if not any(rule.is_split for rule in chosen.values()):
        raise PlanError(
            f"No operator of the model is worth splitting over {degree} devices.",
            why=search.why_nothing_is_split(),
            attempt="another degree, or another strategy",
        )
    return _to_plan(program, degree, chosen)


class _Search:
    def __init__(
        self,
        program: Program,
        degree: int,
        costs: ShardingCosts,
        held_as: Mapping[str, str] | None = None,
        overrides: ShardingOverrides | None = None,
    ) -> None:
        self.program, self.degree, self.costs = program, degree, costs
        self.nodes = live_nodes(program)
        self.finder = RuleFinder(degree, fused_segments(program))
        decided = (overrides or ShardingOverrides()).decisions(program, self.nodes)
        self.node_options = NodeOptions(program, self.nodes, self.finder, held_as, decided)
        self.classes = classify_nodes(program, self.nodes, decided)
        self.options = {c.index: self.node_options.of(c.representative) for c in self.classes}
        self.problem = ChoiceProblem()

    def solve(self, memory_limit: MemoryLimit | None) -> dict[int, OperatorRule]:
        """Return the rule of every live node."""
        self.kept = set() if memory_limit is None else kept_storages(self.program, self.nodes)
        for node_class in self.classes:
            self.problem.add_class(node_class.index, self._option_costs(node_class))
        self.problem.add_class(_WANTED, [0.0])
        wanted = wanted_values(self.program)
        for group in group_values(self.program, self.classes, self.nodes, wanted):
            self._add_value(group, memory_limit)
        if memory_limit is not None:
            held = {c.index: self._held_bytes(c, memory_limit) for c in self.classes}
            self.problem.limit(held, memory_limit.available_bytes)
        taken = self.problem.solve()
        return {
            index: self.options[node_class.index][taken[node_class.index]]
            for node_class in self.classes
            for index in node_class.nodes
        }

    def why_nothing_is_split(self) -> str:
        """Say whether splits exist at all."""
        if not any(rule.is_split for rules in self.options.values() for rule in rules):
            return f"no operator has a size of {self.degree} or more that can be divided"
        return "communication would cost more than it saves"

    def _option_costs(self, node_class: NodeClass) -> list[float]:
        node = self.program.nodes[node_class.representative]
        options, count = self.options[node_class.index], len(node_class.nodes)
        if node.kind is NodeKind.PARAMETER:
            spec = self.program.specs[node.outputs[0]]
            return [count * self.costs.parameter_s(spec, rule.outputs[0]) for rule in options]
        if node.kind is not NodeKind.OPERATOR:
            return [0.0] * len(options)
        signature = signature_of(self.program, node)
        flops = forward_flops(signature) if len(options) > 1 else 0.0
        is_view = self._is_view(node)
        return [count * self.costs.operator_s(signature, rule, flops, is_view=is_view) for rule in options]

    def _add_value(self, group: ValueGroup, limit: MemoryLimit | None) -> None:
        spec = self.program.specs[group.value]
        produced = tuple(rule.outputs[group.output] for rule in self.options[group.producer])
        edges = [
            Edge(group.producer, produced, consumer, self._needed(consumer, position))
            for consumer, position in group.consumers
        ]
        is_fixed = any(self._writes(consumer, position) for consumer, position in group.consumers)

        def cost(before: object, after: object) -> float:
            if before == after:
                return 0.0
            is_impossible = is_fixed or (not spec.dtype.is_floating_point and str(after) == "P")
            if is_impossible:
                return math.inf
            return group.count * self.costs.conversion_s(before, after, spec)  # type: ignore[arg-type]

        def held_bytes(before: object, after: object) -> float:
            is_new = before != after and not (isinstance(before, Replicate) and isinstance(after, Replicate))
            if limit is None or not (is_new and self.program.storages[group.value] in self.kept):
                return 0.0
            local = local_bytes(spec, after, self.degree)  # type: ignore[arg-type]
            return limit.num_microbatches * group.count * local

        self.problem.add_value(edges, cost, held_bytes)

    def _needed(self, consumer: int, position: int) -> tuple[object, ...]:
        if consumer == _WANTED:
            return (Replicate(),)
        return tuple(rule.inputs[position] for rule in self.options[consumer])

    def _writes(self, consumer: int, position: int) -> bool:
        """Whether a consumer writes the value in place, so that it must not get a converted copy."""
        if consumer == _WANTED:
            return False
        node = self.program.nodes[self.classes[consumer].representative]
        return node.inputs[position] in node.mutates

    def _held_bytes(self, node_class: NodeClass, limit: MemoryLimit) -> list[float]:
        """Bytes that one rank holds of the class under each of its options."""
        node, options = self.program.nodes[node_class.representative], self.options[node_class.index]
        count = len(node_class.nodes)
        if node.kind is NodeKind.PARAMETER:
            spec = self.program.specs[node.outputs[0]]
            states = limit.states if spec.requires_grad else 1.0
            return [count * states * local_bytes(spec, rule.outputs[0], self.degree) for rule in options]
        if node.kind is not NodeKind.OPERATOR or self._is_view(node):
            return [0.0] * len(options)
        kept = [self.program.storages[value] in self.kept for value in node.outputs]
        specs = [self.program.specs[value] for value in node.outputs]
        held = [
            sum(
                local_bytes(s, p, self.degree) for s, p, k in zip(specs, rule.outputs, kept, strict=True) if k
            )
            for rule in options
        ]
        on_their_way = map(is_sum_on_its_way, options)
        return [
            0.0 if is_sum else limit.num_microbatches * count * num_bytes
            for is_sum, num_bytes in zip(on_their_way, held, strict=True)
        ]

    def _is_view(self, node: Node) -> bool:
        made = {self.program.storages[value] for value in node.outputs}
        return not node.mutates and made <= {self.program.storages[value] for value in node.inputs}


def _to_plan(program: Program, degree: int, chosen: dict[int, OperatorRule]) -> Sharding:
    rules: dict[OperatorRule, int] = {}
    choices = []
    parameters: dict[str, str] = {}
    for index, node in enumerate(program.nodes):
        rule = chosen.get(index)
        if rule is None:
            choices.append(UNUSED)
        elif rule == OperatorRule.replicated(len(node.inputs), len(node.outputs)):
            choices.append(REPLICATED)
        else:
            choices.append(rules.setdefault(rule, len(rules)))
        if rule is not None and node.kind is NodeKind.PARAMETER and isinstance(rule.outputs[0], Shard):
            parameters[str(node.target)] = str(rule.outputs[0])
    return Sharding(
        degree=degree,
        rules=tuple(_to_plain(rule) for rule in rules),
        choices=tuple(choices),
        fingerprint=operator_fingerprint(program),
        parameters=parameters,
    )


def _to_plain(rule: OperatorRule) -> ShardingRule:
    return ShardingRule(
        inputs=tuple(map(str, rule.inputs)),
        outputs=tuple(map(str, rule.outputs)),
        local_arguments=rule.local_arguments,
        kernel=rule.kernel,
    )
