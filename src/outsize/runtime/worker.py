"""A training job as data, and what each of its processes does."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from outsize.model.argument import load_model
from outsize.plan.plan import Plan
from outsize.runtime.batch_source import BatchSource
from outsize.runtime.checkpoint import find_checkpoint
from outsize.runtime.checkpoint_description import read_metadata
from outsize.runtime.environment.launch_environment import LaunchEnvironment
from outsize.runtime.launch import LocalLaunch, gloo_interface, launch_local
from outsize.runtime.memory_limit import lift_memory_limit
from outsize.runtime.parallelize import parallelize
from outsize.runtime.process_memory import apply_steady_allocation
from outsize.runtime.runnable import check_runnable
from outsize.runtime.trainer import Trainer, TrainingSummary, gather_from_all
from outsize.runtime.warm_up import warm_up

__all__ = ["RankReport", "TrainingJob", "check_job", "join_job", "run_job", "run_rank"]

_COMMUNICATION_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """Everything a process needs to know; plain data, so that it travels to any process."""

    model: str  # model argument
    plan: Plan
    run_directory: str  # exists; metrics, logs and checkpoints go there
    num_steps: int
    sequence: int | None = None
    data: str | None = None  # file.py:function of batches; without it the model's own
    evaluate_every: int = 0
    num_validation_batches: int = 0
    write_checkpoint: bool = True
    resume: bool = False
    show_progress: bool = True


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one process reports; all but its own rank and memory is the same on every process."""

    rank: int
    first_loss: float
    last_loss: float
    validation_losses: tuple[tuple[int, float], ...]
    step_time_s: float
    tokens_per_s: float
    num_tokens: int
    peak_memory_bytes: int | None
    peak_memory_by_rank: tuple[int | None, ...]


def run_job(job: TrainingJob, *, machine: LaunchEnvironment | None = None) -> list[RankReport]:
    """Check the job, run it in one local process a device, and return the reports by rank.

    Where this is one of several machines, ``machine`` is its place: it runs its own ranks alone.

    Raises:
        OutsizeError: the job cannot run, before any process starts; or what stopped the processes.
    """
    check_job(job)
    num_processes = job.plan.mesh.world_size if machine is None else machine.processes_per_machine
    launch = LocalLaunch(num_processes, log_folder=Path(job.run_directory) / "logs", machine=machine)
    return launch_local(launch, run_rank, job)


def join_job(job: TrainingJob, environment: LaunchEnvironment) -> RankReport:
    """Be the rank that this process was started as. The job's store is there already."""
    assert environment.rank is not None
    os.environ.update(
        RANK=str(environment.rank),
        LOCAL_RANK=str(environment.local_rank),
        WORLD_SIZE=str(environment.world_size),
        LOCAL_WORLD_SIZE=str(environment.processes_per_machine),
        MASTER_ADDR=environment.master_address,
        MASTER_PORT=str(environment.master_port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        **gloo_interface(environment),
    )
    return run_rank(job)


def check_job(job: TrainingJob) -> None:
    """Refuse what cannot run, before any process starts.

    Raises:
        OutsizeError: the plan cannot be trained, there is no such data, or no whole checkpoint to go on from.
    """
    check_runnable(job.plan)
    batches = BatchSource(load_model(job.model, sequence=job.sequence), job.data)
    batches.training_batch(0, job.plan.global_batch)
    if job.num_validation_batches:
        batches.validation_batch(0, job.plan.global_batch)
    if job.resume:
        read_metadata(find_checkpoint(Path(job.run_directory) / "checkpoints"))


def run_rank(job: TrainingJob) -> RankReport:
    """Do one process's part of a job, under the variables that torchrun sets."""
    device = _prepare_process(job.plan)
    try:
        source = load_model(job.model, sequence=job.sequence)
        batches = BatchSource(source, job.data)
        sample_batch = source.sample_batch(job.plan.microbatch_size)
        model = parallelize(
            source.factory,
            job.plan,
            sample_batch=sample_batch,
            device=device,
            enforce_memory_limit=True,
            shared_entries=source.shared_entries(sample_batch),
        )
        trainer = Trainer(
            model,
            batches,
            Path(job.run_directory),
            evaluate_every=job.evaluate_every,
            num_validation_batches=job.num_validation_batches,
            show_progress=job.show_progress,
        )
        checkpoints = Path(job.run_directory) / "checkpoints"
        if job.resume:
            model.load_checkpoint(checkpoints)
        summary = trainer.train(job.num_steps)
        peak_memory_bytes = model.memory.measure_peak_bytes()
        if job.write_checkpoint:
            lift_memory_limit()  # files are written from the memory of the machine, not of the device
            model.save_checkpoint(checkpoints)
        return _report(model.mesh.rank, summary, peak_memory_bytes, gather_from_all(peak_memory_bytes))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _prepare_process(plan: Plan) -> torch.device:
    """Choose the device, connect to the other processes, and bring up all that is not the model's."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    is_emulated = plan.device_memory_bytes is not None
    if is_emulated:
        apply_steady_allocation()
    if torch.accelerator.is_available() and not is_emulated:
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        device = torch.device(accelerator.type, local_rank)
        torch.accelerator.set_device_index(local_rank)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_local))
    if plan.mesh.world_size > 1:
        backend = dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, timeout=_COMMUNICATION_TIMEOUT)
    warm_up(device)
    return device


def _report(
    rank: int,
    summary: TrainingSummary,
    peak_memory_bytes: int | None,
    peak_memory_by_rank: Sequence[int | None],
) -> RankReport:
    losses = summary.losses or [float("nan")]
    return RankReport(
        rank=rank,
        first_loss=losses[0],
        last_loss=losses[-1],
        validation_losses=tuple(summary.validation_losses),
        step_time_s=summary.step_time_s,
        tokens_per_s=summary.tokens_per_s,
        num_tokens=summary.num_tokens,
        peak_memory_bytes=peak_memory_bytes,
        peak_memory_by_rank=tuple(peak_memory_by_rank),
    )
