"""The distinct operators of a model with their splits, for people to read."""

from __future__ import annotations

from dataclasses import dataclass

from outsize.model.batched_products import unflatten_batched_products
from outsize.model.deferred import build_deferred
from outsize.model.liveness import live_nodes
from outsize.model.operator_rules.discover import RuleFinder
from outsize.model.operator_rules.rule import OperatorRule
from outsize.model.operator_rules.segments import fused_segments
from outsize.model.operator_rules.signature import OperatorSignature, signature_of
from outsize.model.program import NodeKind, Program
from outsize.model.record import record_module
from outsize.model.source import ModelSource

__all__ = ["OperatorSplits", "list_operator_rules", "operators_of"]


@dataclass(frozen=True, slots=True)
class OperatorSplits:
    """One distinct operator: how often it is called, on what, and its splits that share the work."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    count: int
    splits: tuple[OperatorRule, ...]
    module_path: str  # of the first call


def list_operator_rules(source: ModelSource, degree: int, *, num_samples: int = 2) -> list[OperatorSplits]:
    """Record a model without memory and find the splits of each of its operators over ``degree`` ranks.

    Raises:
        ModelError, RecordingError: the model cannot be built or recorded.
    """
    module = build_deferred(source.factory).module
    program = record_module(module, source.sample_batch(num_samples), granularity="operators")
    return operators_of(program, degree)


def operators_of(program: Program, degree: int) -> list[OperatorSplits]:
    """Return the distinct operators of a recording that have something to divide, in order of first call.

    Left out are those that read no tensor, or only numbers and such small ones that no dim of them or of
    their result has an element for each of ``degree`` ranks.
    """
    program = unflatten_batched_products(program)
    counts: dict[str, int] = {}
    first: dict[str, tuple[OperatorSignature, str]] = {}
    for index in live_nodes(program):
        node = program.nodes[index]
        if node.kind is NodeKind.OPERATOR and node.inputs:
            signature = signature_of(program, node)
            if not any(
                size >= degree for spec in (*signature.inputs, *signature.outputs) for size in spec.shape
            ):
                continue
            counts[signature.key] = counts.get(signature.key, 0) + 1
            first.setdefault(signature.key, (signature, node.module_path))
    finder = RuleFinder(degree, fused_segments(program))
    finder.find_all([signature for signature, _ in first.values()])
    return [
        OperatorSplits(
            name=str(signature.target),
            shapes=tuple(spec.shape for spec in signature.inputs),
            count=counts[key],
            splits=tuple(
                rule for rule in (*finder.rules(signature), *finder.uneven_rules(signature)) if rule.is_split
            ),
            module_path=module_path,
        )
        for key, (signature, module_path) in first.items()
    ]
