"""outsize's own variables, and the flags of the command line, which carry the same five values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outsize.errors import LaunchError
from outsize.runtime.environment.addresses import split_address
from outsize.runtime.environment.launch_environment import LaunchEnvironment, one_task_a_machine
from outsize.runtime.environment.variables import read_number

__all__ = ["LaunchFlags", "read_outsize_variables"]


@dataclass(frozen=True)
class LaunchFlags:
    """What a command line said about the job; None where it said nothing. ``master`` is ``host:port``."""

    num_machines: int | None = None
    machine_rank: int | None = None
    processes_per_machine: int | None = None
    master: str | None = None

    def read(self, processes_per_machine: int) -> LaunchEnvironment | None:
        """Return the environment the flags describe, or None where they do not name the machines.

        Raises:
            LaunchError: they name half of what is needed, or this machine lies outside.
        """
        if (self.num_machines is None) != (self.machine_rank is None):
            alone = "--machine-rank" if self.num_machines is None else "--num-machines"
            raise LaunchError(
                f"{alone} was given alone.",
                why="How many machines there are and which one this is belong together.",
                attempt="--num-machines, --machine-rank and --master on every machine, or none of them",
            )
        given = {f"OUTSIZE_{name.upper()}": value for name, value in vars(self).items() if value is not None}
        texts = {name: str(value) for name, value in given.items()}
        return _read(texts, processes_per_machine, "flags")


def read_outsize_variables(
    environ: Mapping[str, str], processes_per_machine: int
) -> LaunchEnvironment | None:
    """Read OUTSIZE_NUM_MACHINES, OUTSIZE_MACHINE_RANK, OUTSIZE_PROCESSES_PER_MACHINE and OUTSIZE_MASTER.

    Number and rank of the machines are what makes them complete.

    Raises:
        LaunchError: several machines have no master address, or this one lies outside them.
    """
    return _read(environ, processes_per_machine, "outsize_variables")


def _read(environ: Mapping[str, str], processes_per_machine: int, source: str) -> LaunchEnvironment | None:
    if "OUTSIZE_NUM_MACHINES" not in environ or "OUTSIZE_MACHINE_RANK" not in environ:
        return None
    num_machines = read_number(environ, "OUTSIZE_NUM_MACHINES")
    machine_rank = read_number(environ, "OUTSIZE_MACHINE_RANK")
    if machine_rank >= num_machines:
        raise LaunchError(f"machine rank {machine_rank} of {num_machines} machines", why="ranks count from 0")
    master = environ.get("OUTSIZE_MASTER", "")
    if num_machines > 1 and not master:
        raise LaunchError(
            f"{num_machines} machines, but no master address",
            attempt="give --master host:port or OUTSIZE_MASTER, the same on every machine",
        )
    return one_task_a_machine(
        source,
        num_machines=num_machines,
        machine_rank=machine_rank,
        processes_per_machine=read_number(environ, "OUTSIZE_PROCESSES_PER_MACHINE", processes_per_machine),
        master=split_address(master or "127.0.0.1"),
    )
