"""Train under plans on real processes and compare with one process: losses, norms, gradients, parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from helpers.models import make_batch, train_reference
from helpers.processes import run_distributed
from outsize.model.operator_rules.shards import shard_of
from outsize.plan.plan import Plan
from outsize.runtime.parallelize import parallelize
from outsize.runtime.row_shards import RowShards
from outsize.runtime.tensor_parallel import parameter_placements

__all__ = [
    "TrainedRank",
    "assert_equal_to_reference",
    "assert_trains_like_one_process",
    "batches",
    "held_part",
    "train",
]

NUM_STEPS = 5


@dataclass(frozen=True)
class TrainedRank:
    """What one process has of a run; gradients are those of the first step."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    coordinates: dict[str, int]


def batches(num_samples: Sequence[int]) -> list[dict[str, torch.Tensor]]:
    """Return one batch with ragged labels for each number of samples."""
    return [make_batch(number, seed=step) for step, number in enumerate(num_samples)]


def train(factory: Callable[[], Any], plan: Plan, data: Sequence[Any]) -> TrainedRank:
    """Train one step a batch."""
    model = parallelize(factory, plan, sample_batch=data[0])
    model.compute_gradients(data[0])
    gradients = {name: p.grad.clone() for name, p in model.parameters.items() if p.grad is not None}
    results = [model.train_step(batch) for batch in data]
    return TrainedRank(
        losses=[result.loss for result in results],
        norms=[result.gradient_norm for result in results],
        gradients=gradients,
        parameters={name: p.detach().clone() for name, p in model.parameters.items()},
        coordinates=model.mesh.coordinates,
    )


def _train_all(_rank: int, factory: Callable[[], Any], plans: list[Plan], data: Any) -> list[TrainedRank]:
    return [train(factory, plan, data) for plan in plans]


def assert_trains_like_one_process(
    factory: Callable[[], Any], plans: list[Plan], num_samples: Sequence[int] = (), *, timeout_s: float = 110
) -> None:
    """Train under each plan, of the same number of processes and optimizer, and compare with one process."""
    data = batches(num_samples or [plans[0].global_batch] * NUM_STEPS)
    expected = train_reference(factory, data, plans[0].optimizer)
    results = run_distributed(_train_all, plans[0].mesh.world_size, factory, plans, data, timeout_s=timeout_s)
    for plan, *by_rank in zip(plans, *results, strict=True):
        for result in by_rank:
            assert_equal_to_reference(result, expected, plan)
        assert {name for result in by_rank for name in result.parameters} == set(expected[3])
        assert len({tuple(result.losses) for result in by_rank}) == 1, "every rank knows the same loss"


def assert_equal_to_reference(result: TrainedRank, expected: tuple[Any, ...], plan: Plan) -> None:
    """Compare one process's run with that of one process."""
    losses, norms, gradients, parameters = expected
    assert result.losses == pytest.approx(losses, rel=1e-12)
    assert result.norms == pytest.approx(norms, rel=1e-10)
    for name, parameter in result.parameters.items():
        expected_parameter = held_part(name, parameters[name], plan, result.coordinates)
        torch.testing.assert_close(parameter, expected_parameter, rtol=1e-10, atol=1e-10)
        if name in result.gradients or name in gradients:
            expected_gradient = held_part(name, gradients[name], plan, result.coordinates)
            torch.testing.assert_close(result.gradients[name], expected_gradient, rtol=1e-10, atol=1e-12)


def held_part(name: str, whole: torch.Tensor, plan: Plan, coordinates: dict[str, int]) -> torch.Tensor:
    """Return what the process at ``coordinates`` trains of a parameter, or the same part of its gradient."""
    placements = parameter_placements(plan.sharding) if plan.sharding else {}
    if name in placements:
        whole = shard_of(whole, placements[name], plan.mesh.tp, coordinates["tp"])
    if plan.state_sharding == "none" or plan.mesh.fsdp == 1:
        return whole
    return RowShards(plan.mesh.fsdp, coordinates["fsdp"]).own(whole)
