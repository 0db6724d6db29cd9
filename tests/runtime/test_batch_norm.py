"""Synchronised batch norm over replicas beside one process that sees all their samples."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from helpers.models import reference_model
from helpers.processes import run_distributed
from outsize.errors import BatchError
from outsize.plan.plan import Mesh, OptimizerSpec, Plan, ScheduleSpec, StageSpec
from outsize.runtime.parallelize import parallelize

pytestmark = pytest.mark.distributed

SGD = OptimizerSpec("sgd", learning_rate=0.1)


class Normed(nn.Module):
    """Batch norm inside blocks, of images and of vectors, with momentum or an average over all steps, and one
    without parameters between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16, momentum=momentum), nn.Tanh())
            for momentum in (0.3, None)
        )
        self.between = nn.BatchNorm1d(16, affine=False)
        self.untracked = nn.BatchNorm1d(16, track_running_stats=False)
        self.head = nn.Linear(16, 2)

    def forward(self, images: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.images(images).mean(-1).flatten(1)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        hidden = self.between(hidden)
        return {"loss": nn.functional.mse_loss(self.head(self.untracked(hidden)), target)}


def normed() -> nn.Module:
    return Normed().double()


def images(num_samples: int = 8, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, 3, 6, 6, generator=generator, dtype=torch.float64) * 3 + 5
    return {"images": x, "target": torch.randn(num_samples, 2, generator=generator, dtype=torch.float64)}


def make_plan(mesh: Mesh, num_microbatches: int = 1, **changes: Any) -> Plan:
    stages = (StageSpec(0, ""), StageSpec(1, "blocks.1", recompute=("blocks.1",)))[: mesh.pp]
    schedule = ScheduleSpec("1f1b", num_microbatches)
    settings: dict[str, Any] = {"optimizer": SGD, "batch_norm": "synchronised", **changes}
    return Plan("combined", mesh, stages, schedule, 8, **settings)


def train(_rank: int, plan: Plan, batches: list[Any]) -> tuple[Any, ...]:
    model = parallelize(normed, plan, sample_batch=batches[0])
    losses, gradients = [], {}
    for batch in batches:
        losses.append(model.compute_gradients(batch).loss)
        gradients = {name: p.grad.clone() for name, p in model.parameters.items() if p.grad is not None}
        model.optimizer.step()
    evaluated = model.evaluate(batches[0])
    return losses, gradients, {n: b.clone() for n, b in model._held.buffers.items()}, evaluated


def train_one_process(batches: list[Any], parts: list[list[int]] | None = None) -> tuple[Any, ...]:
    """Train on whole batches, or on the given rows one group after another, each counting by its size."""
    model = reference_model(normed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch, parts)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    evaluated = loss_of(model.eval(), batches[0], parts).item()
    return losses, gradients, dict(model.named_buffers()), evaluated


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor], parts: list[list[int]] | None) -> torch.Tensor:
    rows = len(batch["target"])
    losses = [
        model(**{name: value[part] for name, value in batch.items()})["loss"] * len(part) / rows
        for part in parts or [list(range(rows))]
    ]
    return torch.stack(losses).sum()


def assert_equal(results: list[tuple[Any, ...]], expected: tuple[Any, ...]) -> None:
    for losses, gradients, buffers, evaluated in results:
        assert losses == pytest.approx(expected[0], rel=1e-12)
        assert evaluated == pytest.approx(expected[3], rel=1e-10)
        for found, wanted in ((gradients, expected[1]), (buffers, expected[2])):
            for name, tensor in found.items():
                torch.testing.assert_close(tensor, wanted[name], rtol=1e-10, atol=1e-12)
    assert {name for result in results for name in result[1]} == set(expected[1])
    assert {name for result in results for name in result[2]} == set(expected[2])


def test_replicas_normalise_like_one_process_with_all_samples() -> None:
    """B193: 8, 7 and 5 samples over two replicas; losses, gradients, running statistics and counters."""
    batches = [images(rows, seed=rows) for rows in (8, 7, 5)]
    assert_equal(run_distributed(train, 2, make_plan(Mesh(dp=2)), batches), train_one_process(batches))


def test_micro_batches_of_a_pipeline_are_normalised_one_by_one_over_replicas() -> None:
    """Micro-batch k of both replicas is one batch to the norm; recomputation does not count it twice."""
    batches = [images(8, seed=seed) for seed in range(2)]
    plan = make_plan(Mesh(pp=2, dp=2), num_microbatches=2)
    expected = train_one_process(batches, parts=[[0, 1, 4, 5], [2, 3, 6, 7]])
    assert expected[2]["blocks.1.1.num_batches_tracked"].item() == 4
    assert_equal(run_distributed(train, 4, plan, batches), expected)


def too_few(_rank: int, plan: Plan) -> str:
    model = parallelize(normed, plan, sample_batch=images())
    try:
        model.train_step(images(1))
    except BatchError as error:
        return str(error)
    return ""


def test_a_replica_without_a_sample_is_refused() -> None:
    """One sample for two replicas: its repetition on the other must not enter the statistics."""
    messages = run_distributed(too_few, 2, make_plan(Mesh(dp=2)))
    assert all("needs a sample in each" in message for message in messages)


def test_without_it_a_plan_of_several_parts_warns() -> None:
    """B193: a step of more than one micro-batch says what its statistics are of."""
    plan = make_plan(Mesh(), 2, batch_norm="per_replica")
    with pytest.warns(
        UserWarning, match=r"batch norm in images\.1 and 4 more takes statistics over one micro-batch"
    ):
        parallelize(normed, plan, sample_batch=images())


class Tracked(nn.Module):
    """A running mean of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.mean: torch.Tensor

    def forward(self, images: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(images[:, 0, :4, :4].flatten(1))
        self.mean.lerp_(hidden.detach().mean(0), 0.1)
        return nn.functional.mse_loss(hidden - self.mean, target)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_any_buffer_written_several_times_a_step_warns(num_microbatches: int) -> None:
    """The general case of B193; with one micro-batch a step there is nothing to say."""
    plan = make_plan(Mesh(), num_microbatches, batch_norm="per_replica")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        parallelize(lambda: Tracked().double(), plan, sample_batch=images())
    found = [str(each.message) for each in shown if "writes its buffer mean" in str(each.message)]
    assert len(found) == num_microbatches - 1
