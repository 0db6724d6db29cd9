"""What a launcher told this process, whichever launcher it was."""

from __future__ import annotations

from dataclasses import dataclass

from outsize.runtime.environment.addresses import is_loopback
from outsize.runtime.environment.cluster_roles import ClusterRoles

__all__ = ["LaunchEnvironment", "disagreement", "one_process_of_many", "one_task_a_machine"]


@dataclass(frozen=True)
class LaunchEnvironment:
    """Where this process stands among all processes of the job.

    ``rank`` and ``local_rank`` are None where this process is alone on its machine and still has to start the
    ``processes_per_machine`` processes that train, and for roles that do not train. ``world_size`` and
    ``num_machines`` count what trains: chief and workers, neither servers nor evaluators.
    """

    source: str
    num_machines: int
    machine_rank: int
    processes_per_machine: int
    rank: int | None
    local_rank: int | None
    world_size: int
    master_address: str
    master_port: int
    role: str = "worker"
    cluster: ClusterRoles | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the process that decides for all: rank 0, or the one that will start rank 0."""
        return self.rank == 0 or (self.rank is None and self.machine_rank == 0)

    def describe(self) -> str:
        """Return one line for the log."""
        rank = "starts its own processes" if self.rank is None else f"rank {self.rank} of {self.world_size}"
        return (
            f"launch environment: {self.source} ({self.role}, machine {self.machine_rank} of "
            f"{self.num_machines}, {self.processes_per_machine} processes a machine, {rank}, "
            f"master {self.master_address} port {self.master_port})"
        )


def one_task_a_machine(
    source: str,
    *,
    num_machines: int,
    machine_rank: int,
    processes_per_machine: int,
    master: tuple[str, int],
    role: str = "worker",
    cluster: ClusterRoles | None = None,
) -> LaunchEnvironment:
    """Return the environment of a launcher that starts one task on each machine and counts machines.

    With one process a machine the task itself is that process; with more it has to start them.
    """
    is_process = processes_per_machine == 1 and role != "ps"
    return LaunchEnvironment(
        source=source,
        num_machines=num_machines,
        machine_rank=machine_rank,
        processes_per_machine=processes_per_machine,
        rank=machine_rank if is_process else None,
        local_rank=0 if is_process else None,
        world_size=num_machines * processes_per_machine,
        master_address=master[0],
        master_port=master[1],
        role=role,
        cluster=cluster,
    )


def one_process_of_many(
    source: str,
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    processes_per_machine: int,
    master: tuple[str, int],
    machine: tuple[int, int] | None = None,
) -> LaunchEnvironment:
    """Return the environment of a process that the launcher counted itself.

    ``machine`` is (machine rank, number of machines); left out, every machine has the same number of
    processes with consecutive ranks.
    """
    on_one_machine = is_loopback(master[0]) and processes_per_machine >= world_size
    consecutive = (rank // processes_per_machine, -(-world_size // processes_per_machine))
    machine_rank, num_machines = machine or ((0, 1) if on_one_machine else consecutive)
    return LaunchEnvironment(
        source=source,
        num_machines=num_machines,
        machine_rank=machine_rank,
        processes_per_machine=processes_per_machine,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        master_address=master[0],
        master_port=master[1],
    )


def disagreement(chosen: LaunchEnvironment, other: LaunchEnvironment) -> str:
    """Return what two environments say differently, or an empty text.

    Launchers nest: a torchrun inside one SLURM task a machine counts eight processes where SLURM counts one.
    Ranks are therefore only compared where both count several processes a machine, or the same number.
    """
    pairs = [
        ("number of machines", chosen.num_machines, other.num_machines),
        ("machine rank", chosen.machine_rank, other.machine_rank),
    ]
    same_kind = chosen.processes_per_machine == other.processes_per_machine or (
        min(chosen.processes_per_machine, other.processes_per_machine) > 1
    )
    if same_kind and chosen.rank is not None and other.rank is not None:
        pairs += [("rank", chosen.rank, other.rank), ("world size", chosen.world_size, other.world_size)]
    return ", ".join(f"{name} {mine} against {theirs}" for name, mine, theirs in pairs if mine != theirs)
