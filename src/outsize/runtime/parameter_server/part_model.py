"""A whole model on one process, which computes the loss of any part of a global batch.

It is the worker's and the evaluator's side of a job: recordings, micro-batches and loss scales are those of
every other strategy, so that the parts' losses and gradients add up to those of the global batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outsize.errors import RecordingError
from outsize.model.batch_entries import flatten_batch
from outsize.model.deferred import DeferredModel, build_deferred
from outsize.model.program import Program
from outsize.model.source import ModelSource, resize_batch
from outsize.plan.plan import Mesh, Plan
from outsize.runtime.executions import Executions
from outsize.runtime.mesh import ProcessMesh
from outsize.runtime.microbatches import BatchForm, BatchSplitter
from outsize.runtime.random_streams import random_stream
from outsize.runtime.state_sharding import StateSharding

__all__ = ["PartModel", "record_source"]


def record_source(source: ModelSource, plan: Plan) -> tuple[DeferredModel, Program]:
    """Build the model without memory and record it on a micro-batch of the plan.

    Raises:
        ModelError, RecordingError: it cannot be built or recorded, or returns no loss.
    """
    model = PartModel(source, plan, torch.device("cpu"))
    return model.deferred, model.recording


class PartModel:
    """Its parameters are put into the module by the caller. ``plan`` says how parts are cut."""

    def __init__(self, source: ModelSource, plan: Plan, device: torch.device) -> None:
        self.deferred = build_deferred(source.factory, seed=plan.seed)
        self._plan, self._device = plan, device
        sample_batch = source.sample_batch(plan.microbatch_size)
        entries, layout = flatten_batch(sample_batch)
        alone = replace(plan, mesh=Mesh(), state_sharding="none")
        mesh = ProcessMesh(alone.mesh, 0, device)
        state = StateSharding(self.deferred, alone, mesh)
        self._form = BatchForm.of(entries)
        with_samples = self._form.with_samples
        self._executions = Executions(self.deferred, layout, with_samples, alone, mesh, state)
        microbatch = flatten_batch(resize_batch(sample_batch, plan.microbatch_size, with_samples))[0]
        self.recording = self._executions.placement(microbatch).recording
        if self.recording.loss_value is None:
            raise RecordingError(
                "The model returns no loss.",
                why="Training differentiates an output named loss, or the only scalar one.",
                attempt="a sample batch with labels, or a module whose forward returns the loss.",
            )
        self._training_modes = {part: part.training for part in self.module.modules()}

    @property
    def module(self) -> nn.Module:
        """The module; what it still holds on the meta device is given its initial values when it is used."""
        return self.deferred.module

    def train(self, batch: Any, *, step: int, part: int = 0, plan: Plan | None = None) -> float:
        """Add the gradients of one part of a global batch to ``parameter.grad``; return its loss share.

        ``plan`` may cut the batch otherwise; its ``dp`` counts the parts. Random masks are those of replica
        ``part`` in that step.
        """
        plan = plan or self._plan
        place = ProcessMesh(plan.mesh, part, self._device)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        with random_stream(plan.seed, step, place):
            for microbatches in self._splitter(plan, part).split(batch).accumulation_steps:
                executor = self._executions.executor([each.placement for each in microbatches])
                total += executor.train([each.inputs for each in microbatches])
        return total.item()

    def evaluate(self, batch: Any) -> float:
        """Return the loss of a whole batch in evaluation mode."""
        plan = self._plan
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        with self._evaluation_mode():
            for part in range(plan.mesh.dp):
                for microbatches in self._splitter(plan, part).split(batch).accumulation_steps:
                    executor = self._executions.executor([each.placement for each in microbatches])
                    total += executor.evaluate([each.inputs for each in microbatches])
        return total.item()

    def _splitter(self, plan: Plan, part: int) -> BatchSplitter:
        return BatchSplitter(self._form, plan, self._executions, part, self._device)

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        self.module.eval()
        try:
            yield
        finally:
            for part, mode in self._training_modes.items():
                part.training = mode
