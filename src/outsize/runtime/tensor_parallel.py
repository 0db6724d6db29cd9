"""Lower a program to what one rank of the tensor-parallel axis runs: local operators and collectives.

    x (R) ──▶ mm (R~, S1 -> S1) ──▶ silu ──▶ mm (S1, S0 -> P) ──▶ add (R, R)
        becomes
    x ──▶ [R -> R~] ──▶ mm ──▶ silu ──▶ mm ──▶ [P -> R] ──▶ add

Every rank runs the same nodes on its own shards. A value that several operators need in another placement
is converted once, just before the first of them, so that their gradients meet before the one collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from outsize.errors import PlanError
from outsize.model.batched_products import unflatten_batched_products
from outsize.model.fingerprint import operator_fingerprint
from outsize.model.liveness import output_values, wanted_values
from outsize.model.loss_shares import share_loss
from outsize.model.operator_rules.discover import RANDOM_BY_ELEMENT
from outsize.model.operator_rules.hand_rules import Part
from outsize.model.operator_rules.placement import Placement, Replicate, Shard, parse_placement
from outsize.model.operator_rules.rule import OperatorRule
from outsize.model.operator_rules.shards import local_shape, shard_of
from outsize.model.program import Node, NodeKind, Program, Ref, TensorSpec
from outsize.plan.sharding import REPLICATED, UNUSED, Sharding
from outsize.runtime.collectives import Conversion, OwnRandomStream, SplitKernel
from outsize.runtime.matched_choices import matched_choices

__all__ = ["lower", "parameter_placements", "select_shard"]

_ONE_TENSOR = tree_flatten(((0,), {}))[1]
_RESHAPED = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}


def lower(
    program: Program,
    sharding: Sharding,
    *,
    rank: int = 0,
    axis: str = "tp",
    planned_for: Program | None = None,
    keeps_outputs: bool = False,
) -> Program:
    """Return the program of ``rank`` on the axis; those of other ranks differ in sizes cut unevenly.

    Of the model's outputs it keeps the loss, where there is one, with its terms scaled (``share_loss``), or
    all. With ``planned_for``, a recording of the same model that the split was decided for, this one may have
    other operators and sizes, as without labels or for one sample: each rank runs those whole that were not
    planned or do not divide.

    Raises:
        PlanError: the sharding was made for another model, or sizes do not divide as it needs.
    """
    program = unflatten_batched_products(program)
    fingerprint = operator_fingerprint(program)
    if sharding.evaluation is not None and fingerprint == sharding.evaluation.fingerprint:
        sharding = sharding.evaluation
    find_wanted = output_values if keeps_outputs else wanted_values
    is_planned = fingerprint == sharding.fingerprint and len(sharding.choices) == len(program.nodes)
    if planned_for is not None and (keeps_outputs or not is_planned):
        known = program if is_planned else unflatten_batched_products(planned_for)
        choices = matched_choices(program, known, sharding.choices, find_wanted(program))
        sharding = replace(sharding, choices=choices)
    elif not is_planned:
        raise PlanError(
            "The plan's operator splits do not belong to this model.",
            why="the recorded operators differ from those the plan was made for",
            attempt="plan again for this model",
        )
    shared, origins = share_loss(program)
    origin_choices = [None if origin is None else sharding.choices[origin] for origin in origins]
    lowering = _Lowering(shared, sharding, origin_choices, rank, axis, may_run_whole=planned_for is not None)
    return lowering.run(find_wanted(shared))


def parameter_placements(sharding: Sharding) -> dict[str, Shard]:
    """Return the placement of every parameter that is split, by full name."""
    placements = {name: parse_placement(text) for name, text in sharding.parameters.items()}
    return {name: found for name, found in placements.items() if isinstance(found, Shard)}


def select_shard(sharding: Sharding, rank: int) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Return the function that keeps of each whole parameter what ``rank`` holds."""
    placements = parameter_placements(sharding)

    def select(name: str, whole: torch.Tensor) -> torch.Tensor:
        if name not in placements:
            return whole
        return shard_of(whole, placements[name], sharding.degree, rank).clone()

    return select


class _Lowering:
    def __init__(
        self,
        program: Program,
        sharding: Sharding,
        choices: Sequence[int | None],
        rank: int,
        axis: str,
        *,
        may_run_whole: bool,
    ) -> None:
        self.program, self.degree, self.rank, self.axis = program, sharding.degree, rank, axis
        self.may_run_whole = may_run_whole
        self.rules = [
            OperatorRule(
                inputs=tuple(map(parse_placement, rule.inputs)),
                outputs=tuple(map(parse_placement, rule.outputs)),
                local_arguments=rule.local_arguments,
                kernel=rule.kernel,
            )
            for rule in sharding.rules
        ]
        self.choices = choices  # by node; None: as its argument comes
        self.nodes: list[Node] = []
        self.specs: dict[int, TensorSpec] = {}
        self.storages: dict[int, int] = {}
        self.placements: dict[int, Placement] = {}
        self._converted: dict[tuple[int, Placement], int] = {}
        self._next_value = max(program.specs, default=-1) + 1
        self._next_storage = max(program.storages.values(), default=-1) + 1

    def run(self, values: Sequence[int]) -> Program:
        """Return the lowered program, of whose outputs it keeps ``values``."""
        for index, node in enumerate(self.program.nodes):
            if self.choices[index] != UNUSED:
                self._lower_node(index, node)
        wanted = {value: self._as(value, Replicate(), self.nodes[-1]) for value in values}
        loss = self.program.loss_value
        return replace(
            self.program,
            nodes=self.nodes,
            specs=self.specs,
            storages=self.storages,
            outputs=tuple(_output(leaf, wanted) for leaf in self.program.outputs),
            loss_value=None if loss is None else wanted[loss],
            warnings=list(self.program.warnings),
        )

    def _rule(self, index: int, node: Node) -> OperatorRule:
        choice = self.choices[index]
        whole = OperatorRule.replicated(len(node.inputs), len(node.outputs))
        if choice is None:
            held = [self.placements[value] for value in node.inputs] or [Replicate()]
            return OperatorRule(inputs=tuple(held[: len(node.inputs)]), outputs=(held[0],))
        if choice == REPLICATED:
            return whole
        rule = self.rules[choice]
        may_run_whole = self.may_run_whole and node.kind is NodeKind.OPERATOR and not node.mutates
        return whole if may_run_whole and not self._fits(rule, node) else rule

    def _fits(self, rule: OperatorRule, node: Node) -> bool:
        """Whether all that the rule divides can be divided: a batch of another size may not."""
        pairs = [*zip(rule.inputs, node.inputs, strict=True), *zip(rule.outputs, node.outputs, strict=True)]
        sizes = [node.arguments[position] for position in rule.local_arguments]
        return all(
            placement.fits(self.program.specs[value].shape, self.degree)
            for placement, value in pairs
            if isinstance(placement, Shard)
        ) and all(rule.local_size(size, self.degree, self.rank) is not None for size in sizes)

    def _lower_node(self, index: int, node: Node) -> None:
        rule = self._rule(index, node)
        needed = iter(rule.inputs)
        arguments = [
            Ref(self._as(argument.value, next(needed, Replicate()), node))
            if isinstance(argument, Ref)
            else argument
            for argument in node.arguments
        ]
        for position in rule.local_arguments:
            arguments[position] = self._divided(arguments[position], rule, node)
        self.nodes.append(
            replace(
                node,
                arguments=tuple(arguments),
                target=self._target(node, rule),
                mutates=tuple(self._local_value(value, node, arguments) for value in node.mutates),
            )
        )
        for value, placement in zip(node.outputs, rule.outputs, strict=True):
            self._make(value, placement, node)

    def _local_value(self, value: int, node: Node, arguments: list[Any]) -> int:
        """The value a node writes in place: what stands where the whole value stood."""
        position = next(i for i, a in enumerate(node.arguments) if isinstance(a, Ref) and a.value == value)
        local: int = arguments[position].value
        return local

    def _make(self, value: int, placement: Placement, node: Node) -> None:
        spec = self.program.specs[value]
        if isinstance(placement, Shard) and not placement.fits(spec.shape, self.degree):
            raise PlanError(
                f"Dim {placement.dim} of a value of shape {list(spec.shape)} cannot be cut in {self.degree}.",
                why=f"the plan splits it there, in module {node.module_path or 'at the top'}",
                attempt="plan again with this batch size",
            )
        self.placements[value] = placement
        self.specs[value] = replace(spec, shape=local_shape(spec.shape, placement, self.degree, self.rank))
        self.storages[value] = self.program.storages[value]

    def _target(self, node: Node, rule: OperatorRule) -> str | Callable[..., Any]:
        if rule.kernel:
            return SplitKernel(rule.kernel, self._part(node, rule), self.axis)
        if node.target in _RESHAPED:  # shards and gathered values may lie in memory another way
            return torch.ops.aten.reshape.default
        if node.target in RANDOM_BY_ELEMENT and rule.is_split:
            return OwnRandomStream(node.target, self.axis)
        return node.target

    def _part(self, node: Node, rule: OperatorRule) -> Part:
        pairs = zip(rule.inputs, node.inputs, strict=True)
        placement, value = next((p, value) for p, value in pairs if isinstance(p, Shard))
        return Part.of(placement, self.program.specs[value].shape, self.degree, self.rank)

    def _divided(self, size: Any, rule: OperatorRule, node: Node) -> int:
        local = rule.local_size(size, self.degree, self.rank)
        if local is None:
            raise PlanError(
                f"A size of {size} in {node.target} cannot be divided by {self.degree}.",
                why=f"the plan splits it, in module {node.module_path or 'at the top'}",
                attempt="plan again with this batch size",
            )
        return local

    def _as(self, value: int, needed: Placement, reader: Node) -> int:
        """Return the value in the placement needed, converting it where it is first needed."""
        held = self.placements[value]
        if held == needed or self._is_idle(value, held, needed):
            return value
        if (value, needed) not in self._converted:
            self._converted[value, needed] = self._convert(value, held, needed, reader)
        return self._converted[value, needed]

    def _is_idle(self, value: int, held: Placement, needed: Placement) -> bool:
        both = isinstance(held, Replicate) and isinstance(needed, Replicate)
        return both and not self.program.specs[value].requires_grad

    def _convert(self, value: int, held: Placement, needed: Placement, reader: Node) -> int:
        made = self._next_value
        self._next_value += 1
        self.nodes.append(
            Node(
                kind=NodeKind.OPERATOR,
                target=Conversion(held, needed, self.axis),
                outputs=(made,),
                arguments=(Ref(value),),
                structure=_ONE_TENSOR,
                module_path=reader.module_path,
                source=reader.source,
            )
        )
        spec = self.program.specs[value]
        self.specs[made] = replace(spec, shape=local_shape(spec.shape, needed, self.degree, self.rank))
        self.storages[made] = self._next_storage
        self._next_storage += 1
        return made


def _output(leaf: Any, wanted: dict[int, int]) -> Any:
    if not isinstance(leaf, Ref):
        return leaf
    return Ref(wanted[leaf.value]) if leaf.value in wanted else None
