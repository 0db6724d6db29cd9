"""Batches with fewer samples than micro-batches, or without a label that counts, are steps as in PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from helpers.models import reference_model
from helpers.processes import run_distributed
from outsize.plan.actions import Action, ActionKind, Schedule
from outsize.plan.plan import Mesh, OptimizerSpec, Plan, ScheduleSpec, StageSpec
from outsize.plan.schedule_validation import validate_schedule
from outsize.plan.schedules import make_schedule
from outsize.runtime.parallelize import parallelize
from outsize.runtime.row_shards import RowShards

NUM_CLASSES = 5
IGNORED = -100
OPTIMIZER = OptimizerSpec(weight_decay=0.1, max_gradient_norm=None)


class Counting(nn.Module):
    """A layer that counts the samples it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, NUM_CLASSES)
        self.register_buffer("num_seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_seen += len(x)
        return self.layer(x)


class MeanAndSum(nn.Module):
    """A mean over labels that count, and a sum over all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), Counting()
        self.double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.second(self.first(x).tanh())
        mean = nn.functional.cross_entropy(scores, labels, ignore_index=IGNORED)
        return {"loss": mean + scores.square().sum() / 10, "scores": scores}


class MeanOfLabels(MeanAndSum):
    """Nothing but the mean over labels that count."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.second(self.first(x).tanh())
        return {"loss": nn.functional.cross_entropy(scores, labels, ignore_index=IGNORED)}


def make_batch(num_samples: int, *, labels_count: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_samples)
    labels = torch.arange(num_samples) % NUM_CLASSES
    return {
        "x": torch.randn(num_samples, 4, generator=generator, dtype=torch.float64),
        "labels": labels if labels_count else torch.full_like(labels, IGNORED),
    }


def make_plan(mesh: Mesh, num_microbatches: int, *, num_virtual_stages: int = 1, **changes: Any) -> Plan:
    num_stages = mesh.pp * num_virtual_stages
    stages = tuple(StageSpec(index, label) for index, label in enumerate(("", "second")[:num_stages]))
    name = "1f1b" if num_virtual_stages == 1 else "looped_bfs"
    schedule = ScheduleSpec(name, num_microbatches, num_virtual_stages)
    return Plan("pipeline_parallel", mesh, stages, schedule, 8, optimizer=OPTIMIZER, **changes)


ALONE = [
    make_plan(Mesh(), 4),
    make_plan(Mesh(), 2, num_virtual_stages=2, gradient_accumulation_steps=2),
]
TOGETHER = [
    make_plan(Mesh(pp=2), 4),
    make_plan(Mesh(dp=2), 2),
    make_plan(Mesh(fsdp=2), 2, state_sharding="gradients"),
    make_plan(Mesh(fsdp=2), 2, state_sharding="full"),
]


def train_small_batches(_rank: int, plans: list[Plan]) -> list[dict[str, float]]:
    """Compare each step with one process; return the samples that each plan's process counted."""
    counted = []
    for plan in plans:
        model = parallelize(MeanAndSum, plan, sample_batch=make_batch(8))
        whole = reference_model(MeanAndSum)
        optimizer = make_optimizer(whole)
        for num_samples in (8, 3, 1):
            batch = make_batch(num_samples)
            result = model.train_step(batch)
            loss = whole(**batch)["loss"]
            assert result.loss == pytest.approx(loss.item(), rel=1e-12)
            assert result.gradient_norm == pytest.approx(step(optimizer, whole, loss), rel=1e-10)
        seen = {n: b.item() for n, b in model._held.buffers.items()}
        small = make_batch(1)
        torch.testing.assert_close(model.predict(small), whole(**small), rtol=1e-10, atol=1e-12)
        counted.append(seen)
    return counted


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        module.parameters(), OPTIMIZER.learning_rate, OPTIMIZER.betas, weight_decay=OPTIMIZER.weight_decay
    )


def step(optimizer: torch.optim.Optimizer, module: nn.Module, loss: torch.Tensor) -> float:
    """Update the module; return the norm of its gradients."""
    optimizer.zero_grad()
    loss.backward()
    norm = torch.stack([each.grad.norm() for each in module.parameters() if each.grad is not None]).norm()
    optimizer.step()
    return norm.item()


def train_without_labels(_rank: int, plans: list[Plan]) -> None:
    """Compare parameters with those of one process, after a step in between for which no label counts."""
    whole = reference_model(MeanOfLabels)
    optimizer = make_optimizer(whole)
    batches = [make_batch(8, labels_count=counts) for counts in (True, False, True)]
    for batch in batches:
        step(optimizer, whole, whole(**batch)["loss"])
    for plan in plans:
        model = parallelize(MeanOfLabels, plan, sample_batch=batches[0])
        assert [model.train_step(batch).loss for batch in batches][1] == 0.0
        rows = RowShards(plan.mesh.fsdp, model.mesh.coordinates["fsdp"])
        for name, parameter in model.parameters.items():
            wanted = whole.get_parameter(name).detach()
            torch.testing.assert_close(parameter.detach(), rows.own(wanted), rtol=1e-10, atol=1e-12)


def test_samples_count_once_whatever_the_number_of_micro_batches() -> None:
    """Sums, means, buffers and outputs of 3 samples and of 1, for 4 micro-batches of one process."""
    assert [seen["second.num_seen"] for seen in train_small_batches(0, ALONE)] == [12, 12]


@pytest.mark.distributed
def test_samples_count_once_over_processes() -> None:
    """Pipelines leave out what has no samples; replicas that gather parameters together run it in vain."""
    first, second = run_distributed(train_small_batches, 2, TOGETHER, timeout_s=100)
    assert first[0] == {}
    assert second[0] == {"second.num_seen": 12}
    for one, other in zip(first[1:], second[1:], strict=True):
        assert (one["second.num_seen"], other["second.num_seen"]) == (4 + 2 + 1, 4 + 1)


@pytest.mark.distributed
def test_a_step_in_which_no_label_counts_is_the_same_in_every_layout() -> None:
    """Gradients are zero wherever there would be one: momentum and decay move what they do in PyTorch."""
    train_without_labels(0, ALONE)
    run_distributed(train_without_labels, 2, TOGETHER[:3])


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "interleaved_1f1b"])
def test_the_first_micro_batches_of_a_schedule_are_a_schedule(name: str) -> None:
    """Each rank's actions keep their order."""
    whole = make_schedule(name, num_ranks=2, num_microbatches=4)
    for number in range(1, 5):
        validate_schedule(whole.of_first(number))
    assert whole.of_first(4) == whole
    alone = Schedule("two", 2, (0,), (tuple(Action(0, kind, at) for kind in "FB" for at in (1, 0)),))
    assert alone.of_first(1).actions == ((Action(0, ActionKind("F"), 0), Action(0, ActionKind("B"), 0)),)
