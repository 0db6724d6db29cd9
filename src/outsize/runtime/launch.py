"""Starts the processes of a job on this machine, one a device, and brings their results or one error back."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    SignalException,
    Std,
    start_processes,
)

from outsize.errors import LaunchError
from outsize.runtime.environment.interface import interface_towards
from outsize.runtime.environment.launch_environment import LaunchEnvironment
from outsize.runtime.job_store import open_store
from outsize.runtime.worker_errors import error_of_workers

__all__ = ["LocalLaunch", "gloo_interface", "launch_local"]

_PRELOADED = ["torch.distributed.pipelining", "torch.distributed.checkpoint", "torch._dynamo"]
_STOP_TIMEOUT_S = 5


@dataclass(frozen=True, slots=True)
class LocalLaunch:
    """How to start the processes: how many, where their output goes, how long they may take."""

    num_processes: int
    log_folder: Path | None = None  # rank r writes <log_folder>/.../r/stdout.log and stderr.log
    timeout_s: float | None = None
    environment: dict[str, str] | None = None
    machine: LaunchEnvironment | None = None  # where this is one of several machines: its place among them


def launch_local(launch: LocalLaunch, entry: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run ``entry(*arguments)`` in ``launch.num_processes`` processes and return their results by rank.

    Processes come from a fork server that has imported torch once, and find each other through the
    variables that torchrun sets (``RANK``, ``MASTER_ADDR``, ...), so the same entry runs under torchrun.
    Everything listens on the loopback address alone, unless this is one of several machines: then the job's
    store is there already, and results are those of this machine's ranks. The first rank here keeps this
    process's standard output; all other output goes to the log folder. On failure, interrupt or timeout
    every process is ended, by its id.

    Raises:
        OutsizeError: a process raised one; the same error.
        LaunchError: a process failed otherwise, or the time is over.
    """
    with tempfile.TemporaryDirectory(prefix="outsize-") as temporary:
        folder = launch.log_folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        store = open_store("127.0.0.1") if launch.machine is None else None
        meeting_point = _meeting_point(launch.machine, store.port if store is not None else 0)
        with _quiet_elastic_log(), _signal_handlers_put_back():
            return _wait(_start(launch, folder, meeting_point, entry, arguments), launch)


def _start(
    launch: LocalLaunch,
    folder: Path,
    meeting_point: dict[str, str],
    entry: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> PContext:
    ranks = range(launch.num_processes)
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    if method == "forkserver":
        multiprocessing.set_forkserver_preload(_PRELOADED)
    return start_processes(
        name="outsize",
        entrypoint=entry,
        args=dict.fromkeys(ranks, arguments),
        envs={rank: _environment(rank, launch, meeting_point) for rank in ranks},
        logs_specs=DefaultLogsSpecs(
            log_dir=str(folder), redirects={rank: Std.ERR if rank == 0 else Std.ALL for rank in ranks}
        ),
        start_method=method,
    )


def _wait(context: PContext, launch: LocalLaunch) -> list[Any]:
    try:
        result = context.wait(launch.timeout_s if launch.timeout_s is not None else -1, period=0.05)
    except (SignalException, KeyboardInterrupt) as stop:
        raise _stopped(stop) from None
    finally:
        context.close(signal.SIGTERM, timeout=_STOP_TIMEOUT_S)
    if result is None:
        raise LaunchError(
            f"The {launch.num_processes} processes did not finish in {launch.timeout_s:g} s.",
            why="A process may wait for another one; all were ended.",
            attempt=f"the logs under {launch.log_folder}." if launch.log_folder else "a longer timeout.",
        )
    if result.is_failed():
        raise error_of_workers(context.error_files, result.failures, launch.log_folder)
    return [result.return_values[rank] for rank in range(launch.num_processes)]


def _environment(local_rank: int, launch: LocalLaunch, meeting_point: dict[str, str]) -> dict[str, str]:
    machine, count = launch.machine, launch.num_processes
    return {
        "RANK": str(local_rank + (machine.machine_rank * count if machine else 0)),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(machine.world_size if machine else count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": str(machine.machine_rank if machine else 0),
        "GROUP_WORLD_SIZE": str(machine.num_machines if machine else 1),
        "TORCHELASTIC_RUN_ID": "outsize",  # names the log folder
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there, in the (first) starting process
        **meeting_point,
        **(launch.environment or {}),
    }


def _meeting_point(machine: LaunchEnvironment | None, port: int) -> dict[str, str]:
    if machine is None:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": loopback}
    return {
        "MASTER_ADDR": machine.master_address,
        "MASTER_PORT": str(machine.master_port),
        **gloo_interface(machine),
    }


def gloo_interface(machine: LaunchEnvironment) -> dict[str, str]:
    """Return the variable that tells gloo the interface to the other machines, unless the user set it.

    Left to itself gloo takes the address that this machine's name stands for, which may be a loopback one.
    """
    name = interface_towards(machine.master_address, is_alone=machine.num_machines == 1)
    return {} if name is None or "GLOO_SOCKET_IFNAME" in os.environ else {"GLOO_SOCKET_IFNAME": name}


@contextmanager
def _quiet_elastic_log() -> Iterator[None]:
    """Keep torch's launcher from logging tracebacks and whom it ends: the error is raised in its place."""
    names = ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn")
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


@contextmanager
def _signal_handlers_put_back() -> Iterator[None]:
    """Put back the signal handlers that torch's launcher installs and never removes."""
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    handlers = {name: signal.getsignal(getattr(signal, name)) for name in names if hasattr(signal, name)}
    try:
        yield
    finally:
        for name, handler in handlers.items():
            try:
                signal.signal(getattr(signal, name), handler)
            except ValueError:  # not the main thread, where torch installed none
                break


def _stopped(stop: BaseException) -> BaseException:
    number = stop.sigval if isinstance(stop, SignalException) else signal.SIGINT
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + int(number))
