"""Cuts a global batch into the micro-batches of every replica and accumulation step.

global batch  ├──── replica 0 ────┤├──── replica 1 ────┤
              ├ acc. 0 ─┤├ acc. 1 ─┤├ ...
              ├mb 0┤├mb 1┤├mb 0┤...
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outsize.errors import BatchError
from outsize.model.batch_entries import flatten_batch
from outsize.model.loss_elements import count_loss_elements, loss_scales
from outsize.model.program import NodeKind, Program
from outsize.plan.plan import Plan
from outsize.runtime.stage_executor import Microbatch

__all__ = ["BatchSplitter"]


class BatchSplitter:
    """Splits global batches for one replica; every process holds the whole batch, so nothing is sent.

    An entry with as many rows as the global batch is cut along its first dimension; another one goes to every
    micro-batch whole.
    """

    def __init__(self, program: Program, plan: Plan, replica: int, device: torch.device) -> None:
        self._program = program
        self._device = device
        self._replica = replica
        self._num_replicas = plan.mesh.dp * plan.mesh.fsdp
        self._accumulation_steps = plan.gradient_accumulation_steps
        self._num_microbatches = plan.schedule.num_microbatches
        self._global_batch = plan.global_batch
        self._specs = {str(node.target): node for _, node in program.nodes_of_kind(NodeKind.INPUT)}

    def split(self, batch: Any) -> tuple[list[list[Microbatch]], list[int]]:
        """Return this replica's micro-batches by accumulation step, and each loss term's elements in all.

        Raises:
            BatchError: an entry is missing, or has another shape or dtype than the plan was made for.
        """
        entries = flatten_batch(batch)[0]
        self._check(entries)
        counts = [count_loss_elements(self._program, part) for part in self._parts(entries)]
        totals = [sum(column) for column in zip(*counts, strict=True)]
        scales = [tuple(loss_scales(self._program, count, totals)) for count in counts]
        per_replica = self._accumulation_steps * self._num_microbatches
        mine = slice(self._replica * per_replica, (self._replica + 1) * per_replica)
        own = [
            Microbatch({name: value.to(self._device) for name, value in part.items()}, scale)
            for part, scale in zip(self._parts(entries)[mine], scales[mine], strict=True)
        ]
        size = self._num_microbatches
        return [own[start : start + size] for start in range(0, per_replica, size)], totals

    def _parts(self, entries: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Return all micro-batches of the global batch, in order."""
        num_parts = self._num_replicas * self._accumulation_steps * self._num_microbatches
        rows = self._global_batch // num_parts
        return [
            {
                name: value[index * rows : (index + 1) * rows] if self._is_split(value) else value
                for name, value in entries.items()
                if name in self._specs
            }
            for index in range(num_parts)
        ]

    def _is_split(self, value: torch.Tensor) -> bool:
        return value.dim() > 0 and value.shape[0] == self._global_batch

    def _check(self, entries: Mapping[str, torch.Tensor]) -> None:
        for name, node in self._specs.items():
            if name not in entries:
                raise BatchError(
                    f"The batch has no entry {name!r}.",
                    why=f"The model reads it; the batch has {', '.join(sorted(entries))}.",
                    attempt="a batch like the sample batch.",
                )
            self._check_entry(name, entries[name], self._program.specs[node.outputs[0]])

    def _check_entry(self, name: str, value: torch.Tensor, spec: Any) -> None:
        if value.dtype != spec.dtype:
            raise BatchError(
                f"Batch entry {name!r} has dtype {value.dtype}.",
                why=f"The model was recorded with {spec.dtype}.",
                attempt=f"batch[{name!r}].to({spec.dtype}).",
            )
        shape = tuple(value.shape)
        rows = (self._global_batch, *spec.shape[1:]) if spec.shape else ()
        if shape in (spec.shape, rows):
            return
        raise BatchError(
            f"Batch entry {name!r} has shape {shape}.",
            why=f"The plan is for a global batch of {self._global_batch}: {rows}.",
            attempt="batches of that shape (drop or pad the last one), or a plan for this shape.",
        )
