"""Local SGD through the servers equals averaging by hand."""

from __future__ import annotations

import pytest
import torch

from helpers.parameter_servers import make_settings, servers_in_threads
from outsize.runtime.parameter_server.client import PushOutcome, ServerClient
from outsize.runtime.parameter_server.layout import Variable
from outsize.runtime.parameter_server.local_steps import local_steps
from outsize.runtime.parameter_server.optimizer import OptimizerSettings
from outsize.runtime.parameter_server.update_policy import UpdatePolicy

pytestmark = pytest.mark.distributed


def test_two_workers_of_three_local_steps_average_under_the_outer_optimizer() -> None:
    """Two rounds with outer Nesterov momentum (DiLoCo) against the same in one process, float64."""
    arguments = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    settings = make_settings(
        [Variable("a", (4,), torch.float64)],
        optimizer=OptimizerSettings("sgd", arguments),
        policy=UpdatePolicy.synchronous(2),
    )

    def local_step(target: float, parameters: dict[str, torch.Tensor], step: int) -> None:
        parameters["a"] -= 0.1 * (parameters["a"] - target * (step + 1))

    reference = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    outer = torch.optim.SGD([reference], **arguments)
    with servers_in_threads(settings) as coordinator:
        clients = [ServerClient(coordinator.membership, f"worker/{index}") for index in range(2)]
        for _round in range(2):
            reference.grad = torch.zeros(4, dtype=torch.float64)
            for target, client in zip((1.0, 5.0), clients, strict=True):

                def step(parameters: dict[str, torch.Tensor], number: int, target: float = target) -> None:
                    local_step(target, parameters, number)

                pulled = client.pull()
                gradients = local_steps(step, 3, 2)(pulled)
                assert client.push(gradients.dense) is PushOutcome.ACCEPTED
                local = {"a": reference.detach().clone()}
                for number in range(3):
                    step(local, number)
                reference.grad += (reference.detach() - local["a"]) / 2
            outer.step()
        found = coordinator.read_variable("a")
    torch.testing.assert_close(found, reference.detach(), rtol=0, atol=1e-13)
