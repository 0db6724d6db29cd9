"""Returned values that the loss does not use, over a cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers.models import reference_model
from helpers.processes import run_distributed
from outsize.plan.plan import Mesh, OptimizerSpec, Plan, ScheduleSpec, StageSpec
from outsize.runtime.parallelize import parallelize

pytestmark = pytest.mark.distributed


class Side(nn.Module):
    """Two layers to the loss, and one beside it that is only returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.beside = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.first(x).tanh()
        beside = self.beside(hidden)
        return {"loss": self.second(hidden).square().mean(), "beside": beside}


def make_batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


def gradients(rank: int) -> dict[str, torch.Tensor]:
    del rank
    stages = (StageSpec(0, ""), StageSpec(1, "second"))
    plan = Plan(
        "pipeline_parallel", Mesh(pp=2), stages, ScheduleSpec("1f1b", 4), 8, optimizer=OptimizerSpec("sgd")
    )
    model = parallelize(Side, plan, sample_batch=make_batch())
    model.compute_gradients(make_batch())  # micro-batches of 2, 2, 1 and 1
    return {name: p.grad.clone() for name, p in model.parameters.items() if p.grad is not None}


def test_a_returned_value_without_use_may_cross_a_cut_with_uneven_micro_batches() -> None:
    """Its gradient is zero in the shape of each micro-batch (after B175); the others are one process's."""
    found = {}
    for part in run_distributed(gradients, 2, timeout_s=60):
        found.update(part)
    reference = reference_model(Side)
    reference(**make_batch())["loss"].backward()
    for name in ("first.weight", "first.bias", "second.weight", "second.bias"):
        torch.testing.assert_close(found[name], reference.get_parameter(name).grad, rtol=1e-12, atol=1e-14)
    assert not any(value.any() for name, value in found.items() if name.startswith("beside"))
