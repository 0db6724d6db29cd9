"""What each process of a training job does: server, worker or evaluator."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import torch

from outsize.model.argument import load_model
from outsize.model.deferred import apply_materialised
from outsize.runtime.batch_source import BatchSource
from outsize.runtime.metrics import EvaluationMetrics, MetricsFile
from outsize.runtime.parameter_server.evaluator import evaluate_checkpoints
from outsize.runtime.parameter_server.job import ParameterServerJob
from outsize.runtime.parameter_server.membership import Membership
from outsize.runtime.parameter_server.part_model import PartModel
from outsize.runtime.parameter_server.server import Server
from outsize.runtime.parameter_server.training_worker import TrainingWorker
from outsize.runtime.parameter_server.worker import Worker
from outsize.runtime.process_memory import apply_steady_allocation
from outsize.runtime.warm_up import warm_up

__all__ = ["EVALUATIONS", "ROLES", "Role"]

EVALUATIONS = "evaluations.jsonl"
"""What the evaluator writes in the run's folder."""

_POLL_S = 0.5

Role = Callable[[ParameterServerJob, Membership, int], None]
"""A role runs until the job ends, under its index among those of its kind."""


def _serve(job: ParameterServerJob, membership: Membership, index: int) -> None:
    _share_cores(job.num_servers if job.is_on_one_machine else 1)
    Server(membership, index).run()


def _work(job: ParameterServerJob, membership: Membership, index: int) -> None:
    device = _device_of_worker(job, index)
    warm_up(device)
    Worker(membership, index, TrainingWorker(job, index, device).steps).run()


def _device_of_worker(job: ParameterServerJob, index: int) -> torch.device:
    """Return an accelerator where there are any and none is emulated; they are shared if they are too few."""
    is_emulated = job.plan.device_memory_bytes is not None
    if is_emulated:
        apply_steady_allocation()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or is_emulated:
        _share_cores(job.num_workers if job.is_on_one_machine else 1)
        return torch.device("cpu")
    device = torch.device(accelerator.type, index % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device)
    return device


def _share_cores(num_processes: int) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_processes))


def _evaluate(job: ParameterServerJob, _membership: Membership, _index: int) -> None:
    """Evaluate each checkpoint that is newest when its turn comes, in the memory of the machine."""
    torch.set_num_threads(1)
    source = load_model(job.model, sequence=job.sequence)
    model = PartModel(source, job.plan_of_parts, torch.device("cpu"))
    batches = BatchSource(source, job.data)
    run = Path(job.run_directory)

    def evaluate(values: dict[str, torch.Tensor]) -> float:
        tensors = model.deferred.tensors
        shaped = {name: value.view(tensors[name].shape) for name, value in values.items()}
        apply_materialised(model.module, shaped)
        return statistics.fmean(
            model.evaluate(batches.validation_batch(index, job.plan.global_batch), nullcontext())
            for index in range(job.num_validation_batches)
        )

    metrics = MetricsFile(run / EVALUATIONS)
    for step, loss in evaluate_checkpoints(
        run / "checkpoints", evaluate, last_step=job.num_steps, poll_s=_POLL_S
    ):
        metrics.write(EvaluationMetrics(step, loss))


ROLES: Mapping[str, Role] = {"server": _serve, "worker": _work, "evaluator": _evaluate}
