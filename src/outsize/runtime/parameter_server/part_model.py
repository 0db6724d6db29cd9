"""A whole model on one process, which computes the loss of any part of a global batch.

It is the worker's and the evaluator's side of a job: recordings, micro-batches and loss scales are those of
every other strategy, so that the parts' losses and gradients add up to those of the global batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outsize.errors import RecordingError
from outsize.model.batch_entries import flatten_batch
from outsize.model.deferred import build_deferred
from outsize.model.source import ModelSource, resize_batch
from outsize.plan.plan import Mesh, Plan
from outsize.runtime.executions import Executions
from outsize.runtime.mesh import ProcessMesh
from outsize.runtime.microbatches import BatchForm, BatchSplitter, Microbatch
from outsize.runtime.random_streams import random_stream
from outsize.runtime.runnable import check_trainable
from outsize.runtime.stage_executor import StageExecutor
from outsize.runtime.state_sharding import StateSharding

__all__ = ["PartModel"]


class PartModel:
    """Built without memory: the caller puts parameters into the module. ``plan`` says how parts are cut.

    Raises:
        ModelError, RecordingError: it cannot be built or recorded, or returns no loss.
    """

    def __init__(self, source: ModelSource, plan: Plan, device: torch.device) -> None:
        self.deferred = build_deferred(source.factory, seed=plan.seed)
        check_trainable(self.deferred.module)
        self._plan, self._device = plan, device
        sample_batch = source.sample_batch(plan.microbatch_size)
        entries, layout = flatten_batch(sample_batch)
        alone = replace(plan, mesh=Mesh(), state_sharding="none")
        mesh = ProcessMesh(alone.mesh, 0, device)
        state = StateSharding(self.deferred, alone, mesh)
        self._form = BatchForm.of(entries, source.shared_entries(sample_batch))
        with_samples = self._form.with_samples
        self._executions = Executions(self.deferred, layout, with_samples, alone, mesh, state)
        microbatch = flatten_batch(resize_batch(sample_batch, plan.microbatch_size, with_samples))[0]
        placement = self._executions.placement(microbatch)
        self.recording = placement.recording
        if self.recording.loss_value is None:
            raise RecordingError(
                "The model returns no loss.",
                why="Training differentiates an output named loss, or the only scalar one.",
                attempt="a sample batch with labels, or a module whose forward returns the loss.",
            )
        self.held = set(self._executions.held.by_rank[0])
        self._training_modes = {part: part.training for part in self.module.modules()}

    @property
    def module(self) -> nn.Module:
        """The module; what it still holds on the meta device is given its initial values when it is used."""
        return self.deferred.module

    def train(self, batch: Any, *, step: int, part: int, running: AbstractContextManager[None]) -> float:
        """Add the gradients of one part of a global batch to ``parameter.grad``; return its loss share.

        Random masks are those of replica ``part`` in that step. ``running`` is entered while the module runs
        with values, not while it is recorded.
        """
        place = ProcessMesh(self._plan.mesh, part, self._device)
        microbatches = self._split(batch, part, self._plan.denominator)
        with random_stream(self._plan.seed, step, place), running:
            return self._sum(
                executor.train([each.inputs for each in of_step])
                for of_step, executor in self._passes(microbatches)
            )

    def evaluate(self, batch: Any, running: AbstractContextManager[None]) -> float:
        """Return the loss of a whole batch in evaluation mode; ``running`` as in ``train``."""
        with self._evaluation_mode():
            microbatches = [
                of_step for part in range(self._plan.mesh.dp) for of_step in self._split(batch, part)
            ]
            with running:
                return self._sum(
                    executor.evaluate([each.inputs for each in of_step])
                    for of_step, executor in self._passes(microbatches)
                )

    def _split(self, batch: Any, part: int, denominator: str = "samples") -> list[list[Microbatch]]:
        """Return the micro-batches of a part by accumulation step; new shapes are recorded."""
        splitter = BatchSplitter(self._form, self._plan, self._executions, part, self._device)
        return splitter.split(batch, denominator=denominator).accumulation_steps

    def _passes(
        self, microbatches: list[list[Microbatch]]
    ) -> Iterator[tuple[list[Microbatch], StageExecutor]]:
        for of_step in microbatches:
            yield of_step, self._executions.executor([each.placement for each in of_step])

    def _sum(self, losses: Iterator[torch.Tensor]) -> float:
        return sum(losses, torch.zeros((), dtype=torch.float64, device=self._device)).item()

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        self.module.eval()
        try:
            yield
        finally:
            for part, mode in self._training_modes.items():
                part.training = mode
