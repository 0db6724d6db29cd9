"""Processes that were given different models say so before they exchange anything else."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from helpers.processes import run_distributed
from outsize.errors import ModelError
from outsize.plan.plan import Mesh, Plan, ScheduleSpec, StageSpec
from outsize.runtime.parallelize import parallelize

pytestmark = pytest.mark.distributed

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


def test_a_factory_that_depends_on_the_process_is_refused_everywhere() -> None:
    """Weights of the number of the rank: both raise the same error, and can go on with a model they share."""
    results = run_distributed(build_both, 2)
    assert len({loss for _, loss in results}) == 1
    for message, _ in results:
        assert "another model on rank 1 than on rank 0" in message
        assert "outsize.record" in message
