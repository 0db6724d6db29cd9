"""Numbers that a forward takes from the batch are checked again for every micro-batch of a run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers.models import reference_model
from helpers.processes import run_distributed
from outsize.plan.plan import Mesh, OptimizerSpec, Plan, ScheduleSpec, StageSpec
from outsize.runtime.executions import MAX_KEPT
from outsize.runtime.parallelize import parallelize

pytestmark = pytest.mark.distributed

# what the two micro-batches of each step read; a recording of one would give the wrong loss of another
LENGTHS = (((5, 2), (5, 1)), ((3, 3), (2, 4)), ((5, 5), (1, 1)))


class Trimming(nn.Module):
    """Two layers on the longest sample's length, which the forward reads as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, dtype=torch.float64)
        self.second = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs[:, : int(lengths.max())]))
        return self.second(hidden).sin().sum()


def make_batch(lengths: tuple[tuple[int, ...], ...]) -> dict[str, torch.Tensor]:
    values = torch.randn(4, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(len(lengths)))
    return {"inputs": values, "lengths": torch.tensor([length for pair in lengths for length in pair])}


def train(rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    del rank
    plan = Plan(
        "pipeline_parallel",
        Mesh(pp=2),
        (StageSpec(0, ""), StageSpec(1, "second")),
        ScheduleSpec("1f1b", 2),
        4,
        optimizer=OptimizerSpec("sgd", learning_rate=0.1),
    )
    model = parallelize(Trimming, plan, sample_batch=make_batch(LENGTHS[0]))
    losses = [model.train_step(make_batch(lengths)).loss for lengths in LENGTHS]
    return losses, {name: parameter.detach().clone() for name, parameter in model.parameters.items()}


def test_another_number_in_the_batch_is_recorded_again_and_not_ignored() -> None:
    """Batches whose longest samples differ train as on one process, though all have the same shapes."""
    results = run_distributed(train, 2, timeout_s=60)
    reference = reference_model(Trimming)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    losses = []
    for lengths in LENGTHS:
        optimizer.zero_grad()
        batch = make_batch(lengths)
        loss = sum(
            reference(batch["inputs"][rows], batch["lengths"][rows]) for rows in (slice(0, 2), slice(2, 4))
        )
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for found, parameters in results:
        assert found == pytest.approx(losses, rel=1e-12)
        for name, value in parameters.items():
            torch.testing.assert_close(value, reference.get_parameter(name), rtol=1e-12, atol=1e-12)


def test_shapes_without_end_keep_a_stated_number_of_recordings() -> None:
    """Shapes are keys (B153): the same one uses its recording again; of more than 16 the oldest goes."""
    plan = Plan("mirrored", Mesh(), (StageSpec(0, ""),), ScheduleSpec("gpipe", 1), 4)
    model = parallelize(Trimming, plan, sample_batch=batch_of_length(20))
    reference = reference_model(Trimming)
    for length in (*range(1, MAX_KEPT + 4), 1, 1):
        batch = batch_of_length(length)
        expected = reference(batch["inputs"], batch["lengths"])
        assert model.evaluate(batch) == pytest.approx(expected.item(), rel=1e-12)
    assert len(model.executions.recorded_keys) == MAX_KEPT
    assert len(set(model.executions.recorded_keys)) == MAX_KEPT


def batch_of_length(length: int) -> dict[str, torch.Tensor]:
    values = torch.randn(4, length, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
    return {"inputs": values, "lengths": torch.full((4,), length)}
