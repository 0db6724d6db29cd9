"""What a worker does in a training job: one part of a global batch from the servers' present parameters."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outsize.errors import TrainingError
from outsize.model.argument import load_model
from outsize.model.deferred import apply_materialised
from outsize.runtime.batch_source import BatchSource
from outsize.runtime.gradient_clipping import sum_of_squares
from outsize.runtime.measured_memory import start_measuring
from outsize.runtime.memory_limit import apply_memory_limit, readable_out_of_memory
from outsize.runtime.optimizer import build_optimizer
from outsize.runtime.parameter_server.checkpoint import load_whole
from outsize.runtime.parameter_server.client import Pulled, ServerClient
from outsize.runtime.parameter_server.embedding_rows import EmbeddingRows
from outsize.runtime.parameter_server.job import ParameterServerJob
from outsize.runtime.parameter_server.job_variables import find_variables
from outsize.runtime.parameter_server.part_model import PartModel
from outsize.runtime.parameter_server.worker import Gradients, StepContext, StepFunction
from outsize.runtime.trainer import count_tokens

__all__ = ["TrainingWorker"]


class TrainingWorker:
    """Holds the module of one worker. Its dense parameters are the client's buffers, in which they arrive."""

    def __init__(self, job: ParameterServerJob, index: int, device: torch.device) -> None:
        self._job, self._index, self._device = job, index, device
        source = load_model(job.model, sequence=job.sequence)
        self._batches = BatchSource(source, job.data)
        self._plan = job.plan_of_parts(job.updates.num_parts(job.num_workers))
        self._model = PartModel(source, self._plan, device)
        found = find_variables(self._model.deferred, self._model.recording, job.row_wise)
        self._tables = EmbeddingRows(found.tables)
        self._constants = found.constants
        self._memory = start_measuring(device)
        if job.plan.device_memory_bytes is not None:
            apply_memory_limit(job.plan.device_memory_bytes)
        self._parameters: dict[str, nn.Parameter] = {}  # dense and trained, by name
        self._is_installed = False
        self._installed_for: ServerClient | None = None
        self._local_optimizer: torch.optim.Optimizer | None = None

    @property
    def steps(self) -> dict[str, StepFunction]:
        """The steps that the coordinator may ask for."""
        return {"train": self._train, "evaluate": self._evaluate}

    def _train(self, context: StepContext, argument: Any) -> dict[str, Any]:
        started = time.perf_counter()
        update, part = argument["update"], argument["part"]
        job = self._job
        result: dict[str, Any] = {}

        def compute(pulled: Pulled) -> Gradients:
            self._install(context.servers, pulled)
            if job.updates.mode == "local":
                result.update(self._local_steps(context.servers, update, part))
            else:
                result.update(self._gradients(context.servers, update, part))
            return Gradients(self._dense_gradients(), self._tables.gradients())

        with readable_out_of_memory(self._index, job.plan.device_memory_bytes, "training"):
            context.update(compute, minimum_version=update if job.updates.are_exact else None)
        return result | {
            "worker": self._index,
            "step_time_s": time.perf_counter() - started,
            "peak_memory_bytes": self._memory.measure_peak_bytes(),
        }

    def _gradients(self, servers: ServerClient, step: int, part: int) -> dict[str, Any]:
        """Leave the gradients of one part in ``parameter.grad``."""
        batch = self._batches.training_batch(step, self._plan.global_batch)
        self._clear_gradients(servers)
        with self._tables.pulling(servers.pull_more_rows):
            loss = self._model.train(batch, step=step, part=part, plan=self._plan)
        norm = self._gradient_norm()
        if not math.isfinite(norm):
            raise TrainingError(
                f"The gradient norm is {norm} after {step} steps.",
                why="A gradient is not finite. It was not pushed.",
                attempt="a lower learning rate, or a look at this batch.",
            )
        self._clip(norm)
        return {"loss": loss, "gradient_norm": norm, "num_tokens": count_tokens(batch)}

    def _local_steps(self, servers: ServerClient, update: int, part: int) -> dict[str, Any]:
        """Train a copy for some steps; leave ``(before - after) / workers`` in ``parameter.grad``."""
        num_steps, num_parts = self._job.updates.steps_per_update, self._plan.mesh.dp
        parameters = self._parameters
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        if self._local_optimizer is None:
            self._local_optimizer = build_optimizer(self._plan.optimizer, parameters.values())
        losses, num_tokens = 0.0, 0
        for local_step in range(num_steps):
            done = self._gradients(servers, update * num_steps + local_step, part)
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(num_parts)  # the mean of the part, not its share of the global batch
            self._local_optimizer.step()
            losses += done["loss"]
            num_tokens += done["num_tokens"]
        for name, parameter in parameters.items():
            moved = (before[name] - parameter.detach()) / num_parts
            parameter.grad = moved if parameter.grad is None else parameter.grad.copy_(moved)
        return {"loss": losses / num_steps, "gradient_norm": 0.0, "num_tokens": num_tokens}

    def _evaluate(self, context: StepContext, argument: Any) -> float:
        batch = self._batches.validation_batch(argument["index"], self._plan.global_batch)
        with readable_out_of_memory(self._index, self._job.plan.device_memory_bytes, "evaluating"):
            self._install(context.servers, context.servers.pull())
            with self._tables.pulling(context.servers.pull_more_rows):
                return self._model.evaluate(batch)

    def _install(self, servers: ServerClient, pulled: Pulled) -> None:
        """Let the module hold what was pulled: on a CPU the very buffers, else copies on the device."""
        if not self._is_installed:
            self._fill_module(pulled)
        elif self._device.type != "cpu":
            for name, parameter in self._parameters.items():
                parameter.data.copy_(pulled.parameters[name])
        elif self._installed_for is not servers:
            for name, parameter in self._parameters.items():
                parameter.data = pulled.parameters[name]
        self._installed_for = servers

    def _fill_module(self, pulled: Pulled) -> None:
        """Put parameters into the module; tables stay without values, the rest follows where it is used."""
        values = {name: tensor.to(self._device) for name, tensor in pulled.parameters.items()}
        values |= {name: torch.empty_like(one.weight) for name, one in self._tables.tables.items()}
        with readable_out_of_memory(self._index, self._job.plan.device_memory_bytes, "building its model"):
            apply_materialised(self._model.module, values | self._saved_constants())
        parameters = dict(self._model.module.named_parameters())
        self._parameters = {name: parameters[name] for name in pulled.parameters}
        self._is_installed = True

    def _saved_constants(self) -> dict[str, torch.Tensor]:
        if self._job.checkpoint is None or not self._constants:
            return {}
        saved = load_whole(Path(self._job.checkpoint), only=set(self._constants))
        tensors = self._model.deferred.tensors
        return {name: value.view(tensors[name].shape).to(self._device) for name, value in saved.items()}

    def _clear_gradients(self, servers: ServerClient) -> None:
        """On a CPU let gradients be summed where they travel from."""
        for name, parameter in self._parameters.items():
            if self._device.type == "cpu":
                parameter.grad = servers.gradients[name]
            if parameter.grad is not None:
                parameter.grad.zero_()

    def _dense_gradients(self) -> dict[str, torch.Tensor] | None:
        found = {name: one.grad for name, one in self._parameters.items() if one.grad is not None}
        return found or None

    def _gradient_norm(self) -> float:
        gradients = [one.grad for one in self._parameters.values() if one.grad is not None]
        gradients += [values for _, values in self._tables.gradients().values()]
        return math.sqrt(sum(sum_of_squares(gradient).item() for gradient in gradients))

    def _clip(self, norm: float) -> None:
        most = self._plan.optimizer.max_gradient_norm
        if most is not None and norm > most:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(most / (norm + 1e-6))
            self._tables.scale(most / (norm + 1e-6))
