"""A model that trains under a plan: one object a process, one call a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outsize.errors import TrainingError
from outsize.model.batch_entries import flatten_batch
from outsize.model.operator_rules.placement import Shard
from outsize.plan.plan import Plan
from outsize.runtime.agreement import check_same_batch
from outsize.runtime.checkpoint import find_checkpoint, load_entries, save_entries, saved_names
from outsize.runtime.checkpoint_entry import CheckpointEntry
from outsize.runtime.data_parallel import sum_gradients
from outsize.runtime.executions import Executions
from outsize.runtime.gradient_clipping import clip_gradients, compute_gradient_norm
from outsize.runtime.measured_memory import MemoryMeter
from outsize.runtime.memory_limit import readable_out_of_memory
from outsize.runtime.mesh import ProcessMesh
from outsize.runtime.microbatches import BatchSplitter
from outsize.runtime.model_state import initialise_optimizer_state, state_entries
from outsize.runtime.prediction import Predictor
from outsize.runtime.random_streams import random_stream
from outsize.runtime.state_sharding import StateSharding
from outsize.runtime.tied_parameters import TiedParameters

__all__ = ["HeldState", "ParallelModel", "StepResult"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did; the same on every process."""

    loss: float  # of the global batch, before the update
    gradient_norm: float  # of all gradients of the model, before clipping
    num_elements: int  # that the (first) loss was taken over, such as labels that count


@dataclass(frozen=True, slots=True)
class HeldState:
    """What this process holds of the model, by full name (tied parameters by their first)."""

    parameters: Mapping[str, nn.Parameter]  # that the optimizer updates
    in_modules: Mapping[str, nn.Parameter]  # that stand in the modules; others only where rows are views
    buffers: Mapping[str, torch.Tensor]  # those that a state dict has
    placements: Mapping[str, Shard]  # of the parameters that are split over tp
    tied: TiedParameters
    sharding: StateSharding  # over fsdp

    def is_counted(self, name: str, mesh: ProcessMesh) -> bool:
        """Whether this process counts the parameter in a norm: shards all do, copies one of them does."""
        return self.tied.is_counted_here(name) and (name in self.placements or mesh.coordinates["tp"] == 0)

    @property
    def counted_axes(self) -> tuple[str, ...]:
        """The mesh axes along which processes hold different gradients."""
        return ("fsdp", "tp", "pp") if self.sharding.is_sharded else ("tp", "pp")


class ParallelModel:
    """This process's part of a model under a plan. Made by :func:`outsize.parallelize`.

    Every process calls the same methods in the same order, with the same global batch.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: ProcessMesh,
        module: nn.Module,
        held: HeldState,
        memory: MemoryMeter,
        optimizer: torch.optim.Optimizer,
        executions: Executions,
        splitter: BatchSplitter,
    ) -> None:
        self.plan, self.mesh, self.memory, self.optimizer = plan, mesh, memory, optimizer
        self.num_steps = 0
        self._module, self._held = module, held
        self.executions, self._splitter = executions, splitter
        self._predictors: list[Predictor] = []
        self._batches_agreed: set[str] = set()  # methods whose first batch was compared over processes
        self._training_modes = {part: part.training for part in module.modules()}

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters (or shards) that this process holds, by full name; tied ones by their first name."""
        return self._held.parameters

    def train_step(self, batch: Any) -> StepResult:
        """Update the parameters with one global batch.

        Raises:
            BatchError: the batch does not have the shape the plan needs, or the first one is not the same on
                every process; nothing was changed.
            DoesNotFitError: this device ran out of memory.
            TrainingError: a gradient is not finite; no process changed a parameter.
        """
        with readable_out_of_memory(self.mesh.rank, self.plan.device_memory_bytes, "training"):
            result = self.compute_gradients(batch)
            self._update(result.gradient_norm)
        return result

    def compute_gradients(self, batch: Any) -> StepResult:
        """Leave the gradients of one global batch in ``parameter.grad``, summed over all that hold it."""
        self._check_first_batch("train", batch)
        split = self._splitter.split(batch, denominator=self.plan.denominator)
        self.optimizer.zero_grad()
        for parameter in self._held.in_modules.values():
            parameter.grad = None
        loss = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        with random_stream(self.plan.seed, self.num_steps, self.mesh):
            for microbatches in split.accumulation_steps:
                executor = self.executions.executor([each.placement for each in microbatches])
                loss += executor.train([each.inputs for each in microbatches])
        self._sum_over_replicas()
        self._held.tied.sum_gradients(self.parameters)
        counted = {n: p for n, p in self.parameters.items() if self._held.is_counted(n, self.mesh)}
        norm = compute_gradient_norm(counted.values(), self.mesh, self._held.counted_axes)
        return StepResult(self._known_to_all(loss), norm.item(), int(split.num_elements[0]))

    def _sum_over_replicas(self) -> None:
        """Sum gradients over replicas; shards have been, or are now, over ``fsdp``, and then over ``dp``."""
        held = self._held
        if held.sharding.level == "optimizer_states":
            held.sharding.reduce_gradients(held.in_modules)
        group = self.mesh.group("dp") if held.sharding.is_sharded else self.mesh.replica_group
        sum_gradients(list(self.parameters.values()), group)

    def evaluate(self, batch: Any) -> float:
        """Return the loss of one global batch with the module in evaluation mode; parameters stay.

        Raises:
            BatchError: the batch does not have the shape the plan needs, or is not the same everywhere.
        """
        self._check_first_batch("evaluate", batch)
        with self._evaluation_mode():
            loss = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
            for microbatches in self._splitter.split(batch).accumulation_steps:
                executor = self.executions.executor([each.placement for each in microbatches])
                loss += executor.evaluate([each.inputs for each in microbatches])
        return self._known_to_all(loss)

    def predict(self, batch: Any) -> Any:
        """Return the model's outputs for one batch, in evaluation mode, whole and the same on every process.

        The batch is any that the model's forward takes, of up to the plan's global batch of samples; it may
        lack entries of the sample batch, such as labels. Every process holds the outputs of all its samples:
        where they are large, give fewer samples at a time.

        Raises:
            BatchError: too many samples, or an output that cannot be put together from micro-batches.
        """
        self._check_first_batch("predict", batch)
        layout = flatten_batch(batch)[1]
        with readable_out_of_memory(self.mesh.rank, self.plan.device_memory_bytes, "predicting"):
            predictor = next((each for each in self._predictors if each.is_for(layout)), None)
            if predictor is None:
                predictor = Predictor(self.executions, self.plan, self.mesh, self._splitter.form, batch)
                self._predictors.append(predictor)
            with self._evaluation_mode():
                return predictor.predict(batch)

    def _check_first_batch(self, method: str, batch: Any) -> None:
        """Compare the first batch of a method over processes, before a check that may fail on one alone."""
        if method not in self._batches_agreed:
            check_same_batch(batch, self.mesh.device)
            self._batches_agreed.add(method)

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        self._module.eval()
        try:
            yield
        finally:
            for part, mode in self._training_modes.items():
                part.training = mode

    def save_checkpoint(self, folder: Path) -> Path:
        """Save parameters, buffers and optimizer below ``folder``; return the checkpoint's path.

        It loads under any other plan of the same model and optimizer.

        Raises:
            LaunchError: it cannot be written; earlier ones are as they were.
        """
        return save_entries(folder, self.num_steps, self._entries())

    def load_checkpoint(self, folder: Path) -> None:
        """Go on from the newest checkpoint below ``folder``, or from ``folder`` itself if it is one.

        Raises:
            LaunchError: there is no complete checkpoint, or a file of it is damaged; nothing was changed.
            PlanError: it is of another model or optimizer; nothing was changed.
        """
        checkpoint = find_checkpoint(folder)
        initialise_optimizer_state(self.optimizer, self.parameters, saved_names(checkpoint))
        self.num_steps = load_entries(checkpoint, self._entries())
        self._held.sharding.update_modules(self._held.in_modules)

    def _entries(self) -> dict[str, CheckpointEntry]:
        held = self._held
        return state_entries(
            held.parameters, held.buffers, self.optimizer, held.placements, held.sharding, self.mesh
        )

    def _known_to_all(self, loss: torch.Tensor) -> float:
        """Add up the loss over replicas and let every pipeline rank know it (others than the last have 0)."""
        for axis in ("dp", "fsdp", "pp"):
            self.mesh.sum_over(axis, loss)
        return loss.item()

    def _update(self, norm: float) -> None:
        if not math.isfinite(norm):
            raise TrainingError(
                f"The gradient norm is {norm} after {self.num_steps} steps.",
                why="A gradient is not finite. No parameter was changed.",
                attempt="a lower learning rate, gradient clipping from the start, or a look at this batch.",
            )
        max_norm = self.plan.optimizer.max_gradient_norm
        if max_norm is not None:
            clip_gradients(self.parameters, norm, max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._held.sharding.update_modules(self._held.in_modules)
        self.num_steps += 1
