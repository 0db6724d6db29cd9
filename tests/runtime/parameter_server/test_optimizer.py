"""Server optimizers on shards and on rows, against torch.optim on the whole."""

from __future__ import annotations

import pytest
import torch

from outsize.errors import PlanError
from outsize.runtime.parameter_server.optimizer import OptimizerSettings, ShardOptimizer

_SETTINGS = [
    OptimizerSettings("sgd", {"lr": 0.1}),
    OptimizerSettings("sgd", {"lr": 0.1, "momentum": 0.9}),
    OptimizerSettings("adam", {"lr": 0.1}),
    OptimizerSettings("adamw", {"lr": 0.1, "weight_decay": 0.1}),
]


@pytest.mark.parametrize("settings", _SETTINGS, ids=str)
def test_rows_pushed_in_every_step_follow_the_dense_optimizer(settings: OptimizerSettings) -> None:
    """Rows 1 and 4 end where torch.optim takes them when it sees those rows alone; the others stay."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    rows = torch.tensor([1, 4])
    mine = ShardOptimizer(settings, first.clone())
    reference = first[rows].clone().requires_grad_()
    optimizer = settings.make(reference)
    for _ in range(5):
        gradient = torch.randn(2, 3, generator=generator, dtype=torch.float64)
        mine.step_rows(rows, gradient.clone())
        reference.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(mine.parameter[rows], reference.detach(), rtol=0, atol=1e-14)
    untouched = torch.tensor([0, 2, 3, 5])
    assert torch.equal(mine.parameter[untouched], first[untouched])


@pytest.mark.parametrize("settings", _SETTINGS, ids=str)
def test_dense_steps_equal_torch(settings: OptimizerSettings) -> None:
    """States kept outside the torch optimizer change nothing."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    mine, reference = ShardOptimizer(settings, first.clone()), first.clone().requires_grad_()
    optimizer = settings.make(reference)
    for _ in range(5):
        gradient = torch.randn(6, 3, generator=generator, dtype=torch.float64)
        mine.step(gradient.clone())
        reference.grad = gradient
        optimizer.step()
    torch.testing.assert_close(mine.parameter.data, reference.detach(), rtol=0, atol=1e-15)
    assert mine.step_count == 5


def test_what_servers_cannot_run_is_refused() -> None:
    """An unknown optimizer, and a state that is not kept."""
    with pytest.raises(PlanError, match="lbfgs"):
        OptimizerSettings("lbfgs", {})
    with pytest.raises(PlanError, match="amsgrad"):
        OptimizerSettings("adam", {"amsgrad": True})
