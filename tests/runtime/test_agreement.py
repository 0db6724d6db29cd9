"""Processes that were given different models or batches say so before they exchange anything else."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from helpers.processes import run_distributed
from outsize.errors import BatchError, ModelError
from outsize.model.batch_digest import digest_batch
from outsize.plan.plan import Mesh, Plan, ScheduleSpec, StageSpec
from outsize.runtime.parallelize import parallelize

X = (torch.ones(4, 3),)


class Scaled(nn.Module):
    """Its weights begin at a given value."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        nn.init.constant_(self.linear.weight, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).mean()


def of_this_rank() -> nn.Module:
    return Scaled(float(os.environ["RANK"]))


def of_every_rank() -> nn.Module:
    return Scaled(0.5)


def build_both(_rank: int) -> tuple[str, float]:
    plan = Plan("mirrored", Mesh(dp=2), (StageSpec(0, ""),), ScheduleSpec(), 4)
    message = ""
    try:
        parallelize(of_this_rank, plan, sample_batch=X)
    except ModelError as error:
        message = str(error)
    return message, parallelize(of_every_rank, plan, sample_batch=X).train_step(X).loss


@pytest.mark.distributed
def test_a_factory_that_depends_on_the_process_is_refused_everywhere() -> None:
    """Weights of the number of the rank: both raise the same error, and can go on with a model they share."""
    results = run_distributed(build_both, 2)
    assert len({loss for _, loss in results}) == 1
    for message, _ in results:
        assert "another model on rank 1 than on rank 0" in message
        assert "outsize.record" in message


def train_on_own_batches(rank: int) -> list[str]:
    """Try what programs for DDP do: a part of its own on each rank, by values, by shape, or as rows."""
    plan = Plan("mirrored", Mesh(dp=2), (StageSpec(0, ""),), ScheduleSpec(), 4)
    model = parallelize(of_every_rank, plan, sample_batch=X)
    of_this_rank = {
        "values": (torch.full((4, 3), float(rank)),),
        "number of samples": (torch.ones(3 + rank, 3),),
        "too many samples on one rank": (torch.ones(4 + rank, 3),),
        "dims": (torch.ones([4, 3, 1][: 2 + rank]),),
        "no tensor on one rank": (X, "nothing")[rank],
    }
    messages = []
    for batch in of_this_rank.values():
        for method in (model.train_step, model.evaluate, model.predict):
            try:
                method(batch)
            except BatchError as error:
                messages.append(error.what)
    assert model.num_steps == 0
    model.train_step(X)
    return messages


@pytest.mark.distributed
def test_batches_that_depend_on_the_process_are_refused_everywhere() -> None:
    """Every method says so on both ranks, whatever differs, and training goes on with a shared batch."""
    results = run_distributed(train_on_own_batches, 2)
    assert results[0] == results[1] == ["The batch on rank 1 is not the one on rank 0."] * 15


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.tensor([1.0, 3.0]), "flag": True},
        {"x": torch.tensor([[1.0, 2.0]]), "flag": True},
        {"x": torch.tensor([1.0, 2.0]).double(), "flag": True},
        {"y": torch.tensor([1.0, 2.0]), "flag": True},
        {"x": torch.tensor([1.0, 2.0]), "flag": False},
        None,
    ],
)
def test_a_digest_tells_batches_apart(other: object) -> None:
    """By values, shape, dtype, name and plain settings; not by how a tensor lies in memory."""
    batch = {"x": torch.tensor([1.0, 2.0]), "flag": True}
    strided = {"x": torch.tensor([[1.0, 0.0], [2.0, 0.0]])[:, 0], "flag": True}
    assert digest_batch(batch) == digest_batch(strided) != digest_batch(other)
