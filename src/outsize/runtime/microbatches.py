"""Cuts a global batch into the micro-batches of every replica and accumulation step.

global batch  ├──── replica 0 ────┤├──── replica 1 ────┤      10 samples in 4 parts: 3, 3, 2, 2
              ├ acc. 0 ─┤├ acc. 1 ─┤├ ...                      2 samples in 4 parts: 1, 1
              ├mb 0┤├mb 1┤├mb 0┤...

Parts without samples are not run, unless replicas have to run as many: then they repeat the first sample
without effect.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from outsize.errors import BatchError, RecordingError
from outsize.model.batch_entries import BatchLayout, count_samples, flatten_batch, sample_entries
from outsize.model.index_ranges import check_index_ranges
from outsize.model.loss_elements import count_loss_elements
from outsize.model.program import Program
from outsize.plan.plan import Plan
from outsize.runtime.executions import Executions
from outsize.runtime.loss_denominators import LossDenominators, denominators_by_part
from outsize.runtime.stage_executor import MicrobatchInputs
from outsize.runtime.stage_placement import StagePlacement

__all__ = ["BatchForm", "BatchSplitter", "Microbatch", "SplitBatch"]

_MISSING = "missing"


@dataclass(frozen=True, slots=True)
class BatchForm:
    """What batches look like: dtype and number of dims of each entry, and which of them have samples."""

    dtypes: Mapping[str, torch.dtype]
    num_dims: Mapping[str, int]
    with_samples: frozenset[str]

    @classmethod
    def of(cls, entries: Mapping[str, torch.Tensor], shared: Collection[str] = ()) -> BatchForm:
        """Return the form of a sample batch: its samples are the rows of its first entry that has dims.

        Raises:
            BatchError: the entries ``shared`` by all samples are not in the batch, or it has no samples.
        """
        for name in shared:
            if name not in entries:
                raise BatchError(
                    f"The sample batch has no entry {name!r} for samples to share.",
                    why=f"It has {', '.join(entries)}.",
                    attempt="the names of its entries.",
                )
        of_samples = {name: value for name, value in entries.items() if name not in shared}
        if count_samples(of_samples, sample_entries(of_samples)) == 0:
            raise BatchError(
                "The batch has no samples.",
                why=f"Its shapes are {', '.join(f'{n} {tuple(v.shape)}' for n, v in of_samples.items())}.",
                attempt="a batch of one sample or more.",
            )
        return cls(
            dtypes={name: value.dtype for name, value in entries.items()},
            num_dims={name: value.dim() for name, value in entries.items()},
            with_samples=sample_entries(of_samples),
        )


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A micro-batch with the recording that holds for it."""

    inputs: MicrobatchInputs
    placement: StagePlacement
    num_samples: int  # 0 where it only keeps this replica in step with others


@dataclass(frozen=True, slots=True)
class SplitBatch:
    """This replica's micro-batches by accumulation step, and each loss term's elements in the whole batch.

    Of a small batch it may have fewer than the plan says, or none; ``first`` is the first of all replicas.
    """

    accumulation_steps: list[list[Microbatch]]
    num_elements: list[int | float]
    first: Microbatch


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of the global batch. One without samples repeats the first row, and counts nothing."""

    entries: dict[str, torch.Tensor]
    is_empty: bool


class BatchSplitter:
    """Splits global batches for one replica; every process holds the whole batch, so nothing is sent."""

    def __init__(
        self, form: BatchForm, plan: Plan, executions: Executions, replica: int, device: torch.device
    ) -> None:
        self.form, self._plan, self._executions = form, plan, executions
        self._replica, self._device = replica, device

    def split(self, batch: Any, *, denominator: str = "samples") -> SplitBatch:
        """Cut a batch of up to the plan's global batch; parts differ by at most one sample.

        ``denominator`` is what losses are divided by; see :mod:`outsize.runtime.loss_denominators`.

        Raises:
            BatchError: an entry is missing, of another kind or out of range, or there are too many samples.
            RecordingError: the module does not run with this batch. Nothing has been sent.
        """
        entries, layout = flatten_batch(batch)
        num_rows = self._check(entries)
        self._check_constants(layout)
        parts = self._parts(entries, num_rows)
        placements = [self._executions.placement(part.entries) for part in parts]
        _check_forms([placement.recording for placement in placements])
        for part, placement in zip(parts, placements, strict=True):
            check_index_ranges(placement.recording, part.entries)
        counts = [
            [
                0 if part.is_empty else count
                for count in count_loss_elements(placement.recording, part.entries)
            ]
            for part, placement in zip(parts, placements, strict=True)
        ]
        totals = [sum(column) for column in zip(*counts, strict=True)]
        mesh = self._plan.mesh
        denominators = denominators_by_part(counts, mesh.dp * mesh.fsdp, denominator)
        made = [
            partial(self._microbatch, *each)
            for each in zip(parts, placements, counts, denominators, strict=True)
        ]
        own = [
            [made[index]() for index in step if self._executions.run_in_step or not parts[index].is_empty]
            for step in self._steps()
        ]
        return SplitBatch([step for step in own if step], totals, made[0]())

    def _microbatch(
        self,
        part: _Part,
        placement: StagePlacement,
        counts: Sequence[float],
        denominators: LossDenominators,
    ) -> Microbatch:
        scales = denominators.scales(placement.recording, counts)
        entries = {name: value.to(self._device) for name, value in part.entries.items()}
        num_samples = 0 if part.is_empty else count_samples(entries, self.form.with_samples)
        inputs = MicrobatchInputs(entries, tuple(scales), has_effect=not part.is_empty)
        return Microbatch(inputs, placement, num_samples)

    def _steps(self) -> list[range]:
        """Return which of all parts are this replica's, by accumulation step."""
        size, num_steps = self._plan.schedule.num_microbatches, self._plan.gradient_accumulation_steps
        first = self._replica * num_steps * size
        return [range(start, start + size) for start in range(first, first + num_steps * size, size)]

    def _parts(self, entries: Mapping[str, torch.Tensor], num_rows: int) -> list[_Part]:
        """Return all micro-batches of the global batch, in order."""
        mesh = self._plan.mesh
        replicas = mesh.dp * mesh.fsdp
        num_parts = replicas * self._plan.gradient_accumulation_steps * self._plan.schedule.num_microbatches
        smaller, num_larger = divmod(num_rows, num_parts)
        if smaller == 0 and self._plan.batch_norm == "synchronised":
            raise BatchError(
                f"The batch has {num_rows} samples for {num_parts} micro-batches.",
                why="Synchronised batch norm needs a sample in each, or its statistics would be wrong.",
                attempt=f"batches of {num_parts} samples or more.",
            )
        parts: list[_Part] = []
        start = 0
        for index in range(num_parts):
            rows = smaller + (index < num_larger)
            chosen = slice(start, start + rows) if rows else slice(0, 1)
            cut = {n: v[chosen] if n in self.form.with_samples else v for n, v in entries.items()}
            parts.append(_Part(cut, is_empty=rows == 0))
            start += rows
        return parts

    def _check(self, entries: Mapping[str, torch.Tensor]) -> int:
        """Return the number of samples of a batch that has the right form."""
        for name, dtype in self.form.dtypes.items():
            if name not in entries:
                raise BatchError(
                    f"The batch has no entry {name!r}.",
                    why=f"The sample batch has it; this one has {', '.join(sorted(entries))}.",
                    attempt="batches like the sample batch.",
                )
            self._check_entry(name, entries[name], dtype)
        unknown = sorted(set(entries) - set(self.form.dtypes))
        if unknown:
            raise BatchError(f"The batch has an entry {unknown[0]!r} that the sample batch has not.")
        rows = {name: entries[name].shape[0] for name in sorted(self.form.with_samples)}
        if len(set(rows.values())) > 1:
            raise BatchError("The batch's entries differ in their number of samples.", why=f"{rows}.")
        num_rows = count_samples(entries, self.form.with_samples)
        if not 0 < num_rows <= self._plan.global_batch:
            raise BatchError(
                f"The batch has {num_rows} samples.",
                why=f"The plan is for {self._plan.global_batch} in a global batch; fewer are allowed.",
                attempt=f"1 to {self._plan.global_batch} samples, or a plan for more.",
            )
        return num_rows

    def _check_constants(self, layout: BatchLayout) -> None:
        """Refuse other settings than those recorded, which would be taken for the same."""
        expected, given = self._executions.layout.plain_constants, layout.plain_constants
        for name in sorted(expected.keys() | given.keys()):
            found, recorded = (each.get(name, _MISSING) for each in (given, expected))
            if repr(found) != repr(recorded):  # as text: NaN is a setting too, and differs from itself
                raise BatchError(
                    f"Batch entry {name!r} is {found!r}, and in the sample batch {recorded!r}.",
                    why="What is no tensor is recorded with the model, and is the same for every batch.",
                    attempt="a tensor, for what changes from batch to batch.",
                )

    def _check_entry(self, name: str, value: torch.Tensor, dtype: torch.dtype) -> None:
        if value.dtype != dtype:
            raise BatchError(
                f"Batch entry {name!r} has dtype {value.dtype}.",
                why=f"The sample batch has {dtype}.",
                attempt=f"batch[{name!r}].to({dtype}).",
            )
        if value.dim() != self.form.num_dims[name]:
            raise BatchError(
                f"Batch entry {name!r} has shape {tuple(value.shape)}.",
                why=f"In the sample batch it has {self.form.num_dims[name]} dims.",
                attempt="batches like the sample batch.",
            )


def _check_forms(recordings: Sequence[Program]) -> None:
    """Refuse micro-batches whose losses are made of other parts: they cannot be added up part by part.

    Raises:
        RecordingError: two recordings differ.
    """
    first, *others = {id(each): each for each in recordings}.values()
    if any(_forms(other) != _forms(first) for other in others):
        raise RecordingError(
            "The loss has another form for some micro-batches than for others.",
            why="A number read from the batch, or its number of samples, decides how the loss is computed.",
            attempt="tensors in place of such numbers, such as mask.sum().clamp(min=1).",
        )


def _forms(recording: Program) -> list[tuple[Any, ...]]:
    """Return for each loss term the operator that makes it, and how it adds up."""
    return [
        (
            None if term.value is None else recording.nodes[recording.producers[term.value]].target,
            term.is_sum,
            term.divisor is None,
            term.target is None,
        )
        for term in recording.loss_terms
    ]
