"""SLURM job steps (srun): one process a task; the node list is expanded in its own order, never sorted."""

from __future__ import annotations

import re
from collections.abc import Mapping

from outsize.errors import LaunchError
from outsize.runtime.environment.addresses import split_address
from outsize.runtime.environment.launch_environment import (
    LaunchEnvironment,
    one_process_of_many,
    one_task_a_machine,
)
from outsize.runtime.environment.variables import read_index, read_number, read_port

__all__ = ["expand_node_list", "expand_tasks_per_node", "read_slurm"]

_STEP_VARIABLES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
_FIRST_PORT, _NUM_PORTS = 20000, 10000


def read_slurm(environ: Mapping[str, str], processes_per_machine: int) -> LaunchEnvironment | None:
    """Read the variables of a step. A batch script outside srun has no step and is not a task.

    One task a machine starts ``processes_per_machine`` processes itself; several tasks are the processes.
    """
    if any(name not in environ for name in _STEP_VARIABLES):
        return None
    nodes = expand_node_list(environ["SLURM_STEP_NODELIST"])
    world_size = read_number(environ, "SLURM_STEP_NUM_TASKS")
    rank = read_index(environ, "SLURM_PROCID", world_size)
    tasks = expand_tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE") or f"1(x{len(nodes)})")
    if len(tasks) != len(nodes) or sum(tasks) != world_size:
        raise LaunchError(
            f"SLURM_STEP_TASKS_PER_NODE counts {sum(tasks)} tasks on {len(tasks)} nodes",
            why=f"the step has {world_size} tasks on {len(nodes)} nodes",
        )
    master = _master(environ, nodes[0])
    machine_rank, local_rank = _place(environ, rank, tasks)
    if max(tasks) == 1:
        return one_task_a_machine(
            "slurm",
            num_machines=len(nodes),
            machine_rank=machine_rank,
            processes_per_machine=processes_per_machine,
            master=master,
        )
    return one_process_of_many(
        "slurm",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        processes_per_machine=tasks[machine_rank],
        master=master,
        machine=(machine_rank, len(nodes)),
    )


def expand_node_list(text: str) -> list[str]:
    """Return the nodes of a list such as ``n[08-10,12],m5`` in order: n08 n09 n10 n12 m5.

    Raises:
        LaunchError: the list is empty or not well formed.
    """
    if not re.fullmatch(r"(?:[^\[\],\s]|\[[\d,-]+\])+(?:,(?:[^\[\],\s]|\[[\d,-]+\])+)*", text):
        raise LaunchError(f"{text!r} is not a SLURM node list", attempt="write it as n[1-3,5],m7")
    return [node for group in re.split(r",(?![^\[]*\])", text) for node in _expand_group(group)]


def _expand_group(group: str) -> list[str]:
    match = re.search(r"\[([^\]]+)\]", group)
    if match is None:
        return [group]
    before, after = group[: match.start()], _expand_group(group[match.end() :])
    return [
        before + number + rest for part in match[1].split(",") for number in _numbers(part) for rest in after
    ]


def _numbers(part: str) -> list[str]:
    first, _, last = part.partition("-")
    last = last or first
    if not (first.isdecimal() and last.isdecimal()) or int(last) < int(first):
        raise LaunchError(f"{part!r} is not a range in a SLURM node list")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def expand_tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node of a text such as ``3(x2),2,1``: 3, 3, 2, 1.

    Raises:
        LaunchError: the text is not well formed.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise LaunchError(f"{text!r} does not count tasks", attempt="write it as 3(x2),2,1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _place(environ: Mapping[str, str], rank: int, tasks: list[int]) -> tuple[int, int]:
    """Return machine rank and local rank: SLURM's own, else by consecutive blocks of ranks."""
    machine_rank, local_rank = 0, rank
    while local_rank >= tasks[machine_rank]:
        local_rank -= tasks[machine_rank]
        machine_rank += 1
    return (
        read_index(environ, "SLURM_NODEID", len(tasks), machine_rank),
        read_number(environ, "SLURM_LOCALID", local_rank),
    )


def _master(environ: Mapping[str, str], first_node: str) -> tuple[str, int]:
    """Return where to meet; the port follows from the job, so that two jobs on one node do not collide."""
    port = _FIRST_PORT + read_number(environ, "SLURM_JOB_ID", 0) % _NUM_PORTS
    host, port = split_address(environ.get("MASTER_ADDR") or first_node, port)
    return host, read_port(environ, "MASTER_PORT", port)
