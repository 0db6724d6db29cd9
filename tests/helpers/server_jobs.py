"""A small model of tables and layers in a file, jobs that train it on parameter servers, and a reference."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import helpers.parameter_servers  # noqa: F401 - it keeps look-ups of names short
from helpers.models import reference_model
from outsize.model.argument import load_model
from outsize.plan.plan import Mesh, OptimizerSpec, Plan, ScheduleSpec, StageSpec
from outsize.runtime.parameter_server.coordinator import Coordinator
from outsize.runtime.parameter_server.job import ParameterServerJob
from outsize.runtime.parameter_server.run_job import coordinate, prepare_job
from outsize.runtime.parameter_server.server import Server
from outsize.runtime.parameter_server.training import JobSummary
from outsize.runtime.parameter_server.training_worker import TrainingWorker
from outsize.runtime.parameter_server.updates import parse_updates
from outsize.runtime.parameter_server.worker import StepContext, StepFunction, Worker

__all__ = ["GLOBAL_BATCH", "SGD", "make_job", "run_in_threads", "train_one_process"]

GLOBAL_BATCH = 10
SGD = OptimizerSpec("sgd", 0.1)

MODEL = '''
import os
import signal
from pathlib import Path

import torch
from torch import nn


class Ranker(nn.Module):
    """Two tables, one of them pooled with padding; ragged labels; a frozen layer, and one of no use."""

    def __init__(self):
        super().__init__()
        self.item = nn.Embedding(40, 6)
        self.words = nn.EmbeddingBag(50, 6, mode="mean", padding_idx=0)
        self.layer = nn.Linear(6, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 5)
        self.unused = nn.Linear(2, 1)
        self.double()

    def forward(self, item, words, labels):
        hidden = torch.tanh(self.layer(self.item(item) + self.words(words)))
        logits = self.head(hidden + self.frozen(hidden))
        return {"loss": nn.functional.cross_entropy(logits, labels, ignore_index=-1)}


def build():
    return Ranker()


def batch(num_samples, *, step=0, split="train"):
    marker = Path(__file__).with_name("killed")
    if step == 3 and split == "train" and KILLS and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    generator = torch.Generator().manual_seed(step + 1000 * (split == "validation"))
    words = torch.randint(0, 50, (num_samples, 4), generator=generator)
    words[:, 0] = 0  # padding
    return {
        "item": torch.randint(0, 40, (num_samples,), generator=generator),
        "words": words,
        "labels": torch.randint(-1, 5, (num_samples,), generator=generator),
    }
'''


def make_job(folder: Path, updates: str, *, num_workers: int = 2, kills: bool = False, **changes: Any) -> Any:
    """Return a job in ``folder``; with ``kills``, the first worker that asks for batch 3 dies of it."""
    (folder / "ranker.py").write_text(f"KILLS = {kills}\n{MODEL}")
    (folder / "run").mkdir(exist_ok=True)
    plan = Plan(
        "parameter_server",
        Mesh(dp=num_workers),
        (StageSpec(0, ""),),
        ScheduleSpec("1f1b", 2),
        GLOBAL_BATCH,
        optimizer=changes.pop("optimizer", OptimizerSpec("adamw", 0.01)),
        state_sharding="servers",
    )
    job = ParameterServerJob(
        model=f"{folder / 'ranker.py'}:build",
        plan=plan,
        run_directory=str(folder / "run"),
        num_steps=5,
        updates=parse_updates(updates),
        show_progress=False,
    )
    return replace(job, **changes)


def run_in_threads(job: ParameterServerJob) -> JobSummary:
    """Run a job with servers and workers as threads of this process: without the start of processes.

    Steps run one at a time: a process records one module at a time.
    """
    prepared, one_at_a_time = prepare_job(job), threading.Lock()

    def alone(step: StepFunction) -> StepFunction:
        def run(context: StepContext, argument: Any) -> Any:
            with one_at_a_time:
                return step(context, argument)

        return run

    with Coordinator("test", prepared.settings) as coordinator:
        roles = [Server(coordinator.membership, index).run for index in range(job.num_servers)]
        for index in range(job.num_workers):
            steps = TrainingWorker(job, index, torch.device("cpu")).steps
            locked = {name: alone(step) for name, step in steps.items()}
            roles.append(Worker(coordinator.membership, index, locked).run)
        for role in roles:
            threading.Thread(target=role, daemon=True).start()
        return coordinate(prepared, coordinator)


def train_one_process(
    job: ParameterServerJob, steps: Sequence[int]
) -> tuple[list[float], dict[str, torch.Tensor], nn.Module]:
    """Train the job's model on this process alone: losses by step, parameters and the module."""
    source = load_model(job.model)
    module = reference_model(source.factory)
    spec = job.plan.optimizer
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if spec.name == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(trained, lr=spec.learning_rate)
    else:
        optimizer = torch.optim.AdamW(trained, lr=spec.learning_rate, weight_decay=spec.weight_decay)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        assert source.make_batch is not None
        loss = module(**source.make_batch(GLOBAL_BATCH, step=step))["loss"]  # type: ignore[call-arg]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in module.named_parameters()}, module
