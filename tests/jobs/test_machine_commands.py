"""What to type on each machine."""

from __future__ import annotations

import pytest

from outsize.cluster.argument import parse_cluster
from outsize.errors import LaunchError
from outsize.jobs.machine_commands import machine_commands
from outsize.plan.plan import Mesh, Plan, ScheduleSpec, StageSpec

_COMMAND = ("train", "model.py:build", "--cluster", "2x4x24GiB", "--master", "10.0.0.1:1234", "--name", "a b")


def _plan(mesh: Mesh) -> Plan:
    return Plan("combined", mesh, (StageSpec(0, ""),), ScheduleSpec(), 8)


def test_the_commands_of_the_machines_differ_in_their_rank_alone() -> None:
    """Where the machines meet is said to torchrun, which takes --master for its own --master-addr."""
    cluster = parse_cluster("2x4x24GiB")
    first, second = machine_commands(_plan(Mesh(pp=2, dp=4)), cluster, _COMMAND, master="10.0.0.1:1234")
    assert first == (
        "torchrun --nnodes=2 --node-rank=0 --nproc-per-node=4 --master-addr=10.0.0.1 --master-port=1234 "
        "-m outsize train model.py:build --cluster 2x4x24GiB --name 'a b'"
    )
    assert second == first.replace("--node-rank=0", "--node-rank=1")


def test_a_plan_that_leaves_machines_idle_needs_no_command_for_them() -> None:
    """Four of eight devices are one machine, which starts its processes itself."""
    assert machine_commands(_plan(Mesh(dp=4)), parse_cluster("2x4x24GiB"), _COMMAND) == []


def test_machines_that_would_start_different_numbers_of_processes_are_refused() -> None:
    """Six processes do not fill two machines of four devices."""
    with pytest.raises(LaunchError, match="do not fill 2 machines alike"):
        machine_commands(_plan(Mesh(dp=6)), parse_cluster("2x4x24GiB"), _COMMAND)
