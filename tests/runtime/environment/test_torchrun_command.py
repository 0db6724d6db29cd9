"""The command lines that torchrun understands."""

from __future__ import annotations

import shlex

import pytest
from torch.distributed.run import config_from_args, parse_args

from outsize.runtime.environment.torchrun_command import torchrun_command


@pytest.mark.parametrize("address", ["n1", "fd00::1"])
def test_torchrun_reads_the_command_as_it_is_meant(address: str) -> None:
    """torchrun's own parser finds the machines, the processes and the meeting point again."""
    line = torchrun_command(
        ["outsize", "train", "--name", "a run"],
        num_machines=2,
        machine_rank=1,
        processes_per_machine=8,
        master_address=address,
    )
    config, _, arguments = config_from_args(parse_args(shlex.split(line)[1:]))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 8)
    assert (config.rdzv_configs["rank"], config.rdzv_endpoint) == (1, f"{address}:29500")
    assert arguments[-4:] == ["outsize", "train", "--name", "a run"]


def test_a_machine_that_does_not_exist_has_no_command() -> None:
    """Ranks of machines count from 0."""
    with pytest.raises(ValueError, match="2 of 2"):
        torchrun_command(
            ["outsize"], num_machines=2, machine_rank=2, processes_per_machine=1, master_address="a"
        )
