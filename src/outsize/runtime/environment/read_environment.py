"""Finds out who started this process: the first complete description wins, the others are compared to it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping

from outsize.errors import LaunchError
from outsize.runtime.environment.addresses import DEFAULT_MASTER_PORT
from outsize.runtime.environment.jobset import read_jobset
from outsize.runtime.environment.kubeflow_v2 import read_kubeflow_v2
from outsize.runtime.environment.launch_environment import LaunchEnvironment, disagreement, one_task_a_machine
from outsize.runtime.environment.leader_worker_set import read_leader_worker_set
from outsize.runtime.environment.outsize_variables import LaunchFlags, read_outsize_variables
from outsize.runtime.environment.sagemaker import read_sagemaker
from outsize.runtime.environment.skypilot import read_skypilot
from outsize.runtime.environment.slurm import read_slurm
from outsize.runtime.environment.tf_config import read_tf_config
from outsize.runtime.environment.torchrun import read_rank_variables, read_torchrun
from outsize.runtime.environment.vertex_ai import read_vertex_ai

__all__ = ["read_environment"]

_LOGGER = logging.getLogger(__name__)

_Reader = Callable[[Mapping[str, str], int], LaunchEnvironment | None]

_READERS: tuple[_Reader, ...] = (
    read_outsize_variables,
    read_tf_config,
    read_vertex_ai,
    read_rank_variables,
    read_kubeflow_v2,
    read_slurm,
    read_sagemaker,
    read_skypilot,
    read_jobset,
    read_leader_worker_set,
)


def read_environment(
    environ: Mapping[str, str], *, flags: LaunchFlags | None = None, processes_per_machine: int = 1
) -> LaunchEnvironment:
    """Return what the first complete description says, and log which one it was.

    A process that torchrun started has its rank already, so torchrun comes before everything else; then the
    flags, then the readers in order, then this machine alone. ``processes_per_machine`` counts where the
    launcher counts only machines and does not say (the number of this machine's devices, usually). A second
    description that disagrees is warned about by name.

    Raises:
        LaunchError: the description that would be taken is broken.
    """
    candidates = _describe(environ, flags or LaunchFlags(), processes_per_machine)
    chosen = next(candidates)()
    while chosen is None:
        chosen = next(candidates)()
    _LOGGER.info("%s", chosen.describe())
    if chosen.source != "single_machine":
        _warn_about_others(chosen, candidates)
    return chosen


def _describe(
    environ: Mapping[str, str], flags: LaunchFlags, processes_per_machine: int
) -> Iterator[Callable[[], LaunchEnvironment | None]]:
    yield lambda: read_torchrun(environ, processes_per_machine)
    yield lambda: flags.read(processes_per_machine)
    for reader in _READERS:
        yield lambda reader=reader: reader(environ, processes_per_machine)  # type: ignore[misc]
    count = flags.processes_per_machine or processes_per_machine
    yield lambda: one_task_a_machine(
        "single_machine",
        num_machines=1,
        machine_rank=0,
        processes_per_machine=count,
        master=("127.0.0.1", DEFAULT_MASTER_PORT),
    )


def _warn_about_others(
    chosen: LaunchEnvironment, candidates: Iterator[Callable[[], LaunchEnvironment | None]]
) -> None:
    for read in candidates:
        try:
            other = read()
        except LaunchError as error:
            _LOGGER.info("ignored, since %s was taken: %s", chosen.source, error.what)
            continue
        if other is None or other.source in ("single_machine", chosen.source):
            continue
        if difference := disagreement(chosen, other):
            _LOGGER.warning(
                "launch environments disagree: %s was taken, %s says otherwise (%s)",
                chosen.source,
                other.source,
                difference,
            )
