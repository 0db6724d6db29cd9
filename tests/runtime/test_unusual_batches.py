"""Batches and losses that micro-batches could get wrong: those of the whole batch, or an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from outsize.errors import ModelError, RecordingError
from outsize.plan.plan import Mesh, Plan, ScheduleSpec, StageSpec
from outsize.runtime.parallel_model import ParallelModel
from outsize.runtime.parallelize import parallelize

TOLERANCE = 1e-12
NUM_SAMPLES = 4


class Blocks(nn.Module):
    """Two blocks in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_SAMPLES, NUM_SAMPLES, dtype=torch.float64)
        self.second = nn.Linear(NUM_SAMPLES, NUM_SAMPLES, dtype=torch.float64)


class SharedTable(Blocks):
    """Takes a table with as many rows as there are samples."""

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return (self.second(self.first(x)) @ table).square().mean()


class WritesItsBatch(Blocks):
    """Writes to a batch entry that both of its stages read."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x + target)
        target.mul_(3)
        return (self.second(hidden) - target).square().mean()


class LossOfOneElement(Blocks):
    """Returns a loss of shape [1]."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.second(self.first(x)).square().mean().view(1)}


class WeighsBySize(Blocks):
    """Takes another loss for one sample than for several."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.second(self.first(x)).square()
        return out.sum() if len(x) == 1 else out.mean()


def make_plan(num_microbatches: int, *, num_stages: int = 1) -> Plan:
    stages = tuple(StageSpec(i, label) for i, label in enumerate(("", "second")[:num_stages]))
    schedule = ScheduleSpec("looped_bfs" if num_stages > 1 else "gpipe", num_microbatches, num_stages)
    return Plan("pipeline_parallel", Mesh(), stages, schedule, NUM_SAMPLES)


def assert_as_whole(model: ParallelModel, whole: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    """Compare loss and gradients with those of the module itself, called with the whole batch."""
    whole.load_state_dict({name: value.detach() for name, value in model.parameters.items()}, strict=False)
    found = model.compute_gradients({name: value.clone() for name, value in batch.items()})
    output: Any = whole(**{name: value.clone() for name, value in batch.items()})
    loss = output["loss"] if isinstance(output, dict) else output
    loss.sum().backward()
    assert found.loss == pytest.approx(loss.item(), rel=TOLERANCE)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(
            model.parameters[name].grad, parameter.grad, rtol=TOLERANCE, atol=TOLERANCE
        )


def samples(num_samples: int = NUM_SAMPLES) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_samples)
    return torch.randn(num_samples, NUM_SAMPLES, generator=generator, dtype=torch.float64)


def test_an_entry_that_samples_share_is_not_cut() -> None:
    """Though it has as many rows as there are samples."""
    batch = {"x": samples(), "table": samples() + 1}
    model = parallelize(SharedTable, make_plan(2), sample_batch=batch, shared_entries=["table"])
    assert_as_whole(model, SharedTable(), batch)


def test_a_batch_entry_is_written_once_for_each_stage() -> None:
    """Two stages of one process read the same entry; each sees it as the model had it there."""
    batch = {"x": samples(), "target": samples() + 1}
    model = parallelize(WritesItsBatch, make_plan(2, num_stages=2), sample_batch=batch)
    assert_as_whole(model, WritesItsBatch(), batch)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_loss_may_have_shape_one(num_microbatches: int) -> None:
    """As DataParallel's habit of gathering losses makes them."""
    batch = {"x": samples()}
    model = parallelize(LossOfOneElement, make_plan(num_microbatches), sample_batch=batch)
    assert_as_whole(model, LossOfOneElement(), batch)


def test_losses_of_other_forms_cannot_be_added_up() -> None:
    """Three samples in two micro-batches: the second has one sample and sums where the first takes a mean."""
    model = parallelize(WeighsBySize, make_plan(2), sample_batch={"x": samples()})
    with pytest.raises(RecordingError, match="another form for some micro-batches"):
        model.compute_gradients({"x": samples(3)})


class SparseRows(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(10, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x).square().mean()


def test_sparse_gradients_are_refused_before_anything_runs() -> None:
    """With the embedding's name."""
    batch = {"x": torch.zeros(NUM_SAMPLES, 2, dtype=torch.int64)}
    with pytest.raises(ModelError, match="gradients of rows are sparse"):
        parallelize(SparseRows, make_plan(1), sample_batch=batch)
