"""Checkpoints: any number of servers reads what any other number wrote, unless it is incomplete."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.parameter_servers import make_settings, servers_in_threads
from outsize.errors import LaunchError, PlanError
from outsize.runtime.checkpoint import find_checkpoint
from outsize.runtime.parameter_server.checkpoint import load_whole, read_info
from outsize.runtime.parameter_server.client import PushOutcome, ServerClient
from outsize.runtime.parameter_server.coordinator import Coordinator
from outsize.runtime.parameter_server.layout import Variable
from outsize.runtime.parameter_server.optimizer import OptimizerSettings
from outsize.runtime.parameter_server.partitioners import FixedPartitioner
from outsize.runtime.parameter_server.settings import Settings

pytestmark = pytest.mark.distributed

_VARIABLES = [
    Variable("dense", (7, 2), torch.float64),
    Variable("scalar", (), torch.float64),
    Variable("table", (11, 3), torch.float64, row_wise=True),
]


def _settings(num_servers: int, num_shards: int) -> Settings:
    return make_settings(
        _VARIABLES,
        num_servers=num_servers,
        partitioner=FixedPartitioner(num_shards),
        optimizer=OptimizerSettings("adam", {"lr": 0.1}),
    )


def _train(coordinator: Coordinator, steps: range) -> None:
    client = ServerClient(coordinator.membership, "worker/0")
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        pulled = client.pull()
        dense = {
            name: value + torch.randn(value.shape, generator=generator, dtype=torch.float64)
            for name, value in pulled.parameters.items()
        }
        rows = torch.randint(11, (4,), generator=generator)
        values = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        client.push(dense, {"table": (rows, values)}, push_id=step)
    client.close()


def test_a_checkpoint_of_three_servers_goes_on_with_two_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """3 steps of Adam on 3 servers in 5 shards, then 4 on 2 servers in 3 shards, against 7 on one."""
    with servers_in_threads(_settings(1, 1)) as coordinator:
        _train(coordinator, range(7))
        expected = {variable.name: coordinator.read_variable(variable.name) for variable in _VARIABLES}
    with servers_in_threads(_settings(3, 5)) as coordinator:
        _train(coordinator, range(3))
        folder = coordinator.save(tmp_path)
    assert find_checkpoint(tmp_path) == folder
    with servers_in_threads(_settings(2, 3)) as coordinator:
        assert coordinator.restore(folder) == 3
        client = ServerClient(coordinator.membership, "worker/0")
        assert client.push({}, push_id=2) is PushOutcome.REPEATED  # applied pushes are remembered
        _train(coordinator, range(3, 7))
        for name, value in expected.items():
            torch.testing.assert_close(coordinator.read_variable(name), value, rtol=0, atol=1e-13)
        assert coordinator.statistics()[0]["version"] == 7


def test_whole_variables_can_be_read_without_servers(tmp_path: Path) -> None:
    """Values by full name for an evaluator, optimizer states where they are asked for."""
    with servers_in_threads(_settings(2, 3)) as coordinator:
        _train(coordinator, range(2))
        folder = coordinator.save(tmp_path)
        values = {variable.name: coordinator.read_variable(variable.name) for variable in _VARIABLES}
    found = load_whole(folder)
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(found[name].view(value.shape), value)
    states = load_whole(folder, only={"optimizer/table/exp_avg", "optimizer/table/step"})
    assert states["optimizer/table/exp_avg"].shape == (11, 3)
    assert states["optimizer/table/step"] == 2


def test_push_ids_of_a_new_coordinator_go_on_after_those_of_the_checkpoint(tmp_path: Path) -> None:
    """Else every step of a resumed job would be taken for one that was applied already."""
    with servers_in_threads(_settings(1, 1)) as coordinator:
        _train(coordinator, range(3))
        folder = coordinator.save(tmp_path)
    assert read_info(folder).applied.watermark == 3
    with servers_in_threads(_settings(1, 1)) as coordinator:
        coordinator.restore(folder)
        assert coordinator.schedule("any").push_id == 3


def test_what_is_incomplete_or_of_another_model_is_refused(tmp_path: Path) -> None:
    """No manifest, another shape, another optimizer: each is an error in words, and nothing is changed."""
    with pytest.raises(LaunchError, match="no checkpoint"):
        read_info(tmp_path)
    with servers_in_threads(_settings(2, 2)) as coordinator:
        folder = coordinator.save(tmp_path)
    other_shape = make_settings([Variable("dense", (8, 2), torch.float64)])
    with servers_in_threads(other_shape) as coordinator:
        with pytest.raises(PlanError, match="does not belong to this model") as caught:
            coordinator.restore(folder)
        assert "dense is [7, 2] there and [8, 2] here" in caught.value.why
    momentum = make_settings(_VARIABLES, optimizer=OptimizerSettings("sgd", {"lr": 1.0, "momentum": 0.9}))
    with servers_in_threads(momentum) as coordinator, pytest.raises(PlanError, match="momentum_buffer"):
        coordinator.restore(folder)
