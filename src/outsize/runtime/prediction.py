"""Forward passes alone: the model's outputs for a whole batch, put together from micro-batches, everywhere.

```
micro-batch         0         1    (replica 1)  2      3
logits          [2, T, V] [2, T, V]         [2, T, V] [1, T, V]   joined along the dim that counts samples
loss              0.31      0.28              0.33      0.12      added up: each is scaled by its share
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_unflatten

from outsize.model.batch_entries import BatchLayout, flatten_batch
from outsize.model.program import Ref, TensorSpec
from outsize.plan.plan import Plan
from outsize.runtime.executions import Executions
from outsize.runtime.mesh import ProcessMesh
from outsize.runtime.microbatches import BatchForm, BatchSplitter, Microbatch
from outsize.runtime.output_assembly import Assembly, find_assemblies

__all__ = ["Predictor"]

_MAX_DIMS = 16


class Predictor:
    """Predicts for batches of one layout, which may lack what only training needs, such as labels.

    Entries that hold no samples in training, of the form ``trained``, hold none here either.
    """

    def __init__(
        self, executions: Executions, plan: Plan, mesh: ProcessMesh, trained: BatchForm, sample_batch: Any
    ) -> None:
        entries, self._layout = flatten_batch(sample_batch)
        shared = [name for name in entries if name in trained.dtypes and name not in trained.with_samples]
        self._form = BatchForm.of(entries, shared)
        self._executions = executions.for_batches_of(self._layout, self._form.with_samples)
        self._splitter = BatchSplitter(self._form, plan, self._executions, mesh.replica, mesh.device)
        self._plan, self._mesh = plan, mesh

    def is_for(self, layout: BatchLayout) -> bool:
        """Whether batches of this layout are predicted here."""
        return layout == self._layout

    def predict(self, batch: Any) -> Any:
        """Return what the model returns for ``batch``, on every process.

        Raises:
            BatchError: the batch has another form, or an output cannot be put together from micro-batches.
        """
        split = self._splitter.split(batch)
        steps = split.accumulation_steps
        microbatches = [microbatch for step in steps for microbatch in step]
        assemblies = self._assemblies(split.first)
        outputs: list[list[Any]] = []
        for step in steps:
            executor = self._executions.executor([each.placement for each in step])
            outputs += executor.predict([each.inputs for each in step])
        first = split.first.placement
        leaves = list(first.recording.outputs)
        sources = self._ranks_with_outputs(first.schedule.stage_to_rank[-1])
        counted = [
            leaves_of_one
            for leaves_of_one, microbatch in zip(outputs, microbatches, strict=False)
            if microbatch.num_samples
        ]
        for position, how in assemblies.items():
            own = [leaves_of_one[position] for leaves_of_one in counted]
            leaves[position] = self._assemble(
                how, own, first.recording.specs[leaves[position].value], sources
            )
        return tree_unflatten(leaves, first.recording.output_structure)

    def _ranks_with_outputs(self, pipeline_rank: int) -> list[int]:
        """Return the rank that runs the last stage of each replica."""
        mesh = self._mesh.mesh
        replicas = [rank for first in mesh.ranks_along("dp", 0) for rank in mesh.ranks_along("fsdp", first)]
        return [mesh.ranks_along("pp", first)[pipeline_rank] for first in replicas]

    def _assemblies(self, microbatch: Microbatch) -> dict[int, Assembly]:
        """Return how each tensor among the outputs is put together, by its position."""
        recording = microbatch.placement.recording
        replicas = self._plan.mesh.dp * self._plan.mesh.fsdp
        if replicas * self._plan.gradient_accumulation_steps * self._plan.schedule.num_microbatches == 1:
            return {at: "any" for at, leaf in enumerate(recording.outputs) if isinstance(leaf, Ref)}
        larger = {
            name: torch.cat([value, value[:1]]) if name in self._form.with_samples else value
            for name, value in microbatch.inputs.entries.items()
        }
        return find_assemblies(recording, self._executions.placement(larger).recording)

    def _assemble(
        self, how: Assembly, own: list[torch.Tensor], spec: TensorSpec, sources: Sequence[int]
    ) -> torch.Tensor:
        """Return an output of the whole batch.

        ``own`` are those of this replica's micro-batches, if it has samples and its last stage is here;
        ``spec`` is what the first micro-batch of all makes.
        """
        if how == "sum":
            total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
            for value in own:
                total += value.sum()
            for axis in ("dp", "fsdp", "pp"):
                self._mesh.sum_over(axis, total)
            return total.to(spec.dtype)
        if how == "any":
            return self._known_to_all(own[0] if own else None, spec.dtype, sources[0])
        none = torch.empty(spec.shape, dtype=spec.dtype, device=self._mesh.device).narrow(how, 0, 0)
        joined = torch.cat([none, *own], how)
        return torch.cat([self._known_to_all(joined, spec.dtype, source) for source in sources], how)

    def _known_to_all(self, value: torch.Tensor | None, dtype: torch.dtype, source: int) -> torch.Tensor:
        """Return the value that rank ``source`` has, on every process."""
        if self._mesh.mesh.world_size == 1:
            assert value is not None
            return value
        sizes = torch.zeros(_MAX_DIMS + 1, dtype=torch.int64, device=self._mesh.device)
        if self._mesh.rank == source:
            assert value is not None
            value = value.contiguous()
            sizes[: value.dim() + 1] = torch.tensor([value.dim(), *value.shape])
        dist.broadcast(sizes, source)
        if self._mesh.rank != source:
            num_dims, *shape = sizes.tolist()
            value = torch.empty(shape[:num_dims], dtype=dtype, device=self._mesh.device)
        assert value is not None
        if value.numel():
            dist.broadcast(value.reshape(-1).view(torch.uint8), source)  # as bytes: any dtype travels
        return value
