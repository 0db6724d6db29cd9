"""Whole jobs in real processes: exactness against one process, kills, replacements."""

from __future__ import annotations

import pytest
import torch

from helpers.parameter_servers import make_settings, running_job
from outsize.runtime.parameter_server.client import Pulled
from outsize.runtime.parameter_server.layout import Shard, Variable
from outsize.runtime.parameter_server.optimizer import OptimizerSettings
from outsize.runtime.parameter_server.partitioners import FixedPartitioner
from outsize.runtime.parameter_server.worker import Gradients, StepContext

pytestmark = pytest.mark.distributed

_VARIABLES = [
    Variable("weight", (7, 5), torch.float64),
    Variable("bias", (7,), torch.float64),
    Variable("scale", (), torch.float64),
]


def _loss(parameters: dict[str, torch.Tensor], batch: int) -> torch.Tensor:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(batch), dtype=torch.float64)
    outputs = parameters["scale"] * torch.tanh(inputs @ parameters["weight"].T) + parameters["bias"]
    return (outputs - inputs.sum(1, keepdim=True)).square().mean()


def _gradients(pulled: Pulled, batch: int) -> Gradients:
    parameters = {name: value.clone().requires_grad_() for name, value in pulled.parameters.items()}
    _loss(parameters, batch).backward()
    return Gradients({name: value.grad for name, value in parameters.items()})


def _train(context: StepContext, batch: int) -> str:
    return context.update(lambda pulled: _gradients(pulled, batch)).value


def _initial(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)


def _initial_shard(shard: Shard) -> torch.Tensor:
    whole = _initial(shard.variable.name, shard.variable.shape)
    return whole[shard.first_row : shard.first_row + shard.num_rows] if shard.variable.shape else whole


@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerSettings("sgd", {"lr": 0.1}),
        OptimizerSettings("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        OptimizerSettings("adam", {"lr": 0.1}),
        OptimizerSettings("adamw", {"lr": 0.1, "weight_decay": 0.1}),
    ],
    ids=["sgd", "momentum", "adam", "adamw"],
)
def test_one_worker_equals_one_process(optimizer: OptimizerSettings) -> None:
    """Ten asynchronous steps over two servers, variables cut in three, against torch.optim in float64."""
    parameters = {v.name: _initial(v.name, v.shape).requires_grad_() for v in _VARIABLES}
    reference = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[
        optimizer.name
    ](parameters.values(), **optimizer.arguments)
    for batch in range(10):
        reference.zero_grad()
        _loss(parameters, batch).backward()
        reference.step()
    settings = make_settings(_VARIABLES, num_servers=2, partitioner=FixedPartitioner(3), optimizer=optimizer)
    with running_job(settings, {"train": _train}, num_workers=1, initial=_initial_shard) as job:
        futures = [job.coordinator.schedule("train", batch) for batch in range(10)]
        job.coordinator.join()
        assert [future.result() for future in futures] == ["accepted"] * 10
        for name, expected in parameters.items():
            torch.testing.assert_close(
                job.coordinator.read_variable(name), expected.detach(), rtol=0, atol=1e-12
            )
