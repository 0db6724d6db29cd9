"""SLURM steps: node lists in their own order, tasks that are processes or machines."""

from __future__ import annotations

import pytest

from outsize.errors import LaunchError
from outsize.runtime.environment.slurm import expand_node_list, expand_tasks_per_node, read_slurm


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("n[1-2],m5,o[3-4,6,7-9]", "n1 n2 m5 o3 o4 o6 o7 o8 o9"),
        ("n[2,10]", "n2 n10"),
        ("gpu-[008-010]", "gpu-008 gpu-009 gpu-010"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
        ("n3-ib", "n3-ib"),
    ],
)
def test_a_node_list_expands_in_order_with_its_zeros(text: str, nodes: str) -> None:
    """Sorting as text would put n10 before n2 and rank 0 on the wrong node."""
    assert expand_node_list(text) == nodes.split()


@pytest.mark.parametrize("text", ["", "n[1-", "n[3-1]", "n[a]", "n1,,n2", "n[]"])
def test_a_bad_node_list_is_refused(text: str) -> None:
    """Nothing is guessed from half a list."""
    with pytest.raises(LaunchError):
        expand_node_list(text)


def test_tasks_per_node_expand() -> None:
    """The short form of SLURM's own documentation."""
    assert expand_tasks_per_node("3(x2),2,1") == [3, 3, 2, 1]
    with pytest.raises(LaunchError):
        expand_tasks_per_node("3(2)")


def _step(**changes: str) -> dict[str, str]:
    step = {
        "SLURM_JOB_ID": "123456",
        "SLURM_PROCID": "6",
        "SLURM_STEP_NUM_TASKS": "9",
        "SLURM_STEP_NODELIST": "n[2,10,11]",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
    }
    return step | changes


def test_tasks_are_processes_in_blocks() -> None:
    """Rank 6 of 4 + 4 + 1 tasks is the third process of the second node; rank 0's node is n2, not n10."""
    found = read_slurm(_step(), 1)
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank) == (6, 9, 2)
    assert (found.machine_rank, found.num_machines, found.processes_per_machine) == (1, 3, 4)
    assert (found.master_address, found.master_port) == ("n2", 23456)


def test_slurm_s_own_node_and_local_ids_win_over_blocks() -> None:
    """With a cyclic distribution rank 6 of three nodes is the third task of node 0."""
    step = _step(SLURM_STEP_TASKS_PER_NODE="3(x3)", SLURM_NODEID="0", SLURM_LOCALID="2")
    found = read_slurm(step, 1)
    assert found is not None
    assert (found.machine_rank, found.local_rank) == (0, 2)


def test_one_task_a_node_starts_the_processes_of_its_node() -> None:
    """Two tasks on two nodes with eight devices each are a world of 16 still to be started."""
    step = _step(
        SLURM_PROCID="1",
        SLURM_STEP_NUM_TASKS="2",
        SLURM_STEP_NODELIST="n[1-2]",
        SLURM_STEP_TASKS_PER_NODE="1(x2)",
        MASTER_PORT="1234",
    )
    found = read_slurm(step, 8)
    assert found is not None
    assert (found.rank, found.world_size, found.machine_rank, found.master_port) == (None, 16, 1, 1234)


def test_a_batch_script_outside_srun_is_no_step() -> None:
    """sbatch sets SLURM_PROCID to 0 for its script; only srun starts tasks."""
    assert read_slurm({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n[1-2]"}, 1) is None


def test_numbers_that_contradict_each_other_are_refused() -> None:
    """Nine tasks cannot be 4 + 4 on three nodes."""
    with pytest.raises(LaunchError, match="2 nodes"):
        read_slurm(_step(SLURM_STEP_TASKS_PER_NODE="4(x2)"), 1)
