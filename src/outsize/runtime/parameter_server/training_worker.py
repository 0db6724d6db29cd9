"""What a worker does in a training job: one part of a global batch from the servers' present parameters."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outsize.errors import DoesNotFitError, TrainingError
from outsize.model.argument import load_model
from outsize.model.deferred import apply_materialised
from outsize.runtime.batch_source import BatchSource
from outsize.runtime.gradient_clipping import sum_of_squares
from outsize.runtime.measured_memory import MemoryMeter, start_measuring
from outsize.runtime.memory_limit import apply_memory_limit, readable_out_of_memory
from outsize.runtime.optimizer import build_optimizer
from outsize.runtime.parameter_server.checkpoint import load_whole
from outsize.runtime.parameter_server.client import Pulled, ServerClient
from outsize.runtime.parameter_server.embedding_rows import EmbeddingRows
from outsize.runtime.parameter_server.job import ParameterServerJob
from outsize.runtime.parameter_server.job_variables import find_variables
from outsize.runtime.parameter_server.part_model import PartModel
from outsize.runtime.parameter_server.worker import Gradients, StepContext, StepFunction
from outsize.runtime.parameter_server.written_buffers import WrittenBuffers
from outsize.runtime.trainer import count_tokens
from outsize.units import format_bytes

__all__ = ["TrainingWorker"]


class TrainingWorker:
    """Holds the module of one worker. On a CPU its dense parameters are the buffers in which they arrive."""

    def __init__(self, job: ParameterServerJob, index: int, device: torch.device) -> None:
        self._job, self._index, self._device = job, index, device
        source = load_model(job.model, sequence=job.sequence)
        self._batches = BatchSource(source, job.data)
        self._model = PartModel(source, job.plan_of_parts, device)
        found = find_variables(self._model, job.row_wise)
        self._tables = EmbeddingRows(found.tables)
        self._constants = found.constants
        self._written_buffers = WrittenBuffers(self._model.module, found.buffers)
        self._memory: MemoryMeter | None = None  # from the first step on
        self._parameters: dict[str, nn.Parameter] = {}  # dense and trained, by name; empty until installed
        self._installed_for: ServerClient | None = None
        self._local_optimizer: torch.optim.Optimizer | None = None

    @property
    def steps(self) -> dict[str, StepFunction]:
        """The steps that the coordinator may ask for."""
        return {"train": self._train, "evaluate": self._evaluate}

    def _train(self, context: StepContext, argument: Any) -> dict[str, Any]:
        started = time.perf_counter()
        memory = self._watch_memory(context.servers)
        update, part = argument["update"], argument["part"]
        updates = self._job.updates
        result: dict[str, Any] = {}

        def compute(pulled: Pulled) -> Gradients:
            self._install(context.servers, pulled)
            train = self._local_steps if updates.mode == "local" else self._gradients
            result.update(train(context.servers, update, part))
            dense = {name: one.grad for name, one in self._parameters.items() if one.grad is not None}
            return Gradients(dense or None, self._tables.gradients())

        with readable_out_of_memory(self._index, self._job.plan.device_memory_bytes, "training"):
            context.update(compute, minimum_version=update if updates.are_exact else None)
        return result | {
            "worker": self._index,
            "step_time_s": time.perf_counter() - started,
            "peak_memory_bytes": self._peak_bytes(memory, context.servers),
        }

    def _gradients(self, servers: ServerClient, step: int, part: int, scale: float = 1.0) -> dict[str, Any]:
        """Leave the gradients of one part, times ``scale``, in ``parameter.grad`` and the tables."""
        batch = self._batches.training_batch(step, self._job.plan.global_batch)
        self._clear_gradients(servers)
        looking_up = self._tables.pulling(servers.pull_more_rows)
        with self._written_buffers.refused():
            loss = self._model.train(batch, step=step, part=part, running=looking_up)
        norm = self._gradient_norm() * scale
        if not math.isfinite(norm):
            raise TrainingError(
                f"The gradient norm is {norm} after {step} steps.",
                why="A gradient is not finite. It was not pushed.",
                attempt="a lower learning rate, or a look at this batch.",
            )
        most = self._job.plan.optimizer.max_gradient_norm
        if most is not None and norm > most:
            scale *= most / (norm + 1e-6)
        if scale != 1.0:
            self._scale_gradients(scale)
        return {"loss": loss, "num_tokens": count_tokens(batch)}

    def _local_steps(self, servers: ServerClient, update: int, part: int) -> dict[str, Any]:
        """Train a copy for some steps; leave ``(before - after) / workers`` in ``parameter.grad``.

        The servers' optimizer then steps by how far the workers moved on average (Douillard et al. 2023).
        """
        num_steps, num_parts = self._job.updates.steps_per_update, self._job.num_parts
        parameters = self._parameters
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        if self._local_optimizer is None:
            self._local_optimizer = build_optimizer(self._job.plan.optimizer, parameters.values())
        losses, num_tokens = 0.0, 0
        for step in range(update * num_steps, (update + 1) * num_steps):
            # what is pushed as a share of the global batch is here the mean over the part
            done = self._gradients(servers, step, part, scale=num_parts)
            self._local_optimizer.step()
            losses += done["loss"]
            num_tokens += done["num_tokens"]
        for name, parameter in parameters.items():
            moved = (before[name] - parameter.detach()) / num_parts
            parameter.grad = moved if parameter.grad is None else parameter.grad.copy_(moved)
        return {"loss": losses / num_steps, "num_tokens": num_tokens}

    def _evaluate(self, context: StepContext, argument: Any) -> float:
        self._watch_memory(context.servers)
        batch = self._batches.validation_batch(argument["index"], self._job.plan.global_batch)
        with readable_out_of_memory(self._index, self._job.plan.device_memory_bytes, "evaluating"):
            self._install(context.servers, context.servers.pull())
            looking_up = self._tables.pulling(context.servers.pull_more_rows)
            return self._model.evaluate(batch, looking_up)

    def _watch_memory(self, servers: ServerClient) -> MemoryMeter:
        """Measure, and limit, memory from the first step on: the threads of connections are up by then.

        The client's buffers are there too, and count.
        """
        if self._memory is None:
            self._memory = start_measuring(self._device)
            limit = self._job.plan.device_memory_bytes
            if limit is not None and limit < servers.num_bytes:
                raise DoesNotFitError(
                    f"Worker {self._index} cannot hold its dense parameters and gradients.",
                    why=f"They take {format_bytes(servers.num_bytes)} of {format_bytes(limit)}.",
                    attempt="--row-wise for embeddings, larger devices, or a strategy that splits the model.",
                )
            if limit is not None:
                apply_memory_limit(limit - servers.num_bytes)
        return self._memory

    def _peak_bytes(self, memory: MemoryMeter, servers: ServerClient) -> int | None:
        """Return the peak on this device; on a CPU the client's buffers are in use, and were before."""
        peak = memory.measure_peak_bytes()
        return peak if peak is None or self._device.type != "cpu" else peak + servers.num_bytes

    def _install(self, servers: ServerClient, pulled: Pulled) -> None:
        """Let the module hold what was pulled: on a CPU the very buffers, else copies on the device."""
        if self._installed_for is None:
            self._fill_module(pulled)
        elif self._device.type != "cpu":
            for name, parameter in self._parameters.items():
                parameter.data.copy_(pulled.parameters[name])
        elif self._installed_for is not servers:  # a new connection has buffers of its own
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
        for module in self._tables.tables.values():
            module.weight.requires_grad_(False)  # it has no values, and no gradient: its rows have

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

    def _gradient_norm(self) -> float:
        gradients = [one.grad for one in self._parameters.values() if one.grad is not None]
        gradients += [values for _, values in self._tables.gradients().values()]
        return math.sqrt(sum(sum_of_squares(gradient).item() for gradient in gradients))

    def _scale_gradients(self, factor: float) -> None:
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        self._tables.scale(factor)
