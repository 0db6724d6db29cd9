"""One operator run whole and run on shards, on random values in double precision."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from outsize.model.operator_rules.hand_rules import KERNELS, Part, ThreadedAxis
from outsize.model.operator_rules.placement import Partial, Placement, Replicate, Shard
from outsize.model.operator_rules.rule import OperatorRule
from outsize.model.operator_rules.shards import join_shards, local_shape, split_value
from outsize.model.operator_rules.signature import OperatorSignature
from outsize.model.program import TensorSpec

__all__ = ["Trial", "TrialRefused"]

_HALVES = (torch.float16, torch.bfloat16, torch.float32)


class TrialRefused(Exception):  # noqa: N818 - a finding, not an error
    """The operator does not run on what a trial gives it."""


class Trial:
    """Random inputs of an operator, its outputs and gradients on them, and comparison with runs on shards.

    With ``has_ties``, numbers from which an operator makes other than floating numbers are few, zero among
    them, so that comparisons go either way.
    """

    def __init__(self, signature: OperatorSignature, seed: int, *, has_ties: bool = False) -> None:
        self.signature = _in_double(signature)
        self._has_ties = has_ties and not all(spec.dtype.is_floating_point for spec in signature.outputs)
        self.generator = torch.Generator().manual_seed(seed)
        self.inputs = self._draw_valid_inputs()
        leaves = self._leaves(self.inputs)
        self.outputs = self.signature.call(self._writable(leaves))
        self.output_gradients = [self._draw_gradient(output, leaves) for output in self.outputs]
        self.gradients = _gradients(self.outputs, self.output_gradients, leaves)

    @property
    def is_differentiable(self) -> bool:
        """Whether a gradient flows through the operator."""
        return any(gradient is not None for gradient in self.output_gradients)

    @property
    def is_repeatable(self) -> bool:
        """Whether a second run gives the same outputs, as that of a random operator does not."""
        with torch.no_grad():
            again = self.signature.call([tensor.clone() for tensor in self.inputs])
        return all(_is_close(left, right) for left, right in zip(self.outputs, again, strict=True))

    def match(
        self, inputs: tuple[Placement, ...], local_arguments: tuple[int, ...], degree: int
    ) -> OperatorRule | None:
        """Return the rule under which the outputs on shards make up the whole ones, or None.

        Raises:
            TrialRefused: the operator does not run on these shards.
        """
        outputs = self._run_on_shards(OperatorRule(inputs, (), local_arguments), degree)
        if outputs is None:
            raise TrialRefused(str(self.signature.target))
        found: list[Placement] = []
        for index, whole in enumerate(self.outputs):
            placement = _recombination(whole, [rank[index] for rank in outputs], _segments_of(inputs))
            if placement is None:
                return None
            found.append(placement)
        return OperatorRule(inputs, tuple(found), local_arguments)

    def holds(self, rule: OperatorRule, degree: int) -> bool:
        """Tell whether the rule gives the whole outputs at ``degree``."""
        outputs = self._run_on_shards(rule, degree)
        return outputs is not None and all(
            _is_join(whole, [rank[index] for rank in outputs], placement)
            for index, (whole, placement) in enumerate(zip(self.outputs, rule.outputs, strict=True))
        )

    def with_gradients(self, rule: OperatorRule, degree: int) -> OperatorRule | None:
        """Return the rule with every replicated input marked whole or partial in its gradient.

        None where the gradients on shards do not make up the whole ones.
        """
        gradients = self._gradients_on_shards(rule, degree)
        if gradients is None:
            return None
        placements: list[Placement] = []
        for index, (placement, whole) in enumerate(zip(rule.inputs, self.gradients, strict=True)):
            settled: Placement | None = placement
            if whole is not None:
                settled = _gradient_placement(whole, [rank[index] for rank in gradients], placement)  # type: ignore[misc]
            if settled is None:
                return None
            placements.append(settled)
        return replace(rule, inputs=tuple(placements))

    # -- values ---------------------------------------------------------------------------------

    def _draw_valid_inputs(self) -> list[torch.Tensor]:
        sizes = sorted({size for spec in self.signature.inputs for size in spec.shape if size}, reverse=True)
        has_bags = self.signature.target is torch.ops.aten._embedding_bag.default
        if has_bags:  # it reads beyond its table without a word
            sizes = [self.signature.inputs[0].shape[0]]
        for bound in [*sizes, 2]:
            inputs = [self._draw(spec, bound) for spec in self.signature.inputs]
            if has_bags:
                inputs[2] = _starts_of_bags(inputs[1], inputs[2])
            try:
                outputs = self.signature.call(inputs)
            except Exception:  # indices out of range, or values the operator refuses
                continue
            if any(not torch.isfinite(output).all() for output in outputs):
                inputs = [x.abs() + 0.1 if x.is_floating_point() else x for x in inputs]
            return inputs
        raise TrialRefused(str(self.signature.target))

    def _draw(self, spec: TensorSpec, bound: int) -> torch.Tensor:
        if spec.dtype.is_floating_point or spec.dtype.is_complex:
            drawn = torch.randn(spec.shape, generator=self.generator, dtype=spec.dtype)
            return drawn.round() if self._has_ties and not spec.requires_grad else drawn
        high = 2 if spec.dtype == torch.bool else bound
        return torch.randint(0, high, spec.shape, generator=self.generator).to(spec.dtype)

    def _leaves(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            tensor.detach().clone().requires_grad_(spec.requires_grad)
            for tensor, spec in zip(tensors, self.signature.inputs, strict=True)
        ]

    def _writable(self, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return what stands for the leaves where the operator writes in place: leaves may not be written."""
        is_mutable = getattr(getattr(self.signature.target, "_schema", None), "is_mutable", False)
        return [leaf.clone() for leaf in leaves] if is_mutable else leaves

    def _draw_gradient(self, output: torch.Tensor, leaves: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Draw a gradient for an output through which one can flow; auxiliary outputs have none."""
        if not output.requires_grad:
            return None
        gradient = torch.randn(output.shape, generator=self.generator, dtype=output.dtype)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        try:
            torch.autograd.grad(output, wanted, gradient, retain_graph=True, allow_unused=True)
        except RuntimeError:  # such as the log-sum-exp of attention
            return None
        return gradient

    # -- running on shards ----------------------------------------------------------------------

    def _shards(self, inputs: Sequence[Placement], degree: int) -> list[list[torch.Tensor]]:
        cut = [
            split_value(tensor, placement, degree, self.generator)
            for tensor, placement in zip(self.inputs, inputs, strict=True)
        ]
        return [[shards[rank] for shards in cut] for rank in range(degree)]

    def _call(
        self, axis: ThreadedAxis, tensors: Sequence[torch.Tensor], rule: OperatorRule
    ) -> list[torch.Tensor]:
        local = {}
        for position in rule.local_arguments:
            local[position] = rule.local_size(self.signature.arguments[position], axis.degree, axis.rank)
        if not rule.kernel:
            return self.signature.call(tensors, local)
        pairs = zip(rule.inputs, self.signature.inputs, strict=True)
        placement, spec = next((placement, spec) for placement, spec in pairs if isinstance(placement, Shard))
        part = Part.of(placement, spec.shape, axis.degree, axis.rank)
        return self.signature.call(tensors, local, partial(KERNELS[rule.kernel], axis, part))

    def _run_on_shards(self, rule: OperatorRule, degree: int) -> list[list[torch.Tensor]] | None:
        shards = self._shards(rule.inputs, degree)

        def run(axis: ThreadedAxis) -> list[torch.Tensor]:
            with torch.no_grad():
                return self._call(axis, [tensor.clone() for tensor in shards[axis.rank]], rule)

        return _on_each_rank(run, degree, threads=bool(rule.kernel))

    def _gradients_on_shards(self, rule: OperatorRule, degree: int) -> list[list[torch.Tensor | None]] | None:
        shards = [self._leaves(tensors) for tensors in self._shards(rule.inputs, degree)]
        cut_gradients = [
            [None] * degree if gradient is None else _cut_gradient(gradient, placement, degree)
            for gradient, placement in zip(self.output_gradients, rule.outputs, strict=True)
        ]

        def run(axis: ThreadedAxis) -> list[torch.Tensor | None]:
            leaves = shards[axis.rank]
            outputs = self._call(axis, self._writable(leaves), rule)
            found = _gradients(outputs, [cut[axis.rank] for cut in cut_gradients], leaves)
            return [
                torch.zeros_like(leaf) if gradient is None else gradient
                for leaf, gradient in zip(leaves, found, strict=True)
            ]

        return _on_each_rank(run, degree, threads=bool(rule.kernel))


def _starts_of_bags(indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return offsets of bags of about the same size."""
    steps = torch.arange(offsets.shape[0], dtype=offsets.dtype)
    return steps * (indices.shape[0] // max(1, offsets.shape[0]))


T = TypeVar("T")


def _on_each_rank(run: Callable[[ThreadedAxis], T], degree: int, *, threads: bool) -> list[T] | None:
    """Return ``run`` of every rank, at once in threads if they meet; None where one is refused."""
    barrier = threading.Barrier(degree)
    shared: list[Any] = [None] * degree
    axes = [ThreadedAxis(rank, shared, barrier) for rank in range(degree)]

    def run_or_leave(axis: ThreadedAxis) -> T:
        try:
            return run(axis)
        except Exception:
            barrier.abort()
            raise

    try:
        if not threads:
            return [run(axis) for axis in axes]
        with ThreadPoolExecutor(degree) as pool:
            return list(pool.map(run_or_leave, axes))
    except Exception:  # the operator refuses the shards: no such rule
        return None


def _gradients(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    leaves: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    pairs = [(out, grad) for out, grad in zip(outputs, gradients, strict=True) if grad is not None]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not wanted:
        return [None] * len(leaves)
    given = [out for out, _ in pairs], wanted, [grad for _, grad in pairs]
    found = iter(torch.autograd.grad(*given, allow_unused=True))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def _in_double(signature: OperatorSignature) -> OperatorSignature:
    def changed(argument: Any) -> Any:
        if isinstance(argument, TensorSpec) and argument.dtype in _HALVES:
            return replace(argument, dtype=torch.float64)
        return torch.float64 if isinstance(argument, torch.dtype) and argument in _HALVES else argument

    return replace(signature, arguments=tuple(changed(argument) for argument in signature.arguments))


def _segments_of(inputs: Sequence[Placement]) -> set[tuple[int, ...]]:
    return {placement.segments for placement in inputs if isinstance(placement, Shard) and placement.segments}


def _recombination(
    whole: torch.Tensor, shards: list[torch.Tensor], segments: set[tuple[int, ...]]
) -> Placement | None:
    candidates: list[Placement] = [Replicate()]
    for dim in range(whole.dim()):
        candidates.append(Shard(dim))
        candidates += [Shard(dim, pieces) for pieces in segments if sum(pieces) == whole.shape[dim]]
    if whole.is_floating_point():
        candidates.append(Partial())
    return next((placement for placement in candidates if _is_join(whole, shards, placement)), None)


def _is_join(whole: torch.Tensor, shards: list[torch.Tensor], placement: Placement) -> bool:
    if isinstance(placement, Replicate):
        return all(_is_close(shard, whole) for shard in shards)
    if any(shard.dim() != whole.dim() for shard in shards):
        return False
    if isinstance(placement, Shard) and not placement.fits(tuple(whole.shape), len(shards)):
        return False
    shapes = [local_shape(tuple(whole.shape), placement, len(shards), rank) for rank in range(len(shards))]
    if [tuple(shard.shape) for shard in shards] != shapes:
        return False
    return _is_close(join_shards(shards, placement), whole)


def _is_close(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if not right.is_floating_point():
        return torch.equal(left, right)
    return torch.allclose(left, right, rtol=1e-9, atol=1e-10, equal_nan=True)


def _cut_gradient(gradient: torch.Tensor, placement: Placement, degree: int) -> list[torch.Tensor]:
    """The gradient of a partial sum is the whole gradient on every rank."""
    if isinstance(placement, Shard):
        return split_value(gradient, placement, degree, torch.Generator())
    return [gradient] * degree


def _gradient_placement(
    whole: torch.Tensor, shards: list[torch.Tensor], placement: Placement
) -> Placement | None:
    if isinstance(placement, Shard):
        return placement if _is_join(whole, shards, placement) else None
    is_whole = _is_join(whole, shards, Replicate())
    if isinstance(placement, Partial):
        return placement if is_whole else None
    if is_whole:
        return Replicate()
    return Replicate(partial_gradient=True) if _is_join(whole, shards, Partial()) else None
