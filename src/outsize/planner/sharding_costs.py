"""Seconds that a choice of placements costs: operators at local shapes, conversions, bytes held."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_unflatten

from outsize.model.operator_flops import count_flops
from outsize.model.operator_rules.placement import Partial, Placement, Replicate, Shard
from outsize.model.operator_rules.rule import OperatorRule
from outsize.model.operator_rules.shards import local_shape
from outsize.model.operator_rules.signature import OperatorSignature
from outsize.model.program import TensorSpec

__all__ = [
    "ACTIVATION_READS",
    "GLOO_SCATTER_PASSES",
    "PARAMETER_READS",
    "ShardingCosts",
    "forward_flops",
    "is_sum_on_its_way",
    "local_bytes",
]

# To hold a byte for a step is priced as to read it so many times.
PARAMETER_READS = 2000
ACTIVATION_READS = 4

# gloo takes 0.8 to 1.4 of an all-reduce for an all-gather and 1.3 to 3 for a reduce-scatter (two processes,
# 256 KiB to 2 MiB): docs/experiments.md.
GLOO_SCATTER_PASSES = 3.0

_STATES = 4  # a trained parameter is held with its gradient and two moments


@dataclass(frozen=True, slots=True)
class ShardingCosts:
    """Rates of the devices and of the links along the axis.

    The prices of holding a byte for a step decide where times are about equal: high for parameters and
    their states, which are there all the time, so that whatever is large is split; low for activations.
    """

    degree: int
    flops_per_s: float = 1e14
    memory_bytes_per_s: float = 2e12
    link_bytes_per_s: float = 1e11
    link_latency_s: float = 1e-5
    scatter_passes: float = 1.0  # rounds of a ring that an all-gather or reduce-scatter takes; all-reduce: 2
    held_parameter_s_per_byte: float = PARAMETER_READS / 2e12
    held_activation_s_per_byte: float = ACTIVATION_READS / 2e12

    # -- conversions ----------------------------------------------------------------------------

    def conversion_s(self, before: Placement, after: Placement, spec: TensorSpec) -> float:
        """Seconds in forward and backward to bring a value from one placement to another."""
        forward, backward = _collectives(before, after)
        names = [*forward, *(backward if spec.requires_grad else ())]
        shards = [placement for placement in (before, after) if isinstance(placement, Shard)]
        sent = max((local_bytes(spec, s, self.degree) * self.degree for s in shards), default=spec.num_bytes)
        is_same = isinstance(before, Replicate) and isinstance(after, Replicate)
        copied_s = 0.0 if is_same else 2 * spec.num_bytes / self.memory_bytes_per_s
        return sum(self.collective_s(name, sent) for name in names) + copied_s + _PREFERENCE * len(names)

    def collective_s(self, name: str, num_bytes: float) -> float:
        """Seconds of one collective over the axis on a value of ``num_bytes`` in all (ring)."""
        passes = 2.0 if name == "all_reduce" else self.scatter_passes
        share = (self.degree - 1) / self.degree
        return passes * (share * num_bytes / self.link_bytes_per_s + self.link_latency_s)

    # -- operators ------------------------------------------------------------------------------

    def operator_s(
        self, signature: OperatorSignature, rule: OperatorRule, flops: float, *, is_view: bool
    ) -> float:
        """Seconds of an operator in forward and backward under a rule, and the price of what it keeps."""
        if is_view:
            return 0.0
        kept = self._held(signature.outputs, rule.outputs)
        read = self._held(signature.inputs, rule.inputs)
        own_flops = flops * self._largest_share(signature, rule)
        seconds = max(own_flops / self.flops_per_s, (kept + read) / self.memory_bytes_per_s)
        if not any(spec.requires_grad for spec in signature.outputs):
            return seconds
        return seconds * 3 + (0 if is_sum_on_its_way(rule) else kept) * self.held_activation_s_per_byte

    def _largest_share(self, signature: OperatorSignature, rule: OperatorRule) -> float:
        """The part of the work that the first rank does, which has no less than any other."""
        specs = (*signature.inputs, *signature.outputs)
        for spec, placement in zip(specs, (*rule.inputs, *rule.outputs), strict=True):
            if isinstance(placement, Shard):
                size = spec.shape[placement.dim]
                return placement.length(size, self.degree, 0) / size
        return 1.0

    def _held(self, specs: Sequence[TensorSpec], placements: Sequence[Placement]) -> int:
        return sum(local_bytes(s, p, self.degree) for s, p in zip(specs, placements, strict=True))

    def parameter_s(self, spec: TensorSpec, placement: Placement) -> float:
        """The price of holding a parameter and, where it is trained, its states."""
        states = _STATES if spec.requires_grad else 1
        return local_bytes(spec, placement, self.degree) * states * self.held_parameter_s_per_byte


_PREFERENCE = 1e-12  # with equal times, fewer collectives


def _collectives(before: Placement, after: Placement) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the collectives of a conversion in forward and in backward."""
    result: tuple[tuple[str, ...], tuple[str, ...]] = (), ()
    match before, after:
        case _ if before == after:
            pass
        case Replicate(), Replicate():
            result = (), ("all_reduce",) if after.partial_gradient else ()
        case Replicate(), Shard():
            result = (), () if before.partial_gradient else ("all_gather",)
        case Shard(), Replicate():
            result = ("all_gather",), ("reduce_scatter",) if after.partial_gradient else ()
        case Shard(), Shard():
            result = ("all_gather",), ("all_gather",)
        case Partial(), Replicate():
            result = ("all_reduce",), ("all_reduce",) if after.partial_gradient else ()
        case Partial(), Shard():
            result = ("reduce_scatter",), ("all_gather",)
    return result  # a partial sum is made on the spot


def is_sum_on_its_way(rule: OperatorRule) -> bool:
    """Whether an operator makes a partial sum that goes as soon as it is added up."""
    is_sum = any(isinstance(placement, Partial) for placement in rule.outputs)
    return is_sum and not any(isinstance(placement, Partial) for placement in rule.inputs)


def local_bytes(spec: TensorSpec, placement: Placement, degree: int) -> int:
    """Bytes the rank that holds most of a value has of it."""
    return math.prod(local_shape(spec.shape, placement, degree)) * spec.dtype.itemsize


def forward_flops(signature: OperatorSignature) -> float:
    """FLOPs of the whole operator; 0 for those that only move memory."""
    packet = getattr(signature.target, "_overloadpacket", None)
    if packet in (torch.ops.aten.matmul, torch.ops.aten.linear):
        return 2.0 * math.prod(signature.outputs[0].shape) * signature.inputs[0].shape[-1]
    arguments = [_on_meta(a) if isinstance(a, TensorSpec) else a for a in signature.arguments]
    args, kwargs = tree_unflatten(arguments, signature.structure)
    outputs = tuple(_on_meta(spec) for spec in signature.outputs)
    return count_flops(packet, args, kwargs, outputs if len(outputs) > 1 else outputs[0])


def _on_meta(spec: TensorSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta")
