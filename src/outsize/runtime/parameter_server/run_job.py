"""A whole training job on this machine: this process is the coordinator of servers and workers it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from outsize.errors import PlanError, TrainingError
from outsize.model.argument import load_model
from outsize.runtime.batch_source import BatchSource
from outsize.runtime.parameter_server.checkpoint import load_whole, read_info
from outsize.runtime.parameter_server.coordinator import Coordinator
from outsize.runtime.parameter_server.job import ParameterServerJob
from outsize.runtime.parameter_server.job_variables import InitialValues, JobVariables, find_variables
from outsize.runtime.parameter_server.layout import place_variables
from outsize.runtime.parameter_server.local_processes import LocalProcesses
from outsize.runtime.parameter_server.lost import ServerLostError
from outsize.runtime.parameter_server.part_model import PartModel
from outsize.runtime.parameter_server.partitioners import parse_partitioner
from outsize.runtime.parameter_server.settings import Settings
from outsize.runtime.parameter_server.training import JobSummary, ServerTraining

__all__ = ["PreparedJob", "coordinate", "prepare_job", "run_server_job"]

_VERSION_WAIT_S = 3600.0  # a step of another worker, or the start of its replacement, may take long


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job whose numbers and model were found to go together, and the model as its coordinator has it."""

    job: ParameterServerJob
    model: PartModel
    found: JobVariables
    settings: Settings


def prepare_job(job: ParameterServerJob) -> PreparedJob:
    """Check everything that can be checked before a process starts.

    Raises:
        OutsizeError: the numbers do not go together, the model cannot be trained so, or there is no such
            data.
    """
    job.check()
    partitioner = parse_partitioner(job.partitioner)
    source = load_model(job.model, sequence=job.sequence)
    batches = BatchSource(source, job.data)
    if job.num_validation_batches:
        batches.check_validates()
    model = PartModel(source, job.plan_of_parts, torch.device("cpu"))
    found = find_variables(model, job.row_wise)
    layout = place_variables(found.variables, job.num_servers, partitioner)
    if len(layout.shards) < job.num_servers:
        raise PlanError(
            f"{job.num_servers} servers are more than the model's {len(layout.shards)} variables.",
            why="A variable without a partitioner stays whole, on one server.",
            attempt=f"--servers {len(layout.shards)}, or --partitioner fixed:{job.num_servers}.",
        )
    if job.checkpoint is not None:
        _check_resumes(job, read_info(Path(job.checkpoint)).step)
    optimizer = job.updates.server_optimizer(job.plan.optimizer)
    policy = job.updates.policy(job.num_workers)
    per_update = job.updates.steps_per_update
    return PreparedJob(job, model, found, Settings(layout, optimizer, policy, _VERSION_WAIT_S, per_update))


def _check_resumes(job: ParameterServerJob, step: int) -> None:
    if step % job.updates.steps_per_update:
        raise PlanError(
            f"The checkpoint is of step {step}.",
            why=f"One update has {job.updates.steps_per_update} steps.",
            attempt=f"--updates local:N, where N divides {step}.",
        )


def run_server_job(prepared: PreparedJob) -> JobSummary:
    """Start servers, workers and the evaluator, train, and return what came of it.

    Raises:
        OutsizeError: what stopped the job.
    """
    job = prepared.job
    with (
        Coordinator(job.run_directory, prepared.settings) as coordinator,
        LocalProcesses(job, coordinator.membership, coordinator.abort),
    ):
        summary = coordinate(prepared, coordinator)
        coordinator.stop()  # before its processes are waited for
        return summary


def coordinate(prepared: PreparedJob, coordinator: Coordinator) -> JobSummary:
    """Give the servers their values, the first ones or a checkpoint's, and train.

    Raises:
        OutsizeError: what stopped the job.
    """
    job = prepared.job
    names = prepared.found.constants
    try:
        if job.checkpoint is not None:
            version = coordinator.restore(Path(job.checkpoint))
            constants = load_whole(Path(job.checkpoint), only=set(names))
        else:
            version = 0
            deferred, seed = prepared.model.deferred, job.plan.seed
            coordinator.initialise(InitialValues(deferred, seed))
            constants = deferred.materialise(names, seed=seed)
        return ServerTraining(coordinator, job, constants).train(version)
    except ServerLostError as error:
        raise TrainingError(
            f"{error.name} is lost, and with it the newest values of its parameters.",
            why=error.reason,
            attempt="the same command with --resume, which goes on from the last checkpoint.",
        ) from None
